"""Phi-3.5-MoE: LayerNorm with bias, biases in attention and head, longrope, the sparsemixer router."""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, need_choice, need_int, number
from moebatch.model.families.decoder import decoder_spec, experts_of, uniform_windows
from moebatch.model.families.parts import Names, ffn_names
from moebatch.plan.model_spec import ModelSpec, RouterSpec


def _spec(config: Config) -> ModelSpec:
    need_choice(config, "num_experts_per_tok", (2,))
    num_experts, top_k = experts_of(config, "num_local_experts")
    spec = decoder_spec(
        {"rope_theta": 1e6, **config},
        family="phimoe",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "intermediate_size"),
    )
    bias = bool(config.get("attention_bias", False))
    return replace(
        spec,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-5),
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        head_bias=bool(config.get("lm_head_bias", False)),
        router=RouterSpec(
            scores="sparsemixer",
            norm_p=None,
            jitter=number(config, "router_jitter_noise", 0.01),
        ),
        layer_windows=uniform_windows(config),
    )


PHIMOE = Family(
    model_type="phimoe",
    spec=_spec,
    names=Names(
        router="block_sparse_moe.gate",
        experts=ffn_names("block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
    ),
)
