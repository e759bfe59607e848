"""Which experts a token goes to, and the grouping of tokens by expert.

Shapes: T tokens, D hidden_size, E experts, K top_k, R = T*K routed rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from moebatch.model.linear import Linear
from moebatch.plan.model_spec import RouterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A layer's router: matrix [E, D], bias of the logits [E], bias of the choice [E]; all float32."""

    weight: Tensor | Linear
    bias: Tensor | None = None
    selection_bias: Tensor | None = None


def route(hidden: Tensor, router: Router, spec: RouterSpec, *, top_k: int,
          ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Expert weights [T, K] float32 and expert ids [T, K] of hidden [T, D]; see RouterSpec."""
    logits = router_logits(hidden, router)
    if spec.scores == "sparsemixer":
        return _sparsemixer(logits, top_k, spec.jitter)
    if spec.scores == "softmax_of_chosen":
        chosen, experts = torch.topk(logits, top_k, dim=-1)
        return torch.softmax(chosen, dim=-1) * spec.scale, experts
    scores = logits.sigmoid() if spec.scores == "sigmoid" else torch.softmax(logits, dim=-1)
    choice = scores if router.selection_bias is None else scores + router.selection_bias
    if spec.top_groups < spec.num_groups:
        choice = _best_groups(choice, spec)
    experts = torch.topk(choice, top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if spec.norm_p is not None:
        norm = torch.linalg.vector_norm(weights, ord=spec.norm_p, dim=-1, keepdim=True)
        weights = weights / norm.clamp(min=spec.norm_min)
    return weights * spec.scale, experts


def all_scores(hidden: Tensor, router: Router, spec: RouterSpec) -> Tensor:
    """Scores [T, E] of all experts for hidden [T, D]; each token's sum up to one."""
    logits = router_logits(hidden, router)
    if spec.scores != "sigmoid":
        return torch.softmax(logits, dim=-1)
    scores = logits.sigmoid()
    return scores / scores.sum(dim=-1, keepdim=True)


def router_logits(hidden: Tensor, router: Router) -> Tensor:
    """float32 logits [T, E] of hidden [T, D]."""
    if not isinstance(router.weight, Tensor):
        logits = router.weight(hidden)
        return logits if router.bias is None else logits + router.bias
    # A single token twice: the library adds up a vector in another order than a matrix.
    several = hidden.expand(2, -1) if hidden.shape[0] == 1 else hidden
    return linear(several, router.weight, router.bias)[: hidden.shape[0]]


def _best_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """[T, E] with minus infinity outside the groups that a token may choose from.

    Source: DeepSeek-V2 (2405.04434), section 2.2.2; by the best two: DeepSeek-V3 (2412.19437), 2.1.2.
    """
    grouped = choice.view(choice.shape[0], spec.num_groups, -1)
    counted = 1 if spec.group_score == "best" else min(2, grouped.shape[2])
    best = grouped.topk(counted, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(spec.top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)


def _sparsemixer(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """One expert after the other: its weight is its softmax among the remaining that come close to it.

    Close: (largest - logit) / max(|logit|, largest) <= 2 jitter. Source: 2409.12136, section 2.
    """
    remaining, weights, experts = logits, [], []
    for _ in range(top_k):
        largest, chosen = remaining.max(dim=-1, keepdim=True)
        far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * jitter
        probabilities = remaining.masked_fill(far, float("-inf")).softmax(dim=-1)
        weights.append(probabilities.gather(1, chosen))
        experts.append(chosen)
        remaining = remaining.scatter(1, chosen, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(experts, dim=-1)


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
    return ExpertRows(
        tokens=tokens, weights=torch.ones(count, 1, device=tokens.device), starts=(0, count)
    )
