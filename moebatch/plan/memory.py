"""Peak bytes of host memory on a machine without an accelerator, as named parts.

All amounts may be numpy arrays, so that a search is one evaluation.
Shapes as in the paper: T tokens of a pass, S rows that are sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebatch.plan.cost import expert_page_bytes, mean_attention_page_bytes
from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec
from moebatch.plan.policy import KV_BLOCK_TOKENS
from moebatch.plan.speculation import pass_drafts

Amount = Any  # a whole number of bytes, or an array of them
FLOAT = 4
_MAX_INTERMEDIATE = 1 << 22  # numbers of gate and up that one expert call makes (model.experts)
# Streamed pages' work space in the library that multiplies with them, and the heap's holes.
_STREAM_WORK_PAGES, _STREAM_WORK_BYTES = 6, 128 << 20
# The library makes code for each number of rows that a product is called with, and keeps this many.
_PRODUCT_BYTES, _PRODUCTS = 200 << 10, 1024
_MAX_GATHER = 64 << 20  # bytes of keys and values that one attention call brings together
_LOGIT_COPIES = 5  # logits, their filtered and sorted forms, float64 probabilities
MAX_LOGIT_ROWS = 128
STAGED_BYTES = 14 << 20  # where the blocks of the disk arrive that a thread reads (model/direct_io)
LOADERS = 2  # threads that read and pack resident pages: more would cost a page of memory each


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Host memory by use, in bytes. `loading` is needed before the last three are, not with them."""

    base: Amount
    vocabulary: Amount
    resident_weights: Amount
    page_buffer: Amount
    loading: Amount
    kv_cache: Amount
    activations: Amount
    logits: Amount

    @property
    def total(self) -> Amount:
        """Peak of the whole process: weights, and what loading or running adds, whichever is more."""
        running = self.kv_cache + self.activations + self.logits
        weights = self.base + self.vocabulary + self.resident_weights + self.page_buffer
        return weights + np.maximum(self.loading, running)


def vocabulary_bytes(spec: ModelSpec) -> int:
    """Embedding and LM head as they are held."""
    return spec.vocabulary_params * DTYPE_BYTES[spec.weight_dtype]


def attention_page_bytes(spec: ModelSpec) -> int:
    """The largest attention page: projections, norms, router, the FFN of every token.

    The small parts are held in float32.
    """
    return spec.largest_base_params * DTYPE_BYTES[spec.weight_dtype] + spec.float_params * FLOAT


def loading_bytes(spec: ModelSpec, page_bytes: Amount, held: Amount) -> Amount:
    """What LOADERS threads hold while they pack pages: a staging buffer and a float32 copy each.

    The LM head is packed alone, before there are pages and their `held` bytes: its float32 copy and
    its bytes as read.
    """
    widest = max(2 * spec.expert_size, 2 * spec.dense_size, 2 * spec.shared_size, spec.qkv_rows)
    matrix = widest * spec.hidden_size * FLOAT
    head = spec.vocab_size * spec.hidden_size * (FLOAT + DTYPE_BYTES[spec.weight_dtype])
    pages = np.where(
        np.asarray(page_bytes) > 0, LOADERS * (page_bytes + matrix + decoding_bytes(spec)), 0
    )
    return np.maximum(pages, 0 if spec.tie_embeddings else head - held)


def decoding_bytes(spec: ModelSpec) -> int:
    """What one reader holds while it decodes a quantised page: its bytes, numbers and float32 forms."""
    if spec.stored_bits is None:
        return 0
    widest = max(spec.expert_size, spec.dense_size, spec.shared_size) * spec.hidden_size
    return spec.stored_expert_bytes + 3 * widest * FLOAT


def kv_block_bytes(spec: ModelSpec, kv_dtype: str) -> int:
    """One block of KV cache in all layers."""
    return spec.kv_bytes_per_token(kv_dtype) * KV_BLOCK_TOKENS


def ring_blocks(windows: Sequence[int | None], draft_tokens: int = 0) -> int:
    """Blocks of a sequence in the layers with a sliding window; 0 where there are none.

    Drafts that are rejected must not have overwritten what the window still shows.
    """
    widest = max((window for window in windows if window is not None), default=0)
    return -(-(widest + draft_tokens) // KV_BLOCK_TOKENS) if widest else 0


def kv_cache_bytes(spec: ModelSpec, *, kv_blocks: Amount, batch_size: Amount,
                   kv_dtype: str, draft_tokens: int = 0) -> Amount:  # fmt: skip
    """The whole KV cache: layers with a window hold no more than the window of each sequence."""
    layer_block = kv_block_bytes(spec, kv_dtype) // spec.num_layers
    windowed = sum(window is not None for window in spec.layer_windows)
    rings = np.minimum(kv_blocks, batch_size * ring_blocks(spec.layer_windows, draft_tokens))
    return layer_block * ((spec.num_layers - windowed) * kv_blocks + windowed * rings)


def activation_bytes(spec: ModelSpec, *, pass_tokens: Amount, micro_tokens: Amount,
                     kv_blocks: Amount, native: bool = False) -> Amount:  # fmt: skip
    """Hidden states of a pass, one micro-batch's attention, one expert call.

    Per token of the pass: hidden, normed, routing. Per token of the largest micro-batch: the norm,
    qkv as multiplied and in float32, q and k while they are rotated.
    """
    per_pass = (8 if native else 6) * spec.hidden_size + 24 * spec.top_k
    heads = 3 * spec.q_size + 2 * spec.kv_size
    per_token = (spec.hidden_size + heads) * FLOAT + 6 * spec.qkv_rows
    calls = _expert_bytes(spec, pass_tokens)
    if not native or spec.latent is not None:  # the native kernels attend the cache where it lies
        calls = calls + _gather(spec, kv_blocks)
    if not native:
        calls = calls + _products(spec, pass_tokens)
    return np.ceil(pass_tokens * per_pass + micro_tokens * per_token) + calls


def _expert_bytes(spec: ModelSpec, tokens: Amount) -> Amount:
    """One expert call: gate and up, their product, and the rows in and out."""
    size = max(1, spec.expert_size, spec.dense_size, spec.shared_size)
    rows = np.minimum(tokens, max(64, _MAX_INTERMEDIATE // (2 * size)))
    return rows * (4 * size + 3 * spec.hidden_size) * FLOAT


def _products(spec: ModelSpec, pass_tokens: Amount) -> Amount:
    """Code for products: each expert of each layer may see numbers of rows of its own."""
    different = np.minimum(2 * pass_tokens, 2 * spec.num_expert_pages)
    return _PRODUCT_BYTES * np.minimum(different, _PRODUCTS)


def gather_block_bytes(spec: ModelSpec) -> int:
    """What a block takes in an attention call: as it lies in the cache and in float32, at most."""
    return 2 * KV_BLOCK_TOKENS * spec.kv_numbers * FLOAT


def _gather(spec: ModelSpec, kv_blocks: Amount) -> Amount:
    """Keys and values of one attention call."""
    return np.minimum(2 * _MAX_GATHER, kv_blocks * gather_block_bytes(spec))


def logit_bytes(spec: ModelSpec, batch_size: Amount) -> Amount:
    """Logits of one sampling chunk and what sampling makes of them."""
    return np.minimum(batch_size, MAX_LOGIT_ROWS) * spec.vocab_size * FLOAT * _LOGIT_COPIES


def host_memory(spec: ModelSpec, *, batch_size: Amount, pass_tokens: Amount, micro_tokens: Amount,
                kv_blocks: Amount, attention_pages: Amount, expert_pages: Amount,
                page_slots: Amount, kv_dtype: str, base_bytes: int,
                native: bool = False, draft_tokens: int = 0) -> MemoryPlan:  # fmt: skip
    """Peak host memory when so many pages stay; `base_bytes` is what the process takes before any.

    `native`: the native kernels compute, which need no work space to speak of; else PyTorch.

    `pass_tokens` go through a layer in one pass, at most `micro_tokens` in one micro-batch, and up to
    `draft_tokens` more of each row.

    Attention pages are spread evenly, so those that stay are of average size.
    """
    drafts = pass_drafts(batch_size, draft_tokens)
    expert, attention = expert_page_bytes(spec), attention_page_bytes(spec)
    mean = mean_attention_page_bytes(spec)
    slot = np.where(attention_pages < spec.num_layers, max(expert, attention), expert)
    staged = np.maximum(expert * (expert_pages > 0), attention * (attention_pages > 0))
    streamed = spec.num_layers + spec.num_expert_pages - attention_pages - expert_pages
    reading = STAGED_BYTES + decoding_bytes(spec) + (0 if native else _stream_work(spec))
    small = spec.float_params * FLOAT  # is not rounded
    attended = (mean - small) * spec.rounded_share + small
    resident = np.ceil(attention_pages * attended + expert_pages * expert * spec.rounded_share)
    buffer = np.ceil(np.minimum(page_slots, streamed) * slot * spec.streamed_share)
    buffer += np.where(streamed > 0, reading, 0)
    return MemoryPlan(
        base=base_bytes,
        vocabulary=vocabulary_bytes(spec),
        resident_weights=resident,
        page_buffer=buffer,
        loading=loading_bytes(spec, staged, resident + buffer),
        kv_cache=kv_cache_bytes(
            spec,
            kv_blocks=kv_blocks,
            batch_size=batch_size,
            kv_dtype=kv_dtype,
            draft_tokens=draft_tokens,
        ),
        activations=activation_bytes(
            spec,
            pass_tokens=pass_tokens + drafts,
            micro_tokens=micro_tokens + drafts,
            kv_blocks=kv_blocks,
            native=native,
        ),
        logits=logit_bytes(spec, batch_size + drafts),
    )


def _stream_work(spec: ModelSpec) -> int:
    return min(_STREAM_WORK_PAGES * expert_page_bytes(spec), _STREAM_WORK_BYTES)


def in_bytes(plan: MemoryPlan) -> MemoryPlan:
    """The same plan in plain whole numbers."""
    return MemoryPlan(**{name: int(getattr(plan, name)) for name in MemoryPlan.__slots__})
