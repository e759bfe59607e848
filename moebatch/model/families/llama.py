"""The dense family: Llama, Mistral, Qwen2, Qwen3. RMSNorm, rotary positions, GQA, SwiGLU.

They differ in the biases (Llama and Mistral: as the config says, Qwen2: on q, k, v), in the norm of
q and k per head (Qwen3) and in which layers have a sliding window.
"""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, need_choice, need_int
from moebatch.model.families.decoder import decoder_spec, typed_windows, uniform_windows
from moebatch.model.families.parts import Names, ffn_names
from moebatch.plan.model_spec import ModelSpec


def _dense(config: Config, family: str) -> ModelSpec:
    need_choice(config, "mlp_bias", (False,))
    return decoder_spec(
        config,
        family=family,
        num_experts=1,
        top_k=1,
        expert_size=need_int(config, "intermediate_size"),
    )


def _llama_spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(_dense(config, "llama"), qkv_bias=bias, output_bias=bias)


def _mistral_spec(config: Config) -> ModelSpec:
    return replace(_dense(config, "mistral"), layer_windows=uniform_windows(config))


def _qwen2_spec(config: Config) -> ModelSpec:
    return replace(_dense(config, "qwen2"), qkv_bias=True, layer_windows=typed_windows(config))


def _qwen3_spec(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(
        _dense(config, "qwen3"),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        layer_windows=typed_windows(config),
    )


_NAMES = Names(experts=ffn_names("mlp."))  # the one expert of a dense layer

LLAMA, MISTRAL, QWEN2, QWEN3 = (
    Family(model_type=model_type, spec=spec, names=_NAMES)
    for model_type, spec in (
        ("llama", _llama_spec),
        ("mistral", _mistral_spec),
        ("qwen2", _qwen2_spec),
        ("qwen3", _qwen3_spec),
    )
)
