"""The expert cache as a set: which (layer, expert) are in the top tier, and who leaves for whom.

Knows no memory: who owns the buffers asks `look_up` what a layer finds, loads what is missing, and asks
`admit` whether it stays and who leaves for it. A capacity of zero is a cache that keeps nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moebatch.plan.eviction import Eviction, ExpertId, Visit
from moebatch.plan.machine import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Whether an expert that was loaded stays, and which one left for it."""

    admitted: bool
    evicted: ExpertId | None = None


@dataclass(slots=True)
class CacheCounts:
    """Experts that layers asked for and found, or not; each counts once a visit.

    `prefetched` came before they were asked for, `prefetch_hits` are those of them that then were.
    """

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetch_hits: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were there; 1 before anything was asked."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


class ExpertCache:
    """At most `capacity` experts of a model of L layers with E experts each."""

    def __init__(self, capacity: int, eviction: Eviction, *, keep_always: bool = False) -> None:
        """`eviction` says what each expert is worth.

        `keep_always`: what was loaded stays though it be worth less than all that is there.
        """
        assert capacity >= 0, capacity
        self.eviction, self.capacity = eviction, capacity
        self.counts = CacheCounts()
        self._keep_always = keep_always
        self._step = 0
        self._inside = np.zeros(eviction.worth.shape, dtype=bool)
        self._pins = np.zeros(eviction.worth.shape, dtype=np.int32)
        self._size = 0
        self._unused: set[ExpertId] = set()  # prefetched, and not asked for yet

    def __len__(self) -> int:
        return self._size

    def __contains__(self, which: ExpertId) -> bool:
        return bool(self._inside[which])

    @property
    def experts(self) -> list[ExpertId]:
        """What is there, in ascending order."""
        return [(int(i), int(e)) for i, e in np.argwhere(self._inside)]

    @property
    def num_evictable(self) -> int:
        """Experts that are there and not pinned."""
        return int(np.count_nonzero(self._inside & (self._pins == 0)))

    def look_up(self, visit: Visit) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A layer needs experts: (those that are there, those that are not). Counts, and teaches."""
        self._step += 1
        self.eviction.visit(visit, self._step)
        hits = tuple(e for e in visit.experts if self._inside[visit.layer, e])
        misses = tuple(e for e in visit.experts if not self._inside[visit.layer, e])
        self.counts.hits += len(hits)
        self.counts.misses += len(misses)
        if self._unused:
            used = {(visit.layer, e) for e in hits} & self._unused
            self._unused -= used
            self.counts.prefetch_hits += len(used)
        return hits, misses

    def admit(self, which: ExpertId, *, prefetched: bool = False) -> Admission:
        """An expert has been, or is to be, loaded: it stays if there is room or somebody worth less.

        Who is pinned never leaves. One that is there already stays, and nobody leaves. What is
        prefetched has its use before it, and stays whatever it was worth so far.
        """
        if which in self:
            return Admission(admitted=True)
        victim = None
        if self._size >= self.capacity:
            victim = self.victim()
            if victim is None or not (prefetched or self._outweighs(which, victim)):
                return Admission(admitted=False)
            self._remove(victim)
            self.counts.evictions += 1
        self._inside[which] = True
        self._size += 1
        if prefetched:
            self.counts.prefetched += 1
            self._unused.add(which)
        return Admission(admitted=True, evicted=victim)

    def victim(self) -> ExpertId | None:
        """Who would leave next: the one of least worth that is not pinned, the first of equals."""
        free = self._inside & (self._pins == 0)
        if not free.any():
            return None
        least = int(np.argmin(np.where(free, self.eviction.worth, np.inf)))
        if not free.flat[least]:  # all are worth infinitely much
            least = int(np.argmax(free))
        layer, expert = divmod(least, free.shape[1])
        return layer, expert

    def worth(self, which: ExpertId) -> float:
        """What it is worth to keep an expert, in the cache or not."""
        return float(self.eviction.worth[which])

    def pin(self, which: ExpertId) -> None:
        """Keep it until as many `unpin`. It must be there."""
        assert which in self, which
        self._pins[which] += 1

    def unpin(self, which: ExpertId) -> None:
        """The inverse of `pin`."""
        assert self._pins[which] > 0, which
        self._pins[which] -= 1

    def is_pinned(self, which: ExpertId) -> bool:
        """Whether anybody keeps it."""
        return bool(self._pins[which])

    def discard(self, which: ExpertId) -> None:
        """It is gone for a reason of the caller's; it must be there and not pinned."""
        assert which in self and not self._pins[which], which
        self._remove(which)

    def resize(self, capacity: int) -> list[ExpertId]:
        """Change the capacity; who had to leave. Pinned ones stay, above the capacity if need be."""
        assert capacity >= 0, capacity
        self.capacity = capacity
        gone = []
        while self._size > capacity and (victim := self.victim()) is not None:
            self._remove(victim)
            gone.append(victim)
        return gone

    def preload(self, order: Iterable[ExpertId]) -> list[ExpertId]:
        """Take the first of `order` that find room; those are to be loaded."""
        taken = []
        for which in order:
            if self._size >= self.capacity:
                break
            if which not in self:
                self.admit(which)
                taken.append(which)
        return taken

    def seed(self, shares: Numbers) -> None:
        """Begin with what earlier runs used: see Eviction."""
        self.eviction.seed(shares)

    def _outweighs(self, which: ExpertId, victim: ExpertId) -> bool:
        return self._keep_always or self.worth(which) >= self.worth(victim)

    def _remove(self, which: ExpertId) -> None:
        self._inside[which] = False
        self._size -= 1
        self._unused.discard(which)
