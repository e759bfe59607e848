"""Decoders of the Llama shape whose FFN is a set of experts: Mixtral and Qwen3-MoE.

Both take the softmax over all experts, keep the top k and (Mixtral always, Qwen3-MoE as the config
says) scale them to sum to one.
"""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, need_int
from moebatch.model.families.decoder import (
    decoder_spec,
    experts_of,
    norm_p,
    sparse_steps,
    uniform_windows,
)
from moebatch.model.families.parts import Names, ffn_names
from moebatch.plan.model_spec import ModelSpec, RouterSpec


def _mixtral_spec(config: Config) -> ModelSpec:
    num_experts, top_k = experts_of(config, "num_local_experts")
    spec = decoder_spec(
        config,
        family="mixtral",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "intermediate_size"),
    )
    return replace(spec, layer_windows=uniform_windows(config))


def _qwen3_moe_spec(config: Config) -> ModelSpec:
    # transformers 5 writes num_local_experts where the published configs say num_experts
    num_experts, top_k = experts_of(config, "num_experts", "num_local_experts")
    bias = bool(config.get("attention_bias", False))
    spec = decoder_spec(
        config,
        family="qwen3_moe",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "moe_intermediate_size"),
    )
    # unlike the dense Qwen3: all layers have the window, or none
    windows = uniform_windows(config) if config.get("use_sliding_window") else spec.layer_windows
    return replace(
        spec,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        router=RouterSpec(norm_p=norm_p(config)),
        dense_layers=(dense := sparse_steps(config)),
        dense_size=need_int(config, "intermediate_size") if dense else 0,
        layer_windows=windows,
    )


MIXTRAL = Family(
    model_type="mixtral",
    spec=_mixtral_spec,
    names=Names(
        router="block_sparse_moe.gate",
        experts=ffn_names("block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
    ),
)
QWEN3_MOE = Family(model_type="qwen3_moe", spec=_qwen3_moe_spec, names=Names())
