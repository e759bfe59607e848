"""Fits a host policy to an accelerator: what of the weights and the cache stays in its memory.

A first fit without a cost model: the batch that host memory allows, four micro-batches, as many
resident pages as there is room for. Bytes only, no rates.
"""

from dataclasses import dataclass, replace
from math import ceil

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.cost import expert_page_bytes
from moebatch.plan.memory import (
    FLOAT,
    MAX_LOGIT_ROWS,
    MemoryPlan,
    attention_page_bytes,
    kv_block_bytes,
)
from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec
from moebatch.plan.optimizer import num_pages, resident_pages
from moebatch.plan.pipeline import STYLES, WEIGHT_BUFFERS, kv_slots
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.schedule import Processor
from moebatch.plan.speculation import pass_drafts
from moebatch.units import format_bytes

_MICRO_BATCHES = 4  # two are ahead, so fewer would leave a processor waiting
_PREFILL_TOKENS, _LEAST_PREFILL = 8192, 64  # of a pass: products are long enough by then
_PADDING = 1 << 14  # parts of a layer begin at multiples of a few cache lines
ON_DEVICE = ("flexgen", "layerwise")  # schedules whose attention runs on the accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Accelerator memory by use, in bytes. `workspace` is what single operations take for a while."""

    head: int
    resident_weights: int
    layer_buffers: int
    kv_cache: int
    contexts: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """Peak bytes."""
        held = self.head + self.resident_weights + self.layer_buffers + self.kv_cache
        return held + self.contexts + self.activations + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """A policy for an accelerator, the host memory it takes, and the tokens a second it can reach.

    `throughput` None: nothing is said, of a policy from a file or of an emulated device. `crossover`
    as in Plan.
    """

    policy: Policy
    memory: MemoryPlan
    throughput: float | None = None
    crossover: int | None = None


def device_memory(spec: ModelSpec, policy: Policy) -> DeviceMemory:
    """What a policy needs of the accelerator."""
    item = DTYPE_BYTES[spec.weight_dtype]
    attention_pages, expert_pages = resident_pages(spec, policy)
    attention, expert = attention_page_bytes(spec), expert_page_bytes(spec)
    on_gpu = policy.ffn == "gpu"
    kept = attention_pages * attention + expert_pages * expert * on_gpu
    streamed = attention if attention_pages < spec.num_layers else 0
    if on_gpu:
        # spread evenly over the layers: the largest streams what is left, rounded up
        streamed += -(-(spec.num_expert_pages - expert_pages) // spec.num_layers) * expert
    device_cache = policy.attention == "gpu"
    block = kv_block_bytes(spec, policy.kv_dtype)
    on_device = round(policy.kv_resident * spec.num_layers) * device_cache
    rows = policy.batch_size + pass_drafts(policy.batch_size, policy.draft_tokens)
    tokens = policy.prefill_tokens + int(rows)
    keys = spec.cache_heads * spec.cache_head_dim
    queries = spec.num_q_heads * max(spec.head_dim, spec.cache_head_dim)
    row = (3 * spec.hidden_size + 2 * queries) * FLOAT + 2 * keys * DTYPE_BYTES[policy.kv_dtype]
    group = STYLES[policy.schedule].group(policy.num_micro_batches)
    group = max(group, policy.experts_grouped)
    slots = kv_slots(policy.schedule, policy.attention, group)
    # Of the host's attention only a prompt that a pass's budget cut in two comes back to the device;
    # twice the mean length of a sequence stands for the longest.
    sharers = policy.num_micro_batches if device_cache else max(1, policy.batch_size // 2)
    context = -(-policy.kv_blocks // sharers) * block // spec.num_layers
    widest = max(spec.qkv_rows, 2 * spec.expert_size, spec.hidden_size)
    return DeviceMemory(
        head=spec.vocab_size * spec.hidden_size * item,
        resident_weights=kept,
        layer_buffers=WEIGHT_BUFFERS * (streamed + _PADDING * (streamed > 0)),
        kv_cache=policy.kv_blocks * block * on_device // spec.num_layers,
        contexts=slots * context if on_device < spec.num_layers else 0,
        activations=tokens * row,
        workspace=2 * tokens * widest * FLOAT + 2 * MAX_LOGIT_ROWS * spec.vocab_size * FLOAT,
    )


def fit(spec: ModelSpec, policy: Policy, *, schedule: str, device_bytes: int,
        micro_batch_size: int | None, weights_resident: float | None) -> Policy:  # fmt: skip
    """The policy for an accelerator that a host policy becomes; what the user fixed is kept.

    Raises: NoFeasiblePolicy, with the smallest device memory that would do.
    """
    attention: Processor = "gpu" if schedule in ON_DEVICE else "cpu"
    wanted = micro_batch_size or -(-policy.batch_size // _MICRO_BATCHES)
    one = replace(
        policy,
        schedule=schedule,
        attention=attention,
        ffn="gpu",
        micro_batch_size=policy.batch_size if schedule == "layerwise" else wanted,
    )
    pages = num_pages(spec)
    choices = (
        range(pages, -1, -1) if weights_resident is None else [round(weights_resident * pages)]
    )
    caches = (1.0, 0.5, 0.0) if attention == "gpu" else (0.0,)
    for kv_resident in caches:
        for kept in choices:
            found = replace(one, weights_resident=kept / pages, kv_resident=kv_resident)
            need = device_memory(spec, found).total
            if need <= device_bytes:
                return found
    raise NoFeasiblePolicy(
        f"the smallest policy for this model needs {format_bytes(need)} of accelerator memory, "
        f"there are {format_bytes(device_bytes)}",
        hint="raise --gpu-memory, lower --batch-size or --weights-resident, or use --device cpu",
    )


def settle(spec: ModelSpec, policy: Policy, *, schedule: str, device_bytes: int,
           fixed: Overrides) -> Policy | None:  # fmt: skip
    """A policy of the planner as the engine can run it within the device's memory, None if it cannot.

    The planner's model takes every resource to be busy all the time. That takes some micro-batches,
    and prompts that come in passes of bounded size; then as many resident pages as there is room for.
    """
    size = fixed.micro_batch_size or min(
        policy.micro_batch_size, -(-policy.batch_size // _MICRO_BATCHES)
    )
    one = replace(
        policy,
        schedule=schedule,
        micro_batch_size=policy.batch_size if schedule == "layerwise" else size,
        prefill_tokens=min(policy.prefill_tokens, _PREFILL_TOKENS),
        draft_tokens=fixed.draft_tokens or 0,
    )
    pages = num_pages(spec)
    most = pages if policy.ffn == "gpu" else spec.num_layers
    choices = [round(one.weights_resident * pages)]
    if (
        fixed.weights_resident is None
    ):  # of equals the planner takes any; what is resident is no risk
        choices = list(range(most, -1, -1))
    for prefill_tokens in _halved(one.prefill_tokens):
        for kept in choices:
            found = replace(one, weights_resident=kept / pages, prefill_tokens=prefill_tokens)
            if device_memory(spec, found).total <= device_bytes:
                return found
    return None


def _halved(tokens: int) -> list[int]:
    """From so many tokens down, in halves."""
    least = min(tokens, _LEAST_PREFILL)
    sizes = [tokens]
    while sizes[-1] > least:
        sizes.append(max(least, sizes[-1] // 2))
    return sizes


def host_memory(spec: ModelSpec, policy: Policy, plan: MemoryPlan, *, emulated: bool) -> MemoryPlan:
    """Host memory beside an accelerator: the weights that are streamed, pinned, and its activations.

    An emulated device's memory is host memory too.
    """
    total = spec.all_base_params + spec.num_expert_pages * spec.expert_params
    weights = total * DTYPE_BYTES[spec.weight_dtype]
    device = device_memory(spec, policy)
    streamed = weights - device.resident_weights
    on_disk = disk_layers(spec, policy) * streamed // spec.num_layers
    on_device = on_disk if emulated else on_disk + device.resident_weights
    extra = device.total - device.resident_weights if emulated else device.activations
    return replace(plan, resident_weights=weights - on_device, page_buffer=0,
                   activations=plan.activations + extra)  # fmt: skip


def disk_layers(spec: ModelSpec, policy: Policy) -> int:
    """Layers whose streamed weights stay on disk: whole ones, for `weights_on_disk` of all pages."""
    streamed = num_pages(spec) - sum(resident_pages(spec, policy))
    if streamed == 0:
        return 0
    layers = policy.weights_on_disk * num_pages(spec) * spec.num_layers / streamed
    return min(spec.num_layers, ceil(round(layers, 6)))


def with_disk_layers(spec: ModelSpec, policy: Policy, count: int) -> Policy:
    """The policy with so many layers on disk; the inverse of `disk_layers`."""
    streamed = num_pages(spec) - sum(resident_pages(spec, policy))
    return replace(policy, weights_on_disk=count * streamed / spec.num_layers / num_pages(spec))
