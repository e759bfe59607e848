"""Which experts a token goes to, and the grouping of tokens by expert.

Shapes: T tokens, D hidden_size, E experts, K top_k, R = T*K routed rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from moebatch.model.linear import Linear


def route(
    hidden: Tensor, weight: Tensor | Linear, *, top_k: int, norm_top_k: bool
) -> tuple[Tensor, Tensor]:
    """Expert weights [T, K] float32 and expert ids [T, K] of hidden [T, D].

    Softmax over all experts, then the largest K, scaled to sum to one where `norm_top_k`.
    """
    logits = linear(hidden, weight) if isinstance(weight, Tensor) else weight(hidden)
    probabilities = torch.softmax(logits, dim=-1)
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    if norm_top_k:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Routed rows sorted by expert: those of expert e are [starts[e], starts[e + 1]).

    `tokens` [R] is the token of each row, `weights` [R, 1] its routing weight.
    """

    tokens: Tensor
    weights: Tensor
    starts: tuple[int, ...]


def group_by_expert(weights: Tensor, experts: Tensor, num_experts: int,
                    names: Tensor | None = None) -> ExpertRows:  # fmt: skip
    """Gather the tokens of each expert. Rows of one expert keep the order of their tokens.

    `names` [T] are the tokens' numbers where they are not 0, 1, 2 …
    """
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    starts = [0, *torch.cumsum(counts, 0).tolist()]
    tokens = order // experts.shape[1]
    return ExpertRows(
        tokens=tokens if names is None else names[tokens],
        weights=weights.flatten()[order, None],
        starts=tuple(starts),
    )


def everything(num_tokens: int, names: Tensor | None = None) -> ExpertRows:
    """The grouping of a dense layer: one expert takes every token, or those named, with weight one."""
    tokens = torch.arange(num_tokens) if names is None else names
    count = tokens.numel()
    return ExpertRows(tokens=tokens, weights=torch.ones(count, 1), starts=(0, count))
