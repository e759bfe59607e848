"""DeepSeek-V2 and V3: latent attention, shared experts, the first layers dense.

V2 takes a softmax over all experts, V3 a sigmoid of each, chosen with a bias that the weights do not
see; both may look at the best groups of experts only.
"""

from dataclasses import replace

from moebatch.errors import ModelError
from moebatch.model.families.base import Config, Family, count, need_choice, need_int, number
from moebatch.model.families.decoder import decoder_spec, experts_of, first_dense, norm_p
from moebatch.model.families.parts import Names
from moebatch.model.families.rope import mscale_of
from moebatch.plan.model_spec import LatentSpec, ModelSpec, RouterSpec


def _latent_spec(config: Config, family: str, *, interleaved: bool) -> ModelSpec:
    """All but the router, which the two versions do not share."""
    need_choice(config, "attention_bias", (False, None))
    need_choice(config, "moe_layer_freq", (1, None))
    rank = config.get("q_lora_rank")
    latent = LatentSpec(
        q_rank=None if rank is None else need_int(config, "q_lora_rank"),
        kv_rank=need_int(config, "kv_lora_rank"),
        nope_dim=need_int(config, "qk_nope_head_dim"),
        rope_dim=need_int(config, "qk_rope_head_dim"),
        value_dim=need_int(config, "v_head_dim"),
    )
    if latent.rope_dim % 2:
        raise ModelError(f"config.json: qk_rope_head_dim {latent.rope_dim} is not even")
    num_experts, top_k = experts_of(config, "n_routed_experts", "num_experts", "num_local_experts")
    heads = {
        "head_dim": latent.nope_dim + latent.rope_dim,
        "num_key_value_heads": need_int(config, "num_attention_heads"),
    }
    spec = decoder_spec(
        {**config, **heads},
        family=family,
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "moe_intermediate_size"),
    )
    dense = first_dense(config)
    return replace(
        spec,
        latent=latent,
        rope=replace(spec.rope, rotary_dim=latent.rope_dim, interleaved=interleaved),
        attention_scale=spec.head_dim**-0.5 * mscale_of(config),
        shared_size=spec.expert_size * count(config, "n_shared_experts", 0),
        dense_layers=dense,
        dense_size=need_int(config, "intermediate_size") if dense else 0,
    )


def groups_of(config: Config, num_experts: int, top_k: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token chooses from.

    Raises: ModelError when they do not divide the experts, or hold too few.
    """
    groups = count(config, "n_group", 1) or 1
    best = count(config, "topk_group", groups) or groups
    if num_experts % groups or best > groups or best * (num_experts // groups) < top_k:
        raise ModelError(
            f"config.json: {best} of {groups} groups of {num_experts} experts are not possible",
            hint="check n_group, topk_group and n_routed_experts",
        )
    return groups, best


def _v2_spec(config: Config) -> ModelSpec:
    need_choice(config, "norm_topk_prob", (False, None))
    need_choice(config, "topk_method", ("greedy", "group_limited_greedy", None))
    need_choice(config, "mlp_bias", (False, None))
    need_choice(config, "scoring_func", ("softmax", None))
    spec = _latent_spec(config, "deepseek_v2", interleaved=True)
    groups, best = 1, 1
    if config.get("topk_method") == "group_limited_greedy":
        groups, best = groups_of(config, spec.num_experts, spec.top_k)
    router = RouterSpec(
        norm_p=None,
        scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=best,
    )
    return replace(spec, router=router)


def sigmoid_router(config: Config, spec: ModelSpec, *, scale: float = 1.0) -> RouterSpec:
    """DeepSeek-V3's router, which others have taken over; `scale` is what theirs is by default.

    Source: DeepSeek-V3 (2412.19437), section 2.1.2.
    """
    groups, best = groups_of(config, spec.num_experts, spec.top_k)
    return RouterSpec(
        scores="sigmoid",
        has_selection_bias=True,
        num_groups=groups,
        top_groups=best,
        group_score="best_two",
        norm_p=norm_p(config, default=True),
        norm_min=1e-20,
        scale=number(config, "routed_scaling_factor", scale),
    )


def _v3_spec(config: Config) -> ModelSpec:
    need_choice(config, "topk_method", ("noaux_tc", None))
    need_choice(config, "scoring_func", ("sigmoid", None))
    interleaved = config.get("rope_interleave", True) is not False
    spec = _latent_spec(config, "deepseek_v3", interleaved=interleaved)
    return replace(spec, router=sigmoid_router(config, spec, scale=2.5))


DEEPSEEK_V2 = Family(model_type="deepseek_v2", spec=_v2_spec, names=Names())
DEEPSEEK_V3 = Family(model_type="deepseek_v3", spec=_v3_spec, names=Names())
