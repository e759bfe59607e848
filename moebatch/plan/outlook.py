"""A plan for any machine, with all that one wants to know of it: policy, memory, times, limits.

Two kinds of machine, one answer: with an accelerator the pipeline's policy, without one the host's.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.accelerator_time import RESERVE_BYTES, AcceleratorModel, Resources, Setting
from moebatch.plan.cached_fit import other_bytes, slot_bytes
from moebatch.plan.device_fit import DevicePlan
from moebatch.plan.device_regime import (
    DeviceQuestion,
    cached_plan,
    clearly_cached,
    rate,
    setting_of,
    tail_of,
)
from moebatch.plan.machine import MachineSpec, Numbers
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import KV_BLOCK_TOKENS, Overrides, Policy
from moebatch.plan.regime import Question, choose_regime
from moebatch.plan.search_accelerator import (
    Found,
    Grid,
    Space,
    batch_sizes,
    least_memory,
    page_levels,
    search,
)
from moebatch.plan.workload import WorkloadSpec
from moebatch.units import format_bytes

USABLE = (
    0.9  # of a memory's capacity, unless the user says otherwise: fragmentation, other programs
)
BASE_BYTES = 420 << 20  # what the process holds on the host before any weights, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMap:
    """One memory's parts in bytes, its predicted peak and what may be used of it."""

    name: str
    parts: Mapping[str, int]
    peak: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A policy and its prediction. `layer` and `prefill_layer` are busy seconds of each resource in one
    layer of a decode step and of a prefill pass; `seconds` is the whole job where its size is known.
    `crossover` as in Plan."""

    policy: Policy
    throughput: float
    prefill_pass_s: float
    decode_step_s: float
    layer: Mapping[str, float]
    prefill_layer: Mapping[str, float]
    memories: tuple[MemoryMap, ...]
    seconds: float | None
    alternatives: tuple[tuple[Policy, float], ...]
    crossover: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes that may be used; None: the usable share of what the machine has."""

    host: int | None = None
    accelerator: int | None = None
    reserve: int = RESERVE_BYTES  # accelerator memory that libraries take beside the policy
    usable: float = USABLE

    def of_host(self, machine: MachineSpec) -> int:
        """Host memory for the whole process."""
        return int(machine.host.memory_bytes * self.usable) if self.host is None else self.host

    def of_accelerator(self, machine: MachineSpec) -> int:
        """Accelerator memory for everything."""
        assert machine.accelerator is not None
        most = int(machine.accelerator.memory_bytes * self.usable)
        return most if self.accelerator is None else min(self.accelerator, most)


def look(spec: ModelSpec, workload: WorkloadSpec, machine: MachineSpec, *, limits: Limits,
         compute: str, fixed: Overrides | None = None, space: Space = "full",
         shares: Numbers | None = None) -> Outlook:  # fmt: skip
    """Plan a job for a machine; `shares` [L, E] are how tokens spread over the experts.

    Raises: NoFeasiblePolicy with the smallest change that would make it fit.
    """
    fixed = fixed or Overrides()
    if machine.accelerator is None:
        return _on_host(spec, workload, machine, limits=limits, compute=compute, fixed=fixed,
                        shares=shares)  # fmt: skip
    asked = DeviceQuestion(
        spec=spec, workload=workload, machine=machine, compute=compute, fixed=fixed, shares=shares,
        memory_bytes=limits.of_host(machine), base_bytes=BASE_BYTES,
        device_bytes=limits.of_accelerator(machine) - limits.reserve,
    )  # fmt: skip
    if fixed.regime == "cache":
        return _cached(asked, cached_plan(asked), limits.reserve)
    streamed = _on_accelerator(spec, workload, machine, limits=limits, fixed=fixed, space=space)
    return streamed if space == "paper" else _with_regime(asked, streamed, limits.reserve)


def speed_of(spec: ModelSpec, workload: WorkloadSpec, *, limits: Limits, compute: str,
             fixed: Overrides, space: Space) -> Callable[[MachineSpec], float]:  # fmt: skip
    """The predicted throughput as a function of the machine, each planned anew."""

    def speed(machine: MachineSpec) -> float:
        return look(spec, workload, machine, limits=limits, compute=compute, fixed=fixed,
                    space=space).throughput  # fmt: skip

    return speed


def _on_host(spec: ModelSpec, workload: WorkloadSpec, machine: MachineSpec, *, limits: Limits,
             compute: str, fixed: Overrides, shares: Numbers | None) -> Outlook:  # fmt: skip
    limit = limits.of_host(machine)
    plan = choose_regime(Question(
        spec=spec, workload=workload, machine=machine, compute=compute, memory_bytes=limit,
        base_bytes=BASE_BYTES, fixed=fixed, shares=shares,
    ))  # fmt: skip
    job, passes = plan.job, max(1, plan.job.passes)
    each = {"host": job.parts.get("compute", 0.0), "disk": job.parts.get("disk", 0.0)}
    per_pass = {name: seconds / passes / spec.num_layers for name, seconds in each.items()}
    parts = {name: int(size) for name, size in asdict(plan.memory).items()}
    peak = int(plan.memory.total)
    memory = MemoryMap(name="host memory", parts=parts, peak=peak, limit=limit)
    return Outlook(
        policy=plan.policy,
        throughput=job.throughput,
        prefill_pass_s=job.prefill_s,
        decode_step_s=job.decode_s / passes,
        layer=per_pass,
        prefill_layer=per_pass,
        memories=(memory,),
        seconds=None if workload.num_sequences is None else job.total_s,
        alternatives=plan.alternatives,
        crossover=plan.crossover,
    )  # fmt: skip


def accelerator_model(spec: ModelSpec, workload: WorkloadSpec, machine: MachineSpec,
                      kv_dtype: str, reserve: int = RESERVE_BYTES) -> AcceleratorModel:  # fmt: skip
    """The cost model of a workload on a machine with an accelerator."""
    return AcceleratorModel(
        spec, machine, mean_prompt=workload.mean_prompt, mean_gen=workload.mean_gen,
        pairs_per_prompt=workload.pairs_per_prompt, kv_dtype=kv_dtype, base_bytes=BASE_BYTES,
        reserve_bytes=reserve,
    )  # fmt: skip


def grid_of(spec: ModelSpec, workload: WorkloadSpec, fixed: Overrides) -> Grid:
    """What is searched, narrowed to what the user fixed."""
    rows = workload.num_sequences
    most = 20_000 if rows is None else max(1, rows)
    grid = Grid(batches=batch_sizes(most), pages=page_levels(spec))
    if fixed.batch_size is not None:
        grid = replace(grid, batches=(min(fixed.batch_size, most),))
    if fixed.micro_batch_size is not None:
        grid = replace(grid, micro_batches=(fixed.micro_batch_size,))
    if fixed.weights_resident is not None:
        total = spec.num_layers + spec.num_expert_pages
        grid = replace(grid, pages=(round(fixed.weights_resident * total),))
    if fixed.attention is not None:
        grid = replace(grid, gpu_attention=(int(fixed.attention == "gpu"),))
    if fixed.ffn is not None:
        grid = replace(grid, gpu_ffn=(int(fixed.ffn == "gpu"),))
    return grid if fixed.kv_resident is None else replace(grid, kv_resident=(fixed.kv_resident,))


def _on_accelerator(spec: ModelSpec, workload: WorkloadSpec, machine: MachineSpec, *,
                    limits: Limits, fixed: Overrides, space: Space) -> Outlook:  # fmt: skip
    kv_dtype = fixed.kv_dtype or (
        "float16" if spec.weight_dtype == "float32" else spec.weight_dtype
    )
    model = accelerator_model(spec, workload, machine, kv_dtype, limits.reserve)
    gpu, host = limits.of_accelerator(machine), limits.of_host(machine)
    grid = grid_of(spec, workload, fixed)
    found = search(spec, model, grid, gpu_bytes=gpu, host_bytes=host, space=space)
    if not found:
        raise _refusal(*least_memory(spec, model, grid), gpu=gpu, host=host)
    best = found[0]
    decode, prefill = model.decode(best.setting), model.prefill(best.setting)
    rate = best.throughput
    rows = workload.num_sequences
    return Outlook(
        policy=policy_of(spec, workload, best.setting, kv_dtype),
        throughput=rate,
        prefill_pass_s=float(prefill.total),
        decode_step_s=float(decode.total),
        layer=_per_layer(decode, spec),
        prefill_layer=_per_layer(prefill, spec),
        memories=_maps(model, best.setting, gpu=gpu, host=host),
        seconds=None if rows is None else rows * workload.mean_gen / rate,
        alternatives=tuple(_alternative(spec, workload, one, kv_dtype) for one in found[1:6]),
    )


def _with_regime(asked: DeviceQuestion, streamed: Outlook, reserve: int) -> Outlook:
    """The cache regime where that is clearly faster, else streaming with its tail."""
    policy, memories = streamed.policy, streamed.memories
    tail = tail_of(asked, policy, host_bytes=memories[-1].peak)
    plan = clearly_cached(asked, policy)
    if plan is not None:
        others = ((policy, streamed.throughput), *streamed.alternatives)
        found = _cached(asked, plan, reserve)
        return replace(found, crossover=tail.crossover, alternatives=others[:5])
    if tail.host_bytes:
        host = memories[-1]
        parts = {**host.parts, "experts_for_the_tail": tail.host_bytes}
        host = replace(host, parts=parts, peak=host.peak + tail.host_bytes)
        memories = (*memories[:-1], host)
    return replace(streamed, policy=tail.policy, memories=memories, crossover=tail.crossover)


def _cached(asked: DeviceQuestion, plan: DevicePlan, reserve: int) -> Outlook:
    """What there is to know of a plan of the cache regime."""
    spec, work, policy = asked.spec, asked.workload, plan.policy
    at, time = setting_of(spec, work, policy), asked.time(policy.kv_dtype)
    decode = time.cached_decode(at, policy.expert_slots)
    prefill = time.cached_prefill(at, policy.expert_slots)
    experts = policy.expert_slots * slot_bytes(spec)
    parts = {"reserve": reserve, "experts": experts, "all_else": other_bytes(spec, policy)}
    on_host = {name: int(size) for name, size in asdict(plan.memory).items()}
    speed = rate(asked, policy)
    return Outlook(
        policy=policy,
        throughput=speed,
        prefill_pass_s=prefill.total,
        decode_step_s=decode.total,
        layer=_per_layer(decode.busy, spec),
        prefill_layer=_per_layer(prefill.busy, spec),
        memories=(
            MemoryMap(name="accelerator memory", parts=parts, peak=sum(parts.values()),
                      limit=asked.device_bytes + reserve),
            MemoryMap(name="host memory", parts=on_host, peak=int(plan.memory.total),
                      limit=asked.memory_bytes),
        ),
        seconds=None if work.num_sequences is None else work.num_sequences * work.mean_gen / speed,
        alternatives=(),
    )  # fmt: skip


def _alternative(spec: ModelSpec, workload: WorkloadSpec, one: Found,
                 kv_dtype: str) -> tuple[Policy, float]:  # fmt: skip
    return policy_of(spec, workload, one.setting, kv_dtype), one.throughput


def policy_of(spec: ModelSpec, workload: WorkloadSpec, at: Setting, kv_dtype: str) -> Policy:
    """A setting of the search as a policy."""
    total = spec.num_layers + spec.num_expert_pages
    blocks = (workload.mean_prompt + workload.mean_gen) / KV_BLOCK_TOKENS + 0.5
    longest = ceil((workload.max_prompt + workload.max_gen) / KV_BLOCK_TOKENS)
    return Policy(
        batch_size=int(at.batch),
        micro_batch_size=int(at.micro_batch),
        attention="gpu" if at.gpu_attention else "cpu",
        ffn="gpu" if at.gpu_ffn else "cpu",
        weights_resident=float((at.attention_pages + at.expert_pages) / total),
        kv_resident=float(at.kv_resident),
        prefill_tokens=max(1, round(at.prefill_batch * workload.mean_prompt)),
        page_slots=max(
            1, ceil(2 * (total - at.attention_pages - at.expert_pages) / spec.num_layers)
        ),
        kv_blocks=max(longest, ceil(at.batch * blocks)),
        kv_dtype=kv_dtype,
        schedule="flexgen" if at.gpu_attention else "cgopipe",
        prefill_micro_batch_size=max(1, int(at.prefill_micro_batch)),
        experts_grouped=max(1, int(at.group)),
        weights_on_disk=float(at.disk_pages / total),
    )


def predicted_throughput(spec: ModelSpec, workload: WorkloadSpec, machine: MachineSpec,
                         policy: Policy) -> float:  # fmt: skip
    """Tokens per second that the model gives a policy, whatever memory it takes."""
    at = setting_of(spec, workload, policy)
    model = accelerator_model(spec, workload, machine, policy.kv_dtype)
    prefill, decode = model.prefill(at).total, model.decode(at).total
    return float(model.throughput(at, prefill_s=prefill, decode_s=decode))


def _per_layer(times: Resources, spec: ModelSpec) -> dict[str, float]:
    names = ("accelerator", "host", "to_accelerator", "to_host", "disk")
    return {name: float(getattr(times, name)) / spec.num_layers for name in names}


def _maps(model: AcceleratorModel, at: Setting, *, gpu: int, host: int) -> tuple[MemoryMap, ...]:
    on_gpu, on_host = model.accelerator_memory(at), model.host_memory(at)
    return tuple(
        MemoryMap(
            name=name,
            parts={part: int(size) for part, size in asdict(plan).items()},
            peak=int(plan.total),
            limit=limit,
        )
        for name, plan, limit in (
            ("accelerator memory", on_gpu, gpu),
            ("host memory", on_host, host),
        )
    )


def _refusal(least_gpu: float, least_host: float, *, gpu: int, host: int) -> NoFeasiblePolicy:
    """Names the memory that is short, and how much would do."""
    short = [
        (name, option, least, limit)
        for name, option, least, limit in (
            ("accelerator memory", "--gpu-memory", least_gpu, gpu),
            ("host memory", "--memory", least_host, host),
        )
        if least > limit
    ]
    if not short:
        return NoFeasiblePolicy(
            "no policy fits accelerator and host memory at once",
            hint="give more of either with --gpu-memory or --memory, or free --batch-size and others",
        )
    name, option, least, limit = short[0]
    return NoFeasiblePolicy(
        f"the smallest policy for this model needs {format_bytes(least)} of {name}, "
        f"{format_bytes(limit)} may be used",
        hint=f"it takes {option} {ceil(least / 2**20)}MiB, or a smaller model",
    )
