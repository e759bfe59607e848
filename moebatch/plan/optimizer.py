"""Chooses a policy for a memory budget: an exhaustive search over residence and prefill size.

A first planner for machines without an accelerator. Its machine is two assumed rates; they decide
only between a larger batch and more resident weights, and only for models that do not fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.memory import (
    MemoryPlan,
    activation_bytes,
    all_attention_bytes,
    attention_page_bytes,
    expert_page_bytes,
    kv_block_bytes,
    loading_bytes,
    logit_bytes,
    vocabulary_bytes,
)
from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec
from moebatch.plan.pages import PageTable, page_table
from moebatch.plan.policy import KV_BLOCK_TOKENS, Policy
from moebatch.plan.workload import WorkloadSpec
from moebatch.units import format_bytes

DISK_BYTES_PER_S = 1e9  # assumed: an NVMe drive behind a virtual machine
COMPUTE_FLOPS_PER_S = 1e11  # assumed: two AVX2 cores
_PREFILL_CHOICES = (16384, 8192, 4096, 2048, 1024, 512)  # of equals the first: larger products
_MAX_BATCH = 4096
_MICRO_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the user fixed; None leaves the choice to the planner."""

    batch_size: int | None = None
    micro_batch_size: int | None = None
    weights_resident: float | None = None
    prefill_tokens: int | None = None
    kv_dtype: str | None = None


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


def memory_of(spec: ModelSpec, policy: Policy, *, base_bytes: int) -> MemoryPlan:
    """Peak host memory under a policy; `base_bytes` is what the process takes before any weights."""
    # Counts, not a page table: the search asks for thousands of policies.
    attention_pages, expert_pages = resident_pages(spec, policy)
    expert, attention = expert_page_bytes(spec), attention_page_bytes(spec)
    # attention pages are spread evenly, so those that stay are of average size
    mean = all_attention_bytes(spec) / spec.num_layers
    resident = round(attention_pages * mean) + expert_pages * expert
    slot = max(expert, attention) if attention_pages < spec.num_layers else expert
    staged = max(expert * (expert_pages > 0), attention * (attention_pages > 0))
    slots = min(policy.page_slots, num_pages(spec) - attention_pages - expert_pages)
    return MemoryPlan(
        base=base_bytes,
        vocabulary=vocabulary_bytes(spec),
        resident_weights=resident,
        page_buffer=slots * slot,
        loading=loading_bytes(spec, staged),
        kv_cache=policy.kv_blocks * kv_block_bytes(spec, policy.kv_dtype),
        activations=activation_bytes(spec, policy),
        logits=logit_bytes(spec, policy.batch_size),
    )


def choose(spec: ModelSpec, workload: WorkloadSpec, *, memory_bytes: int, base_bytes: int,
           fixed: Overrides) -> tuple[Policy, MemoryPlan]:  # fmt: skip
    """The policy with the highest estimated throughput whose peak memory stays within the budget.

    Raises: NoFeasiblePolicy, with the smallest budget that would do.
    """
    best: tuple[float, Policy, MemoryPlan] | None = None
    least: int | None = None
    for smallest in _candidates(spec, workload, fixed):
        plan = memory_of(spec, smallest, base_bytes=base_bytes)
        least = min(least or plan.total, plan.total)
        if plan.total > memory_bytes:
            continue
        policy = _grow(spec, workload, smallest, memory_bytes - plan.total, fixed)
        score = throughput(spec, workload, policy)
        if best is None or score > best[0] * (1 + 1e-9):
            best = (score, policy, memory_of(spec, policy, base_bytes=base_bytes))
    if best is None:
        assert least is not None
        raise NoFeasiblePolicy(
            f"the smallest policy for this model needs {format_bytes(least)} of memory, "
            f"the budget is {format_bytes(memory_bytes)}",
            hint=f"raise --memory to at least {ceil(least / 2**20)}MiB, or use a smaller model",
        )
    return best[1], best[2]


def _candidates(spec: ModelSpec, workload: WorkloadSpec, fixed: Overrides) -> Iterator[Policy]:
    """Policies with the smallest batch that is allowed, most resident weights first."""
    pages = num_pages(spec)
    kept_choices = (
        range(pages, -1, -1)
        if fixed.weights_resident is None
        else [round(fixed.weights_resident * pages)]
    )
    batch_size = 1 if fixed.batch_size is None else fixed.batch_size
    if workload.num_sequences is not None:
        batch_size = min(batch_size, max(1, workload.num_sequences))
    for kept in kept_choices:
        streamed = pages - kept
        for prefill in _prefill_choices(workload, fixed):
            yield Policy(
                batch_size=batch_size,
                micro_batch_size=_micro_batch_size(fixed, batch_size),
                weights_resident=kept / pages,
                prefill_tokens=prefill,
                page_slots=max(1, min(streamed, max(4, ceil(streamed / spec.num_layers / 2)))),
                kv_blocks=_kv_blocks(workload, batch_size),
                kv_dtype=fixed.kv_dtype or spec.weight_dtype,
            )


def _grow(spec: ModelSpec, workload: WorkloadSpec, policy: Policy, spare_bytes: int,
          fixed: Overrides) -> Policy:  # fmt: skip
    """The largest batch that fits into the memory that a minimal policy leaves."""
    if fixed.batch_size is not None:
        return policy
    more = replace(policy, batch_size=policy.batch_size + 1)
    row_bytes = (
        _mean_blocks(workload) * kv_block_bytes(spec, policy.kv_dtype)
        + activation_bytes(spec, more)
        - activation_bytes(spec, policy)
        + logit_bytes(spec, 1)
    )
    batch_size = min(policy.batch_size + int(spare_bytes // row_bytes), _MAX_BATCH)
    if workload.num_sequences is not None:
        batch_size = max(1, min(batch_size, workload.num_sequences))
    extra = max(0, int((spare_bytes - (batch_size - 1) * row_bytes)
                       // kv_block_bytes(spec, policy.kv_dtype)))  # fmt: skip
    wanted = _kv_blocks(workload, batch_size)
    most = max(wanted, batch_size * _blocks(workload.max_prompt + workload.max_gen))
    return replace(
        policy,
        batch_size=batch_size,
        micro_batch_size=_micro_batch_size(fixed, batch_size),
        kv_blocks=min(most, max(policy.kv_blocks, ceil((batch_size - 1) * _mean_blocks(workload))
                                + extra)),
    )  # fmt: skip


def _prefill_choices(workload: WorkloadSpec, fixed: Overrides) -> Sequence[int]:
    """Prompt tokens of a pass: no more than the power of two above all prompts together."""
    if fixed.prefill_tokens is not None:
        return [fixed.prefill_tokens]
    if workload.num_sequences is None:
        return _PREFILL_CHOICES
    total = workload.num_sequences * workload.mean_prompt
    return [n for n in _PREFILL_CHOICES if n < 2 * total] or _PREFILL_CHOICES[-1:]


def _micro_batch_size(fixed: Overrides, batch_size: int) -> int:
    wanted = _MICRO_BATCH if fixed.micro_batch_size is None else fixed.micro_batch_size
    return min(wanted, batch_size)


def throughput(spec: ModelSpec, workload: WorkloadSpec, policy: Policy) -> float:
    """Estimated generated tokens per second of the whole job, prefill and decode.

    Source: MoE-Lightning, eq. 12-14 and the objective of section 3.3, for a machine of two tiers.
    """
    attention_pages, expert_pages = resident_pages(spec, policy)
    streamed_attention = spec.num_layers - attention_pages
    streamed_experts = spec.num_expert_pages - expert_pages
    stream_s = (
        streamed_attention * all_attention_bytes(spec) / spec.num_layers
        + streamed_experts * expert_page_bytes(spec)
    ) / DISK_BYTES_PER_S
    token_s = 2 * spec.active_params / COMPUTE_FLOPS_PER_S
    # Each pass reads the resident weights once from memory, however few tokens it carries.
    weight_s = spec.total_params * DTYPE_BYTES[spec.weight_dtype] / 2e10
    batch = policy.batch_size
    prompt_tokens = batch * workload.mean_prompt
    # Not rounded up: passes are shared with decode, and a larger batch must not look slower.
    prefill_passes = max(1.0, prompt_tokens / policy.prefill_tokens)
    prefill_s = max(prefill_passes * max(stream_s, weight_s), prompt_tokens * token_s)
    decode_s = workload.mean_gen * max(stream_s, weight_s, batch * token_s)
    return batch * workload.mean_gen / (prefill_s + decode_s)


def _blocks(num_tokens: float) -> int:
    return ceil(num_tokens / KV_BLOCK_TOKENS)


def _mean_blocks(workload: WorkloadSpec) -> float:
    """Blocks of an average sequence; half a block is lost at its end."""
    return (workload.mean_prompt + workload.mean_gen) / KV_BLOCK_TOKENS + 0.5


def _kv_blocks(workload: WorkloadSpec, batch_size: int) -> int:
    """Enough for the batch at its full average length, and for the longest sequence alone."""
    return max(
        ceil(batch_size * _mean_blocks(workload)), _blocks(workload.max_prompt + workload.max_gen)
    )
