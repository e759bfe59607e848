"""GLM-4.5 and later: DeepSeek-V3's router on ordinary attention, with half of a head rotated, and q
and k normed per head in the larger models."""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, count, need_int, number
from moebatch.model.families.decoder import decoder_spec, experts_of, first_dense
from moebatch.model.families.deepseek import sigmoid_router
from moebatch.model.families.parts import Names
from moebatch.plan.model_spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    num_experts, top_k = experts_of(config, "n_routed_experts", "num_local_experts")
    spec = decoder_spec(
        config,
        family="glm4_moe",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "moe_intermediate_size"),
        rotary_share=0.5,
    )
    dense = first_dense(config, default=1)
    return replace(
        spec,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-5),
        router=sigmoid_router(config, spec),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
        shared_size=spec.expert_size * count(config, "n_shared_experts", 1),
        dense_layers=dense,
        dense_size=need_int(config, "intermediate_size") if dense else 0,
    )


GLM4_MOE = Family(model_type="glm4_moe", spec=_spec, names=Names())
