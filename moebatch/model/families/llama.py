"""The dense family: Llama, Mistral, Qwen2, Qwen3. RMSNorm, rotary positions, GQA, SwiGLU.

They differ in the biases (Llama and Mistral: as the config says, Qwen2: on q, k, v), in the norm of
q and k per head (Qwen3) and in which layers have a sliding window.
"""

from moebatch.errors import ModelError
from moebatch.model.families.base import (
    Config,
    Family,
    Part,
    dtype_of,
    need_choice,
    need_int,
    number,
    optional_int,
    rope_of,
)
from moebatch.plan.model_spec import ModelSpec

_SLIDING = "sliding_attention"


def decoder_spec(config: Config, *, family: str, num_experts: int, top_k: int, expert_size: int,
                 qkv_bias: bool = False, output_bias: bool = False, qk_norm: bool = False,
                 norm_top_k: bool = True, layer_windows: tuple[int | None, ...] | None = None,
                 ) -> ModelSpec:  # fmt: skip
    """The spec of a Llama-shaped decoder, dense or with experts."""
    need_choice(config, "hidden_act", ("silu",))
    num_layers = need_int(config, "num_hidden_layers")
    hidden_size = need_int(config, "hidden_size")
    num_q_heads = need_int(config, "num_attention_heads")
    max_model_len = need_int(config, "max_position_embeddings")
    num_kv_heads = optional_int(config, "num_key_value_heads", num_q_heads)
    head_dim = optional_int(config, "head_dim", hidden_size // num_q_heads)
    if num_q_heads % num_kv_heads or head_dim < 2 or head_dim % 2:
        raise ModelError(
            f"config.json: {num_q_heads} query heads of size {head_dim} on {num_kv_heads} key/value"
            " heads are not possible",
            hint="check num_attention_heads, num_key_value_heads, hidden_size and head_dim",
        )
    return ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        top_k=top_k,
        expert_size=expert_size,
        vocab_size=need_int(config, "vocab_size"),
        max_model_len=max_model_len,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope_of(config, max_model_len),
        layer_windows=layer_windows or (None,) * num_layers,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        norm_top_k=norm_top_k,
        weight_dtype=dtype_of(config),
    )


def _window(config: Config) -> int | None:
    return None if config.get("sliding_window") is None else need_int(config, "sliding_window")


def uniform_windows(config: Config) -> tuple[int | None, ...]:
    """Mistral and Mixtral: one window for all layers, or none."""
    return (_window(config),) * need_int(config, "num_hidden_layers")


def typed_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: a window where `layer_types` says so, or from `max_window_layers` on."""
    num_layers = need_int(config, "num_hidden_layers")
    if not config.get("use_sliding_window"):
        return (None,) * num_layers
    first = config.get("max_window_layers")
    first = 0 if first == 0 else optional_int(config, "max_window_layers", num_layers)
    types = config.get("layer_types") or [
        _SLIDING if i >= first else "full_attention" for i in range(num_layers)
    ]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"config.json: layer_types does not name {num_layers} layers")
    for kind in types:
        need_choice({"layer_types": kind}, "layer_types", (_SLIDING, "full_attention"))
    window = _window(config)
    return tuple(window if kind == _SLIDING else None for kind in types)


def _dense(config: Config, *, family: str, qkv_bias: bool = False, output_bias: bool = False,
           qk_norm: bool = False, layer_windows: tuple[int | None, ...] | None = None,
           ) -> ModelSpec:  # fmt: skip
    need_choice(config, "mlp_bias", (False,))
    return decoder_spec(
        config,
        family=family,
        num_experts=1,
        top_k=1,
        expert_size=need_int(config, "intermediate_size"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        layer_windows=layer_windows,
    )


def _llama_spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return _dense(config, family="llama", qkv_bias=bias, output_bias=bias)


def _mistral_spec(config: Config) -> ModelSpec:
    return _dense(config, family="mistral", layer_windows=uniform_windows(config))


def _qwen2_spec(config: Config) -> ModelSpec:
    return _dense(config, family="qwen2", qkv_bias=True, layer_windows=typed_windows(config))


def _qwen3_spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    windows = typed_windows(config)
    return _dense(config, family="qwen3", qkv_bias=bias, output_bias=bias, qk_norm=True,
                  layer_windows=windows)  # fmt: skip


def attention_parts(spec: ModelSpec, layer: int, *, router: str | None = None) -> tuple[Part, ...]:
    """Norms, projections and the router of a layer; q, k and v stacked into one matrix."""
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."
    rows = spec.q_size + 2 * spec.kv_size
    qkv = tuple(attention + f"{x}_proj.weight" for x in "qkv")
    parts = [
        Part(
            name="input_norm",
            shape=(spec.hidden_size,),
            sources=(prefix + "input_layernorm.weight",),
        ),
        Part(
            name="post_norm",
            shape=(spec.hidden_size,),
            sources=(prefix + "post_attention_layernorm.weight",),
        ),
        Part(name="qkv", shape=(rows, spec.hidden_size), sources=qkv),
        Part(
            name="output",
            shape=(spec.hidden_size, spec.q_size),
            sources=(attention + "o_proj.weight",),
        ),
    ]
    if spec.qkv_bias:
        biases = tuple(attention + f"{x}_proj.bias" for x in "qkv")
        parts.append(Part(name="qkv_bias", shape=(rows,), sources=biases))
    if spec.output_bias:
        bias = (attention + "o_proj.bias",)
        parts.append(Part(name="output_bias", shape=(spec.hidden_size,), sources=bias))
    if spec.qk_norm:
        for x in "qk":
            norm = (attention + f"{x}_norm.weight",)
            parts.append(Part(name=f"{x}_norm", shape=(spec.head_dim,), sources=norm))
    if router is not None:
        shape = (spec.num_experts, spec.hidden_size)
        parts.append(Part(name="router", shape=shape, sources=(prefix + router,)))
    return tuple(parts)


def expert_parts(spec: ModelSpec, *, prefix: str, gate: str, up: str, down: str,
                 ) -> tuple[Part, ...]:  # fmt: skip
    """One expert: gate and up stacked into one matrix, and down."""
    return (
        Part(
            name="gate_up",
            shape=(2 * spec.expert_size, spec.hidden_size),
            sources=(f"{prefix}{gate}.weight", f"{prefix}{up}.weight"),
        ),
        Part(
            name="down",
            shape=(spec.hidden_size, spec.expert_size),
            sources=(f"{prefix}{down}.weight",),
        ),
    )


def vocabulary_parts(spec: ModelSpec) -> tuple[Part, ...]:
    """Embedding, final norm and LM head; a tied head is read from the embedding."""
    table = (spec.vocab_size, spec.hidden_size)
    embedding = ("model.embed_tokens.weight",)
    head = embedding if spec.tie_embeddings else ("lm_head.weight",)
    return (
        Part(name="embedding", shape=table, sources=embedding),
        Part(name="final_norm", shape=(spec.hidden_size,), sources=("model.norm.weight",)),
        Part(name="head", shape=table, sources=head),
    )


def _dense_attention(spec: ModelSpec, layer: int) -> tuple[Part, ...]:
    return attention_parts(spec, layer)


def _dense_ffn(spec: ModelSpec, layer: int, expert: int) -> tuple[Part, ...]:
    del expert  # a dense layer has only one
    prefix = f"model.layers.{layer}.mlp."
    return expert_parts(spec, prefix=prefix, gate="gate_proj", up="up_proj", down="down_proj")


LLAMA, MISTRAL, QWEN2, QWEN3 = (
    Family(
        model_type=model_type,
        spec=spec,
        attention_parts=_dense_attention,
        expert_parts=_dense_ffn,
        vocabulary_parts=vocabulary_parts,
    )
    for model_type, spec in (
        ("llama", _llama_spec),
        ("mistral", _mistral_spec),
        ("qwen2", _qwen2_spec),
        ("qwen3", _qwen3_spec),
    )
)
