"""One machine as numbers: processors with their memory, the links between, the disk, their rates.

Units: bytes, bytes per second, FLOP per second, seconds. A catalogued machine has peaks alone; a
measured one (moebatch.runtime.probe) also knows how its rates depend on the work: `HostRates`.
Source: MoE-Lightning (arXiv 2411.11217), section 3.2: levels i with P_peak^i, B_peak^i, B_peak^{j,i}.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebatch.errors import UsageError

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured rate as a function of one quantity, linear between points in log(x), flat outside."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, x: float | Numbers) -> Any:
        """The rate at x, a number or an array."""
        xs, rates = zip(*self.points, strict=True)
        at = np.log(np.maximum(x, 1e-9))
        return np.interp(at, np.log(xs), rates)

    @property
    def peak(self) -> float:
        """The highest rate that was seen."""
        return max(rate for _, rate in self.points)

    def rising(self) -> "Curve":
        """Nowhere lower than further left."""
        best = np.maximum.accumulate([rate for _, rate in self.points]).tolist()
        return Curve(tuple((x, rate) for (x, _), rate in zip(self.points, best, strict=True)))

    def at_least(self, other: "Curve") -> "Curve":
        """Nowhere lower than another curve."""
        return Curve(tuple((x, max(rate, float(other(x)))) for x, rate in self.points))

    def scaled(self, factor: float) -> "Curve":
        """All rates times a factor."""
        return Curve(tuple((x, rate * factor) for x, rate in self.points))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """How the host's own kernels behave, beyond their peaks; measured through the real code.

    `gemm[form]`: FLOP/s of an expert applied to x tokens, by form of the weights: "packed" are
    resident ones, "streamed" those used where they were read. `weight_bandwidth[form]` is the rate at
    which such a product reads its weights. `decode_attention`: bytes of KV cache per second against
    context length; `prefill_attention`: FLOP/s against prompt length. `per_call_s` is spent on each
    product or expert, `per_task_s[op]` on each task, `per_value_s[op]` on each hidden value (token x
    hidden size) that passes through a task, besides its products and its attention. Outside tasks:
    `per_pass_s` a pass, `per_row_s` a row in it, `per_sample_s` a sampled row and vocabulary entry.
    Beside tasks: `per_streamed_byte_s` of all cores for each byte of weights that is put in its place.
    """

    gemm: Mapping[str, Curve]
    weight_bandwidth: Mapping[str, float]
    decode_attention: Curve
    prefill_attention: Curve
    per_call_s: float
    per_row_s: float
    per_task_s: Mapping[str, float]
    per_value_s: Mapping[str, float]
    per_pass_s: float
    per_sample_s: float
    per_streamed_byte_s: float = 0.0

    def scaled(self, factor: float) -> "HostRates":
        """A processor that is faster by a factor in everything."""
        return HostRates(
            gemm={form: curve.scaled(factor) for form, curve in self.gemm.items()},
            weight_bandwidth={form: rate * factor for form, rate in self.weight_bandwidth.items()},
            decode_attention=self.decode_attention.scaled(factor),
            prefill_attention=self.prefill_attention.scaled(factor),
            per_call_s=self.per_call_s / factor,
            per_row_s=self.per_row_s / factor,
            per_task_s={op: s / factor for op, s in self.per_task_s.items()},
            per_value_s={op: s / factor for op, s in self.per_value_s.items()},
            per_pass_s=self.per_pass_s / factor,
            per_sample_s=self.per_sample_s / factor,
            per_streamed_byte_s=self.per_streamed_byte_s / factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A processor and the memory beside it. `flops` is the peak by data type of the weights."""

    name: str
    memory_bytes: float
    bandwidth: float
    flops: Mapping[str, float]

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for a data type; the slowest known one for a type that is not listed."""
        return self.flops.get(dtype) or min(self.flops.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """The levels of one machine, from fast to slow: accelerator memory (if any), host memory, disk.

    `link` carries from host to accelerator, `link_back` the other way (b_cg and b_gc); the accelerator
    is one processor also where it stands for several (tensor parallelism within a node).
    `kernels` is the variant of the native kernels that `rates` were measured with, "pytorch" for none.
    """

    name: str
    host: Processor
    disk_bandwidth: float
    accelerator: Processor | None = None
    link: float = 0.0
    link_back: float = 0.0
    num_accelerators: int = 1
    rates: Mapping[str, HostRates] = field(default_factory=dict)
    source: str = ""
    kernels: str = ""

    @property
    def native(self) -> bool:
        """Whether the rates are those of the native kernels."""
        return self.kernels not in ("", "pytorch")

    def scaled_host(self, factor: float) -> "MachineSpec":
        """A host with `factor` times the memory, bandwidth and FLOP/s (paper, figure 10)."""
        host = self.host
        return replace(
            self,
            host=replace(
                host,
                memory_bytes=host.memory_bytes * factor,
                bandwidth=host.bandwidth * factor,
                flops={name: peak * factor for name, peak in host.flops.items()},
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MachineSpec":
        """From what `to_dict` gave, after a way through JSON.

        Raises: UsageError when something is missing or no number.
        """
        try:
            accelerator = values.get("accelerator")
            machine = cls(
                name=str(values["name"]),
                host=_processor(values["host"]),
                disk_bandwidth=_positive(values["disk_bandwidth"]),
                accelerator=None if accelerator is None else _processor(accelerator),
                link=float(values.get("link", 0.0)),
                link_back=float(values.get("link_back", values.get("link", 0.0))),
                num_accelerators=int(values.get("num_accelerators", 1)),
                rates={k: _rates(v) for k, v in values.get("rates", {}).items()},
                source=str(values.get("source", "")),
                kernels=str(values.get("kernels", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"no machine description: {error!r}", hint="moebatch doctor --json prints one"
            ) from None
        if machine.accelerator is not None and machine.link <= 0:
            raise UsageError("the machine description has an accelerator but no link bandwidth")
        return machine


def _positive(value: Any) -> float:
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{value!r} is no positive number")
    return number


def _processor(values: Mapping[str, Any]) -> Processor:
    return Processor(
        name=str(values["name"]),
        memory_bytes=_positive(values["memory_bytes"]),
        bandwidth=_positive(values["bandwidth"]),
        flops={str(k): _positive(v) for k, v in values["flops"].items()},
    )


def _curve(points: Any) -> Curve:
    listed = points["points"] if isinstance(points, Mapping) else points
    return Curve(tuple((_positive(x), _positive(y)) for x, y in listed))


def _rates(values: Mapping[str, Any]) -> HostRates:
    numbers = ("per_call_s", "per_row_s", "per_pass_s", "per_sample_s")
    return HostRates(
        gemm={k: _curve(v) for k, v in values["gemm"].items()},
        weight_bandwidth={k: _positive(v) for k, v in values["weight_bandwidth"].items()},
        decode_attention=_curve(values["decode_attention"]),
        prefill_attention=_curve(values["prefill_attention"]),
        per_task_s={k: float(v) for k, v in values["per_task_s"].items()},
        per_value_s={k: float(v) for k, v in values["per_value_s"].items()},
        per_streamed_byte_s=float(values.get("per_streamed_byte_s", 0.0)),
        **{name: float(values[name]) for name in numbers},
    )


_WHAT_IF: dict[str, Callable[[MachineSpec, float], MachineSpec]] = {
    "host-scale": MachineSpec.scaled_host,
    "cpu-memory": lambda m, v: replace(m, host=replace(m.host, memory_bytes=v)),
    "cpu-bandwidth": lambda m, v: replace(m, host=replace(m.host, bandwidth=v)),
    "cpu-flops": lambda m, v: replace(m, host=replace(m.host, flops={"any": v})),
    "pcie": lambda m, v: replace(m, link=v, link_back=v),
    "disk": lambda m, v: replace(m, disk_bandwidth=v),
}
_WHAT_IF_GPU: dict[str, Callable[[Processor, float], Processor]] = {
    "gpu-memory": lambda p, v: replace(p, memory_bytes=v),
    "gpu-bandwidth": lambda p, v: replace(p, bandwidth=v),
    "gpu-flops": lambda p, v: replace(p, flops={"any": v}),
}
_UNITS = {"pcie": 1e9, "disk": 1e9, "cpu-bandwidth": 1e9, "gpu-bandwidth": 1e9,
          "cpu-flops": 1e12, "gpu-flops": 1e12}  # fmt: skip
WHAT_IF_KEYS = (*_WHAT_IF, *_WHAT_IF_GPU)


def changed(machine: MachineSpec, key: str, value: float) -> MachineSpec:
    """The machine with one figure replaced. Bandwidths are in GB/s, FLOP/s in TFLOP/s.

    Raises: UsageError for a key that is not in WHAT_IF_KEYS, or one about an accelerator that is
    not there.
    """
    amount = value * _UNITS.get(key, 1.0)
    if not (amount > 0 and math.isfinite(amount)):
        raise UsageError(f"--what-if {key}: {value} is no positive number")
    if key in _WHAT_IF:
        if key == "pcie" and machine.accelerator is None:
            raise UsageError("--what-if pcie: this machine has no accelerator")
        return _WHAT_IF[key](_without_rates(machine, key), amount)
    if key not in _WHAT_IF_GPU:
        raise UsageError(f"--what-if {key} is not known", hint="known: " + ", ".join(WHAT_IF_KEYS))
    if machine.accelerator is None:
        raise UsageError(f"--what-if {key}: this machine has no accelerator")
    return replace(machine, accelerator=_WHAT_IF_GPU[key](machine.accelerator, amount))


def _without_rates(machine: MachineSpec, key: str) -> MachineSpec:
    """Measured curves say nothing about another processor: plan with its peaks instead."""
    touches = key in ("host-scale", "cpu-bandwidth", "cpu-flops")
    return replace(machine, rates={}) if touches else machine


def loads(text: str) -> MachineSpec:
    """A machine from a JSON file's text.

    Raises: UsageError when the text is no machine.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"no machine description: {error}") from None
    if not isinstance(values, dict):
        raise UsageError("no machine description: no JSON object")
    return MachineSpec.from_dict(values)
