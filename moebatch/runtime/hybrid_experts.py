"""The experts of a layer on three lanes at once: accelerator, host, and the link between them.

When a layer's routing is known its lanes are simulated; then the accelerator computes what is in its
memory, the host what is not worth bringing, and the link brings the rest. Results are added up in
ascending order of experts wherever they were computed, so the text does not depend on the split.
Shapes: T tokens, D hidden_size, E experts, K top_k, R routed rows.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moebatch.model.experts import Expert, add_routed, write_expert
from moebatch.model.router import ExpertRows, all_scores, route
from moebatch.plan.eviction import ExpertId, Visit
from moebatch.plan.expert_cache import CacheCounts
from moebatch.plan.hybrid import (
    ExpertCosts,
    LayerLoad,
    Split,
    balanced,
    by_rules,
    layer_load,
    split_of,
)
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.plan.prefetch import Outlook, Trust, worth_prefetching
from moebatch.plan.schedule import Lane, Op, Task
from moebatch.plan.timeline import Span
from moebatch.runtime.device import Device, Scratch
from moebatch.runtime.device_forward import Routers
from moebatch.runtime.executor import Queue, Signal, ThreadQueue
from moebatch.runtime.expert_slots import ExpertSlots, Urgency
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.layer_pace import LayerPace
from moebatch.runtime.pinned_experts import PinnedExperts

_CORRECTION, _MOST_CORRECTED = 0.05, 3.0  # weight of the newest layer, and how far it may be off
_MOST_OFFERED = 2  # prefetches at a time: the next layer's routing tells better


@dataclass(slots=True)
class LaneCounts:
    """Experts that each lane took, each once a visit; `fetched` are among those of the device."""

    device: int = 0
    host: int = 0
    fetched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """One layer's work: its routed rows, in device memory and in the host's, and its split."""

    layer: int
    rows: ExpertRows
    host_rows: ExpertRows
    split: Split


class HybridExperts:
    """Computes the experts of one layer after the other; for the accelerator's lane."""

    def __init__(self, *, spec: ModelSpec, store: PinnedExperts, slots: ExpertSlots, device: Device,
                 routers: Routers, policy: Policy, costs: ExpertCosts) -> None:  # fmt: skip
        """`costs` may be replaced by measured ones before the first pass."""
        self._spec, self._store, self._slots, self._device = spec, store, slots, device
        self._routers, self._policy, self.costs = routers, policy, costs
        self._scratch = Scratch(device)
        self._host_queue: Queue = device.queues.get(Lane.CPU, ThreadQueue())
        self._offload_queue: Queue = device.queues.get(Lane.D2H, ThreadQueue())
        self._host = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moebatch-misses")
        self._left: tuple[int, tuple[int, ...]] | None = None
        self._trust = Trust(policy.prefetch_layers)
        self._pace = LayerPace()
        self._sparse = [i for i in range(spec.num_layers) if spec.experts_in(i)]
        self.lanes = LaneCounts()
        prefetches = bool(policy.prefetch_layers and slots.cache.capacity)
        self.foresight = Foresight(self, spec=spec) if prefetches else None
        self._host_s = self._waited_s = 0.0
        self._signals: list[tuple[Task, Signal]] = []

    def run(self, layer: int, hidden: Tensor, normed: Tensor, rows: ExpertRows) -> None:
        """Add the experts' results for the routed rows of normed [T, D] to hidden [T, D].

        The rows' `starts` are host values, so all that was launched before has ended.
        """
        self._pace.layer(layer)
        self._leave()
        tokens = {e: n for e, n in enumerate(_counts(rows)) if n}
        split = self._split(layer, tokens, normed)
        where = torch.device("cpu")
        host_rows = ExpertRows(tokens=rows.tokens.to(where), weights=rows.weights.to(where),
                               starts=rows.starts)  # fmt: skip
        visit = _Visit(layer=layer, rows=rows, host_rows=host_rows, split=split)
        shape = (rows.tokens.shape[0], hidden.shape[1])
        results = self._scratch.on_device("results", shape, torch.float32)
        job = self._start_host(visit, normed) if split.host else None
        self._offer(layer, hidden, rows, split)
        self._compute_on_device(visit, normed, results)
        if job is not None:
            self._take(job, visit, results)
        add_routed(hidden, results, rows)
        self._device.spoil(results)

    def _compute_on_device(self, visit: _Visit, normed: Tensor, results: Tensor) -> None:
        """The accelerator's share, each expert as soon as it is there."""
        seconds = 0.0
        for expert in visit.split.device:
            which = (visit.layer, expert)
            held = self._store.on_device(self._slots.wait_for(which), which)
            start = time.perf_counter()
            write_expert(results, normed, visit.rows, held)
            seconds += time.perf_counter() - start
        if self._device.emulated:  # a real one has not computed yet, and is nobody else's
            factor = self._correction(visit, visit.split.device, seconds, self.costs.device_s)
            self.costs = replace(self.costs, device_expert_s=self.costs.device_expert_s * factor,
                                 device_token_s=self.costs.device_token_s * factor)  # fmt: skip

    def routed(self, layer: int, states: Tensor) -> Mapping[int, int]:
        """See Foreseen."""
        held = self._scratch.on_device("foreseen", tuple(states.shape), states.dtype)
        self._device.copy_in(held, states)
        return self._routed(layer, held)

    def bring(self, ranked: Sequence[ExpertId]) -> None:
        """See Foreseen."""
        self._slots.offer(ranked, Urgency.PREFETCH)

    def holds(self, which: ExpertId) -> bool:
        """See Foreseen."""
        return which[1] in self._slots.contents(which[0])

    @property
    def counts(self) -> CacheCounts:
        """See Foreseen."""
        return self._slots.cache.counts

    @property
    def room(self) -> float:
        """See Foreseen."""
        return self._slots.most_reserved

    @property
    def expert_s(self) -> float:
        """See Foreseen."""
        return self.costs.transfer_s

    @property
    def in_place_s(self) -> float | None:
        """See Foreseen: what the host takes more than the accelerator."""
        if self._policy.misses == "fetch":
            return None
        return max(0.0, self.costs.host_s(1) - self.costs.device_s(1))

    @property
    def waited_s(self) -> float:
        """See Foreseen."""
        return self._slots.waited_s + self._waited_s

    def pass_ends(self) -> list[Span]:
        """After a pass: what host and link did in it."""
        self._pace.pass_ends()
        signals, self._signals = self._signals, []
        spans = [Span(task, *signal.times()) for task, signal in signals]
        return spans + self._slots.take_spans()

    def close(self) -> None:
        """Stop the threads."""
        self._host.shutdown()
        self._slots.close()

    def _leave(self) -> None:
        """What the layer before has pinned is read no more: its routing was waited for since."""
        if self._left is not None:
            self._slots.leave(*self._left)
            self._left = None

    def _split(self, layer: int, tokens: dict[int, int], normed: Tensor) -> Split:
        """Who computes what; pins what the accelerator reads and sends for what it lacks."""
        slots, costs = self._slots, self.costs
        experts = tuple(tokens)
        self._trust.came(layer, experts)
        if self.foresight is not None:
            self.foresight.came(layer, experts)
        scores = self._scores(layer, normed) if slots.cache.eviction.needs_scores else ()
        hits = slots.look_up(Visit(layer=layer, experts=experts, scores=scores))
        arriving, free = slots.arriving(layer, costs.transfer_s / max(1, self._store.slot_bytes))
        load = layer_load(tokens, set(hits) - arriving.keys(), arriving=arriving,
                          link_free_s=free, can_fetch=slots.can_fetch())  # fmt: skip
        split = self._planned(load)
        refused = slots.fetch(layer, split.fetch)
        if refused:
            split = split_of(replace(load, can_fetch=0), {*split.host, *refused}, costs)
        slots.hurry(layer, [e for e in split.device if e in arriving])
        self._left = (layer, (*hits, *(e for e in split.fetch)))
        self.lanes.host += len(split.host)
        self.lanes.device += len(split.device)
        self.lanes.fetched += len(split.fetch)
        return split

    def _planned(self, load: LayerLoad) -> Split:
        misses = [e for e in load.tokens if e not in load.cached and e not in load.arriving]
        match self._policy.misses:
            case "balanced":
                return balanced(load, self.costs)
            case "rules":
                return by_rules(load, self.costs)
            case "host":
                return split_of(load, misses, self.costs)
            case _:  # what there is no room for stays with the host
                return split_of(load, misses[load.can_fetch :], self.costs)

    def _scores(self, layer: int, normed: Tensor) -> Sequence[float]:
        """The layer's router scores [E], averaged over the tokens."""
        router = self._routers.attention(layer).router
        if router is None:
            return ()
        each = all_scores(normed.float(), router, self._spec.router)
        scores: list[float] = each.mean(dim=0).tolist()
        return scores

    def _start_host(self, visit: _Visit, normed: Tensor) -> "Future[Tensor]":
        """Have the host compute its share; the future's results lie in pinned memory."""
        held = self._scratch.pinned("normed", tuple(normed.shape), normed.dtype)
        shape = (visit.rows.tokens.shape[0], normed.shape[1])
        results = self._scratch.pinned("results", shape, torch.float32)
        return self._host.submit(self._compute_on_host, visit, normed, held, results)

    def _compute_on_host(self, visit: _Visit, normed: Tensor, held: Tensor,
                         results: Tensor) -> Tensor:  # fmt: skip
        offload = Task(Op.OFFLOAD_NORMED, Lane.D2H, visit.layer)
        copied = self._offload_queue.launch(lambda _: self._device.copy_out(held, normed), offload)
        copied.wait()
        self._signals.append((offload, copied))
        self._host_s = 0.0
        for expert in visit.split.host:
            task = Task(Op.FFN, Lane.CPU, visit.layer, page=expert + 1)
            one = self._store.on_host((visit.layer, expert))
            work = partial(_write, results, held, visit.host_rows, one)
            signal = self._host_queue.launch(work, task)
            start, end = signal.times()
            self._host_s += end - start
            self._signals.append((task, signal))
        self._device.spoil(held)
        return results

    def _take(self, job: "Future[Tensor]", visit: _Visit, results: Tensor) -> None:
        """Wait for the host's results and copy them to their rows on the device."""
        start = time.perf_counter()
        host = job.result()
        self._waited_s += time.perf_counter() - start
        factor = self._correction(visit, visit.split.host, self._host_s, self.costs.host_s)
        self.costs = replace(self.costs, host_expert_s=self.costs.host_expert_s * factor,
                             host_token_s=self.costs.host_token_s * factor)  # fmt: skip
        starts = visit.rows.starts
        for first, last in _runs(sorted(visit.split.host)):
            part = slice(starts[first], starts[last + 1])
            self._device.copy_in(results[part], host[part])

    @staticmethod
    def _correction(visit: _Visit, experts: Sequence[int], seconds: float,
                    cost_s: Callable[[int], float]) -> float:  # fmt: skip
        """What experts take in the run, beside all else, replaces bit by bit what they took alone."""
        counts = _counts(visit.rows)
        predicted = sum(cost_s(counts[e]) for e in experts)
        if predicted <= 0.0:
            return 1.0
        ratio = min(_MOST_CORRECTED, max(1 / _MOST_CORRECTED, seconds / predicted))
        return 1.0 + _CORRECTION * (ratio - 1.0)

    def _offer(self, layer: int, hidden: Tensor, rows: ExpertRows, split: Split) -> None:
        """Give the link what to do when nothing waits for it."""
        if self._policy.keep_computed:
            kept = [(layer, e) for e in reversed(split.host)]
            self._slots.offer(kept, Urgency.KEEP)
        if self._policy.prefetch_layers and self._slots.cache.capacity:
            self._slots.offer(self._predicted(layer, hidden, rows), Urgency.PREFETCH)

    def _predicted(self, layer: int, hidden: Tensor, rows: ExpertRows) -> list[tuple[int, int]]:
        """Experts of the next layers that are worth bringing, by their routers on this hidden state."""
        ahead = [i for i in self._sparse if layer < i <= layer + self._policy.prefetch_layers]
        per_byte = self.costs.transfer_s / max(1, self._store.slot_bytes)
        backlog = self._slots.backlog_s(per_byte)
        in_time = [i for i in ahead if self._pace.until(layer, i) > backlog]
        if not in_time:
            return []
        states = hidden[torch.unique(rows.tokens)]
        outlooks = []
        for following in in_time:
            tokens = self._routed(following, states)
            self._trust.predicted(following, following - layer, tokens)
            load = layer_load(tokens, self._slots.contents(following))
            outlooks.append(
                Outlook(
                    layer=following,
                    load=load,
                    until_s=self._pace.until(layer, following),
                    trust=self._trust.of(following - layer),
                )
            )
        return worth_prefetching(outlooks, self.costs, backlog_s=backlog, most=_MOST_OFFERED)

    def _routed(self, layer: int, states: Tensor) -> dict[int, int]:
        """Tokens of each expert if the layer's router saw these hidden states [T, D]."""
        weights, spec = self._routers.attention(layer), self._spec
        if weights.router is None:
            return {0: states.shape[0]}
        normed = weights.post_norm(states)
        experts = route(normed, weights.router, spec.router, top_k=spec.top_k)[1]
        counts = torch.bincount(experts.flatten(), minlength=spec.num_experts).tolist()
        return {e: n for e, n in enumerate(counts) if n}


def _write(results: Tensor, hidden: Tensor, rows: ExpertRows, expert: Expert, task: Task) -> None:
    write_expert(results, hidden, rows, expert)


def _counts(rows: ExpertRows) -> list[int]:
    return [last - first for first, last in zip(rows.starts, rows.starts[1:], strict=False)]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches (first, last) of numbers that follow one another."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
