"""The cache regime on an accelerator: how many experts its memory has room for.

All but the experts is resident; what is left of the memory becomes slots for experts. Bytes only.
"""

from dataclasses import replace

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.cost import expert_page_bytes
from moebatch.plan.device_fit import device_memory
from moebatch.plan.eviction import EvictionName
from moebatch.plan.memory import FLOAT, MemoryPlan, attention_page_bytes
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.plan.schedule import Processor
from moebatch.plan.stream import ALIGN
from moebatch.units import format_bytes

DEVICE_EVICTION: EvictionName = "mrs"
DEVICE_PREFETCH_LAYERS = 3
MAX_PASS_TOKENS = 512  # of prompts in one pass: the regime is for few rows, its buffers are small


def cached_policy(policy: Policy) -> Policy:
    """The policy that the regime runs under: one group of micro-batches, all but experts resident."""
    return replace(
        policy,
        regime="cache",
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


def fit_cache(spec: ModelSpec, policy: Policy, *, device_bytes: int, capacity: int | None = None,
              attention: Processor | None = None) -> Policy:  # fmt: skip
    """The policy on a device: the KV cache there if it fits, and slots in what is left.

    `capacity` fixes the number of experts, `attention` who attends.
    Raises: NoFeasiblePolicy when not even all but the experts fits, or not as many experts as were
    asked for.
    """
    slot = _slot_bytes(spec)
    choices: list[tuple[Processor, int]] = [("gpu", capacity or 1), ("cpu", capacity or 0)]
    for processor, wanted in choices:
        if attention not in (None, processor):
            continue
        found = cached_policy(replace(policy, attention=processor))
        other = other_bytes(spec, found)
        if other + wanted * slot <= device_bytes:
            room = min((device_bytes - other) // slot, spec.num_expert_pages)
            return replace(found, expert_slots=room if capacity is None else capacity)
    raise NoFeasiblePolicy(
        f"the cache regime needs {format_bytes(other + wanted * slot)} of accelerator memory: all but "
        f"the experts, and {wanted} of these; there are {format_bytes(device_bytes)}",
        hint="raise --gpu-memory, lower --expert-cache, or use --regime stream",
    )


def cached_device_bytes(spec: ModelSpec, policy: Policy) -> int:
    """Accelerator memory under a policy of the regime."""
    slots = min(policy.expert_slots, spec.num_expert_pages)
    return other_bytes(spec, policy) + slots * _slot_bytes(spec)


def cached_host_memory(spec: ModelSpec, policy: Policy, plan: MemoryPlan, *,
                       emulated: bool) -> MemoryPlan:  # fmt: skip
    """Host memory beside the accelerator: all experts; an emulated device's memory is the host's."""
    experts = spec.num_expert_pages * _slot_bytes(spec)
    device = cached_device_bytes(spec, policy) if emulated else 0
    return replace(plan, resident_weights=experts, page_buffer=0,
                   activations=plan.activations + device)  # fmt: skip


def _slot_bytes(spec: ModelSpec) -> int:
    return expert_page_bytes(spec) + ALIGN
