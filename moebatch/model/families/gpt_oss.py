"""gpt-oss: attention sinks, every other layer with a sliding window, biases everywhere, clamped
SwiGLU, a softmax over the chosen experts only.

Experts lie stacked and transposed, gate and up in turn; or as mxfp4, then by rows.
"""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, need_choice, need_int, number
from moebatch.model.families.decoder import decoder_spec, experts_of, windows_of_types
from moebatch.model.families.parts import FFNNames, Names
from moebatch.plan.model_spec import ModelSpec, RouterSpec

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _spec(config: Config) -> ModelSpec:
    need_choice(config, "swiglu_alpha", (1.702, None))
    need_choice(config, "attention_bias", (True, None))
    num_experts, top_k = experts_of(config, "num_local_experts", "num_experts")
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_parameters": _DEFAULT_ROPE}
    spec = decoder_spec(
        {"rope_theta": 150000.0, "head_dim": 64, **config},
        family="gpt_oss",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "intermediate_size"),
    )
    types = config.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(spec.num_layers)
    ]
    return replace(
        spec,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-5),
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        expert_bias=True,
        swiglu_limit=number(config, "swiglu_limit", 7.0),
        router=RouterSpec(scores="softmax_of_chosen", has_bias=True),
        layer_windows=windows_of_types(config, types, spec.num_layers),
    )


GPT_OSS = Family(
    model_type="gpt_oss",
    spec=_spec,
    names=Names(
        router="mlp.router",
        experts=FFNNames(
            gate_up=("mlp.experts.gate_up_proj",),
            down="mlp.experts.down_proj",
            stacked=True,
            gate_up_layout="column_pairs",
            down_layout="columns",
            gate_up_bias=("mlp.experts.gate_up_proj_bias",),
            down_bias="mlp.experts.down_proj_bias",
        ),
    ),
)
