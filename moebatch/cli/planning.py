"""What a run is going to do: the policy from a file or from the planner, checked against the budget."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moebatch.cli.asked import ResourceOptions
from moebatch.cli.regime import known_shares
from moebatch.cli.this_machine import this_machine
from moebatch.data.requests import Request
from moebatch.errors import NoFeasiblePolicy, UsageError
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import LocalModel
from moebatch.model.stored import locate
from moebatch.plan.machine import MachineSpec
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import Plan, job_time, memory_of
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.regime import Question, choose_regime
from moebatch.plan.workload import WorkloadSpec
from moebatch.units import format_bytes, format_duration


def plan_run(model: LocalModel, workload: WorkloadSpec, resources: ResourceOptions, *, compute: str,
             threads: int, budget: int, base_bytes: int) -> Plan:  # fmt: skip
    """The plan of a run on this machine. Where weights are streamed, their own disk is measured.

    Raises: NoFeasiblePolicy when nothing fits; UsageError for a policy that cannot run here.
    """
    machine, spec = this_machine(threads=threads), model.spec
    if resources.quantization != "none":
        spec = replace(spec, rounded_bits=bits_per_weight(resources.quantization))
    fixed = resources.regime.overrides(spec, resources.overrides)
    shares = known_shares(model)

    def plan(machine: MachineSpec) -> Plan:
        if resources.policy is not None:
            return _given(
                spec, workload, resources.policy, fixed, machine=machine,
                compute=compute, budget=budget, base_bytes=base_bytes,
            )  # fmt: skip
        return choose_regime(Question(
            spec=spec, workload=workload, machine=machine, compute=compute,
            memory_bytes=budget, base_bytes=base_bytes, fixed=fixed, shares=shares,
        ))  # fmt: skip

    planned = plan(machine)
    if planned.policy.weights_resident == 1.0:
        return planned
    from moebatch.runtime.disk_probe import file_bandwidth

    largest = max(model.path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    return plan(replace(machine, disk_bandwidth=file_bandwidth(largest)))


def bits_per_weight(quantization: str) -> float:
    """What a weight takes once it has been rounded, scales included."""
    from moebatch.native import kernels

    return {"int8": kernels.INT8, "int4": kernels.INT4}[quantization].bits_per_weight


def _given(spec: ModelSpec, workload: WorkloadSpec, policy: Policy, fixed: Overrides, *,
           machine: MachineSpec, compute: str, budget: int, base_bytes: int) -> Plan:  # fmt: skip
    """The plan that a policy file stands for, flags replacing single fields.

    Raises: NoFeasiblePolicy when it does not fit into the budget; UsageError when it needs an
    accelerator.
    """
    policy = overridden(policy, fixed)
    if "gpu" in (policy.attention, policy.ffn) or policy.schedule != "zigzag":
        raise UsageError(
            "the policy is for a machine with an accelerator, and this run has none",
            hint="make one for this machine: moebatch plan DATASET --model M --save FILE",
        )
    memory = memory_of(spec, policy, base_bytes=base_bytes, workload=workload,
                       native=machine.native)  # fmt: skip
    if memory.total > budget:
        raise NoFeasiblePolicy(
            f"this policy needs {format_bytes(memory.total)} of memory, "
            f"the budget is {format_bytes(budget)}",
            hint="raise --memory, lower --batch-size or --weights-resident, or leave --policy away",
        )
    job = job_time(spec, workload, policy, machine=machine, compute=compute)
    return Plan(policy=policy, memory=memory, job=job)


def overridden(policy: Policy, fixed: Overrides) -> Policy:
    """A policy with the fields that the user gave himself."""
    given: dict[str, Any] = {
        "batch_size": fixed.batch_size,
        "micro_batch_size": fixed.micro_batch_size,
        "weights_resident": fixed.weights_resident,
        "prefill_tokens": fixed.prefill_tokens,
        "kv_dtype": fixed.kv_dtype,
        "draft_tokens": fixed.draft_tokens,
        "regime": fixed.regime,
        "expert_slots": fixed.expert_slots,
        "eviction": fixed.eviction,
        "prefetch_layers": fixed.prefetch_layers,
    }
    if fixed.regime == "stream":
        given["tail_rows"] = 0
    return replace(policy, **{name: value for name, value in given.items() if value is not None})


def read_policy(path: str) -> Policy | None:
    """The policy of `--policy`; None for auto.

    Raises: UsageError when the file cannot be read or is none.
    """
    if path == "auto":
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the policy {path}: {error}") from None
    return Policy.from_json(text)


def plan_line(name: str, spec: ModelSpec, plan: Plan, budget: int) -> str:
    """The plan in one line, before a run."""
    from moebatch.units import format_count

    policy, job = plan.policy, plan.job
    kept = f"weights resident {policy.weights_resident:.0%}"
    if policy.regime == "cache":
        kept = f"expert cache of {policy.expert_slots} of {spec.num_expert_pages}"
    elif policy.tail_rows:
        kept += f" · expert cache from {policy.tail_rows} rows on"
    return (
        f"{name}: {format_count(spec.total_params)} parameters, "
        f"{format_count(spec.active_params)} active · batch {policy.batch_size}, "
        f"micro-batch {policy.micro_batch_size} · {kept} · "
        f"planned memory {format_bytes(plan.memory.total)} of {format_bytes(budget)} · "
        f"predicted {job.throughput:.1f} tok/s, at most {format_duration(job.total_s)}"
    )


def with_actual_dtype(model: LocalModel, checkpoint: Checkpoint) -> LocalModel:
    """The data type that the experts really have: config.json is often wrong about it.

    What is quantised is decoded to the type of the embedding.
    """
    layer = model.spec.last_sparse
    part = model.family.expert_parts(model.spec, layer, 0)[0]
    stored = locate(checkpoint, part.sources[0])
    if stored.kind != "plain":
        stored = locate(checkpoint, model.family.vocabulary_parts(model.spec)[0].sources[0])
    dtype = stored.entries[0].dtype
    return replace(model, spec=replace(model.spec, weight_dtype=dtype))


def workload_of(head: Sequence[Request], num_rows: int, *, complete: bool) -> WorkloadSpec:
    """Lengths of the first rows, each of a row's choices a sequence of its own, for all rows."""
    lengths = [
        (len(request.prompt_token_ids), request.params.max_tokens or 1)
        for request in head
        for _ in range(request.params.n)
    ]
    looked_at = WorkloadSpec.measure(lengths, complete=True)
    if complete:
        return looked_at
    return looked_at.of_size(max(len(lengths), round(num_rows * len(lengths) / len(head))))
