"""Peak bytes of host memory under a policy, as named parts.

Shapes as in the paper: T tokens of a pass, S rows that are sampled.
"""

from dataclasses import dataclass

from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec
from moebatch.plan.policy import KV_BLOCK_TOKENS, Policy

FLOAT = 4
_EXPERT_TILE_BYTES = 2 * (1 << 22) * FLOAT + (1 << 22) * FLOAT  # gate and up, their product, gather
_LOGIT_COPIES = 5  # logits, their filtered and sorted forms, float64 probabilities
MAX_LOGIT_ROWS = 128
LOADERS = 2  # threads that read and pack resident pages: more would cost a page of memory each


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Host memory by use, in bytes. `loading` is needed before the last three are, not with them."""

    base: int
    vocabulary: int
    resident_weights: int
    page_buffer: int
    loading: int
    kv_cache: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Peak of the whole process: weights, and what loading or running adds, whichever is more."""
        running = self.kv_cache + self.activations + self.logits
        weights = self.base + self.vocabulary + self.resident_weights + self.page_buffer
        return weights + max(self.loading, running)


def vocabulary_bytes(spec: ModelSpec) -> int:
    """Embedding and LM head as they are held."""
    return spec.vocabulary_params * DTYPE_BYTES[spec.weight_dtype]


def expert_page_bytes(spec: ModelSpec) -> int:
    """One expert of one layer."""
    return spec.expert_params * DTYPE_BYTES[spec.weight_dtype]


def attention_page_bytes(spec: ModelSpec) -> int:
    """The largest attention page: projections, norms, router, the FFN of every token.

    The small parts are held in float32.
    """
    return spec.largest_base_params * DTYPE_BYTES[spec.weight_dtype] + spec.float_params * FLOAT


def all_attention_bytes(spec: ModelSpec) -> int:
    """The attention pages of all layers."""
    params = spec.all_base_params * DTYPE_BYTES[spec.weight_dtype]
    return params + spec.num_layers * spec.float_params * FLOAT


def loading_bytes(spec: ModelSpec, page_bytes: int) -> int:
    """What LOADERS threads hold while they pack pages: a staging buffer and a float32 copy each.

    The LM head is packed alone, before any page: its float32 copy and its bytes as read.
    """
    widest = max(2 * spec.expert_size, 2 * spec.dense_size, 2 * spec.shared_size, spec.qkv_rows)
    matrix = widest * spec.hidden_size * FLOAT
    head = spec.vocab_size * spec.hidden_size * (FLOAT + DTYPE_BYTES[spec.weight_dtype])
    pages = LOADERS * (page_bytes + matrix) if page_bytes else 0
    return max(pages, 0 if spec.tie_embeddings else head)


def kv_block_bytes(spec: ModelSpec, kv_dtype: str) -> int:
    """One block of KV cache in all layers."""
    return spec.kv_bytes_per_token(kv_dtype) * KV_BLOCK_TOKENS


def activation_bytes(spec: ModelSpec, policy: Policy) -> int:
    """Hidden states of a pass, one micro-batch's attention, one expert's tile.

    Per token of the pass: hidden, normed, routing. Per token of the largest micro-batch: the norm,
    qkv, rotated q and k, expanded keys and values, attention and its projection.
    """
    tokens = policy.prefill_tokens + policy.batch_size
    per_pass = 2 * spec.hidden_size * FLOAT + 24 * spec.top_k
    per_token = (3 * spec.hidden_size + 6 * spec.q_size + 4 * spec.kv_size) * FLOAT
    return tokens * per_pass + tokens * per_token + _EXPERT_TILE_BYTES + 3 * _gather_bytes()


def _gather_bytes() -> int:
    return 64 << 20


def logit_bytes(spec: ModelSpec, batch_size: int) -> int:
    """Logits of one sampling chunk and what sampling makes of them."""
    return min(batch_size, MAX_LOGIT_ROWS) * spec.vocab_size * FLOAT * _LOGIT_COPIES
