"""The cache regime on an accelerator: its settings, and how many experts its memory has room for.

All but the experts is resident; what is left of the memory becomes slots for experts. Bytes only.
"""

from dataclasses import dataclass, replace
from typing import Literal

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.cost import expert_page_bytes
from moebatch.plan.device_fit import device_memory
from moebatch.plan.eviction import EvictionName
from moebatch.plan.memory import FLOAT, attention_page_bytes
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.plan.stream import ALIGN
from moebatch.units import format_bytes

# Who takes care of experts that are not in the cache: all are fetched, all are computed by the host,
# or the layer is simulated by HybriMoE's rules or by the better split.
Misses = Literal["fetch", "host", "rules", "balanced"]
MISSES: tuple[Misses, ...] = ("fetch", "host", "rules", "balanced")

MAX_PASS_TOKENS = 512  # of prompts in one pass: the regime is for few rows, its buffers are small


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How the cache regime works; it never changes the text.

    `capacity` experts of the whole model are in accelerator memory. `prefetch_layers` 0: none is
    brought before it is asked for. `keep`: what the host computed is brought for later when the link
    is idle.
    """

    capacity: int
    eviction: EvictionName = "mrs"
    misses: Misses = "balanced"
    prefetch_layers: int = 3
    keep: bool = True

    def __post_init__(self) -> None:
        assert self.capacity >= 0 and self.prefetch_layers >= 0
        assert self.misses in MISSES


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPlan:
    """A policy for the cache regime and how many experts there is room for."""

    policy: Policy
    capacity: int
    other_bytes: int


def cached_policy(policy: Policy) -> Policy:
    """The policy that the regime runs under: one group of micro-batches, all but experts resident."""
    return replace(
        policy,
        schedule="layerwise" if policy.attention == "gpu" else "flexgen-cpu",
        ffn="gpu",
        weights_resident=1.0,
        kv_resident=1.0 if policy.attention == "gpu" else 0.0,
        prefill_tokens=min(policy.prefill_tokens, MAX_PASS_TOKENS),
        experts_grouped=2 * policy.num_micro_batches,  # one group: decode rows and prompts
    )


def other_bytes(spec: ModelSpec, policy: Policy) -> int:
    """Accelerator memory that is not for experts."""
    used = device_memory(spec, cached_policy(policy))
    tokens = min(policy.prefill_tokens, MAX_PASS_TOKENS) + policy.batch_size
    results = tokens * spec.top_k * spec.hidden_size * FLOAT
    attention = spec.num_layers * (attention_page_bytes(spec) + ALIGN)
    return attention + used.total - used.resident_weights - used.layer_buffers + results


def fit_cache(spec: ModelSpec, policy: Policy, *, device_bytes: int,
              capacity: int | None = None) -> CachedPlan:  # fmt: skip
    """The regime on a device: the KV cache there if it fits, and slots in what is left.

    `capacity` fixes the number of experts. Raises: NoFeasiblePolicy when not even all but the
    experts fits, or not as many experts as were asked for.
    """
    slot = expert_page_bytes(spec) + ALIGN
    wanted = 1 if capacity is None else capacity
    for attention in ("gpu", "cpu"):
        found = cached_policy(replace(policy, attention=attention))
        other = other_bytes(spec, found)
        if other + wanted * slot <= device_bytes:
            room = min((device_bytes - other) // slot, spec.num_expert_pages)
            return CachedPlan(policy=found, other_bytes=other,
                              capacity=room if capacity is None else capacity)  # fmt: skip
    if capacity is None and other <= device_bytes:
        return CachedPlan(policy=found, capacity=0, other_bytes=other)
    need = other + (wanted * slot if capacity else 0)
    raise NoFeasiblePolicy(
        f"the expert cache needs all but the experts in accelerator memory: {format_bytes(need)} "
        f"with {capacity or 0} experts, there are {format_bytes(device_bytes)}",
        hint="raise --gpu-memory, lower --expert-cache, or use --regime stream",
    )
