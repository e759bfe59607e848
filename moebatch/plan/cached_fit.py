"""The cache regime on an accelerator: how many experts its memory has room for.

All but the experts is resident; what is left of the memory becomes slots for experts. Bytes only.
"""

from dataclasses import replace
from math import ceil

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.cost import expert_page_bytes
from moebatch.plan.device_fit import device_memory, disk_layers
from moebatch.plan.eviction import EvictionName
from moebatch.plan.memory import FLOAT, MemoryPlan, attention_page_bytes
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import resident_pages
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
    """Accelerator memory that is not for experts, under a policy of the regime."""
    return _resident_bytes(spec, policy) + _working_bytes(spec, policy)


def tail_policy(policy: Policy) -> Policy:
    """What the tail of a job that streams under `policy` goes on with: few rows and no prompts, the KV
    cache where it is."""
    return replace(
        _with_cache_in_place(policy),
        batch_size=max(1, min(policy.tail_rows, policy.batch_size)),
        prefill_tokens=1,
        tail_rows=0,
    )


def tail_bytes(spec: ModelSpec, policy: Policy) -> int:
    """Accelerator memory of the tail of a job that streams, but for experts."""
    return _resident_bytes(spec, tail_policy(policy)) + tail_working_bytes(spec, policy)


def tail_working_bytes(spec: ModelSpec, policy: Policy) -> int:
    """Of those what passes work with. Rows that are left keep to their micro-batches, so contexts of
    these may be as large as ever; without drafts the host's attention needs none."""
    contexts = device_memory(spec, _with_cache_in_place(policy)).contexts
    if policy.attention == "cpu" and not policy.draft_tokens:
        contexts = 0
    few = tail_policy(policy)
    return contexts + _working_bytes(spec, few) - device_memory(spec, few).contexts


def tail_host_bytes(spec: ModelSpec, policy: Policy, *, slots: int, emulated: bool) -> int:
    """Host memory that the tail of a job takes beside what streaming takes: the experts that lie on the
    accelerator or on disk; an emulated accelerator's memory is the host's.

    Where the host computes the experts, it holds them in another form until the change.
    """
    streaming = device_memory(spec, policy).total
    grown = max(0, tail_bytes(spec, policy) + slots * slot_bytes(spec) - streaming)
    resident = resident_pages(spec, policy)[1]
    on_disk = disk_layers(spec, policy) * (spec.num_expert_pages - resident) / spec.num_layers
    missing = spec.num_expert_pages if policy.ffn == "cpu" else resident + ceil(on_disk)
    return missing * slot_bytes(spec) + grown * emulated


def _with_cache_in_place(policy: Policy) -> Policy:
    kept = policy.kv_resident if policy.attention == "gpu" else 0.0
    return replace(cached_policy(policy), kv_resident=kept)


def _resident_bytes(spec: ModelSpec, policy: Policy) -> int:
    used = device_memory(spec, policy)
    return spec.num_layers * (attention_page_bytes(spec) + ALIGN) + used.head + used.kv_cache


def _working_bytes(spec: ModelSpec, policy: Policy) -> int:
    """Activations, contexts, the experts' results, states of a draft model."""
    used = device_memory(spec, policy)
    results = (policy.prefill_tokens + policy.batch_size) * spec.top_k * spec.hidden_size * FLOAT
    foreseen = policy.batch_size * spec.hidden_size * FLOAT * (policy.draft_tokens > 0)
    return used.contexts + used.activations + used.workspace + results + foreseen


def fit_cache(spec: ModelSpec, policy: Policy, *, device_bytes: int, capacity: int | None = None,
              attention: Processor | None = None) -> Policy:  # fmt: skip
    """The policy on a device: the KV cache there if it fits, and slots in what is left.

    `capacity` fixes the number of experts, `attention` who attends.
    Raises: NoFeasiblePolicy when not even all but the experts fits, or not as many experts as were
    asked for.
    """
    slot = slot_bytes(spec)
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
    return other_bytes(spec, cached_policy(policy)) + slots * slot_bytes(spec)


def cached_host_memory(spec: ModelSpec, policy: Policy, plan: MemoryPlan, *,
                       emulated: bool) -> MemoryPlan:  # fmt: skip
    """Host memory beside the accelerator: all experts; an emulated device's memory is the host's."""
    experts = spec.num_expert_pages * slot_bytes(spec)
    device = cached_device_bytes(spec, policy) if emulated else 0
    return replace(plan, resident_weights=experts, page_buffer=0,
                   activations=plan.activations + device)  # fmt: skip


def slot_bytes(spec: ModelSpec) -> int:
    """What an expert takes in host memory and in a slot of the accelerator."""
    return expert_page_bytes(spec) + ALIGN
