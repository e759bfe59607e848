"""Which expert of a full cache is worth least: LRU, LFU, MRS, and Belady's optimum for replay.

A policy holds one number for every expert of the model, in the cache or not: what it is worth to keep.
Numbers only grow stale by being compared, so a visit changes those of one layer alone.
Shapes: L layers, E experts of a layer. A step is one visit to one layer.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moebatch.plan.machine import Numbers

EvictionName = Literal["lru", "lfu", "mrs"]
EVICTIONS: tuple[EvictionName, ...] = ("lru", "lfu", "mrs")

ExpertId = tuple[int, int]  # (layer, expert)

MRS_ALPHA = 0.5  # weight of the newest scores, as in HybriMoE's code
MRS_KEPT = 2  # times the chosen experts: how many of a step's scores count
_RECENCY = 2.0**-30  # breaks ties of counts: far below one use, exact for a billion steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One pass's visit to one layer: the experts that have tokens, ascending, each once.

    `scores` [E] are the layer's router scores, averaged over the tokens; empty where not known.
    """

    layer: int
    experts: tuple[int, ...]
    scores: Sequence[float] = ()


class Eviction:
    """The worth of every expert; the base of the policies. `worth` [L, E]: the least leaves first."""

    needs_scores = False

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """Nothing is known yet: all are worth the same."""
        self.worth: Numbers = np.zeros((num_layers, num_experts))

    def visit(self, visit: Visit, step: int) -> None:
        """Learn what a layer needed in step `step`, counted from 1."""
        raise NotImplementedError

    def seed(self, shares: Numbers) -> None:
        """Begin with a profile: shares [L, E] of each layer's tokens, from earlier runs.

        Whatever is seen from now on weighs more.
        """
        self.worth = shares - 1.0


class LRU(Eviction):
    """Least recently used."""

    def visit(self, visit: Visit, step: int) -> None:
        """See Eviction."""
        self.worth[visit.layer, list(visit.experts)] = step


class LFU(Eviction):
    """Least frequently used, counted over the whole run; of equals the one used longest ago."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """See Eviction."""
        super().__init__(num_layers, num_experts)
        self._counts = np.zeros((num_layers, num_experts))

    def visit(self, visit: Visit, step: int) -> None:
        """See Eviction."""
        row, experts = visit.layer, list(visit.experts)
        self._counts[row, experts] += 1.0
        self.worth[row, experts] = self._counts[row, experts] + step * _RECENCY


class MRS(Eviction):
    """Score-aware: S = alpha TopP(s) + (1 - alpha) S for all experts of the visited layer.

    TopP keeps the largest of the scores s, twice as many as there are chosen experts, and zeroes the
    rest. So what a router nearly chose is kept, and what it has lost sight of decays.
    Source: HybriMoE (arXiv 2504.05897), eq. 3.
    """

    needs_scores = True

    def visit(self, visit: Visit, step: int) -> None:
        """See Eviction. Without scores, the chosen experts share the layer's score evenly."""
        row = self.worth[visit.layer]
        scores = np.zeros_like(row)
        if len(visit.scores):
            scores[:] = visit.scores
            kept = min(scores.size, MRS_KEPT * len(visit.experts))
            scores[np.argsort(-scores, kind="stable")[kept:]] = 0.0
        elif visit.experts:
            scores[list(visit.experts)] = 1.0 / len(visit.experts)
        self.worth[visit.layer] = MRS_ALPHA * scores + (1.0 - MRS_ALPHA) * row

    def seed(self, shares: Numbers) -> None:
        """See Eviction: a share is the mean of what scores would have been."""
        self.worth = shares.copy()


class Belady(Eviction):
    """The optimum, which knows the future: who is needed last leaves first. For replay alone.

    It is the optimum of caches that need not keep what they have just loaded.
    Source: Belady, A study of replacement algorithms, IBM Systems Journal 5 (1966).
    """

    def __init__(self, num_layers: int, num_experts: int, visits: Iterable[Visit]) -> None:
        """`visits` are all that will come, in order."""
        super().__init__(num_layers, num_experts)
        self._uses: dict[ExpertId, list[int]] = {}
        for step, visit in enumerate(visits, start=1):
            for expert in visit.experts:
                self._uses.setdefault((visit.layer, expert), []).append(step)
        self.worth[:] = -np.inf
        for which, uses in self._uses.items():
            self.worth[which] = -uses[0]

    def visit(self, visit: Visit, step: int) -> None:
        """See Eviction."""
        for expert in visit.experts:
            uses = self._uses[visit.layer, expert]
            later = bisect_right(uses, step)
            self.worth[visit.layer, expert] = -uses[later] if later < len(uses) else -np.inf

    def seed(self, shares: Numbers) -> None:
        """See Eviction: who knows the future needs no past."""


_BY_NAME: Mapping[str, type[Eviction]] = {"lru": LRU, "lfu": LFU, "mrs": MRS}


def eviction(name: EvictionName, *, num_layers: int, num_experts: int) -> Eviction:
    """The policy of a name."""
    return _BY_NAME[name](num_layers, num_experts)


def shares_of(counts: Sequence[Sequence[int]] | Numbers) -> Numbers:
    """Tokens of each expert [L, E] as shares of their layer; a layer without tokens is even."""
    counted = np.asarray(counts, dtype=np.float64)
    sums = counted.sum(axis=1, keepdims=True)
    even = np.full_like(counted, 1.0 / max(1, counted.shape[1]))
    return np.where(sums > 0, counted / np.maximum(sums, 1.0), even)


def preload_order(shares: Numbers, *, without: Collection[int] = ()) -> list[ExpertId]:
    """All experts of the layers that have any, the most used first; `without` are dense layers.

    Of equals those that come first in their layers, so an unknown model is loaded evenly over them.
    """
    layers, experts = shares.shape
    found = [(i, e) for e in range(experts) for i in range(layers) if i not in without]
    return sorted(found, key=lambda which: -shares[which])
