"""Two records side by side: what both measured, the ratio, and whether it is more than noise."""

from math import sqrt
from typing import Any

from moebatch.cli.bench.table import number

Key = tuple[Any, ...]


def _measured(record: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    found = {}
    for setting in record["settings"]:
        for arm in setting["arms"]:
            key = (setting["workload"], setting["prompts"]["padded"], setting["model"],
                   setting["num_prompts"], setting["gen_len"], setting["memory_bytes"],
                   setting["device"], arm["name"], arm["label"])  # fmt: skip
            if arm["tok_s"]:
                found[key] = {**arm["tok_s"], "peak": arm["peak_cpu_bytes"]}
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each setting and arm that either has; `ratio` is after / before.

    `differs` is True where the means are further apart than two standard errors, None where a record
    has one run alone.
    """
    old, new = _measured(before), _measured(after)
    result = []
    for key in [*old, *(key for key in new if key not in old)]:
        a, b = old.get(key), new.get(key)
        result.append({
            "workload": key[0] + (" padded" if key[1] else ""), "model": key[2], "prompts": key[3],
            "gen_len": key[4], "memory_bytes": key[5], "device": key[6],
            "arm": " ".join(part for part in key[7:] if part),
            "before": a and a["mean"], "after": b and b["mean"],
            "ratio": b["mean"] / a["mean"] if a and b else None,
            "differs": _differs(a, b) if a and b else None,
        })  # fmt: skip
    return result


def _differs(a: dict[str, Any], b: dict[str, Any]) -> bool | None:
    if a["sd"] is None or b["sd"] is None:
        return None
    error = sqrt(a["sd"] ** 2 / len(a["runs"]) + b["sd"] ** 2 / len(b["runs"]))
    return bool(abs(a["mean"] - b["mean"]) > 2 * error)


def markdown(found: list[dict[str, Any]]) -> str:
    """The comparison as a table."""
    lines = ["| workload | model | prompts | gen_len | arm | before | after | after/before | |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in found:
        verdict = {True: "differs", False: "within the noise", None: ""}[row["differs"]]
        cells = [row["workload"], row["model"], row["prompts"], row["gen_len"], row["arm"],
                 *(_shown(row[name]) for name in ("before", "after", "ratio")), verdict]  # fmt: skip
        lines.append("| " + " | ".join("" if c is None else str(c) for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(value: float | None) -> str:
    return "" if value is None else number(value)
