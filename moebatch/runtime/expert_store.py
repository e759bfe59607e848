"""Experts in memory as a cache over the checkpoint: buffers, and the thread that fills them.

The caller's thread visits layer after layer; one more thread reads what is missing, and what has been
wished for while nothing is missing. A layer's experts are needed from `visit` until `release`; views
of an expert are valid until then. At most `capacity` + `spare` buffers exist.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.errors import Interrupted
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.experts import Expert
from moebatch.model.families import Family
from moebatch.model.linear import Linear
from moebatch.model.panels import PanelWriter
from moebatch.model.weights import expert_of
from moebatch.plan.eviction import Eviction, ExpertId, Visit
from moebatch.plan.expert_cache import CacheCounts, ExpertCache
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.schedule import Lane, Op, Task
from moebatch.plan.timeline import Span
from moebatch.runtime.page_reader import PageReader

View = Callable[[str, Tensor], Linear | Tensor]
Progress = Callable[[int, int], None]
_LOOK_UP_S = 0.25
_NEWEST = 0.1  # weight of the newest measurement


@dataclass(slots=True, eq=False)
class _Held:
    """An expert in memory or on its way there.

    `buffer` None: reading has not begun, or its weights have memory of their own.
    """

    which: ExpertId
    buffer: Tensor | None = None
    expert: Expert | None = None  # None: not read yet
    prefetch: bool = False
    cancelled: bool = False


class ExpertStore:
    """The experts of one model. Close it: it owns a thread."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family,
                 view: View, copies: bool, capacity: int, spare: int, eviction: Eviction,
                 panels: PanelWriter | None = None,
                 interrupted: Callable[[], bool] = lambda: False) -> None:  # fmt: skip
        """Nothing is read and no buffer taken yet.

        `view` makes a part that was read usable; where it `copies`, the buffer is free again then.
        `panels`: see PageReader.

        `capacity` experts are kept, `spare` more may be held while they are used: at least one.
        `interrupted` is asked while the caller waits; True ends that with Interrupted.
        """
        assert spare >= 1, spare
        self.cache = ExpertCache(capacity, eviction)
        self._spec, self._view, self._copies = spec, view, copies
        self._checkpoint, self._interrupted = checkpoint, interrupted
        self._reader = PageReader(checkpoint, weight_dtype=spec.weight_dtype, panels=panels)
        self._plans = {
            (layer, expert): self._reader.plan(family.expert_parts(spec, layer, expert))
            for layer in range(spec.num_layers)
            for expert in range(spec.experts_in(layer))
        }
        self._slot_bytes = max((plan.num_bytes for plan in self._plans.values()), default=0)
        self._held: dict[ExpertId, _Held] = {}
        self._free: list[Tensor] = []
        self._spare, self._passing = spare, 0  # buffers of experts that are not in the cache
        self._demands: deque[_Held] = deque()
        self._waiting: deque[ExpertId] = deque()  # misses without a buffer, in order
        self._wishes: deque[ExpertId] = deque()
        self._guarded: dict[
            int, set[ExpertId]
        ] = {}  # by layer: expected to be used, kept till then
        self._reading: _Held | None = None
        self._spans: list[Span] = []
        self._expert_s = self.waited_s = 0.0
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="moebatch-experts", daemon=True)
        self._thread.start()

    @property
    def bytes_read(self) -> int:
        """Bytes of experts read from the checkpoint so far."""
        return self._reader.bytes_read

    def holds(self, which: ExpertId) -> bool:
        """Whether an expert is in the cache or on its way into it."""
        with self._changed:
            return which in self.cache

    @property
    def most_guarded(self) -> int:
        """Experts that may be kept for layers to come: half of the cache."""
        return self.cache.capacity // 2

    @property
    def expert_s(self) -> float:
        """Seconds that reading an expert takes, as the last ones were; 0 before the first."""
        return self._expert_s

    @property
    def counts(self) -> CacheCounts:
        """Hits and misses so far."""
        return self.cache.counts

    def load(self, order: Iterable[ExpertId], *, progress: Progress) -> None:
        """Read the first experts of `order` that find room.

        Raises: ModelError when a file cannot be read; Interrupted.
        """
        with self._changed:
            chosen = self.cache.preload(order)
            for which in chosen:
                self.cache.pin(which)
                self._demand(which)
            self._changed.notify_all()
        for done, which in enumerate(chosen, start=1):
            self.wait([which])
            with self._changed:
                self.cache.unpin(which)
            progress(done, len(chosen))

    def adopt(self, experts: Mapping[ExpertId, Expert]) -> None:
        """Take experts that are in memory already, as far as the capacity goes; the rest is let go."""
        with self._changed:
            for which in self.cache.preload(experts):
                self._held[which] = _Held(which, expert=experts[which])

    def visit(self, visit: Visit) -> None:
        """A layer needs experts: those that are missing are read, in ascending order.

        Prefetching for other layers stops, should it be under way.
        """
        with self._changed:
            self._wishes.clear()  # some are for this layer; now it says what it needs
            for which in self._guarded.pop(visit.layer, ()):
                self.cache.unpin(which)
            hits, misses = self.cache.look_up(visit)
            for expert in hits:
                self.cache.pin((visit.layer, expert))
            for expert in misses:
                self._miss((visit.layer, expert))
            reading = self._reading
            if misses and reading is not None and reading.prefetch:
                layer, expert = reading.which
                reading.cancelled = layer != visit.layer or expert not in visit.experts
            self._changed.notify_all()

    def ready(self, which: ExpertId) -> Expert | None:
        """A needed expert, if it is there."""
        with self._changed:
            held = self._held.get(which)
            return None if held is None else held.expert

    def wait(self, which: Sequence[ExpertId]) -> None:
        """Until one of these needed experts is there.

        Raises: Interrupted, or what the reader raised.
        """
        self._await(
            lambda: any(
                (held := self._held.get(one)) is not None and held.expert is not None
                for one in which
            )
        )

    def release(self, which: ExpertId) -> None:
        """A needed expert has been used: it stays if it is worth it."""
        with self._changed:
            if which in self.cache:
                self.cache.unpin(which)
                return
            self._passing -= 1
            if not self._admit(which):
                self._drop(which)
            if self._waiting and self._passing < self._spare:
                self._passing += 1
                self._demand(self._waiting.popleft())
                self._changed.notify_all()

    def wish(self, ranked: Sequence[ExpertId]) -> None:
        """Experts that are expected to be needed, the most useful first; replaces earlier wishes.

        Those that are there are kept until their layer's visit, others read while nothing is missing.
        """
        with self._changed:
            for which in ranked:
                if which in self.cache:
                    self._guard(which)
            self._wishes = deque(which for which in ranked if which not in self.cache)
            self._changed.notify_all()

    def take_spans(self) -> list[Span]:
        """What has been read since the last call, as tasks of the disk's lane."""
        with self._changed:
            spans, self._spans = self._spans, []
        return spans

    def resize(self, capacity: int) -> None:
        """Change how many experts are kept."""
        with self._changed:
            for which in self.cache.resize(capacity):
                self._drop(which)
            self._free.clear()

    def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _miss(self, which: ExpertId) -> None:
        """Read a needed expert: into the cache, or by way of a spare buffer as soon as one is free."""
        if self._admit(which):
            self.cache.pin(which)
            self._demand(which)
        elif self._passing < self._spare:
            self._passing += 1
            self._demand(which)
        else:
            self._waiting.append(which)

    def _admit(self, which: ExpertId, *, prefetched: bool = False) -> bool:
        admission = self.cache.admit(which, prefetched=prefetched)
        if admission.evicted is not None:
            self._drop(admission.evicted)
        return admission.admitted

    def _demand(self, which: ExpertId) -> None:
        held = self._held[which] = _Held(which)
        self._demands.append(held)

    def _guard(self, which: ExpertId) -> None:
        """Keep an expert until its layer is visited; at most half of the cache is kept so."""
        layer = self._guarded.setdefault(which[0], set())
        if which not in layer and self._may_guard():
            self.cache.pin(which)
            layer.add(which)

    def _may_guard(self) -> bool:
        return sum(map(len, self._guarded.values())) < self.most_guarded

    def _buffer(self) -> Tensor:
        return self._free.pop() if self._free else _buffer(self._slot_bytes)

    def _drop(self, which: ExpertId) -> None:
        """Let an expert go; its views die."""
        held = self._held.pop(which)
        if held.buffer is not None:
            self._free.append(held.buffer)

    def _await(self, done: Callable[[], bool]) -> None:
        """Keep the caller's thread until then; it looks up now and then for an interrupt."""
        start = time.perf_counter()
        while not self._interrupted():
            with self._changed:
                if self._changed.wait_for(lambda: self._failure is not None or done(),
                                          timeout=_LOOK_UP_S):  # fmt: skip
                    if self._failure is not None:
                        raise self._failure
                    self.waited_s += time.perf_counter() - start
                    return
        raise Interrupted

    def _serve(self) -> None:
        """The reader's thread: what is needed first, then what is wished for."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._demands or self._wishes)
                if self._closing:
                    return
                held = self._demands.popleft() if self._demands else self._begin_prefetch()
                self._reading = held
                if held is None:
                    continue
                held.buffer = held.buffer if held.buffer is not None else self._buffer()
            try:
                whole = self._read(held)
            except BaseException as error:  # handed to the caller, who raises it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._reading = None
                self._finish(held, whole)
                self._changed.notify_all()

    def _begin_prefetch(self) -> _Held | None:
        """Make room for the first wish; None where there is none to be made."""
        which = self._wishes.popleft()
        if which in self._held:
            return None
        if not self._may_guard() or not self._admit(which, prefetched=True):
            self._wishes.clear()
            return None
        self._guard(which)
        self.cache.pin(which)  # until it is read
        held = self._held[which] = _Held(which, prefetch=True)
        return held

    def _read(self, held: _Held) -> bool:
        """Fill an expert's buffer; whether all of it came."""
        assert held.buffer is not None
        plan, start = self._plans[held.which], time.perf_counter()
        with self._changed:
            after = self._plans[self._demands[0].which] if self._demands else None
        for _ in self._reader.steps(plan, held.buffer, cached=False, following=after):
            if held.cancelled:
                return False
        layer, expert = held.which
        task = Task(Op.LOAD_PAGE, Lane.DISK, layer, page=expert + 1)
        span = Span(task, start, time.perf_counter())
        with self._changed:
            self._spans.append(span)
            weight = _NEWEST if self._expert_s else 1.0
            self._expert_s += weight * (span.end_s - start - self._expert_s)
        return True

    def _finish(self, held: _Held, whole: bool) -> None:
        """Make an expert that was read available, or let it go where reading was stopped."""
        which = held.which
        if held.prefetch:
            self.cache.unpin(which)
        if whole:
            assert held.buffer is not None
            held.expert = self._expert(which, held.buffer)
            if self._copies:
                self._free.append(held.buffer)
                held.buffer = None
            return
        layer = self._guarded.get(which[0], set())
        if which in layer:
            layer.remove(which)
            self.cache.unpin(which)
        if self.cache.is_pinned(which):  # its layer has come meanwhile
            held.prefetch = held.cancelled = False
            self._demands.append(held)
        else:
            self.cache.discard(which)
            self._drop(which)

    def _expert(self, which: ExpertId, buffer: Tensor) -> Expert:
        views = self._reader.views(self._plans[which], buffer)
        parts = {name: self._view(name, view) for name, view in views.items()}
        spec = self._spec
        return expert_of(parts, index=which[1], size=spec.expert_size, limit=spec.swiglu_limit)


def _buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)
