"""Chooses a policy for a model, a workload and a machine; what a policy's shares stand for."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.cache_time import CacheTime, cache_memory
from moebatch.plan.host_time import HostTime
from moebatch.plan.job_time import JobTime, predict
from moebatch.plan.machine import MachineSpec, Numbers
from moebatch.plan.memory import MemoryPlan, host_memory, in_bytes
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.pages import PageTable, page_table
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.search_host import HostModel, candidates, pass_sizes, search_host
from moebatch.plan.workload import WorkloadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A policy with what is predicted of it. `alternatives` are other policies and their throughput.

    With `crossover` rows in flight or fewer the cache regime is faster than streaming; None: not known.
    """

    policy: Policy
    memory: MemoryPlan
    job: JobTime
    alternatives: tuple[tuple[Policy, float], ...] = ()
    crossover: int | None = None


def table_of(spec: ModelSpec, policy: Policy) -> PageTable:
    """The page table that a policy's `weights_resident` stands for: attention pages are kept first."""
    attention, experts = resident_pages(spec, policy)
    return page_table(
        spec.num_layers,
        spec.num_experts,
        resident_attention=attention,
        resident_experts=experts,
        dense=spec.dense_layers,
        base_ffn=[layer for layer in range(spec.num_layers) if spec.base_ffn_size(layer)],
    )


def resident_pages(spec: ModelSpec, policy: Policy) -> tuple[int, int]:
    """How many attention pages and expert pages of the model stay in memory."""
    kept = round(policy.weights_resident * num_pages(spec))
    attention = min(kept, spec.num_layers)
    return attention, kept - attention


def num_pages(spec: ModelSpec) -> int:
    """Pages of the whole model."""
    return spec.num_layers + spec.num_expert_pages


def memory_of(spec: ModelSpec, policy: Policy, *, base_bytes: int,
              workload: WorkloadSpec | None = None, native: bool = False) -> MemoryPlan:  # fmt: skip
    """Peak host memory under a policy; `base_bytes` is what the process takes before any weights.

    `native`: computed by the native kernels.
    Without a workload, every pass is taken to be as large as the policy allows.
    """
    attention_pages, expert_pages = resident_pages(spec, policy)
    largest = policy.prefill_tokens + policy.batch_size
    sizes = {"pass_tokens": largest, "micro_tokens": largest}
    if workload is not None:
        sizes = pass_sizes(workload, policy.batch_size, policy.prefill_tokens)
    common: dict[str, Any] = {
        "batch_size": policy.batch_size,
        "kv_blocks": policy.kv_blocks,
        "attention_pages": attention_pages,
        "page_slots": policy.page_slots,
        "kv_dtype": policy.kv_dtype,
        "base_bytes": base_bytes,
        "native": native,
        "draft_tokens": policy.draft_tokens,
        **sizes,
    }
    if policy.regime == "cache":
        return in_bytes(cache_memory(spec, slots=policy.expert_slots, **common))
    return in_bytes(host_memory(spec, expert_pages=expert_pages, **common))


def choose(spec: ModelSpec, workload: WorkloadSpec, *, machine: MachineSpec, compute: str,
           memory_bytes: int, base_bytes: int, fixed: Overrides) -> Plan:  # fmt: skip
    """The policy with the highest predicted throughput whose peak memory stays within the budget.

    Raises: NoFeasiblePolicy, with the smallest budget that would do.
    """
    kv_dtype = fixed.kv_dtype or spec.weight_dtype
    model = HostModel(spec, workload, machine, compute=compute, kv_dtype=kv_dtype,
                      base_bytes=base_bytes, draft_tokens=fixed.draft_tokens or 0)  # fmt: skip
    found = search_host(
        model, candidates(spec, workload, fixed), memory_bytes=memory_bytes,
        micro_batch=fixed.micro_batch_size,
    )  # fmt: skip
    if workload.num_sequences is not None:
        # The search's objective is that of a long job; of its best, and of the largest batch, the one
        # whose passes, each followed, end first.
        whole = replace(fixed, batch_size=workload.num_sequences or 1)
        with suppress(NoFeasiblePolicy):
            grid = candidates(spec, workload, whole if fixed.batch_size is None else fixed)
            found += search_host(model, grid, memory_bytes=memory_bytes,
                                 micro_batch=fixed.micro_batch_size)[:1]  # fmt: skip
    followed = [
        (job_time(spec, workload, policy, machine=machine, compute=compute), policy, memory)
        for policy, memory, _ in found
    ]
    followed.sort(key=lambda one: -one[0].throughput)
    job, policy, memory = followed[0]
    others = {other: each.throughput for each, other, _ in followed[1:] if other != policy}
    return Plan(policy=policy, memory=memory, job=job, alternatives=tuple(others.items()))


def job_time(spec: ModelSpec, workload: WorkloadSpec, policy: Policy, *, machine: MachineSpec,
             compute: str, shares: Numbers | None = None) -> JobTime:  # fmt: skip
    """The predicted passes and seconds of a job on the host; `shares` as in CacheTime."""
    attention_pages, expert_pages = resident_pages(spec, policy)
    cached = CacheTime(spec, machine, compute=compute, kv_dtype=policy.kv_dtype,
                       eviction=policy.eviction, shares=shares)  # fmt: skip
    if policy.regime == "cache":
        return predict(cached, workload, policy, attention_pages=attention_pages,
                       expert_pages=policy.expert_slots)  # fmt: skip
    time = HostTime(spec, machine, compute=compute, kv_dtype=policy.kv_dtype)
    return predict(time, workload, policy, attention_pages=attention_pages,
                   expert_pages=expert_pages, tail=cached if policy.tail_rows else None)  # fmt: skip
