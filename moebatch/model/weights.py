"""The weights of a layer as the mathematics uses them, and the projections before attention.

Shapes: T tokens, D hidden_size, H query heads, G key/value heads, d head_dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from moebatch.model.experts import Expert, fused
from moebatch.model.layers import Norm, apply_rope, rms_norm
from moebatch.model.linear import Linear, NativeLinear
from moebatch.model.router import Router
from moebatch.plan.model_spec import ModelSpec

Parts = Mapping[str, Linear | Tensor]
# Parts that are applied by `Linear`; all others stay float32 tensors.
MATRICES = ("qkv", "output", "q_b", "gate_up", "down", "base_gate_up", "base_down")
# Small matrices that stay in float32; the native kernels multiply them where there are any.
SMALL_MATRICES = ("router", "shared_gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFFN:
    """The FFN of every token of a layer; `gate` [1, D] weighs it by a sigmoid."""

    expert: Expert
    gate: Tensor | Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """All of a layer but its experts; vectors, the router and `kv_b` in float32."""

    input_norm: Norm
    post_norm: Norm
    qkv: Linear
    output: Linear
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    q_a_norm: Tensor | None
    q_b: Linear | None
    kv_a_norm: Tensor | None
    kv_b: Tensor | None
    router: Router | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Embedding table [V, D] in the checkpoint's type, to be indexed; final norm, LM head, its bias."""

    embedding: Tensor | NativeLinear
    final_norm: Norm
    head: Linear
    head_bias: Tensor | None


def attention_weights(parts: Parts, spec: ModelSpec) -> AttentionWeights:
    """The weights of a layer's attention page."""
    router = None
    if "router" in parts:
        router = Router(
            weight=parts["router"],
            bias=_optional(parts, "router_bias"),
            selection_bias=_optional(parts, "selection_bias"),
        )
    return AttentionWeights(
        input_norm=norm_of(parts, "input_norm", spec),
        post_norm=norm_of(parts, "post_norm", spec),
        qkv=_linear(parts["qkv"]),
        output=_linear(parts["output"]),
        qkv_bias=_optional(parts, "qkv_bias"),
        output_bias=_optional(parts, "output_bias"),
        q_norm=_optional(parts, "q_norm"),
        k_norm=_optional(parts, "k_norm"),
        sinks=_optional(parts, "sinks"),
        q_a_norm=_optional(parts, "q_a_norm"),
        q_b=_linear(parts["q_b"]) if "q_b" in parts else None,
        kv_a_norm=_optional(parts, "kv_a_norm"),
        kv_b=_optional(parts, "kv_b"),
        router=router,
    )


def norm_of(parts: Parts, name: str, spec: ModelSpec) -> Norm:
    """The named norm of the model's kind."""
    return Norm(
        kind=spec.norm,
        weight=_tensor(parts[name]),
        bias=_optional(parts, name + "_bias"),
        eps=spec.rms_norm_eps,
    )


def expert_of(parts: Parts, *, index: int, size: int, limit: float | None,
              prefix: str = "") -> Expert:  # fmt: skip
    """The expert that a page holds."""
    gate_up, down = _linear(parts[prefix + "gate_up"]), _linear(parts[prefix + "down"])
    gate_up_bias = _optional(parts, prefix + "gate_up_bias")
    down_bias = _optional(parts, prefix + "down_bias")
    return Expert(
        index=index,
        size=size,
        gate_up=gate_up,
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        limit=limit,
        native=fused(gate_up, down, size=size, gate_up_bias=gate_up_bias, down_bias=down_bias),
    )


def base_ffn(parts: Parts, *, size: int) -> BaseFFN:
    """The FFN for every token that an attention page holds."""
    expert = expert_of(parts, index=0, size=size, limit=None, prefix="base_")
    return BaseFFN(expert=expert, gate=parts.get("shared_gate"))


def gate_values(x: Tensor, gate: Tensor | Linear) -> Tensor:
    """What the FFN of every token is weighed by [T, 1]: x [T, D] float32."""
    return (linear(x, gate) if isinstance(gate, Tensor) else gate(x)).sigmoid()


def project(x: Tensor, weights: AttentionWeights, spec: ModelSpec, rope: tuple[Tensor, Tensor],
            ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotated queries [T, H, d] and what the cache takes: keys and values [T, G, d].

    Latent attention: "keys" are the latents [T, 1, k + r], and so are the values.
    """
    y = weights.qkv(x).float()
    if weights.qkv_bias is not None:
        y += weights.qkv_bias
    if spec.latent is not None:
        return _project_latent(y, weights, spec, rope)
    if spec.clip_qkv is not None and not spec.qk_norm:
        y = y.clamp(-spec.clip_qkv, spec.clip_qkv)
    q, k, v = torch.split(y, [spec.q_size, spec.kv_size, spec.kv_size], dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q = _head_norm(q, weights.q_norm, spec.rms_norm_eps)
        k = _head_norm(k, weights.k_norm, spec.rms_norm_eps)
        if spec.clip_qkv is not None:  # after the norms: OLMoE has both
            q, k, v = (t.clamp(-spec.clip_qkv, spec.clip_qkv) for t in (q, k, v))
    q, k, v = (t.reshape(t.shape[0], -1, spec.head_dim) for t in (q, k, v))
    interleaved = spec.rope.interleaved
    return (
        apply_rope(q, rope, interleaved=interleaved),
        apply_rope(k, rope, interleaved=interleaved),
        v,
    )


def _project_latent(y: Tensor, weights: AttentionWeights, spec: ModelSpec,
                    rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    latent = spec.latent
    assert latent is not None and weights.kv_a_norm is not None
    q, compressed, rotated = torch.split(
        y, [latent.q_rank or spec.q_size, latent.kv_rank, latent.rope_dim], dim=1
    )
    if weights.q_b is not None and weights.q_a_norm is not None:
        q = weights.q_b(rms_norm(q, weights.q_a_norm, _LATENT_EPS)).float()
    interleaved = spec.rope.interleaved
    q = q.reshape(q.shape[0], -1, spec.head_dim)
    plain, turning = torch.split(q, [latent.nope_dim, latent.rope_dim], dim=-1)
    q = torch.cat((plain, apply_rope(turning, rope, interleaved=interleaved)), dim=-1)
    compressed = rms_norm(compressed, weights.kv_a_norm, _LATENT_EPS)[:, None]
    turned = apply_rope(rotated[:, None], rope, interleaved=interleaved)
    latents = torch.cat((compressed, turned), dim=-1)
    return q, latents, latents


_LATENT_EPS = 1e-6  # of the norms within latent attention, whatever config.json says of the others


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H d] normed per head, weight [d], or as a whole, weight [H d]."""
    return rms_norm(x.reshape(x.shape[0], -1, weight.shape[0]), weight, eps).flatten(1)


def _tensor(part: Linear | Tensor) -> Tensor:
    assert isinstance(part, Tensor)
    return part


def _linear(part: Linear | Tensor) -> Linear:
    assert not isinstance(part, Tensor)
    return part


def _optional(parts: Parts, name: str) -> Tensor | None:
    return _tensor(parts[name]) if name in parts else None
