"""Weights as whole numbers of 4 or 8 bits: how they are rounded, and what they stand for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.errors import UsageError

PANEL = 16  # outputs of a matrix are padded to whole panels of so many
_BLOCK = 32  # inputs come in whole blocks of so many
_LINE = 64
_MAX_GROUP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Whole numbers of `bits`, 4 or 8; `group` inputs of an output share a scale in float16.

    With `zeros` a group also has a zero point, so that its numbers cover an uneven range: better for
    lopsided weights, and a byte more per group. Without, the middle number stands for zero.
    """

    bits: int
    group: int
    zeros: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group not in range(_BLOCK, _MAX_GROUP + 1, _BLOCK):
            raise UsageError(
                f"weights cannot be rounded to {self.bits} bits in groups of {self.group}",
                hint=f"4 or 8 bits, and a multiple of {_BLOCK} inputs up to {_MAX_GROUP}",
            )

    @property
    def bits_per_weight(self) -> float:
        """Scales and zero points included."""
        return self.bits + (24 if self.zeros else 16) / self.group


def restored(panels: Tensor, rounding: Rounding, outputs: int, inputs: int) -> Tensor:
    """The weights [O, I] in float32 that packed bytes stand for: scale * (number - zero point).

    The layout is described in src/kernels.h.
    """
    groups = -(-inputs // rounding.group)
    padded = -(-inputs // _BLOCK) * _BLOCK
    panels = panels.reshape(-(-outputs // PANEL), -1)
    scales = panels[:, : groups * PANEL * 2].contiguous().view(torch.float16)
    zeros = torch.tensor(1 << (rounding.bits - 1))
    end = groups * PANEL * 2
    if rounding.zeros:
        zeros = panels[:, end : end + groups * PANEL].reshape(-1, groups, 1, PANEL)
        end += groups * PANEL
    numbers = panels[:, -(-end // _LINE) * _LINE :].reshape(len(panels), -1, PANEL, 4)
    if rounding.bits == 4:  # inputs k and k + 4 in a byte
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=2).flatten(1, 2)
    numbers = numbers.transpose(2, 3).reshape(len(panels), padded, PANEL)
    spare = groups * rounding.group - padded
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, spare)).view(
        len(panels), groups, rounding.group, PANEL
    )
    weights = (numbers.float() - zeros.float()) * scales.view(-1, groups, 1, PANEL).float()
    weights = weights.flatten(1, 2)[:, :inputs].transpose(1, 2)
    return weights.reshape(-1, inputs)[:outputs]
