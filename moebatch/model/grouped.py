"""All experts of a stack in one grouped product, where a library has one (`torch.nn.functional`).

For few tokens an expert: an accelerator then spends more time on starting kernels than in them.
The plain twin is `moebatch.model.experts.add_expert`, expert by expert.
Shapes: E experts of the stack, D hidden_size, F expert size, T tokens, R rows routed to the stack.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from moebatch.model.router import ExpertRows

_GROUPED = getattr(torch.nn.functional, "grouped_mm", None)
_MAX_NUMBERS = 1 << 24  # of gate and up in one call; with more, kernels are long enough one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack:
    """Experts, ascending, whose matrices lie at equal distances, without biases and limit.

    `gate_up` is [E, 2F, D], `down` [E, D, F].
    """

    experts: tuple[int, ...]
    gate_up: Tensor
    down: Tensor


def stacked(memory: Tensor, experts: tuple[int, ...], *, stride: int,
            gate_up: tuple[int, tuple[int, ...]], down: tuple[int, tuple[int, ...]],
            dtype: torch.dtype) -> ExpertStack:  # fmt: skip
    """Views of byte memory: the experts lie `stride` bytes apart, each part at (offset, shape)."""
    numbers = memory.view(dtype)

    def part(place: tuple[int, tuple[int, ...]]) -> Tensor:
        offset, (rows, columns) = place
        return numbers.as_strided(
            (len(experts), rows, columns),
            (stride // dtype.itemsize, columns, 1),
            numbers.storage_offset() + offset // dtype.itemsize,
        )

    return ExpertStack(experts=experts, gate_up=part(gate_up), down=part(down))


def grouped_swiglu(hidden: Tensor, rows: ExpertRows, stack: ExpertStack) -> Mapping[int, Tensor]:
    """down(silu(gate x) * up x) of each expert's rows of hidden [T, D], by expert, unweighted.

    Empty where the rows are too many for one call. Of experts without rows there is nothing.
    """
    spans = {e: (rows.starts[e], rows.starts[e + 1]) for e in stack.experts}
    total = sum(end - start for start, end in spans.values())
    if total == 0 or total * stack.gate_up.shape[1] > _MAX_NUMBERS:
        return {}
    tokens = torch.cat([rows.tokens[start:end] for start, end in spans.values()])
    ends, end = [], 0
    for start, stop in spans.values():
        end += stop - start
        ends.append(end)
    offsets = torch.tensor(ends, dtype=torch.int32, device=hidden.device)
    size = stack.down.shape[2]
    x = hidden.index_select(0, tokens).to(stack.gate_up.dtype)
    gate_up = _product(x, stack.gate_up, offsets)
    inner = silu(gate_up[:, :size]) * gate_up[:, size:]
    made = _product(inner, stack.down, offsets)
    found, first = {}, 0
    for expert, last in zip(stack.experts, ends, strict=True):
        if last > first:
            found[expert] = made[first:last]
        first = last
    return found


def _product(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """x [R, I] times the matrix of its group, [E, O, I] -> [R, O]."""
    assert _GROUPED is not None
    y: Tensor = _GROUPED(x, matrices.transpose(1, 2), offs=offsets)
    return y


def can_group(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the grouped product is there for a device and right: tried on three small matrices."""
    if _GROUPED is None:
        return False
    ones = torch.arange(3 * 64 * 32, device=device).remainder(7).to(dtype).view(3, 64, 32)
    x = ones[0, :24].clone()
    ends = [8, 8, 24]
    try:
        y = _product(x, ones, torch.tensor(ends, dtype=torch.int32, device=device))
    except (RuntimeError, NotImplementedError):
        return False
    plain = torch.cat([x[:8] @ ones[0].t(), x[8:] @ ones[2].t()])
    return bool(torch.allclose(y.float(), plain.float(), rtol=0.02))


def add_results(output: Tensor, rows: ExpertRows, expert: int, result: Tensor) -> None:
    """Add one expert's results [R, D], weighted, to output [T, D] float32, in place."""
    part = slice(rows.starts[expert], rows.starts[expert + 1])
    output.index_add_(0, rows.tokens[part], result.float() * rows.weights[part])
