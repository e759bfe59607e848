"""Norms and rotary positions.

Shapes: T tokens, D hidden_size, H heads, d head_dim, r rotary dimensions of a head.
"""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.nn.functional import rms_norm as torch_rms_norm

from moebatch.plan.model_spec import RopeSpec


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] scaled to unit root mean square, times weight [D]."""
    return torch_rms_norm(x, (x.shape[-1],), weight, eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm with its weights [D]: root mean square, or mean and variance ("layer")."""

    kind: Literal["rms", "layer"]
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        if self.kind == "rms":
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class Rope:
    """Rotary position embedding: angles of positions."""

    def __init__(self, spec: RopeSpec, head_dim: int) -> None:
        """Frequencies [r/2], scaled as the spec says; r: dimensions of a head that turn."""
        rotary_dim = spec.rotary_dim or head_dim
        self._short = inverse_frequencies(spec, rotary_dim)
        self._short_factor = spec.attention_factor
        self._original = spec.original_max_position
        self._long: Tensor | None = None
        if spec.kind == "longrope":
            self._long = inverse_frequencies(spec, rotary_dim, long=True)
            self._long_factor = spec.long_attention_factor

    def table(self, positions: Tensor, limits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [T]: [T, 1, r/2] each, float32.

        `limits` [T] is how long each token's row may become: longrope turns rows that may outgrow the
        original length by its long factors, from their first token on.
        """
        if self._long is None or limits is None:
            angles = positions.float()[:, None] * self._short
            factor: Tensor | float = self._short_factor
        else:
            long = (limits > self._original)[:, None]
            angles = positions.float()[:, None] * torch.where(long, self._long, self._short)
            factor = torch.where(long, self._long_factor, self._short_factor)
        return (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]


def apply_rope(x: Tensor, table: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """Rotate the first r of each head's dimensions, x [T, H, d]; a new tensor.

    Pairs are r/2 apart, or neighbours where `interleaved`: these come out r/2 apart, which no product
    of a query and a key sees.
    """
    cos, sin = table
    rotary_dim = 2 * cos.shape[-1]
    turning = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned if turning is x else (*turned, x[..., rotary_dim:]), dim=-1)


def inverse_frequencies(spec: RopeSpec, rotary_dim: int, *, long: bool = False) -> Tensor:
    """Angle per position of each pair of dimensions, [r/2] float32; of longrope the `long` ones.

    Source: RopeSpec's; yarn: 2309.00071, eq. 23 (NTK by parts).
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    base = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "llama3":
        return _llama3(base, spec)
    if spec.kind == "yarn":
        return _yarn(base, spec, rotary_dim)
    if spec.kind == "longrope":
        return base / torch.tensor(spec.long_factors if long else spec.short_factors)
    return base


def _llama3(base: Tensor, spec: RopeSpec) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    wavelength = 2 * pi / base
    turns = spec.original_max_position / wavelength
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * base / spec.factor + blend * base


def _yarn(base: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        ratio = spec.original_max_position / (rotations * 2 * pi)
        return head_dim * log(ratio) / (2 * log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001  # equal bounds would divide by zero
    stretched = ((torch.arange(head_dim // 2).float() - low) / span).clamp(0, 1)
    return base / spec.factor * stretched + base * (1 - stretched)
