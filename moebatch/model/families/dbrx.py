"""DBRX: LayerNorm without bias, q, k and v in one matrix and clipped, the matrices of all experts
stacked in three tensors, the last of them transposed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moebatch.errors import ModelError
from moebatch.model.families.base import Config, Family, need_choice, need_int, number
from moebatch.model.families.decoder import decoder_spec, experts_of
from moebatch.model.families.parts import FFNNames, Names
from moebatch.plan.model_spec import ModelSpec, RouterSpec

_ATTENTION, _FFN = "norm_attn_norm.attn.", "ffn.experts.mlp."


def _section(config: Config, key: str) -> Mapping[str, Any]:
    section = config.get(key)
    if not isinstance(section, Mapping):
        raise ModelError(f"config.json: {key} is missing", hint="the checkpoint is incomplete")
    return section


def _spec(config: Config) -> ModelSpec:
    attention, ffn = _section(config, "attn_config"), _section(config, "ffn_config")
    need_choice(ffn, "ffn_act_fn", ({"name": "silu"}, None))
    num_experts, top_k = experts_of(ffn, "moe_num_experts", top_k="moe_top_k")
    theta = number(attention, "rope_theta", 10000.0)
    spec = decoder_spec(
        {
            "hidden_size": need_int(config, "d_model"),
            "num_attention_heads": need_int(config, "n_heads"),
            "num_hidden_layers": need_int(config, "n_layers"),
            "max_position_embeddings": need_int(config, "max_seq_len"),
            "num_key_value_heads": need_int(attention, "kv_n_heads"),
            "rope_theta": theta,
            **{
                key: config[key]
                for key in ("vocab_size", "dtype", "torch_dtype", "rope_parameters")
                if key in config
            },
        },
        family="dbrx",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(ffn, "ffn_hidden_size"),
    )
    clip, norm = attention.get("clip_qkv"), ffn.get("moe_normalize_expert_weights", 1.0)
    return replace(
        spec,
        norm="layer",
        rms_norm_eps=1e-5,
        clip_qkv=None if clip is None else number(attention, "clip_qkv", 8.0),
        router=RouterSpec(
            norm_p=None if norm is None else number(ffn, "moe_normalize_expert_weights", 1.0)
        ),
    )


DBRX = Family(
    model_type="dbrx",
    spec=_spec,
    names=Names(
        layer="transformer.blocks.{layer}.",
        input_norm="norm_attn_norm.norm_1",
        post_norm="norm_attn_norm.norm_2",
        qkv=(_ATTENTION + "Wqkv",),
        output=_ATTENTION + "out_proj",
        router="ffn.router.layer",
        experts=FFNNames(
            gate_up=(_FFN + "w1", _FFN + "v1"),
            down=_FFN + "w2",
            stacked=True,
            down_layout="columns",
        ),
        embedding="transformer.wte.weight",
        final_norm="transformer.norm_f",
    ),
)
