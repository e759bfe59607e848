"""Which experts of the next layers to bring before they are asked for.

A candidate is worth what its presence would save of its layer's makespan, by simulation, times how
often predictions so far ahead have come true. What would come too late to save anything is left.
Source: HybriMoE (arXiv 2504.05897), section IV-C; the ranking's formula is ours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moebatch.plan.eviction import ExpertId
from moebatch.plan.hybrid import ExpertCosts, LayerLoad, balanced

_CANDIDATES = 3  # of a layer, those with the most tokens: the simulation is to take no time
_FIRST_TRUST = 0.5
_MEMORY = 0.1  # weight of the newest prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A layer to come: its predicted load, in how many seconds it begins, how far to trust it."""

    layer: int
    load: LayerLoad
    until_s: float
    trust: float


def worth_prefetching(outlooks: Iterable[Outlook], costs: ExpertCosts, *, backlog_s: float,
                      most: int) -> list[ExpertId]:  # fmt: skip
    """At most so many experts in the order in which the link should bring them.

    `backlog_s`: how long the link is busy with what it has begun.
    """
    gains: list[tuple[float, ExpertId, Outlook]] = []
    for one in outlooks:
        if backlog_s + costs.transfer_s >= one.until_s + balanced(one.load, costs).makespan_s:
            continue
        saved_by: dict[int, float] = {}  # experts with as many tokens save as much
        for expert in _largest_missing(one.load):
            count = one.load.tokens[expert]
            if count not in saved_by:
                arrival = backlog_s + costs.transfer_s
                saved_by[count] = _saved(one, expert, costs, arrival_s=arrival)
            if saved_by[count] > 0.0:
                gains.append((saved_by[count] * one.trust, (one.layer, expert), one))
    gains.sort(key=lambda gain: (-gain[0], gain[1]))
    chosen: list[ExpertId] = []
    arrival = backlog_s
    for _, which, one in gains[:most]:
        in_time = arrival + costs.transfer_s < one.until_s
        if in_time or not chosen or _saved(one, which[1], costs,
                                           arrival_s=arrival + costs.transfer_s) > 0.0:  # fmt: skip
            chosen.append(which)
            arrival += costs.transfer_s
    return chosen


def _largest_missing(load: LayerLoad) -> list[int]:
    missing = [e for e in load.tokens if e not in load.cached and e not in load.arriving]
    return sorted(missing, key=lambda e: (-load.tokens[e], e))[:_CANDIDATES]


def _saved(one: Outlook, expert: int, costs: ExpertCosts, *, arrival_s: float) -> float:
    """What of the makespan goes if the expert is brought now."""
    late = arrival_s - one.until_s
    if late <= 0.0:
        present = replace(one.load, cached=one.load.cached | {expert})
    else:
        present = replace(one.load, arriving={**one.load.arriving, expert: late})
    return balanced(one.load, costs).makespan_s - balanced(present, costs).makespan_s


class Trust:
    """How often experts that were predicted so many layers ahead were then needed."""

    def __init__(self, most_ahead: int) -> None:
        """`most_ahead`: predictions reach that many layers."""
        self._trust = [_FIRST_TRUST] * (most_ahead + 1)
        self._made: dict[tuple[int, int], frozenset[int]] = {}

    def predicted(self, layer: int, ahead: int, experts: Iterable[int]) -> None:
        """A prediction for a layer that is so many layers ahead."""
        self._made[layer, ahead] = frozenset(experts)

    def came(self, layer: int, experts: Sequence[int]) -> None:
        """What the layer then needed."""
        for ahead in range(1, len(self._trust)):
            made = self._made.pop((layer, ahead), None)
            if made:
                share = len(made & set(experts)) / len(made)
                self._trust[ahead] += _MEMORY * (share - self._trust[ahead])

    def of(self, ahead: int) -> float:
        """The share of a prediction that comes true, 0 to 1."""
        return self._trust[ahead]
