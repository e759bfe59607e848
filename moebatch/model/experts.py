"""Expert FFN over the tokens of all grouped micro-batches: each expert runs once.

Knows nothing of where weights came from: it gets views of pages that are already in memory.
Shapes: T tokens, D hidden_size, F expert_size, R rows of one expert.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from moebatch.model.linear import Linear, NativeLinear
from moebatch.model.router import ExpertRows
from moebatch.native.kernels import SILU, FfnWeights, Gate

# Rows that one call carries: the intermediate [R, 2F] then stays within tens of MB.
_MAX_INTERMEDIATE = 1 << 22
_CLAMPED_ALPHA = 1.702  # of gpt-oss; sigmoid(1.702 x) is close to the normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One expert's matrices: gate and up stacked [2F, D], down [D, F]; their biases in float32.

    `limit` clamps gate and up, and the activation is then that of gpt-oss.
    `native` is all of it for the fused kernel, where the matrices can be used so.
    """

    index: int
    size: int
    gate_up: Linear
    down: Linear
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float | None = None
    native: FfnWeights | None = None


def fused(gate_up: Linear, down: Linear, *, size: int, gate_up_bias: Tensor | None,
          down_bias: Tensor | None) -> FfnWeights | None:  # fmt: skip
    """An expert for the fused kernel: where both matrices are packed and gate fills whole panels."""
    if not (isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear)):
        return None
    kernels, stacked = gate_up.kernels, gate_up.packed
    if size % kernels.panel_outputs:
        return None
    biases = None
    if gate_up_bias is not None or down_bias is not None:
        both = torch.zeros(stacked.outputs) if gate_up_bias is None else gate_up_bias
        last = torch.zeros(down.packed.outputs) if down_bias is None else down_bias
        biases = (both[:size], both[size:], last)
    gate, up = kernels.rows(stacked, 0, size), kernels.rows(stacked, size, 2 * size)
    return kernels.ffn_weights(gate, up, down.packed, biases=biases)


def swiglu(x: Tensor, expert: Expert) -> Tensor:
    """down(silu(gate x) * up x): x [R, D] -> [R, D], in the type in which the matrices compute.

    With a limit: gate sigmoid(1.702 gate) (up + 1), gate at most and up within the limit.
    """
    gate_up = _plus(expert.gate_up(x), expert.gate_up_bias)
    gate, up = gate_up[:, : expert.size], gate_up[:, expert.size :]
    if expert.limit is None:
        inner = torch.mul(silu(gate), up)
    else:
        gate, up = gate.clamp(max=expert.limit), up.clamp(-expert.limit, expert.limit)
        inner = gate * torch.sigmoid(_CLAMPED_ALPHA * gate) * (up + 1)
    return _plus(expert.down(inner), expert.down_bias)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def add_experts(output: Tensor, hidden: Tensor, rows: ExpertRows,
                experts: Sequence[Expert]) -> None:  # fmt: skip
    """`add_expert` in ascending order; in one call of the fused kernel if they can.

    All experts with rows between the first and the last of them must be there.
    """
    first, down = experts[0], experts[0].down
    native = [expert.native for expert in experts if expert.native is not None]
    if len(native) < len(experts) or not isinstance(down, NativeLinear):
        for expert in experts:
            add_expert(output, hidden, rows, expert)
        return
    clamped = first.limit is not None
    down.kernels.add_ffn(
        output,
        hidden,
        native,
        starts=[*(rows.starts[one.index] for one in experts), rows.starts[experts[-1].index + 1]],
        tokens=rows.tokens,
        weights=rows.weights,
        round_x=down.round_x,
        gate=Gate(alpha=_CLAMPED_ALPHA, shift=1.0, limit=first.limit) if clamped else SILU,
    )


def add_expert(output: Tensor, hidden: Tensor, rows: ExpertRows, expert: Expert) -> None:
    """Add one expert's weighted results to output [T, D] float32, in place, for its rows of hidden.

    Experts must be added in ascending order: a token's sum then has one order whatever the batch.
    """
    for tokens, result in expert_results(hidden, rows, expert):
        output.index_add_(0, tokens, result)


def expert_results(hidden: Tensor, rows: ExpertRows, expert: Expert,
                   ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """(tokens [R], weighted results [R, D]) of one expert, part by part; what `add_expert` adds."""
    start, end = rows.starts[expert.index], rows.starts[expert.index + 1]
    step = max(64, _MAX_INTERMEDIATE // (2 * expert.size))
    for first in range(start, end, step):
        part = slice(first, min(first + step, end))
        tokens = rows.tokens[part]
        yield tokens, swiglu(hidden.index_select(0, tokens), expert) * rows.weights[part]


def write_expert(results: Tensor, hidden: Tensor, rows: ExpertRows, expert: Expert) -> None:
    """Write one expert's weighted results to its rows of results [R, D], for `add_routed`."""
    first = rows.starts[expert.index]
    for tokens, result in expert_results(hidden, rows, expert):
        results[first : first + tokens.shape[0]] = result
        first += tokens.shape[0]


def add_routed(output: Tensor, results: Tensor, rows: ExpertRows) -> None:
    """Add the weighted results [R, D] of all routed rows at once: bit for bit as `add_expert` does.

    Every token must have the same number of rows.
    """
    if not results.shape[0]:
        return
    tokens = torch.unique(rows.tokens)
    # Rows are sorted by expert, so each token's rows come in ascending order of their experts.
    order = torch.argsort(rows.tokens, stable=True).view(tokens.shape[0], -1)
    total = output.index_select(0, tokens)
    for k in range(order.shape[1]):
        total += results.index_select(0, order[:, k])
    output.index_copy_(0, tokens, total)


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
