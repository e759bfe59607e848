"""The shapes of one model, as plain numbers; bytes and parameters of its parts.

Knows no tensor names (moebatch.model.families) and no machine.
"""

from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: base and frequency scaling.

    `rotary_dim` is how many of a head's dimensions turn (None: all), `interleaved` whether pairs are
    neighbours instead of half a head apart. The long factors of "longrope" are for rows that may
    outgrow `original_max_position`; `attention_factor` and `long_attention_factor` scale cos and sin.
    Source: Su et al. (2104.09864); linear and llama3 scaling as in the published checkpoints;
    yarn: Peng et al. (2309.00071), section 3; longrope: Ding et al. (2402.13753).
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    rotary_dim: int | None = None
    interleaved: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a token's experts are chosen and weighted; the fields in the order in which they act.

    `scores`: softmax over all experts, sigmoid of each, softmax over the chosen ones only, or the
    two masked softmaxes of sparsemixer (2409.12136), which looks at scores within `jitter`.
    `has_bias` adds to the logits, `has_selection_bias` to the scores for the choice only.
    Of `num_groups` equal groups of experts the best `top_groups` are looked at, by their best score
    or the sum of their best two. The chosen weights are divided by their `norm_p`-norm (None: are
    not), but at least `norm_min`, and multiplied by `scale`.
    """

    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"] = "softmax"
    has_bias: bool = False
    has_selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    norm_p: float | None = 1.0
    norm_min: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: keys and values are made of one small vector per token.

    The cache holds `kv_rank` + `rope_dim` numbers a token and layer. `q_rank` None: queries are
    projected at once. A head's key has `nope_dim` + `rope_dim` dimensions, its value `value_dim`.
    Source: DeepSeek-V2 (2405.04434), section 2.1.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of a decoder-only model. A dense model is one with a single expert and no router.

    `layer_windows[i]` is the sliding attention window of layer i in tokens, None for full attention.
    `weight_dtype` is the data type in which matrices are held: the checkpoint's, or where that is
    quantised what it is decoded to; `stored_bits` is then what a number of an expert takes on disk.
    `rounded_bits` is what a number of a page's matrices takes in memory when they are rounded as they
    are loaded; None: they are not.
    Layers in `dense_layers` have one FFN of `dense_size` and no
    experts; all others also an FFN of `shared_size` for every token, if that is not 0. Both belong to
    the page of the attention.
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
    weight_dtype: str = "bfloat16"
    stored_bits: float | None = None
    rounded_bits: float | None = None
    router: RouterSpec = RouterSpec()
    latent: LatentSpec | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    qk_norm_span: Literal["head", "projection"] = "head"
    clip_qkv: float | None = None
    sinks: bool = False
    attention_scale: float | None = None
    expert_bias: bool = False
    swiglu_limit: float | None = None
    dense_layers: tuple[int, ...] = ()
    dense_size: int = 0
    shared_size: int = 0
    shared_gate: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    @property
    def has_router(self) -> bool:
        """Whether tokens choose among experts."""
        return self.num_experts > 1

    @property
    def norm_top_k(self) -> bool:
        """Whether the weights of a token's experts are normalised."""
        return self.router.norm_p is not None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads), as attention sees them."""
        return self.num_kv_heads * self.head_dim

    @property
    def attended_size(self) -> int:
        """Width of what the output projection takes."""
        return self.num_q_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def qkv_rows(self) -> int:
        """Outputs of the first projections together: q, k, v, or what latent attention has of them."""
        if self.latent is None:
            return self.q_size + 2 * self.kv_size
        return (self.latent.q_rank or self.q_size) + self.latent.kv_rank + self.latent.rope_dim

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def cache_heads(self) -> int:
        """Key/value heads in the KV cache."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def cache_head_dim(self) -> int:
        """Dimensions of a head's key in the KV cache."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def cache_value_dim(self) -> int | None:
        """How much of a key in the cache is the value too; None: values are held apart."""
        return self.latent.kv_rank if self.latent else None

    @property
    def expert_params(self) -> int:
        """Parameters of one expert: gate, up and down matrices, and their biases."""
        bias = (2 * self.expert_size + self.hidden_size) * self.expert_bias
        return 3 * self.hidden_size * self.expert_size + bias

    @property
    def stored_expert_bytes(self) -> int:
        """Bytes of one expert in the checkpoint: what a streamed page has to be read of."""
        bits = self.stored_bits or 8 * DTYPE_BYTES[self.weight_dtype]
        return round(self.expert_params * bits / 8)

    @property
    def rounded_share(self) -> float:
        """Bytes that a page's matrices take once they are rounded, as a share of those they had."""
        bits = 8 * DTYPE_BYTES[self.weight_dtype]
        return 1.0 if self.rounded_bits is None else self.rounded_bits / bits

    @property
    def streamed_share(self) -> float:
        """Bytes that a streamed page takes, as a share of its own: the rounded form is beside it."""
        return 1.0 if self.rounded_bits is None else 1.0 + self.rounded_share

    @property
    def shared_params(self) -> int:
        """Parameters of the FFN that every token of a layer with experts goes through."""
        return self._ffn_params(self.shared_size) + self.hidden_size * self.shared_gate

    @property
    def dense_params(self) -> int:
        """Parameters of the FFN of a layer without experts."""
        return self._ffn_params(self.dense_size)

    def _ffn_params(self, size: int) -> int:
        bias = (2 * size + self.hidden_size) * self.ffn_bias
        return 3 * self.hidden_size * size + bias if size else 0

    @property
    def float_params(self) -> int:
        """Parameters of a layer that are held in float32 and used as plain tensors: the router, and
        the matrix that turns latents into keys and values."""
        router = self.num_experts * self.hidden_size if self.has_router else 0
        latent = self.latent
        kv_b = latent.kv_rank * self._expanded_size if latent else 0
        return router + kv_b

    @property
    def _expanded_size(self) -> int:
        latent = self.latent
        return self.num_q_heads * (latent.nope_dim + latent.value_dim) if latent else 0

    @property
    def _core_params(self) -> int:
        """Attention, its norms and biases."""
        hidden, latent = self.hidden_size, self.latent
        params = hidden * (self.qkv_rows + self.attended_size)
        params += self.qkv_rows * self.qkv_bias + hidden * self.output_bias
        params += (1 + self.norm_bias) * 2 * hidden + self.num_q_heads * self.sinks
        if self.qk_norm:
            whole = self.qk_norm_span == "projection"
            params += self.q_size + self.kv_size if whole else 2 * self.head_dim
        if latent:
            params += latent.kv_rank * (1 + self._expanded_size)
            params += latent.q_rank * (1 + self.q_size) if latent.q_rank else 0
        return params

    @property
    def attention_params(self) -> int:
        """Parameters of a layer with experts besides them: attention, norms, router, shared FFN."""
        biases = self.router.has_bias + self.router.has_selection_bias
        router = self.num_experts * (self.hidden_size + biases) if self.has_router else 0
        return self._core_params + router + self.shared_params

    def base_params(self, layer: int) -> int:
        """Parameters of one layer's attention page: all but its experts."""
        if layer in self.dense_layers:
            return self._core_params + self.dense_params
        return self.attention_params

    @property
    def all_base_params(self) -> int:
        """Parameters of the attention pages of all layers."""
        dense = len(self.dense_layers)
        return (self.num_layers - dense) * self.attention_params + dense * (
            self._core_params + self.dense_params
        )

    @property
    def largest_base_params(self) -> int:
        """Parameters of the largest attention page."""
        return max(self.base_params(layer) for layer in (*self.dense_layers[:1], self.last_sparse))

    @property
    def last_sparse(self) -> int:
        """A layer with experts; the last layer where there is none."""
        sparse = (i for i in reversed(range(self.num_layers)) if i not in self.dense_layers)
        return next(sparse, self.num_layers - 1)

    def experts_in(self, layer: int) -> int:
        """Experts of one layer."""
        return 0 if layer in self.dense_layers else self.num_experts

    @property
    def num_expert_pages(self) -> int:
        """Experts of all layers together."""
        return (self.num_layers - len(self.dense_layers)) * self.num_experts

    def base_ffn_size(self, layer: int) -> int:
        """Width of the FFN in a layer's attention page, which takes every token; 0 where none is."""
        return self.dense_size if layer in self.dense_layers else self.shared_size

    @property
    def vocabulary_params(self) -> int:
        """Parameters of the embedding, the final norm and the LM head."""
        tables = 1 if self.tie_embeddings else 2
        norm = (1 + self.norm_bias) * self.hidden_size
        return tables * self.vocab_size * self.hidden_size + norm + self.vocab_size * self.head_bias

    @property
    def total_params(self) -> int:
        """Parameters of the whole model."""
        experts = self.num_expert_pages * self.expert_params
        return self.all_base_params + experts + self.vocabulary_params

    @property
    def active_params(self) -> int:
        """Parameters that one token uses."""
        sparse = self.num_layers - len(self.dense_layers)
        experts = sparse * self.top_k * self.expert_params
        return self.all_base_params + experts + self.vocabulary_params

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token puts into one layer's KV cache."""
        pools = 1 if self.latent else 2
        return pools * self.cache_heads * self.cache_head_dim

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of KV cache that one token takes over all layers, if none had forgotten it."""
        return self.kv_numbers * self.num_layers * DTYPE_BYTES[kv_dtype]

    def layer_bytes(self, dtype: str) -> int:
        """Bytes of one layer's weights, of a layer with experts."""
        params = self.attention_params + self.num_experts * self.expert_params
        return params * DTYPE_BYTES[dtype]
