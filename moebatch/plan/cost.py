"""FLOPs and bytes of every operation of one layer: the only place for these formulas.

All take plain numbers or numpy arrays. T tokens of a call, R decode rows, C context tokens summed over
rows, W = DTYPE_BYTES of the weights. A product of [T, a] and [a, b] counts 2 T a b FLOPs.
Source: MoE-Lightning (arXiv 2411.11217), section 3.3, with what it leaves out for brevity: projections,
router, norms, embedding, LM head and the expected number of distinct experts.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec

ACTIVATION_BYTES = 2  # what crosses the link, and what an accelerator computes in

Amount = Any  # float or an array of float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operation: FLOPs, bytes of weights it reads, bytes of other data it reads and writes."""

    flops: Amount = 0.0
    weight_bytes: Amount = 0.0
    data_bytes: Amount = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            flops=self.flops + other.flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            data_bytes=self.data_bytes + other.data_bytes,
        )

    @property
    def bytes(self) -> Amount:
        """All bytes that the operation moves at its own level."""
        return self.weight_bytes + self.data_bytes

    @property
    def intensity(self) -> Amount:
        """Operational intensity I_x: FLOPs per byte."""
        return self.flops / self.bytes


def _product(tokens: Amount, inputs: int, outputs: int, dtype: str) -> Work:
    return Work(
        flops=2.0 * tokens * inputs * outputs,
        weight_bytes=inputs * outputs * DTYPE_BYTES[dtype],
        data_bytes=tokens * (inputs + outputs) * ACTIVATION_BYTES,
    )


def norm(spec: ModelSpec, tokens: Amount) -> Work:
    """One RMS norm: square, sum, scale."""
    return Work(
        flops=4.0 * tokens * spec.hidden_size,
        data_bytes=2.0 * tokens * spec.hidden_size * ACTIVATION_BYTES,
    )


def qkv_projection(spec: ModelSpec, tokens: Amount) -> Work:
    """Hidden states to queries, keys and values; with latent attention to what it makes of them."""
    first = _product(tokens, spec.hidden_size, spec.qkv_rows, spec.weight_dtype)
    latent = spec.latent
    if latent is None:
        return first
    if latent.q_rank:
        first += _product(tokens, latent.q_rank, spec.q_size, spec.weight_dtype)
    per_head = latent.nope_dim + latent.value_dim
    return first + _product(tokens, latent.kv_rank, spec.num_q_heads * per_head, "float32")


def output_projection(spec: ModelSpec, tokens: Amount) -> Work:
    """Attention's result back to hidden states."""
    return _product(tokens, spec.attended_size, spec.hidden_size, spec.weight_dtype)


def decode_attention(spec: ModelSpec, rows: Amount, context: Amount, kv_dtype: str) -> Work:
    """Both products of softmax attention for R single tokens over C context tokens in all.

    Each element of the KV cache is read once, for all query heads of its group.
    """
    value_dim = spec.cache_value_dim or spec.head_dim
    per_key = spec.num_q_heads * (spec.cache_head_dim + value_dim)
    return Work(
        flops=2.0 * context * per_key,
        data_bytes=kv_bytes(spec, context, kv_dtype) + rows * per_key * ACTIVATION_BYTES,
    )


def prefill_attention(spec: ModelSpec, tokens: Amount, pairs: Amount) -> Work:
    """Both products for prompts; `pairs` counts (query, visible key) pairs, about half of s^2 each."""
    return Work(
        flops=2.0 * pairs * (spec.q_size + spec.attended_size),
        data_bytes=tokens * 2.0 * (spec.q_size + spec.kv_size) * ACTIVATION_BYTES,
    )


def router(spec: ModelSpec, tokens: Amount) -> Work:
    """Scores of all experts; nothing for a dense model."""
    if not spec.has_router:
        return Work()
    return _product(tokens, spec.hidden_size, spec.num_experts, "float32")


def distinct_experts(spec: ModelSpec, tokens: Amount) -> Amount:
    """Expected experts of a layer that T tokens touch: E (1 - (1 - k/E)^T)."""
    share = spec.top_k / spec.num_experts
    if share >= 1.0:
        return np.minimum(tokens, 1.0) * spec.num_experts
    # ideal routing; a real router is a little less even
    return spec.num_experts * (1.0 - np.power(1.0 - share, tokens))


def experts(spec: ModelSpec, tokens: Amount) -> Work:
    """Gate, up and down of every chosen expert; each touched expert's weights are read once."""
    pairs = tokens * spec.top_k
    touched = distinct_experts(spec, tokens)
    return Work(
        flops=2.0 * pairs * spec.expert_params,
        weight_bytes=touched * spec.expert_params * DTYPE_BYTES[spec.weight_dtype],
        data_bytes=pairs * (2 * spec.hidden_size + 3 * spec.expert_size) * ACTIVATION_BYTES,
    )


def one_expert(spec: ModelSpec, tokens: Amount) -> Work:
    """Gate, up and down of one expert with so many tokens."""
    return Work(
        flops=2.0 * tokens * spec.expert_params,
        weight_bytes=expert_page_bytes(spec),
        data_bytes=tokens * (2 * spec.hidden_size + 3 * spec.expert_size) * ACTIVATION_BYTES,
    )


def base_ffn(spec: ModelSpec, tokens: Amount, *, dense: bool) -> Work:
    """The FFN that every token goes through: of a layer without experts, or the shared experts."""
    size = spec.dense_size if dense else spec.shared_size
    if not size:
        return Work()
    up = _product(tokens, spec.hidden_size, 2 * size, spec.weight_dtype)
    return up + _product(tokens, size, spec.hidden_size, spec.weight_dtype)


def embedding(spec: ModelSpec, tokens: Amount) -> Work:
    """One row of the table per token."""
    return Work(data_bytes=2.0 * tokens * spec.hidden_size * DTYPE_BYTES[spec.weight_dtype])


def lm_head(spec: ModelSpec, rows: Amount) -> Work:
    """Logits of the tokens that are sampled."""
    return _product(rows, spec.hidden_size, spec.vocab_size, spec.weight_dtype)


def kv_bytes(spec: ModelSpec, tokens: Amount, kv_dtype: str) -> Amount:
    """Keys and values of one layer."""
    return tokens * float(spec.kv_numbers * DTYPE_BYTES[kv_dtype])


def qkv_bytes(spec: ModelSpec, tokens: Amount) -> Amount:
    """OffloadQKV: queries, keys and values of one layer on their way to the host."""
    return tokens * float(spec.qkv_rows) * ACTIVATION_BYTES


def attended_bytes(spec: ModelSpec, tokens: Amount) -> Amount:
    """LoadH: attention's result of one layer on its way to the accelerator."""
    return tokens * float(spec.attended_size) * ACTIVATION_BYTES


def hidden_bytes(spec: ModelSpec, tokens: Amount) -> Amount:
    """Hidden states of one layer, one way."""
    return tokens * float(spec.hidden_size) * ACTIVATION_BYTES


def mean_attention_page_bytes(spec: ModelSpec) -> float:
    """An attention page, averaged over the layers; the small parts are held in float32."""
    params = spec.all_base_params * DTYPE_BYTES[spec.weight_dtype]
    return params / spec.num_layers + spec.float_params * 4.0


def expert_page_bytes(spec: ModelSpec) -> int:
    """One expert of one layer."""
    return spec.expert_params * DTYPE_BYTES[spec.weight_dtype]


def expert_slot_bytes(spec: ModelSpec) -> int:
    """What an expert takes that is read on demand."""
    return ceil(expert_page_bytes(spec) * spec.streamed_share)
