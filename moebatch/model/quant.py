"""Bytes of a checkpoint -> a part of ours: decoding of quantised formats, transposition, pairs.

Decoding happens when a page comes in, so pages in memory are always plain matrices.
Shapes: O outputs (rows), I inputs (columns), N groups of inputs that share a scale.
"""

import torch
from torch import Tensor

from moebatch.model.families.parts import Layout
from moebatch.model.stored import Quantization, Stored

# The 16 numbers of e2m1 (OCP Microscaling formats 1.0, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where output k of eight lies in AWQ's word of eight nibbles


def decode(stored: Stored, tensors: list[Tensor], quantization: Quantization) -> Tensor:
    """The matrix [O, I] (or vector) of one source, exact or in float32 where it was quantised.

    `tensors` are the source's entries in their order, in the types and shapes of the checkpoint.
    """
    if stored.kind == "plain":
        return tensors[0]
    if stored.kind == "mxfp4":
        return mxfp4(tensors[0], tensors[1])
    if stored.kind == "fp8":
        return fp8(tensors[0], tensors[1], quantization.block)
    zeros = tensors[2] if stored.has_zeros else None
    groups = tensors[-1] if stored.has_groups else None
    if stored.kind == "gptq":
        assert zeros is not None
        return gptq(tensors[0], tensors[1], zeros, groups, quantization.zero_offset)
    if stored.kind == "awq":
        assert zeros is not None
        return awq(tensors[0], tensors[1], zeros)
    return packed(tensors[0], tensors[1], zeros, groups)


def arrange(out: Tensor, matrix: Tensor, layout: Layout) -> None:
    """Copy a decoded source into its rows of a part, converting type and layout."""
    if layout.startswith("column"):
        matrix = matrix.t()
    if layout.endswith("pairs"):
        half = out.shape[0] // 2
        for k in (0, 1):
            out[k * half : (k + 1) * half].copy_(matrix[k::2])
    else:
        out.copy_(matrix.reshape(out.shape))


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [O, I/32, 16] uint8, low half first, and scales [O, I/32] uint8 (2^(s - 127)).

    The result is bf16, which holds every such number. Two numbers are looked up at a time.
    Source: OCP Microscaling formats 1.0, sections 5.2 and 5.4.
    """
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((table[byte & 15], table[byte >> 4]), dim=-1).view(torch.int32).flatten()
    values = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    factors = torch.exp2(scales.float() - 127).bfloat16()
    return values.view(*scales.shape, 32).mul_(factors[..., None]).flatten(1)


def fp8(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """numbers [O, I] e4m3 times their scales: one, one a row, or one a block of rows and columns."""
    values, factors = numbers.float(), scales.float()
    if factors.numel() == 1:
        return values * factors.reshape(())
    if factors.numel() == values.shape[0] and (factors.ndim == 1 or factors.shape[1] == 1):
        return values * factors.reshape(-1, 1)
    rows, columns = values.shape
    for k, factor in enumerate(factors.repeat_interleave(block[1], dim=1)[:, :columns]):
        values[k * block[0] : min((k + 1) * block[0], rows)] *= factor
    return values


def gptq(weight: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None,
         zero_offset: int) -> Tensor:  # fmt: skip
    """weight [I/8, O] with eight inputs a word, scales [N, O], zeros [N, O/8].

    `groups` [I] is the group of each input, None where they follow each other.
    """
    numbers = _nibbles(weight.t())  # [O, I]
    points = _nibbles(zeros) + zero_offset  # [N, O]
    return _scaled(numbers, scales.t(), points.t(), groups)


def awq(weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """weight [I, O/8] with eight outputs a word in AWQ's order, scales [N, O], zeros [N, O/8]."""

    def in_order(words: Tensor) -> Tensor:
        return _nibbles(words).view(words.shape[0], -1, 8)[..., list(_AWQ_ORDER)].flatten(1)

    return _scaled(in_order(weight).t(), scales.t(), in_order(zeros).t(), None)


def packed(weight: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None) -> Tensor:
    """weight [O, I/8], scales [O, N], zeros [O/8, N] (None: 0); numbers are stored with 8 added."""
    numbers = _nibbles(weight)
    offset = torch.full(scales.shape, 8) if zeros is None else _nibbles(zeros.t()).t()
    return _scaled(numbers, scales, offset[: scales.shape[0]], groups)


def _nibbles(words: Tensor) -> Tensor:
    """int32 [R, C] -> uint8 [R, 8C]: the eight 4-bit numbers of each word, lowest first."""
    # lowest byte first: the machines of the formats, and ours
    octets = words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _scaled(numbers: Tensor, scales: Tensor, points: Tensor, groups: Tensor | None) -> Tensor:
    """(numbers - points) * scales: [O, I], and [O, N] of each group of inputs."""
    if groups is not None:
        index = groups.long()
        return (numbers.float() - points.float()[:, index]).mul_(scales.float()[:, index])
    rows, columns = numbers.shape
    grouped = numbers.reshape(rows, scales.shape[1], -1).float()
    return (
        grouped.sub_(points.float()[..., None]).mul_(scales.float()[..., None]).view(rows, columns)
    )
