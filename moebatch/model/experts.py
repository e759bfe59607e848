"""Expert FFN over the tokens of all grouped micro-batches: each expert runs once.

Knows nothing of where weights came from: it gets views of pages that are already in memory.
Shapes: T tokens, D hidden_size, F expert_size, R rows of one expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from moebatch.model.linear import Linear, NativeLinear
from moebatch.model.router import ExpertRows
from moebatch.native.kernels import FfnWeights

# Rows that one call carries: the intermediate [R, 2F] then stays within tens of MB.
_MAX_INTERMEDIATE = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One expert's matrices: gate and up stacked [2F, D], down [D, F].

    `native` are the same matrices for the fused kernel, where they can be used so.
    """

    index: int
    size: int
    gate_up: Linear
    down: Linear
    native: FfnWeights | None = None


def make_expert(index: int, *, size: int, gate_up: Linear, down: Linear) -> Expert:
    """An expert, with its fused form where both matrices are packed and gate fills whole panels."""
    native = None
    if isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear):
        kernels, stacked = gate_up.kernels, gate_up.packed
        if size % kernels.panel_outputs == 0:
            gate, up = kernels.rows(stacked, 0, size), kernels.rows(stacked, size, 2 * size)
            native = kernels.ffn_weights(gate, up, down.packed)
    return Expert(index=index, size=size, gate_up=gate_up, down=down, native=native)


def swiglu(x: Tensor, expert: Expert) -> Tensor:
    """down(silu(gate x) * up x): x [R, D] -> [R, D], in the type in which the matrices compute."""
    gate_up = expert.gate_up(x)
    gate, up = gate_up[:, : expert.size], gate_up[:, expert.size :]
    return expert.down(torch.mul(silu(gate), up))


def add_experts(output: Tensor, hidden: Tensor, rows: ExpertRows,
                experts: Sequence[Expert]) -> None:  # fmt: skip
    """`add_expert` for neighbours in ascending order; in one call of the fused kernel if they can."""
    first, down = experts[0], experts[0].down
    native = [expert.native for expert in experts if expert.native is not None]
    if len(native) < len(experts) or not isinstance(down, NativeLinear):
        for expert in experts:
            add_expert(output, hidden, rows, expert)
        return
    down.kernels.add_ffn(
        output,
        hidden,
        native,
        starts=rows.starts[first.index : first.index + len(experts) + 1],
        tokens=rows.tokens,
        weights=rows.weights,
        round_x=down.round_x,
    )


def add_expert(output: Tensor, hidden: Tensor, rows: ExpertRows, expert: Expert) -> None:
    """Add one expert's weighted results to output [T, D] float32, in place, for its rows of hidden.

    Experts must be added in ascending order: a token's sum then has one order whatever the batch.
    """
    start, end = rows.starts[expert.index], rows.starts[expert.index + 1]
    step = max(64, _MAX_INTERMEDIATE // (2 * expert.size))
    for first in range(start, end, step):
        part = slice(first, min(first + step, end))
        tokens = rows.tokens[part]
        result = swiglu(hidden.index_select(0, tokens), expert)
        output.index_add_(0, tokens, result * rows.weights[part])


def ffn_plain(hidden: Tensor, weights: Tensor, experts: Tensor,
              matrices: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:  # fmt: skip
    """The reference form: token by token, expert by expert; gate, up, down of each expert."""
    output = torch.zeros_like(hidden)
    for t in range(hidden.shape[0]):
        for weight, e in zip(weights[t], experts[t].tolist(), strict=True):
            gate, up, down = (matrix.float() for matrix in matrices[e])
            x = hidden[t]
            output[t] += weight * linear(silu(linear(x, gate)) * linear(x, up), down)
    return output
