"""A record as rows: one for each arm of each setting; Markdown, CSV or JSON lines."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from moebatch.cli.bench.roofs import NAMES as ROOF_NAMES
from moebatch.units import format_bytes

_GIB = 1 << 30
BUSY = 0.05  # share of the processors that others may take before a row says so
COLUMNS = (
    "workload", "model", "prompts", "gen_len", "memory", "arm", "N", "mu", "policy",
    "predicted", "measured", "sd", "bound by", "% of roof", "peak gpu GiB", "peak cpu GiB",
    "ours/it", "paper", "note",
)  # fmt: skip
Row = dict[str, Any]


def rows(record: dict[str, Any]) -> Iterator[Row]:
    """Plain values, None where something is not known or has no meaning."""
    for setting in record["settings"]:
        for arm in setting["arms"]:
            yield _row(setting, arm)


def _row(setting: dict[str, Any], arm: dict[str, Any]) -> Row:
    planned = arm["planned"] or {}
    policy, roofs = planned.get("policy") or {}, planned.get("roofs") or {}
    rate = arm["tok_s"]["mean"] if arm["tok_s"] else None
    predicted = planned.get("predicted") or {}
    ours = arm["name"] == "moebatch"
    return {
        "workload": setting["workload"] + (" padded" if setting["prompts"]["padded"] else ""),
        "model": setting["model"],
        "prompts": setting["num_prompts"],
        "gen_len": setting["gen_len"],
        "memory": None
        if setting["memory_bytes"] is None
        else format_bytes(setting["memory_bytes"]),
        "arm": arm["name"] + (f" {arm['label']}" if arm["label"] else ""),
        "N": policy.get("batch_size"),
        "mu": policy.get("micro_batch_size"),
        "policy": policy_words(policy),
        "predicted": predicted.get("tok_s"),
        "measured": rate,
        "sd": arm["tok_s"]["sd"] if arm["tok_s"] else None,
        "bound by": ROOF_NAMES.get(roofs.get("bound_by", "")),
        "% of roof": 100 * rate / roofs["tok_s"] if rate and roofs.get("tok_s") else None,
        "peak gpu GiB": _gib(arm["peak_gpu_bytes"]),
        "peak cpu GiB": _gib(arm["peak_cpu_bytes"]),
        "ours/it": None if ours else arm["ours_to_it"],
        "paper": setting["paper"]["tok_s"] if ours and setting["paper"] else None,
        "note": _note(setting, arm),
    }


def policy_words(policy: dict[str, Any]) -> str | None:
    """A policy in a few words."""
    if not policy:
        return None
    words = f"{policy['schedule']}, weights resident {policy['weights_resident']:.0%}"
    return words if policy["attention"] == policy["ffn"] else f"{words}, attention on the host"


def others_share(arm: dict[str, Any]) -> float:
    """The largest share of the processors that other programs took during an arm's runs."""
    return max((run.get("others_share") or 0.0 for run in arm["runs"]), default=0.0)


def _note(setting: dict[str, Any], arm: dict[str, Any]) -> str | None:
    parts = [arm["reason"], arm["note"] if arm["tok_s"] else None]
    busy = others_share(arm)
    if busy > BUSY:
        parts.append(f"other programs took {busy:.0%} of the processors")
    if arm["tok_s"] and setting["memory_bytes"] and not arm["memory_limited"]:
        parts.append("memory not limited from outside")
    return "; ".join(part for part in parts if part) or None


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / _GIB


def markdown(record: dict[str, Any]) -> str:
    """The rows as a table; columns without a value in any row are left out."""
    found = list(rows(record))
    used = [name for name in COLUMNS if any(row[name] is not None for row in found)]
    used = [name for name in used if name != "sd"]
    lines = [_line(used), _line(["---"] * len(used))]
    lines += [_line([shown(row, name) for name in used]) for row in found]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def shown(row: Row, name: str) -> str:
    """A cell as people read it."""
    value = row[name]
    if value is None:
        return ""
    if name == "measured" and row["sd"] is not None:
        return f"{number(value)} ± {number(row['sd'])}"
    if name == "% of roof":
        return f"{value:.0f} %"
    return number(value) if isinstance(value, float) else str(value).replace("|", "\\|")


def number(value: float) -> str:
    """Three digits that count."""
    if abs(value) >= 100:
        return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def comma_separated(record: dict[str, Any]) -> str:
    """The rows as CSV with full precision."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(record))
    return text.getvalue()


def json_lines(record: dict[str, Any]) -> str:
    """The rows as one JSON object a line."""
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows(record))
