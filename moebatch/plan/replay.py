"""Replays the routing of a run against caches of any capacity and policy: hit rates, no model.

All policies see the same visits, so their hit rates can be compared. Belady's optimum says what the
best of them could have reached.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moebatch.plan.eviction import (
    EVICTIONS,
    Belady,
    Eviction,
    EvictionName,
    Visit,
    eviction,
    preload_order,
)
from moebatch.plan.expert_cache import ExpertCache
from moebatch.plan.machine import Numbers

BELADY = "belady"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a cache would have found. `misses` are experts that had to be loaded when needed."""

    eviction: str
    capacity: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were there."""
        return self.hits / max(1, self.hits + self.misses)


def replay(visits: Sequence[Visit], *, num_layers: int, num_experts: int, capacity: int,
           name: str, shares: Numbers | None = None) -> ReplayResult:  # fmt: skip
    """One policy at one capacity; `shares` [L, E] is a profile that the cache is loaded by at first.

    `name` is one of EVICTIONS, or "belady".
    """
    cache = ExpertCache(capacity, _policy(name, visits, num_layers, num_experts))
    if shares is not None:
        cache.seed(shares)
        cache.preload(preload_order(shares))
    for visit in visits:
        _, misses = cache.look_up(visit)
        for expert in misses:
            cache.admit((visit.layer, expert))
    return ReplayResult(eviction=name, capacity=capacity, hits=cache.counts.hits,
                        misses=cache.counts.misses)  # fmt: skip


def compare(visits: Iterable[Visit], *, num_layers: int, num_experts: int,
            capacities: Sequence[int], names: Sequence[str] = (*EVICTIONS, BELADY),
            shares: Numbers | None = None) -> list[ReplayResult]:  # fmt: skip
    """Every policy at every capacity, in this order."""
    known = list(visits)
    return [
        replay(known, num_layers=num_layers, num_experts=num_experts, capacity=capacity,
               name=name, shares=shares)
        for capacity in capacities
        for name in names
    ]  # fmt: skip


def _policy(name: str, visits: Sequence[Visit], num_layers: int, num_experts: int) -> Eviction:
    if name == BELADY:
        return Belady(num_layers, num_experts, visits)
    known: dict[str, EvictionName] = {each: each for each in EVICTIONS}
    return eviction(known[name], num_layers=num_layers, num_experts=num_experts)
