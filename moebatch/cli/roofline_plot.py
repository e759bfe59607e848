"""Draws the Hierarchical Roofline Model of a plan: log-log, all roofs, operations, turning points."""

from pathlib import Path
from typing import Any

import numpy as np

from moebatch.cli.plan_asked import Asked
from moebatch.cli.roofline_points import Points, points
from moebatch.errors import UsageError
from moebatch.plan.outlook import Outlook
from moebatch.plan.roofline import Level

_INK, _UPPER, _LOWER, _LINK, _POINT = "#222222", "#2563ab", "#3c8d4f", "#c2571a", "#8a2be2"


def draw(asked: Asked, outlook: Outlook, path: Path) -> None:
    """Write the picture. On the x axis, the FLOPs per byte of the level at which a roof applies.

    Raises: UsageError when the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    hrm = points(asked, outlook)
    figure, axes = plt.subplots(figsize=(10, 6.2), dpi=140)
    x = np.logspace(*_range(hrm), 400)
    _roof(axes, x, hrm.roofs.upper, _UPPER)
    if hrm.roofs.lower.peak > 0:
        _roof(axes, x, hrm.roofs.lower, _LOWER)
    link = hrm.roofs.link * x
    name = "link" if hrm.roofs.lower.peak > 0 else "disk"
    axes.plot(x, link, color=_LINK, ls="--", lw=1.8,
              label=f"{name}: {hrm.roofs.link / 1e9:.3g} GB/s")  # fmt: skip
    _operations(axes, hrm)
    _turning_points(axes, hrm)
    axes.set(
        xscale="log", yscale="log", xlim=(x[0], x[-1]), ylim=(_floor(hrm, x[0]), _ceiling(hrm)),
        xlabel="operational intensity, FLOPs per byte", ylabel="FLOP/s",
    )  # fmt: skip
    p = outlook.policy
    axes.set_title(
        f"{asked.model_name} on {asked.machine.name}: N = {p.batch_size}, µ = {p.micro_batch_size}, "
        f"attention on {p.attention}, experts on {p.ffn} · {outlook.throughput:.1f} tokens/s",
        fontsize=11, loc="left",
    )  # fmt: skip
    axes.grid(which="major", color="#dddddd", lw=0.6)
    axes.legend(loc="upper left", fontsize=8.5, framealpha=0.95)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    finally:
        plt.close(figure)


def _range(hrm: Points) -> tuple[float, float]:
    marks = [hrm.attention.lower, hrm.ffn.lower, hrm.ffn.upper, hrm.p1, hrm.p2, hrm.balance]
    known = [mark for mark in marks if mark > 0]
    return np.log10(min(known) / 6), np.log10(max(known) * 12)


def _ceiling(hrm: Points) -> float:
    return 4 * max(hrm.roofs.upper.peak, hrm.roofs.lower.peak)


def _floor(hrm: Points, left: float) -> float:
    lowest = [hrm.roofs.link * left, hrm.roofs.upper.bandwidth * left]
    return min(lowest) / 1.5


def _roof(axes: Any, x: np.ndarray, level: Level, color: str) -> None:
    label = f"{level.name}: {level.peak / 1e12:.3g} TFLOP/s, {level.bandwidth / 1e9:.4g} GB/s"
    axes.plot(x, level.local(x), color=color, lw=2.2, label=label)


def _operations(axes: Any, hrm: Points) -> None:
    """Each operation where it can run: on its own level, and with its data from below."""
    roofs = hrm.roofs
    for operation, marker in ((hrm.attention, "o"), (hrm.ffn, "s")):
        upper = roofs.attainable(operation.upper, operation.lower)
        axes.plot(operation.lower, upper, marker, ms=10, color=_UPPER, mec=_INK, zorder=5,
                  label=f"{operation.name} on {roofs.upper.name}, data from below")  # fmt: skip
        if roofs.lower.peak > 0:
            axes.plot(operation.lower, roofs.lower.local(operation.lower), marker, ms=10,
                      color=_LOWER, mec=_INK, zorder=5,
                      label=f"{operation.name} on {roofs.lower.name}")  # fmt: skip


def _turning_points(axes: Any, hrm: Points) -> None:
    marks = [("P2", hrm.p2, 0.06), ("balance point", hrm.balance, 0.14)]
    if hrm.roofs.lower.peak > 0:
        marks.append(("P1 of attention", hrm.p1, 0.22))
    for name, x, height in marks:
        axes.axvline(x, color=_POINT, lw=1.0, ls=":")
        axes.annotate(f" {name} {x:,.0f}", (x, height), xycoords=("data", "axes fraction"),
                      color=_POINT, fontsize=9)  # fmt: skip
