"""MiniMax-M2: a sigmoid router with a bias for the choice, q and k normed over the whole projection,
half of a head rotated; Mixtral's names."""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, need_int
from moebatch.model.families.decoder import decoder_spec, experts_of
from moebatch.model.families.parts import Names, ffn_names
from moebatch.plan.model_spec import ModelSpec, RouterSpec


def _spec(config: Config) -> ModelSpec:
    num_experts, top_k = experts_of(config, "num_local_experts")
    settings = {"rope_theta": 5e6, "head_dim": 128, **config}
    if config.get("rotary_dim") is not None:  # published configs say it so
        share = need_int(config, "rotary_dim") / need_int(settings, "head_dim")
        settings["partial_rotary_factor"] = share
    spec = decoder_spec(
        settings,
        family="minimax_m2",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "intermediate_size"),
        rotary_share=1.0,
    )
    return replace(
        spec,
        qk_norm=True,
        qk_norm_span="projection",
        router=RouterSpec(scores="sigmoid", has_selection_bias=True),
    )


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    spec=_spec,
    names=Names(
        router="block_sparse_moe.gate",
        selection_bias="block_sparse_moe.e_score_correction_bias",
        experts=ffn_names("block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
    ),
)
