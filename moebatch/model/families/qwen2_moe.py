"""Qwen1.5-MoE and Qwen2-MoE: a shared expert, weighed by a sigmoid, beside routed ones that are not
normalised; biases on q, k and v."""

from dataclasses import replace

from moebatch.model.families.base import Config, Family, count, need_int
from moebatch.model.families.decoder import (
    decoder_spec,
    experts_of,
    norm_p,
    sparse_steps,
    windows_of_types,
)
from moebatch.model.families.parts import Names, ffn_names
from moebatch.plan.model_spec import ModelSpec, RouterSpec


def _spec(config: Config) -> ModelSpec:
    num_experts, top_k = experts_of(config, "num_experts", "num_local_experts")
    spec = decoder_spec(
        config,
        family="qwen2_moe",
        num_experts=num_experts,
        top_k=top_k,
        expert_size=need_int(config, "moe_intermediate_size"),
    )
    dense = sparse_steps(config)
    return replace(
        spec,
        qkv_bias=bool(config.get("qkv_bias", True)),
        router=RouterSpec(norm_p=norm_p(config)),
        shared_size=need_int(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=dense,
        dense_size=need_int(config, "intermediate_size") if dense else 0,
        layer_windows=_windows(config, spec.num_layers),
    )


def _windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """As the reference has it: every other layer of the first `max_window_layers`, from the first."""
    if not config.get("use_sliding_window"):
        return (None,) * num_layers
    last = count(config, "max_window_layers", 28)
    types = config.get("layer_types") or [
        "full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(num_layers)
    ]
    return windows_of_types(config, types, num_layers)


QWEN2_MOE = Family(
    model_type="qwen2_moe", spec=_spec, names=Names(shared=ffn_names("mlp.shared_expert."))
)
