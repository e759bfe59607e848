"""Norms and rotary positions.

Shapes: T tokens, D hidden_size, H heads, d head_dim.
"""

from math import ceil, floor, log, pi

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from moebatch.plan.model_spec import RopeSpec


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] scaled to unit root mean square, times weight [D]."""
    return torch_rms_norm(x, (x.shape[-1],), weight, eps)


class Rope:
    """Rotary position embedding in the half-split layout of the Hugging Face checkpoints."""

    def __init__(self, spec: RopeSpec, head_dim: int) -> None:
        """Frequencies [d/2], scaled as the spec says."""
        self._inv_freq = inverse_frequencies(spec, head_dim)
        self._factor = spec.attention_factor

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [T]: [T, 1, d/2] each, float32."""
        angles = positions.float()[:, None] * self._inv_freq
        return (angles.cos() * self._factor)[:, None], (angles.sin() * self._factor)[:, None]


def apply_rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [T, H, d] by the angles of its positions; a new tensor."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, [d/2] float32.

    Source: RopeSpec's; yarn: 2309.00071, eq. 23 (NTK by parts).
    """
    base = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "llama3":
        return _llama3(base, spec)
    if spec.kind == "yarn":
        return _yarn(base, spec, head_dim)
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
