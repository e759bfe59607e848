"""Granite-MoE and its variant with a shared FFN: multipliers on embedding, attention, residuals and
logits, a softmax over the chosen experts, gate and up of all experts in one tensor."""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, count, need_int, number
from moebatch.model.families.decoder import decoder_spec, experts_of
from moebatch.model.families.parts import FFNNames, Names
from moebatch.plan.model_spec import ModelSpec, RouterSpec


def _moe_spec(config: Config, *, family: str = "granitemoe") -> ModelSpec:
    num_experts, top_k = experts_of(config, "num_local_experts")
    spec = decoder_spec(
        config,
        family=family,
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "intermediate_size"),
    )
    bias = bool(config.get("attention_bias", False))
    return replace(
        spec,
        qkv_bias=bias,
        output_bias=bias,
        router=RouterSpec(scores="softmax_of_chosen"),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        attention_scale=number(config, "attention_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_divisor=number(config, "logits_scaling", 1.0),
    )


def _shared_spec(config: Config) -> ModelSpec:
    spec = _moe_spec(config, family="granitemoeshared")
    return replace(spec, shared_size=count(config, "shared_intermediate_size", 0))


_NAMES = Names(
    router="block_sparse_moe.router.layer",
    experts=FFNNames(
        gate_up=("block_sparse_moe.input_linear.weight",),
        down="block_sparse_moe.output_linear.weight",
        stacked=True,
    ),
    shared=FFNNames(
        gate_up=("shared_mlp.input_linear.weight",), down="shared_mlp.output_linear.weight"
    ),
)
GRANITE_MOE = Family(model_type="granitemoe", spec=_moe_spec, names=_NAMES)
GRANITE_MOE_SHARED = Family(model_type="granitemoeshared", spec=_shared_spec, names=_NAMES)
