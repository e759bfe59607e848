"""OLMoE: q and k are normed over the whole projection; weights of the experts are not normalised."""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, need_int, number
from moebatch.model.families.decoder import decoder_spec, experts_of, norm_p
from moebatch.model.families.parts import Names
from moebatch.plan.model_spec import ModelSpec, RouterSpec


def _spec(config: Config) -> ModelSpec:
    num_experts, top_k = experts_of(config, "num_experts", "num_local_experts")
    bias, clip = bool(config.get("attention_bias", False)), config.get("clip_qkv")
    spec = decoder_spec(
        config,
        family="olmoe",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "intermediate_size"),
    )
    return replace(
        spec,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-5),
        qk_norm=True,
        qk_norm_span="projection",
        clip_qkv=None if clip is None else number(config, "clip_qkv", 1.0),
        qkv_bias=bias,
        output_bias=bias,
        router=RouterSpec(norm_p=norm_p(config)),
    )


OLMOE = Family(model_type="olmoe", spec=_spec, names=Names())
