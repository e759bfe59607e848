"""Streaming whole layers, or a cache of experts: which is faster for how many rows, and who decides.

With many rows in flight nearly every expert has tokens, and streaming reads each once, ahead of time.
With few rows most experts have none: the cache regime reads those that do. A job may stream and change
over at its tail, when no more rows wait than the crossover.
"""

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan import cost
from moebatch.plan.cache_time import CacheTime, cache_memory
from moebatch.plan.eviction import EvictionName
from moebatch.plan.host_time import HostTime, PassLoad
from moebatch.plan.job_time import JobTime
from moebatch.plan.machine import MachineSpec, Numbers
from moebatch.plan.memory import kv_block_bytes
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import (
    Plan,
    choose,
    job_time,
    memory_of,
    num_pages,
    resident_pages,
)
from moebatch.plan.policy import KV_BLOCK_TOKENS, Overrides, Policy
from moebatch.plan.search_host import (
    Candidates,
    HostModel,
    candidates,
    infeasible,
    most_blocks,
    pass_sizes,
)
from moebatch.plan.workload import WorkloadSpec

EVICTION: EvictionName = "mrs"  # unless the user says otherwise
_SPARE = 2  # experts on their way beside those that are kept
_FOLLOWED = 2  # candidates whose passes are followed one by one
SWEEP = 0.95  # a pass that touches this share of the experts reads all: there caching means nothing
CLEARLY = 0.95  # what takes no more than this share of the time is clearly faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked for: one job on one machine. `shares` [L, E] as in CacheTime."""

    spec: ModelSpec
    workload: WorkloadSpec
    machine: MachineSpec
    compute: str
    memory_bytes: int
    base_bytes: int
    fixed: Overrides
    shares: Numbers | None = None


def choose_regime(asked: Question) -> Plan:
    """The better of both regimes, or the one that the user fixed.

    Raises: NoFeasiblePolicy, with the smallest budget that would do.
    """
    if asked.fixed.regime == "cache":
        plan = cache_plan(asked)
        return replace(plan, crossover=_crossover_of(asked, plan))
    streamed = choose(asked.spec, asked.workload, machine=asked.machine, compute=asked.compute,
                      memory_bytes=asked.memory_bytes, base_bytes=asked.base_bytes,
                      fixed=asked.fixed)  # fmt: skip
    if asked.fixed.regime == "stream" or streamed.policy.weights_resident == 1.0:
        return streamed
    streamed = with_tail(asked, streamed)
    try:
        cached = cache_plan(asked)
    except NoFeasiblePolicy:
        return streamed
    if cost.distinct_experts(asked.spec, cached.policy.batch_size) > SWEEP * asked.spec.num_experts:
        return streamed
    rows = asked.workload.num_sequences
    few = rows is not None and streamed.crossover is not None and rows <= streamed.crossover
    # Of few rows nearly all passes are the tail's: then both are nearly the same.
    if streamed.job.throughput < cached.job.throughput * (1 / CLEARLY if few else CLEARLY):
        others = ((streamed.policy, streamed.job.throughput), *streamed.alternatives)
        return replace(cached, crossover=streamed.crossover, alternatives=others[:6])
    return streamed


def cache_plan(asked: Question) -> Plan:
    """The best policy of the cache regime: of the best by the search's estimate, followed pass by pass.

    Raises: NoFeasiblePolicy.
    """
    spec, workload = asked.spec, asked.workload
    found: list[tuple[float, Policy]] = []
    least = np.inf
    for batch, prefill in _sizes(asked):
        policy, need = _cache_policy(asked, batch, prefill)
        least = min(least, need)
        if policy is not None:
            found.append((_estimate(asked, policy), policy))
    if not found:
        raise infeasible(float(least), asked.memory_bytes)
    found.sort(key=lambda one: -one[0])
    policies = [policy for _, policy in found[:_FOLLOWED]]
    jobs = [_job(asked, policy) for policy in policies]
    best = max(range(len(jobs)), key=lambda k: jobs[k].throughput)
    policy = policies[best]
    memory = memory_of(spec, policy, base_bytes=asked.base_bytes, workload=workload,
                       native=asked.machine.native)  # fmt: skip
    return Plan(policy=policy, memory=memory, job=jobs[best])


def _job(asked: Question, policy: Policy) -> JobTime:
    return job_time(asked.spec, asked.workload, policy, machine=asked.machine,
                    compute=asked.compute, shares=asked.shares)  # fmt: skip


def _estimate(asked: Question, policy: Policy) -> float:
    """Tokens per second of a long job, by the formula of the search on the host."""
    model = _host_model(asked, policy.kv_dtype)
    model.time = CacheTime(asked.spec, asked.machine, compute=asked.compute,
                           kv_dtype=policy.kv_dtype, eviction=policy.eviction,
                           shares=asked.shares)  # fmt: skip
    attention = resident_pages(asked.spec, policy)[0]
    numbers = (policy.batch_size, policy.prefill_tokens, attention, policy.expert_slots)
    return float(model.throughput(Candidates(*(np.array([float(n)]) for n in numbers)))[0])


def _host_model(asked: Question, kv_dtype: str) -> HostModel:
    return HostModel(asked.spec, asked.workload, asked.machine, compute=asked.compute,
                     kv_dtype=kv_dtype, base_bytes=asked.base_bytes,
                     draft_tokens=asked.fixed.draft_tokens or 0)  # fmt: skip


def _sizes(asked: Question) -> list[tuple[int, int]]:
    """(batch, prefill tokens): powers of two and all rows; prefill as streaming tries it."""
    grid = candidates(asked.spec, asked.workload, asked.fixed)
    most = int(grid.batch.max())
    if asked.fixed.batch_size is not None:
        batches = {most}
    else:
        batches = {min(most, 1 << k) for k in range(8)} | {min(most, 256)}
    prefills = sorted({int(n) for n in grid.prefill_tokens})
    return [(batch, prefill) for batch in sorted(batches) for prefill in prefills[:3]]


def _cache_policy(asked: Question, batch: int, prefill: int) -> tuple[Policy | None, float]:
    """The policy with the most slots that fit; None where not even none fit, and what would do."""
    spec, fixed = asked.spec, asked.fixed
    kv_dtype = fixed.kv_dtype or spec.weight_dtype
    model = _host_model(asked, kv_dtype)
    blocks = max(int(model.kv_blocks(batch)), min(most_blocks(asked.workload, batch), 64 * batch))
    micro = min(fixed.micro_batch_size or 64, batch)
    least = np.inf
    for spare in (_SPARE, 1):
        attention = _attention_choices(asked)
        needs = cache_memory(
            spec, slots=fixed.expert_slots or 0, attention_pages=attention, page_slots=spare,
            batch_size=batch, kv_blocks=blocks, kv_dtype=kv_dtype, base_bytes=asked.base_bytes,
            native=asked.machine.native, draft_tokens=fixed.draft_tokens or 0,
            **pass_sizes(asked.workload, batch, prefill),
        ).total  # fmt: skip
        least = min(least, float(np.min(needs)))
        fits = np.flatnonzero(needs <= asked.memory_bytes)
        if not fits.size:
            continue
        k = int(fits[0])
        room = int((asked.memory_bytes - needs[k]) // cost.expert_slot_bytes(spec))
        slots = _slots(asked, int(attention[k]), room)
        return Policy(
            batch_size=batch, micro_batch_size=micro, prefill_tokens=prefill, page_slots=spare,
            kv_blocks=blocks, kv_dtype=kv_dtype, regime="cache", expert_slots=slots,
            weights_resident=float(attention[k] / num_pages(spec)),
            eviction=fixed.eviction or EVICTION, draft_tokens=fixed.draft_tokens or 0,
            prefetch_layers=3 if fixed.prefetch_layers is None else fixed.prefetch_layers,
        ), least  # fmt: skip
    return None, least


def _attention_choices(asked: Question) -> Numbers:
    """Numbers of attention pages that may stay, most first."""
    layers = asked.spec.num_layers
    if asked.fixed.weights_resident is not None:
        kept = round(asked.fixed.weights_resident * num_pages(asked.spec))
        return np.array([float(min(kept, layers))])
    return np.arange(layers, -1, -1, dtype=float)


def _slots(asked: Question, attention: int, room: int) -> int:
    """Experts to keep: what the user said, else what there is room for."""
    fixed, most = asked.fixed, asked.spec.num_expert_pages
    if fixed.expert_slots is not None:
        return min(fixed.expert_slots, most)
    if fixed.weights_resident is not None:
        kept = round(fixed.weights_resident * num_pages(asked.spec))
        return min(kept - attention, room)
    return min(room, most)


def with_tail(asked: Question, plan: Plan) -> Plan:
    """A plan that streams, with the rows at which it changes over to a cache, and what that saves."""
    rows = crossover(asked, plan)
    if rows < 1:
        return replace(plan, crossover=0)
    fixed = asked.fixed
    policy = replace(
        plan.policy, tail_rows=rows, expert_slots=int(tail_slots(asked, plan, rows)),
        eviction=fixed.eviction or EVICTION,
        prefetch_layers=3 if fixed.prefetch_layers is None else fixed.prefetch_layers,
    )  # fmt: skip
    return replace(plan, policy=policy, job=_job(asked, policy), crossover=rows)


def crossover(asked: Question, plan: Plan) -> int:
    """The most rows in flight, all decoding, with which a plan's tail is clearly faster cached."""
    spec, policy = asked.spec, plan.policy
    attention, experts = resident_pages(spec, policy)
    rows = np.arange(1, policy.batch_size + 1, dtype=float)
    slots = tail_slots(asked, plan, rows)
    return _first_loss(asked, rows, attention=attention, experts=experts, slots=slots,
                       kv_dtype=policy.kv_dtype, micro_batch=policy.micro_batch_size)  # fmt: skip


def _crossover_of(asked: Question, cached: Plan) -> int | None:
    """The same for a plan of the cache regime, against streaming in the same memory."""
    policy = cached.policy
    attention, _ = resident_pages(asked.spec, policy)
    rows = np.arange(1, max(policy.batch_size, 256) + 1, dtype=float)
    slots = np.full_like(rows, policy.expert_slots)
    return _first_loss(asked, rows, attention=attention, experts=policy.expert_slots, slots=slots,
                       kv_dtype=policy.kv_dtype, micro_batch=64)  # fmt: skip


def _first_loss(asked: Question, rows: Numbers, *, attention: int, experts: int, slots: Numbers,
                kv_dtype: str, micro_batch: int) -> int:  # fmt: skip
    """How many rows from one on are clearly faster with `slots` cached than with `experts` resident."""
    spec, machine, compute = asked.spec, asked.machine, asked.compute
    load = PassLoad(rows=rows, context=rows * asked.workload.mean_context, sampled=rows,
                    micro_batches=np.ceil(rows / micro_batch))  # fmt: skip
    streaming = HostTime(spec, machine, compute=compute, kv_dtype=kv_dtype)
    caching = CacheTime(spec, machine, compute=compute, kv_dtype=kv_dtype,
                        eviction=asked.fixed.eviction or EVICTION, shares=asked.shares)  # fmt: skip
    streamed = streaming.seconds(load, attention_pages=attention, expert_pages=experts).total
    cached = caching.seconds(load, attention_pages=attention, expert_pages=slots).total
    # A gain of a few per cent is within the error of prediction, and both curves are flat there.
    slower = np.flatnonzero(cached >= CLEARLY * np.broadcast_to(streamed, cached.shape))
    return int(slower[0]) if slower.size else int(rows.size)


def tail_slots(asked: Question, plan: Plan, rows: Numbers | int) -> Numbers:
    """Experts that the tail can keep: those that are resident, and what the page buffer, the KV
    cache of rows that have ended, and the rest of the budget have room for."""
    spec, policy, work = asked.spec, plan.policy, asked.workload
    expert = cost.expert_slot_bytes(spec)
    longest = ceil((work.max_prompt + work.max_gen) / KV_BLOCK_TOKENS)
    freed = np.maximum(0, policy.kv_blocks - np.asarray(rows) * longest)
    full = sum(window is None for window in spec.layer_windows) / spec.num_layers
    room = asked.memory_bytes - int(plan.memory.total)
    room = room + freed * full * kv_block_bytes(spec, policy.kv_dtype)
    room = room + (policy.page_slots - _SPARE) * expert
    kept = resident_pages(spec, policy)[1] + np.floor(room / expert)
    most = spec.num_expert_pages
    if asked.fixed.expert_slots is not None:
        most = min(most, asked.fixed.expert_slots)
    slots: Numbers = np.clip(kept, 0, most)
    return slots
