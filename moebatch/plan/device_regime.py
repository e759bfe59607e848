"""Streaming whole layers to an accelerator, or a cache of experts on it: which is faster when.

The same questions as in `regime`, for machines without one. Streaming brings all experts over the link
that are not resident; a cache brings none that has no tokens, and leaves some of the others to the
host. A job may stream and change over at its tail.
"""

from dataclasses import dataclass, replace
from math import ceil

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan import cost
from moebatch.plan.accelerator_time import AcceleratorModel, Setting
from moebatch.plan.cache_time import CacheTime
from moebatch.plan.cached_fit import (
    DEVICE_EVICTION,
    DEVICE_PREFETCH_LAYERS,
    cached_host_memory,
    fit_cache,
    slot_bytes,
    tail_bytes,
    tail_host_bytes,
)
from moebatch.plan.device_fit import DevicePlan
from moebatch.plan.hybrid_time import HybridTime
from moebatch.plan.machine import MachineSpec, Numbers
from moebatch.plan.memory import kv_block_bytes
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import choose, num_pages, resident_pages
from moebatch.plan.policy import KV_BLOCK_TOKENS, Overrides, Policy
from moebatch.plan.regime import CLEARLY, SWEEP
from moebatch.plan.search_accelerator import settings_of
from moebatch.plan.workload import WorkloadSpec
from moebatch.units import format_bytes

_LEAST_ROWS = 256  # that a crossover is looked for in, however small the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceQuestion:
    """One job on one machine with an accelerator: `memory_bytes` of the host and `device_bytes` of the
    accelerator may be used. An `emulated` one computes on the host's cores and takes its memory.
    `base_bytes`: what the process holds before any weights. `shares` [L, E] as in CacheTime."""

    spec: ModelSpec
    workload: WorkloadSpec
    machine: MachineSpec
    compute: str
    memory_bytes: int
    device_bytes: int
    base_bytes: int
    fixed: Overrides
    shares: Numbers | None = None
    emulated: bool = False

    @property
    def may_choose(self) -> bool:
        """Whether there is a choice of the regime: who says what stays where has made it."""
        fixed = self.fixed
        given = (fixed.regime, fixed.weights_resident, fixed.kv_resident, fixed.ffn)
        return self.spec.has_router and all(value is None for value in given)

    def model(self, kv_dtype: str) -> AcceleratorModel:
        """The cost model of streaming."""
        work = self.workload
        return AcceleratorModel(
            self.spec, self.machine, mean_prompt=work.mean_prompt, mean_gen=work.mean_gen,
            pairs_per_prompt=work.pairs_per_prompt, kv_dtype=kv_dtype, base_bytes=self.base_bytes,
        )  # fmt: skip

    def time(self, kv_dtype: str) -> HybridTime:
        """The cost model of both regimes."""
        experts = CacheTime(self.spec, self.machine, compute=self.compute, kv_dtype=kv_dtype,
                            eviction=self.fixed.eviction or DEVICE_EVICTION,
                            shares=self.shares)  # fmt: skip
        return HybridTime(self.spec, self.machine, model=self.model(kv_dtype), experts=experts,
                          emulated=self.emulated)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A policy that streams, with the tail that suits it. `crossover`: the most rows with which the
    cache is clearly faster, None where memory has no room for it. `host_bytes`: what the tail takes on
    the host beside what streaming takes."""

    policy: Policy
    crossover: int | None = None
    host_bytes: int = 0


def setting_of(spec: ModelSpec, workload: WorkloadSpec, policy: Policy) -> Setting:
    """A policy as the numbers of the formulas."""
    pages = policy.weights_resident * (spec.num_layers + spec.num_expert_pages)
    attention, experts = settings_of(spec, round(pages))
    prompts = min(policy.batch_size, max(1.0, policy.prefill_tokens / workload.mean_prompt))
    on_disk = policy.weights_on_disk * (spec.num_layers + spec.num_expert_pages)
    return Setting(
        batch=policy.batch_size, micro_batch=policy.micro_batch_size, prefill_batch=prompts,
        prefill_micro_batch=min(prompts, policy.micro_batch_size),
        gpu_attention=float(policy.attention == "gpu"), gpu_ffn=float(policy.ffn == "gpu"),
        attention_pages=attention, expert_pages=experts, kv_resident=policy.kv_resident,
        group=policy.experts_grouped, disk_pages=min(on_disk, spec.num_expert_pages - experts),
    )  # fmt: skip


def choose_on_device(asked: DeviceQuestion, streamed: DevicePlan) -> DevicePlan:
    """The cache regime where that is clearly faster, else `streamed`, with a tail where that pays."""
    cached = clearly_cached(asked, streamed.policy)
    if cached is not None:
        return cached
    tail = tail_of(asked, streamed.policy, host_bytes=int(streamed.memory.total))
    weights = streamed.memory.resident_weights + tail.host_bytes
    memory = replace(streamed.memory, resident_weights=weights)
    return replace(streamed, policy=tail.policy, memory=memory, crossover=tail.crossover)


def tail_of(asked: DeviceQuestion, policy: Policy, *, host_bytes: int) -> Tail:
    """The tail of a job under a policy that takes so much host memory streaming.

    Where experts are not streamed, since the host computes them, there is none: a change would have to
    read them once more, in another form. It begins with few rows, however many the crossover allows:
    beyond them the gain is the host's computing alone, which has not been measured on real ones.
    """
    if not asked.may_choose or policy.weights_resident == 1.0:
        return Tail(policy=policy)
    fixed, ahead = asked.fixed, asked.fixed.prefetch_layers
    changing = replace(
        policy,
        eviction=fixed.eviction or DEVICE_EVICTION,
        prefetch_layers=DEVICE_PREFETCH_LAYERS if ahead is None else ahead,
    )
    rows = _crossover(asked, changing, host_bytes)
    if not rows or policy.ffn == "cpu":
        return Tail(policy=policy, crossover=rows)
    last = replace(changing, tail_rows=min(rows, policy.batch_size, few_rows(asked.spec)))
    best = _with_slots(asked, last, host_bytes=host_bytes)
    assert best is not None  # of fewer rows than the crossover's
    best = replace(best, tail_passes=_least_passes(asked, best))
    return Tail(policy=best, crossover=rows, host_bytes=_host_bytes(asked, best))


def few_rows(spec: ModelSpec) -> int:
    """The most rows whose tokens do not touch nearly all experts of a layer."""
    rows = 1
    while cost.distinct_experts(spec, rows + 1) <= SWEEP * spec.num_experts:
        rows += 1
    return rows


def _crossover(asked: DeviceQuestion, policy: Policy, host_bytes: int) -> int | None:
    """How many rows from one on are clearly faster with the cache; None where memory does not do."""
    time, rows = asked.time(policy.kv_dtype), 0
    for more in _row_counts(max(policy.batch_size, _LEAST_ROWS)):
        found = _with_slots(asked, replace(policy, tail_rows=more), host_bytes=host_bytes)
        if found is None:
            return rows or None
        streamed, cached = _seconds(asked, time, found)
        if cached >= CLEARLY * streamed:
            break
        rows = more
    return rows


def _seconds(asked: DeviceQuestion, time: HybridTime, policy: Policy) -> tuple[float, float]:
    """Decode steps of `tail_rows` rows: streaming, and with the cache."""
    at = replace(setting_of(asked.spec, asked.workload, policy), batch=policy.tail_rows)
    return time.streamed_decode(at), time.cached_decode(at, policy.expert_slots).total


def _host_bytes(asked: DeviceQuestion, policy: Policy) -> int:
    """Host memory of the tail beside what streaming takes: experts, less the KV cache of rows that have
    ended."""
    spec, work = asked.spec, asked.workload
    longest = ceil((work.max_prompt + work.max_gen) / KV_BLOCK_TOKENS)
    ended = max(0, policy.kv_blocks - policy.tail_rows * longest)
    full = sum(window is None for window in spec.layer_windows) / len(spec.layer_windows)
    freed = int(ended * full * kv_block_bytes(spec, policy.kv_dtype))
    more = tail_host_bytes(spec, policy, slots=policy.expert_slots, emulated=asked.emulated)
    return max(0, more - freed)


def _least_passes(asked: DeviceQuestion, policy: Policy) -> int:
    """Passes of the tail that make up for the change: resident experts go to the host, others come, and
    those on disk are read."""
    spec, machine = asked.spec, asked.machine
    on_disk = policy.weights_on_disk * num_pages(spec) / machine.disk_bandwidth
    out = resident_pages(spec, policy)[1] / machine.link_back
    back = policy.expert_slots / machine.link
    streamed, cached = _seconds(asked, asked.time(policy.kv_dtype), policy)
    return ceil((on_disk + out + back) * cost.expert_page_bytes(spec) / (streamed - cached))


def _row_counts(most: int) -> list[int]:
    """All small numbers of rows, then steps of a twelfth, and `most` itself."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(most, counts[-1] + max(1, counts[-1] // 12)))
    return counts


def _with_slots(asked: DeviceQuestion, policy: Policy, *, host_bytes: int) -> Policy | None:
    """The policy with as many slots at its tail as memory has room for; None where it has not even
    room for the rest."""
    spec, wanted = asked.spec, asked.fixed.expert_slots
    most = spec.num_expert_pages if wanted is None else min(wanted, spec.num_expert_pages)
    room = (asked.device_bytes - tail_bytes(spec, policy)) // slot_bytes(spec)
    slots = min(most, room)
    while slots >= 0:
        found = replace(policy, expert_slots=slots)
        over = host_bytes + _host_bytes(asked, found) - asked.memory_bytes
        if over <= 0:
            return found
        if not asked.emulated:
            return None
        slots -= -(-over // slot_bytes(spec))
    return None


def clearly_cached(asked: DeviceQuestion, streamed: Policy) -> DevicePlan | None:
    """The plan of the cache regime if it is clearly faster than a policy that streams; else None.

    It is for few rows: those of a job of a known size that do not touch nearly all experts.
    """
    rows, spec = asked.workload.num_sequences, asked.spec
    if not asked.may_choose or streamed.weights_resident == 1.0 or not rows:
        return None
    if cost.distinct_experts(spec, rows) > SWEEP * spec.num_experts:
        return None
    try:
        cached = cached_plan(asked)
    except NoFeasiblePolicy:
        return None
    found = rate(asked, cached.policy)
    if CLEARLY * found <= rate(asked, streamed):
        return None
    return cached if asked.emulated else replace(cached, throughput=found)


def rate(asked: DeviceQuestion, policy: Policy) -> float:
    """Generated tokens per second under a policy of either regime."""
    at, time = setting_of(asked.spec, asked.workload, policy), asked.time(policy.kv_dtype)
    if policy.regime == "cache":
        prefill = time.cached_prefill(at, policy.expert_slots).total
        decode = time.cached_decode(at, policy.expert_slots).total
    else:
        prefill, decode = time.streamed_prefill(at), time.streamed_decode(at)
    model = asked.model(policy.kv_dtype)
    return float(model.throughput(at, prefill_s=prefill, decode_s=decode))


def cached_plan(asked: DeviceQuestion) -> DevicePlan:
    """The plan of the cache regime: the host's batch, halved until caches and experts fit; the rest of
    the accelerator's memory is for experts.

    Raises: NoFeasiblePolicy when the memory of either does not do.
    """
    spec, fixed, ahead = asked.spec, asked.fixed, asked.fixed.prefetch_layers
    host = replace(fixed, kv_dtype=fixed.kv_dtype or spec.weight_dtype, attention=None, ffn=None,
                   regime=None)  # fmt: skip
    while True:
        plan = choose(spec, asked.workload, machine=asked.machine, compute=asked.compute,
                      memory_bytes=asked.memory_bytes, base_bytes=asked.base_bytes,
                      fixed=host)  # fmt: skip
        policy = replace(
            plan.policy,
            eviction=fixed.eviction or DEVICE_EVICTION,
            prefetch_layers=DEVICE_PREFETCH_LAYERS if ahead is None else ahead,
        )
        try:
            found = fit_cache(spec, policy, device_bytes=asked.device_bytes,
                              capacity=fixed.expert_slots, attention=fixed.attention)  # fmt: skip
            memory = cached_host_memory(spec, found, plan.memory, emulated=asked.emulated)
            if memory.total > asked.memory_bytes:
                raise NoFeasiblePolicy(
                    f"the cache regime needs {format_bytes(memory.total)} of host memory for all "
                    f"experts, the budget is {format_bytes(asked.memory_bytes)}",
                    hint="raise --memory, or use --regime stream",
                )
            return DevicePlan(policy=found, memory=memory)
        except NoFeasiblePolicy:
            half = policy.batch_size // 2
            if fixed.batch_size is not None or half == 0:
                raise
            host = replace(host, batch_size=half)
