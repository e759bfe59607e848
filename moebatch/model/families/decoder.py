"""What the configs of most decoders have in common: sizes, heads, experts, windows."""

from moebatch.errors import ModelError
from moebatch.model.families.base import (
    Config,
    count,
    dtype_of,
    need_choice,
    need_int,
    number,
    optional_int,
    stored_bits_of,
)
from moebatch.model.families.rope import rope_of
from moebatch.plan.model_spec import ModelSpec

_SLIDING = "sliding_attention"


def decoder_spec(config: Config, *, family: str, num_experts: int, top_k: int, expert_size: int,
                 rotary_share: float | None = None, interleaved: bool = False,
                 ) -> ModelSpec:  # fmt: skip
    """The spec of a Llama-shaped decoder, dense or with experts; families `replace` the rest."""
    need_choice(config, "hidden_act", ("silu",))
    num_layers = need_int(config, "num_hidden_layers")
    hidden_size = need_int(config, "hidden_size")
    num_q_heads = need_int(config, "num_attention_heads")
    max_model_len = need_int(config, "max_position_embeddings")
    num_kv_heads = optional_int(config, "num_key_value_heads", num_q_heads)
    head_dim = optional_int(config, "head_dim", hidden_size // num_q_heads)
    check_heads(num_q_heads, num_kv_heads, head_dim)
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
        rope=rope_of(
            config,
            max_model_len,
            rotary_share=rotary_share,
            head_dim=head_dim,
            interleaved=interleaved,
        ),
        layer_windows=(None,) * num_layers,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        weight_dtype=dtype_of(config),
        stored_bits=stored_bits_of(config),
    )


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuse heads that do not divide into groups, or have no pairs to rotate."""
    if num_q_heads % num_kv_heads or head_dim < 2 or head_dim % 2:
        raise ModelError(
            f"config.json: {num_q_heads} query heads of size {head_dim} on {num_kv_heads} key/value"
            " heads are not possible",
            hint="check num_attention_heads, num_key_value_heads, hidden_size and head_dim",
        )


def experts_of(config: Config, count: str, *alternatives: str,
               top_k: str = "num_experts_per_tok") -> tuple[int, int]:  # fmt: skip
    """Number of experts and of those that a token goes to; `count` or another key names the first."""
    key = next((name for name in (count, *alternatives) if config.get(name) is not None), count)
    num_experts, chosen = need_int(config, key), need_int(config, top_k)
    if num_experts < 2 or chosen > num_experts:
        raise ModelError(
            f"config.json: {chosen} of {num_experts} experts per token is not possible",
            hint=f"check {key} and {top_k}",
        )
    return num_experts, chosen


def first_dense(config: Config, key: str = "first_k_dense_replace", *, default: int = 0,
                ) -> tuple[int, ...]:  # fmt: skip
    """The layers without experts of a model whose first ones have none."""
    return tuple(range(_some_sparse(config, count(config, key, default))))


def sparse_steps(config: Config) -> tuple[int, ...]:
    """The layers without experts by `mlp_only_layers` and `decoder_sparse_step` (Qwen)."""
    num_layers, step = (
        need_int(config, "num_hidden_layers"),
        count(config, "decoder_sparse_step", 1),
    )
    only = config.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(layer) is int for layer in only):
        raise ModelError(f"config.json: mlp_only_layers is {only!r}, expected a list of layers")
    dense = tuple(i for i in range(num_layers) if i in only or not step or (i + 1) % step)
    _some_sparse(config, len(dense))
    return dense


def _some_sparse(config: Config, num_dense: int) -> int:
    """Refuse a model whose layers are all dense."""
    if num_dense >= need_int(config, "num_hidden_layers"):
        raise ModelError("config.json: none of the layers has experts",
                         hint="dense models of this architecture are not supported")  # fmt: skip
    return num_dense


def norm_p(config: Config, key: str = "norm_topk_prob", *, default: bool = False) -> float | None:
    """RouterSpec.norm_p of a config that says whether weights are made to sum to one."""
    return 1.0 if config.get(key, default) else None


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
    return windows_of_types(config, types, num_layers)


def windows_of_types(config: Config, types: object, num_layers: int) -> tuple[int | None, ...]:
    """A window in the layers that `types` calls sliding."""
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"config.json: layer_types does not name {num_layers} layers")
    for kind in types:
        need_choice({"layer_types": kind}, "layer_types", (_SLIDING, "full_attention"))
    window = _window(config)
    return tuple(window if kind == _SLIDING else None for kind in types)
