"""moebatch's own arm, in a process of its own: plan, load, warm up, run, say what happened.

    python -m moebatch.cli.bench.worker TASK.json

Prints JSON lines: {"event": "planned", …} before anything is loaded, {"event": "done", …} at the end.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebatch.cli.accelerator import (
    AcceleratorOptions,
    given_plan,
    open_accelerator,
    plan_for,
)
from moebatch.cli.asked import ResourceOptions
from moebatch.cli.bench.roofs import roofs_of, streams
from moebatch.cli.bench.task import Task, read_rows
from moebatch.cli.planning import overridden, plan_run, with_actual_dtype
from moebatch.cli.this_machine import this_machine
from moebatch.data.requests import Completion, Request, SamplingParams
from moebatch.errors import MoebatchError
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import LocalModel, resolve_model
from moebatch.plan.device_fit import DevicePlan
from moebatch.plan.machine import MachineSpec
from moebatch.plan.memory import LOADERS
from moebatch.plan.optimizer import Plan
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.profiles import link_profile
from moebatch.plan.schedule import Op
from moebatch.plan.workload import WorkloadSpec

if TYPE_CHECKING:
    from moebatch.runtime.arithmetic import Arithmetic
    from moebatch.runtime.device import Device
    from moebatch.runtime.engine import Engine, EngineStats

_TRACED = 12  # passes whose lanes are kept for the drawing: prefill first, then decode
_WARM_PASSES = 16  # more than a warm-up makes
_MOST_SPANS = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What is known before the weights are read."""

    model: LocalModel
    how: "Arithmetic"
    plan: Plan | DevicePlan
    device: "Device | None"
    roofs: dict[str, Any] | None


def main(path: str) -> int:
    """Run the task of a file; the exit code of the command line's errors."""
    task = Task.read(Path(path))
    try:
        _run(task)
    except MoebatchError as error:
        hint = f" ({error.hint})" if error.hint else ""
        sys.stderr.write(f"error: {error}{hint}\n")
        return error.exit_code
    return 0


def _run(task: Task) -> None:
    rows = read_rows(task.rows)
    warm = read_rows(task.warm_up) if task.warm_up else []
    model = resolve_model(task.model)
    with Checkpoint(model.path) as checkpoint:
        checkpoint.check(model.parts())
        model = with_actual_dtype(model, checkpoint)
        setup = _plan(task, model, rows)
        _say("planned", _planned(setup))
        from moebatch.runtime.engine import Engine

        with Engine(
            checkpoint, spec=model.spec, family=model.family, policy=setup.plan.policy,
            open_stream=lambda skip: _NoText(), decode=lambda ids, skip: "",
            eos_token_ids=model.eos_token_ids, max_model_len=model.spec.max_model_len,
            compute=setup.how.compute, kernels=setup.how.kernels,
            quantization=setup.how.quantization, device=setup.device,
            traced_passes=_TRACED + _WARM_PASSES,
        ) as engine:  # fmt: skip
            engine.load(threads=min(setup.how.threads, LOADERS))
            if warm:
                _generate(engine, warm, more_follow=True)
            _say("done", _measured(engine, rows))


class _NoText:
    """Text is not wanted: the lengths are forced and nothing stops a row."""

    def push(self, token_id: int, /) -> str:
        """See TextStream."""
        return ""


def _plan(task: Task, model: LocalModel, rows: Sequence[tuple[list[int], int]]) -> _Setup:
    from moebatch.runtime import arithmetic, host

    options = task.options
    asked = AcceleratorOptions(device=options.get("device", "auto"),
                               schedule=options.get("schedule"),
                               memory_bytes=options.get("gpu_memory"))  # fmt: skip
    device = open_accelerator(asked)
    how = arithmetic.prepare(
        dtype=options["dtype"], quantization=options["quantization"], threads=task.threads,
        weight_dtype=model.spec.weight_dtype, accelerator=device is not None,
    )  # fmt: skip
    policy = options.get("policy")
    resources = ResourceOptions(
        memory_bytes=task.memory_bytes, cpu_threads=how.threads, dtype=options["dtype"],
        overrides=Overrides(**options.get("overrides", {})),
        policy=None if policy is None else Policy(**policy),
        quantization=options["quantization"],
    )  # fmt: skip
    budget = task.memory_bytes or host.default_budget_bytes()
    workload = WorkloadSpec.measure([(len(ids), n) for ids, n in rows], complete=True)
    machine, base = this_machine(threads=how.threads, quiet=True), host.base_bytes()
    plan: Plan | DevicePlan
    if device is None:
        plan = plan_run(model, workload, resources, compute=how.compute, threads=how.threads,
                        budget=budget, base_bytes=base)  # fmt: skip
    elif resources.policy is not None:
        given = overridden(resources.policy, resources.overrides)
        plan = given_plan(device, model.spec, given, budget=budget, base_bytes=base)
    else:
        plan = plan_for(device, model.spec, workload, machine=machine, compute=how.compute,
                        schedule=asked.schedule, fixed=resources.overrides, budget=budget,
                        base_bytes=base)  # fmt: skip
    if device is None and streams(model.spec, plan.policy):
        machine = replace(machine, disk_bandwidth=_disk_bandwidth(model.path))
    return _Setup(model=model, how=how, plan=plan, device=device,
                  roofs=_roofs(model, workload, plan.policy, machine, device=device,
                               compute=how.compute))  # fmt: skip


def _roofs(model: LocalModel, workload: WorkloadSpec, policy: Policy, machine: MachineSpec, *,
           device: "Device | None", compute: str) -> dict[str, Any] | None:  # fmt: skip
    """The roofs; None with a real accelerator, whose peaks are not among the host's."""
    if device is not None and not device.emulated:
        return None
    link = None if device is None else link_profile(device.name.partition(":")[2]).h2d_bytes_per_s
    found = roofs_of(model.spec, workload, policy, machine, compute=compute, link=link)
    return {
        **found.to_dict(),
        "peak_flops": machine.host.peak(compute),
        "memory_bandwidth": machine.host.bandwidth,
        "disk_bandwidth": machine.disk_bandwidth,
    }


def _disk_bandwidth(path: Path) -> float:
    from moebatch.runtime.disk_probe import file_bandwidth

    return file_bandwidth(max(path.glob("*.safetensors"), key=lambda one: one.stat().st_size))


def _planned(setup: _Setup) -> dict[str, Any]:
    plan, spec = setup.plan, setup.model.spec
    return {
        "policy": asdict(plan.policy),
        "compute_dtype": setup.how.compute,
        "kernels": setup.how.variant,
        "quantization": setup.how.quantization,
        "memory_bytes": int(plan.memory.total),
        "memory_parts": {name: int(size) for name, size in asdict(plan.memory).items()},
        "predicted": _predicted(plan),
        "roofs": setup.roofs,
        "model": {
            "family": spec.family, "params": spec.total_params, "dtype": spec.weight_dtype,
            "active_params": spec.active_params, "num_layers": spec.num_layers,
            "num_experts": spec.num_experts, "top_k": spec.top_k,
        },
    }  # fmt: skip


def _predicted(plan: Plan | DevicePlan) -> dict[str, Any] | None:
    """What the planner expects; None where it says nothing."""
    if isinstance(plan, DevicePlan):
        return None if plan.throughput is None else {"tok_s": plan.throughput}
    job = plan.job
    return {"tok_s": job.throughput, "prefill_s": job.prefill_s, "decode_s": job.decode_s,
            "passes": job.passes}  # fmt: skip


def _generate(engine: "Engine", rows: Sequence[tuple[list[int], int]], *,
              more_follow: bool = False) -> int:  # fmt: skip
    """Run the rows to their forced ends; the number of tokens that came out, counted from ids.

    Raises: MoebatchError for a row that did not give what was asked.
    """
    requests = [
        Request(index=k, id=str(k), prompt_token_ids=tuple(ids),
                params=SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True))
        for k, (ids, n) in enumerate(rows)
    ]  # fmt: skip
    counts: dict[int, int] = {}
    for outcome in engine.run(requests, more_follow=more_follow):
        if not isinstance(outcome, Completion):
            raise MoebatchError(f"row {outcome.id}: {outcome.message}")
        counts[outcome.request.index] = sum(len(choice.token_ids) for choice in outcome.choices)
    short = [k for k, (_, n) in enumerate(rows) if counts.get(k) != n]
    if short:
        raise MoebatchError(f"row {short[0]} gave {counts.get(short[0])} tokens,"
                            f" {rows[short[0]][1]} were asked for")  # fmt: skip
    return sum(counts.values())


def _measured(engine: "Engine", rows: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
    """Run the measured rows; what changed meanwhile is theirs, the warm-up is left out."""
    stats, experts = engine.stats, engine.expert_tokens
    before = _snapshot(stats)
    read, first_traced = engine.disk_read_bytes, len(engine.traced)
    began = time.time()
    generated = _generate(engine, rows)
    ended = time.time()
    after = _snapshot(stats)
    tokens = [
        [new - old for new, old in zip(now, then, strict=True)]
        for now, then in zip(engine.expert_tokens, experts, strict=True)
    ]
    return {
        "generated": generated,
        "prefill_s": after["prefill_s"] - before["prefill_s"],
        "decode_s": after["decode_s"] - before["decode_s"],
        "wall_s": ended - began,
        "load_s": stats.load_s,
        "passes": int(after["passes"] - before["passes"]),
        "disk_read_bytes": engine.disk_read_bytes - read,
        "lane_busy_s": {
            name: busy - before.get("lane " + name, 0.0)
            for name, busy in ((k[5:], v) for k, v in after.items() if k.startswith("lane "))
        },
        "device": engine.device_facts,
        "expert_tokens": tokens,
        "timeline": _timeline(engine, first_traced),
        "began": began,
        "ended": ended,
    }


def _snapshot(stats: "EngineStats") -> dict[str, float]:
    lanes = {f"lane {lane.value}": busy for lane, busy in stats.lane_busy_s.items()}
    return {"prefill_s": stats.prefill_s, "decode_s": stats.decode_s,
            "passes": float(stats.passes), **lanes}  # fmt: skip


def _timeline(engine: "Engine", first: int) -> list[list[Any]]:
    """[lane, op, layer, pass, start, seconds] of the job's first passes, the warm-up's left out."""
    traced = engine.traced[first : first + _TRACED]
    if not traced:
        return []
    origin = min((span.start_s for one in traced for span in one.timeline.spans), default=0.0)
    spans = [
        [span.task.lane.value, span.task.op.value, span.task.layer, number,
         round(span.start_s - origin, 5), round(span.end_s - span.start_s, 5)]
        for number, one in enumerate(traced) for span in one.timeline.spans
        if span.end_s > span.start_s and span.task.op not in (Op.FREE_PAGE, Op.FREE_LAYER)
    ]  # fmt: skip
    return spans[:_MOST_SPANS]


def _say(event: str, values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
