"""Sweeps: which quantity was varied, and the planner's curve between and beyond the measured points."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log
from typing import Any

from moebatch.errors import NoFeasiblePolicy, UsageError
from moebatch.plan.machine import MachineSpec
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import choose
from moebatch.plan.outlook import BASE_BYTES, USABLE
from moebatch.plan.policy import Overrides
from moebatch.plan.workload import WorkloadSpec

_POINTS = 12
AXES = {"num_prompts": "requests", "memory_bytes": "memory budget", "params": "parameters"}
Settings = Sequence[dict[str, Any]]


def joined(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several records of one machine as one: all settings, sweeps across them, their curves.

    Raises: UsageError for records of different machines.
    """
    first = records[0]
    if len(records) == 1:
        return first
    for other in records[1:]:
        if any(other["machine"][key] != first["machine"][key] for key in ("cpu", "cores")):
            raise UsageError("the records are of different machines", hint="make a page of each")
    settings = [setting for record in records for setting in record["settings"]]
    known = {(curve["axis"], curve["name"]): curve["predicted"]
             for record in records for curve in record.get("curves", [])}  # fmt: skip
    sweeps = [
        {"axis": axis, "name": name, "measured": _points(axis, group),
         "predicted": known.get((axis, name), [])}
        for axis in AXES for name, group in _groups(axis, settings)
    ]  # fmt: skip
    commands = dict.fromkeys(record["command"] for record in records)
    return {**first, "settings": settings, "curves": sweeps, "command": "; ".join(commands)}


def curves(document: dict[str, Any], machine: MachineSpec, specs: dict[str, ModelSpec],
           ) -> list[dict[str, Any]]:  # fmt: skip
    """One for each sweep: the axis, what stayed the same, measured points, the planner's curve.

    A curve stands for moebatch on the host; with an accelerator there are points alone.
    """
    return [
        {"axis": axis, "name": name, "measured": _points(axis, group),
         "predicted": _curve(axis, group, machine, specs)}
        for axis in AXES
        for name, group in _groups(axis, document["settings"])
    ]  # fmt: skip


def _groups(axis: str, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Settings that differ in the axis alone, at least two."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for one in settings:
        fixed = {"model": one["model"], "num_prompts": one["num_prompts"],
                 "memory_bytes": one["memory_bytes"], "gen_len": one["gen_len"]}  # fmt: skip
        fixed.pop("model" if axis == "params" else axis)
        groups[tuple(fixed.items())].append(one)
    for key, group in groups.items():
        values = {x for x, _ in _at(axis, group)}
        if len(values) > 1:
            yield _name(key), group


def _name(fixed: tuple[tuple[str, Any], ...]) -> str:
    words = {"model": "{}", "num_prompts": "{} requests", "gen_len": "{} new tokens"}
    said = [words[name].format(value) for name, value in fixed
            if value is not None and name in words]  # fmt: skip
    memory = dict(fixed).get("memory_bytes")
    return ", ".join([*said, *([f"memory {memory / 2**30:.2f} GiB"] if memory else [])])


def _at(axis: str, group: Settings) -> Iterator[tuple[float, dict[str, Any]]]:
    """(x, moebatch's first arm) of the settings that have both."""
    for one in group:
        arm = next((arm for arm in one["arms"] if arm["name"] == "moebatch" and arm["tok_s"]), None)
        if arm is None or arm["planned"] is None:
            continue
        x = arm["planned"]["model"]["params"] if axis == "params" else one[axis]
        if x is None:  # no limit was asked for: all that the model takes
            x = arm["planned"]["memory_bytes"]
        yield float(x), arm


def _points(axis: str, group: Settings) -> list[dict[str, Any]]:
    points = [
        {"x": x, "tok_s": arm["tok_s"]["mean"], "sd": arm["tok_s"]["sd"],
         "predicted": (arm["planned"]["predicted"] or {}).get("tok_s")}
        for x, arm in _at(axis, group)
    ]  # fmt: skip
    return sorted(points, key=lambda point: point["x"])


def _curve(axis: str, group: Settings, machine: MachineSpec,
           specs: dict[str, ModelSpec]) -> list[dict[str, float]]:  # fmt: skip
    """The planner's answer at steps through the axis; empty where it has none."""
    at = list(_at(axis, group))
    one, (_, arm) = group[0], at[0]
    if axis == "params" or arm["planned"]["predicted"] is None:
        return []
    roofs = arm["planned"]["roofs"] or {}
    disk = next((other["planned"]["roofs"]["disk_bandwidth"] for _, other in at
                 if other["planned"]["policy"]["weights_resident"] < 1), None)  # fmt: skip
    machine = replace(machine, disk_bandwidth=disk or roofs["disk_bandwidth"])
    found = []
    for x in _steps([x for x, _ in at]):
        rows = round(x) if axis == "num_prompts" else one["num_prompts"]
        memory = round(x) if axis == "memory_bytes" else one["memory_bytes"]
        try:
            plan = choose(
                specs[one["model"]], _workload(one, rows), machine=machine,
                compute=arm["planned"]["compute_dtype"], base_bytes=BASE_BYTES, fixed=Overrides(),
                memory_bytes=memory or int(machine.host.memory_bytes * USABLE),
            )  # fmt: skip
        except NoFeasiblePolicy:
            continue
        found.append({"x": x, "tok_s": plan.job.throughput})
    return found


def _steps(values: Sequence[float]) -> list[float]:
    """Equal steps of the logarithm, from a little below the lowest to a little above the highest."""
    low, high = 0.7 * min(values), 1.4 * max(values)
    step = log(high / low) / (_POINTS - 1)
    return [low * 2.718281828459045 ** (k * step) for k in range(_POINTS)]


def _workload(one: dict[str, Any], rows: int) -> WorkloadSpec:
    """As many requests, with prompts of the same lengths."""
    lengths = one["prompts"]["lengths"]
    gen = one["gen_len"] or round(one["generated"] / one["num_prompts"])
    drawn = [lengths[int((k + 0.5) * len(lengths) / rows)] for k in range(max(1, rows))]
    return WorkloadSpec.measure([(length, gen) for length in drawn], complete=True)
