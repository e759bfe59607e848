"""ERNIE 4.5 MoE: neighbouring dimensions rotated together, experts chosen with a bias that their
softmax weights do not see, shared experts, tied embeddings, dense layers at either end."""

from dataclasses import replace

from moebatch.errors import ModelError
from moebatch.model.families.base import Config, Family, count, need_int, number
from moebatch.model.families.decoder import decoder_spec, experts_of
from moebatch.model.families.parts import Names
from moebatch.plan.model_spec import ModelSpec, RouterSpec


def _spec(config: Config) -> ModelSpec:
    num_experts, top_k = experts_of(
        config, "moe_num_experts", "num_experts", "num_local_experts", top_k="moe_k"
    )
    spec = decoder_spec(
        {"rope_theta": 500000.0, "tie_word_embeddings": True, **config},
        family="ernie4_5_moe",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "moe_intermediate_size"),
        interleaved=True,
    )
    bias, dense = bool(config.get("use_bias", False)), _dense_layers(config, spec.num_layers)
    return replace(
        spec,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=bias,
        head_bias=bias,
        router=RouterSpec(has_selection_bias=True, norm_min=number(config, "moe_norm_min", 1e-12)),
        shared_size=spec.expert_size * count(config, "moe_num_shared_experts", 2),
        dense_layers=dense,
        dense_size=need_int(config, "intermediate_size") if dense else 0,
    )


def _dense_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    first, step = count(config, "moe_layer_start_index", 1), count(config, "moe_layer_interval", 1)
    last = config.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last in (-1, None) else count(config, "moe_layer_end_index", 0)
    dense = tuple(
        i for i in range(num_layers) if not first <= i <= last or not step or (i + 1) % step
    )
    if len(dense) == num_layers:
        raise ModelError("config.json: none of the layers has experts",
                         hint="dense models of this architecture are not supported")  # fmt: skip
    return dense


ERNIE_MOE = Family(
    model_type="ernie4_5_moe",
    spec=_spec,
    names=Names(selection_bias="mlp.moe_statics.e_score_correction_bias"),
)
