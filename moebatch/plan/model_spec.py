"""The shapes of one model, as plain numbers; bytes and parameters of its parts.

Knows no tensor names (moebatch.model.families) and no machine.
"""

from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: base and frequency scaling.

    Source: Su et al. (2104.09864); linear and llama3 scaling as in the published checkpoints;
    yarn: Peng et al. (2309.00071), section 3.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of a decoder-only model. A dense model is one with a single expert and no router.

    `layer_windows[i]` is the sliding attention window of layer i in tokens, None for full attention.
    `weight_dtype` is the data type of the checkpoint's matrices.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeSpec
    layer_windows: tuple[int | None, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norm_top_k: bool = True
    weight_dtype: str = "bfloat16"

    @property
    def has_router(self) -> bool:
        """Whether tokens choose among experts."""
        return self.num_experts > 1

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def expert_params(self) -> int:
        """Parameters of one expert: gate, up and down matrices."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def attention_params(self) -> int:
        """Parameters of one layer besides its experts: projections, norms, router."""
        projections = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        biases = (self.q_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * (
            self.output_bias
        )
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        router = self.hidden_size * self.num_experts if self.has_router else 0
        return projections + biases + norms + router

    @property
    def vocabulary_params(self) -> int:
        """Parameters of the embedding, the final norm and the LM head."""
        tables = 1 if self.tie_embeddings else 2
        return tables * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def total_params(self) -> int:
        """Parameters of the whole model."""
        layer = self.attention_params + self.num_experts * self.expert_params
        return self.num_layers * layer + self.vocabulary_params

    @property
    def active_params(self) -> int:
        """Parameters that one token uses."""
        layer = self.attention_params + self.top_k * self.expert_params
        return self.num_layers * layer + self.vocabulary_params

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.kv_size * self.num_layers * DTYPE_BYTES[kv_dtype]

    def layer_bytes(self, dtype: str) -> int:
        """Bytes of one layer's weights."""
        params = self.attention_params + self.num_experts * self.expert_params
        return params * DTYPE_BYTES[dtype]
