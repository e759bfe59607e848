"""Decoders of the Llama shape whose FFN is a set of experts: Mixtral and Qwen3-MoE.

Both take the softmax over all experts, keep the top k and (Mixtral always, Qwen3-MoE as the config
says) scale them to sum to one.
"""

from moebatch.errors import ModelError
from moebatch.model.families.base import Config, Family, Part, need_choice, need_int
from moebatch.model.families.llama import (
    attention_parts,
    decoder_spec,
    expert_parts,
    uniform_windows,
    vocabulary_parts,
)
from moebatch.plan.model_spec import ModelSpec


def _experts(config: Config, *, count: str) -> tuple[int, int]:
    num_experts, top_k = need_int(config, count), need_int(config, "num_experts_per_tok")
    if num_experts < 2 or top_k > num_experts:
        raise ModelError(
            f"config.json: {top_k} of {num_experts} experts per token is not possible",
            hint=f"check {count} and num_experts_per_tok",
        )
    return num_experts, top_k


def _mixtral_spec(config: Config) -> ModelSpec:
    num_experts, top_k = _experts(config, count="num_local_experts")
    return decoder_spec(
        config,
        family="mixtral",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "intermediate_size"),
        layer_windows=uniform_windows(config),
    )


def _qwen3_moe_spec(config: Config) -> ModelSpec:
    need_choice(config, "decoder_sparse_step", (1,))
    need_choice(config, "mlp_only_layers", ([], None))
    # transformers 5 writes num_local_experts where the published configs say num_experts
    count = "num_experts" if "num_experts" in config else "num_local_experts"
    num_experts, top_k = _experts(config, count=count)
    bias = bool(config.get("attention_bias", False))
    # unlike the dense Qwen3: all layers have the window, or none
    windows = uniform_windows(config) if config.get("use_sliding_window") else None
    return decoder_spec(
        config,
        family="qwen3_moe",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "moe_intermediate_size"),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_top_k=bool(config.get("norm_topk_prob", False)),
        layer_windows=windows,
    )


def _mixtral_attention(spec: ModelSpec, layer: int) -> tuple[Part, ...]:
    return attention_parts(spec, layer, router="block_sparse_moe.gate.weight")


def _mixtral_expert(spec: ModelSpec, layer: int, expert: int) -> tuple[Part, ...]:
    prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
    return expert_parts(spec, prefix=prefix, gate="w1", up="w3", down="w2")


def _qwen3_attention(spec: ModelSpec, layer: int) -> tuple[Part, ...]:
    return attention_parts(spec, layer, router="mlp.gate.weight")


def _qwen3_expert(spec: ModelSpec, layer: int, expert: int) -> tuple[Part, ...]:
    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
    return expert_parts(spec, prefix=prefix, gate="gate_proj", up="up_proj", down="down_proj")


MIXTRAL = Family(
    model_type="mixtral",
    spec=_mixtral_spec,
    attention_parts=_mixtral_attention,
    expert_parts=_mixtral_expert,
    vocabulary_parts=vocabulary_parts,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    spec=_qwen3_moe_spec,
    attention_parts=_qwen3_attention,
    expert_parts=_qwen3_expert,
    vocabulary_parts=vocabulary_parts,
)
