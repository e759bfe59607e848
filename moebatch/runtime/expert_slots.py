"""The expert cache in accelerator memory: which slot holds whom, and the link that fills slots.

One thread brings experts over the link, in pieces. Between two pieces it looks for what is more
urgent: an expert that a layer waits for goes before one that a later layer may need, and that before
one that is only worth keeping. What was begun is always finished, later if need be.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from moebatch.plan.eviction import ExpertId, Visit
from moebatch.plan.expert_cache import ExpertCache
from moebatch.plan.schedule import Lane, Op, Task
from moebatch.plan.timeline import Span
from moebatch.runtime.device import Device
from moebatch.runtime.executor import Queue, ThreadQueue
from moebatch.runtime.pinned_experts import PinnedExperts

_LOOK_UP_S = 0.25


class Urgency(IntEnum):
    """Why an expert is brought; the lower number goes first."""

    NEEDED = 0  # a layer waits for it
    PREFETCH = 1  # one of the next layers may need it
    KEEP = 2  # the host computed it, and it is worth more than another


@dataclass(slots=True)
class _Transfer:
    which: ExpertId
    urgency: Urgency
    slot: int | None = None
    moved: int = 0


class ExpertSlots:
    """Slots of one device under one cache policy. Close it: it has a thread.

    An expert that is pinned is not evicted: those of the layer under way, those under way on the
    link, and those prefetched for a layer that is still to come. All methods but the link's own are
    for one thread, that of the accelerator's lane.
    """

    def __init__(self, store: PinnedExperts, *, cache: ExpertCache, device: Device,
                 num_slots: int, chunk_bytes: int) -> None:  # fmt: skip
        """`cache.capacity` must be `num_slots`; `chunk_bytes` cross the link at a time."""
        assert cache.capacity == num_slots
        self.cache, self._store, self._device = cache, store, device
        self._chunk_bytes = max(1, chunk_bytes)
        self._queue: Queue = device.queues.get(Lane.H2D, ThreadQueue())
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[ExpertId, int] = {}
        self._transfers: dict[ExpertId, _Transfer] = {}  # begun, or queued with a slot
        self._waiting: dict[Urgency, deque[_Transfer]] = {u: deque() for u in Urgency}
        self._reserved: dict[ExpertId, int] = {}  # prefetched: pinned until this layer has come
        self._most_reserved = num_slots // 4
        self._current: _Transfer | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._spans: list[Span] = []
        self.bytes_moved, self.waited_s = 0, 0.0
        self.moved: dict[Urgency, int] = dict.fromkeys(Urgency, 0)
        self._thread = threading.Thread(target=self._serve, name="moebatch-experts", daemon=True)
        self._thread.start()

    def look_up(self, visit: Visit) -> tuple[int, ...]:
        """A layer comes: what is there for it, the experts still under way among them, is pinned.

        Prefetches that have not begun are dropped: the link is for this layer first.
        """
        with self._changed:
            self._drop(Urgency.PREFETCH)
            hits, _ = self.cache.look_up(visit)
            for expert in hits:
                self.cache.pin((visit.layer, expert))
            for which in [w for w, layer in self._reserved.items() if layer == visit.layer]:
                del self._reserved[which]
                self.cache.unpin(which)
            return hits

    def leave(self, layer: int, experts: Iterable[int]) -> None:
        """Nothing that was launched reads these any more; each was pinned once."""
        with self._changed:
            for expert in experts:
                self.cache.unpin((layer, expert))

    def can_fetch(self) -> int:
        """How many experts there is room for beside those that are pinned."""
        with self._changed:
            return len(self._free) + self.cache.num_evictable

    def fetch(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Bring what a layer waits for, in this order; each is pinned, for `leave`.

        Returns those for which there is no room: all others are pinned.
        """
        refused = []
        with self._changed:
            for expert in experts:
                transfer = _Transfer(which=(layer, expert), urgency=Urgency.NEEDED)
                if not self._admit(transfer):
                    refused.append(expert)
                    continue
                self.cache.pin(transfer.which)
                self._waiting[Urgency.NEEDED].append(transfer)
            self._changed.notify_all()
        return refused

    def hurry(self, layer: int, experts: Iterable[int]) -> None:
        """A layer waits for experts that are already under way."""
        with self._changed:
            for expert in experts:
                transfer = self._transfers.get((layer, expert))
                if transfer is None or transfer.urgency is Urgency.NEEDED:
                    continue
                if transfer in self._waiting[transfer.urgency]:
                    self._waiting[transfer.urgency].remove(transfer)
                    self._waiting[Urgency.NEEDED].append(transfer)
                transfer.urgency = Urgency.NEEDED
            self._changed.notify_all()

    def offer(self, which: Iterable[ExpertId], urgency: Urgency) -> None:
        """Experts to bring when the link has nothing better to do.

        Offers of one urgency replace those before, but for what has begun.
        """
        with self._changed:
            self._drop(urgency)
            for one in which:
                if one not in self.cache:
                    self._waiting[urgency].append(_Transfer(which=one, urgency=urgency))
            self._changed.notify_all()

    def arriving(self, layer: int, seconds_per_byte: float) -> tuple[dict[int, float], float]:
        """What is under way: (experts of a layer and in how many seconds each is there if it goes
        before all others, seconds until the link can take another)."""
        with self._changed:
            under_way = self._current
            busy = 0.0
            if under_way is not None and under_way.which[0] != layer:
                busy = min(self._chunk_bytes, self._left(under_way)) * seconds_per_byte
            found: dict[int, float] = {}
            own = [t for t in self._transfers.values() if t.which[0] == layer]
            for transfer in sorted(own, key=lambda t: t is not under_way):
                busy += self._left(transfer) * seconds_per_byte
                found[transfer.which[1]] = busy
            return found, busy

    def backlog_s(self, seconds_per_byte: float) -> float:
        """Seconds of link time that what was begun or is waited for still takes."""
        with self._changed:
            return sum(self._left(t) for t in self._transfers.values()) * seconds_per_byte

    def _left(self, transfer: _Transfer) -> int:
        return self._store.image(transfer.which).numel() - transfer.moved

    @property
    def most_reserved(self) -> int:
        """Experts that may be brought for layers to come: a quarter of the slots."""
        return self._most_reserved

    def wait_for(self, which: ExpertId) -> int:
        """The slot of an expert, once it is there."""
        start = time.perf_counter()
        with self._changed:
            while which in self._transfers and not self._failure:
                self._changed.wait(_LOOK_UP_S)
            if self._failure:
                raise self._failure
            self.waited_s += time.perf_counter() - start
            return self._slot_of[which]

    def contents(self, layer: int) -> frozenset[int]:
        """A layer's experts that are there or under way."""
        with self._changed:
            return frozenset(e for i, e in self._slot_of if i == layer)

    def preload(self, order: Iterable[ExpertId]) -> None:
        """Fill the free slots with the first of `order`, at once."""
        with self._changed:
            taken = self.cache.preload(order)
            for which in taken:
                self._slot_of[which] = self._free.pop()
        for which in taken:
            slot = self._store.slot(self._slot_of[which], which)
            task = _task(which)
            self._queue.launch(lambda _, s=slot, w=which: self._copy(s, w), task).wait()  # type: ignore[misc]

    @property
    def held(self) -> list[tuple[int, ExpertId]]:
        """Which slot holds whom."""
        with self._changed:
            return [(slot, which) for which, slot in self._slot_of.items()]

    def take_spans(self) -> list[Span]:
        """What crossed the link since the last call."""
        with self._changed:
            spans, self._spans = self._spans, []
            return spans

    def close(self) -> None:
        """Stop the thread, after the piece under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _copy(self, slot: object, which: ExpertId) -> None:
        self._device.copy_in(slot, self._store.image(which))  # type: ignore[arg-type]

    def _drop(self, urgency: Urgency) -> None:
        """Forget what of an urgency has not begun."""
        kept = [t for t in self._waiting[urgency] if t.slot is not None]
        self._waiting[urgency] = deque(kept)

    def _admit(self, transfer: _Transfer) -> bool:
        """Find a slot for an expert, evicting another; False where all are pinned."""
        which = transfer.which
        answer = self.cache.admit(which, prefetched=transfer.urgency is Urgency.PREFETCH)
        if not answer.admitted:
            return False
        if answer.evicted is not None:
            self._free.append(self._slot_of.pop(answer.evicted))
        slot = self._free.pop()
        self._store.clear(slot)
        self._slot_of[which] = transfer.slot = slot
        self._transfers[which] = transfer
        self.cache.pin(which)  # until it is there
        return True

    def _begin(self, transfer: _Transfer) -> bool:
        """Find room for what was offered; False where it is not worth it any more."""
        if transfer.slot is not None:
            return True
        if transfer.which in self.cache:
            return False
        if transfer.urgency is Urgency.KEEP and not self._worth_keeping(transfer.which):
            return False
        if transfer.urgency is Urgency.PREFETCH and len(self._reserved) >= self._most_reserved:
            return False
        if not self._admit(transfer):
            return False
        if transfer.urgency is Urgency.PREFETCH:
            self.cache.pin(transfer.which)
            self._reserved[transfer.which] = transfer.which[0]
        return True

    def _worth_keeping(self, which: ExpertId) -> bool:
        if self._free:
            return True
        victim = self.cache.victim()
        return victim is not None and self.cache.worth(which) >= self.cache.worth(victim)

    def _next(self) -> _Transfer | None:
        """The most urgent transfer that has room, under the lock."""
        for urgency in Urgency:
            waiting = self._waiting[urgency]
            while waiting:
                transfer = waiting.popleft()
                if self._begin(transfer):
                    return transfer
        return None

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    transfer = None
                    while not self._closing and (transfer := self._next()) is None:
                        self._changed.wait()
                    if self._closing or transfer is None:
                        return
                    self._current = transfer
                self._move(transfer)
        except BaseException as error:  # raised where it is waited for
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _move(self, transfer: _Transfer) -> None:
        """One piece of an expert; the rest goes back to the head of its queue."""
        assert transfer.slot is not None
        image = self._store.image(transfer.which)
        last = min(transfer.moved + self._chunk_bytes, image.numel())
        part = slice(transfer.moved, last)
        target = self._store.slot(transfer.slot, transfer.which)[part]
        task = _task(transfer.which)
        signal = self._queue.launch(lambda _: self._device.copy_in(target, image[part]), task)
        signal.wait()
        with self._changed:
            self.bytes_moved += last - transfer.moved
            transfer.moved, self._current = last, None
            self._spans.append(Span(task, *signal.times()))
            if last < image.numel():
                self._waiting[transfer.urgency].appendleft(transfer)
                return
            self.moved[transfer.urgency] += 1
            del self._transfers[transfer.which]
            self.cache.unpin(transfer.which)
            self._changed.notify_all()


def _task(which: ExpertId) -> Task:
    return Task(Op.LOAD_PAGE, Lane.H2D, which[0], page=which[1] + 1)
