"""How many layers' experts to prefetch while a draft model runs: the cutoff layer of SP-MoE.

The draft's attention output of layer l goes through the target's router of that layer; what it names is
fetched over one link, in order. Once the target begins, what it needs at once goes first: of what was
named only the experts that have come by then, and one under way, are of use. Source: SP-MoE (arXiv
2510.10302); the paper's inequality is `hidden_layers`, the choice by the whole step's expected seconds
is ours.
"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """One step of drafting and verifying. Seconds: of a draft layer, of a target layer without waiting
    for experts, of one expert over the link.

    Each of `layers`, those with experts, needs `experts` that are not there yet, and as many are named
    for it, of which the share `accuracy` is right. `draft_tokens` are drafted, each through
    `draft_layers`, of which each speaks for its share of `layers`; the first token's routing is what is
    known of. `slots`: how many fetched experts there is room for. `in_place_s`: of one that is missing,
    where it is computed where it lies; None: it is fetched.
    """

    draft_layer_s: float
    target_layer_s: float
    expert_s: float
    layers: int
    draft_layers: int
    draft_tokens: int
    experts: float
    accuracy: float
    slots: float
    in_place_s: float | None = None

    @property
    def draft_s(self) -> float:
        """The drafting stage."""
        return self.draft_tokens * self.draft_layers * self.draft_layer_s


def _named_at(costs: StepCosts, layer: int) -> float:
    """When the draft's layer that speaks for a layer has been computed, from the step's start."""
    return (layer * costs.draft_layers // costs.layers + 1) * costs.draft_layer_s


def fetched_at(costs: StepCosts, cutoff: int) -> list[float]:
    """When the experts named for each layer below the cutoff have come, from the step's start."""
    times, free = [], 0.0
    for layer in range(cutoff):
        free = max(free, _named_at(costs, layer)) + costs.experts * costs.expert_s
        times.append(free)
    return times


def most_layers(costs: StepCosts) -> int:
    """Layers whose experts have room."""
    if costs.experts * costs.layers <= costs.slots:
        return costs.layers
    return int(costs.slots / costs.experts)


def hidden_layers(costs: StepCosts) -> int:
    """The paper's cutoff: the most layers whose experts have room and come while it is drafted."""
    most = most_layers(costs)
    return sum(time <= costs.draft_s for time in fetched_at(costs, most))


def step_seconds(costs: StepCosts, cutoff: int) -> float:
    """Expected seconds of drafting and verifying: what was not named rightly is fetched when needed."""
    came, link = _begun(costs, cutoff)
    now, last = costs.draft_s, len(came) - 1
    for layer in range(costs.layers):
        share = came[layer] if layer <= last else 0.0
        missing = costs.experts * (1.0 - costs.accuracy * share)
        right = 1.0 - missing / costs.experts if costs.experts else 1.0
        # Waits, each weighed with the chance that there is anything to wait for.
        ready = now + costs.accuracy * max(0.0, link - now) * (layer == last)
        if costs.in_place_s is not None:
            ready = max(ready, now + missing * costs.in_place_s)
        elif missing > 0:
            busy = (1.0 - right**costs.experts) * max(0.0, link - now)
            link = max(link, now) + missing * costs.expert_s
            ready = max(ready, now + busy + missing * costs.expert_s)
        now = ready + costs.target_layer_s
    return now


def _begun(costs: StepCosts, cutoff: int) -> tuple[list[float], float]:
    """Of each layer's named experts the share that is begun while it is drafted, as far as any is;
    and when the link is free again."""
    shares, free = [], 0.0
    for layer in range(cutoff):
        start = max(free, _named_at(costs, layer))
        if start >= costs.draft_s or not costs.experts:
            break
        count = costs.experts
        if costs.expert_s:
            count = min(count, ceil((costs.draft_s - start) / costs.expert_s))
        shares.append(count / costs.experts)
        free = start + count * costs.expert_s
    return shares, free


def cutoff_layer(costs: StepCosts) -> int:
    """The number of layers to prefetch for with which the step ends first; of equals the fewest."""
    choices = range(most_layers(costs) + 1)
    return min(choices, key=lambda cutoff: (step_seconds(costs, cutoff), cutoff))
