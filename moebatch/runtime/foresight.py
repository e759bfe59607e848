"""What the layers of a draft model tell of the experts that the target is about to ask for.

While the draft model computes, what a layer of it has after attention goes through the target's router
of that layer, and the experts that it names are brought meanwhile: for the layers below a cutoff, so
that the target does not wait for what was begun too late. Source: SP-MoE (arXiv 2510.10302); both
models must have hidden states of one size, as models of one family do.
Shapes: T tokens of a draft step, D hidden_size.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moebatch.plan.cutoff import StepCosts, cutoff_layer
from moebatch.plan.eviction import ExpertId
from moebatch.plan.expert_cache import CacheCounts
from moebatch.plan.model_spec import ModelSpec

_NEWEST = 0.1  # weight of the newest measurement
_LOOK_EVERY = 8  # stages between those in which the layers above the cutoff are looked at, too


class Foreseen(Protocol):
    """A cache of experts, as far as it can be told what is to come."""

    def routed(self, layer: int, states: Tensor) -> Mapping[int, int]:
        """Tokens of each expert if the layer's router saw these hidden states [T, D] of the host's;
        nothing where the router is not at hand."""
        ...

    def bring(self, ranked: Sequence[ExpertId]) -> None:
        """Experts to bring while nothing is waited for, in this order; replaces those before."""
        ...

    def holds(self, which: ExpertId) -> bool:
        """Whether an expert is there, or was brought and is on its way."""
        ...

    @property
    def counts(self) -> CacheCounts:
        """Hits and misses so far."""
        ...

    @property
    def room(self) -> float:
        """How many experts that are not there may be brought ahead."""
        ...

    @property
    def expert_s(self) -> float:
        """Seconds that bringing an expert takes; 0: not known yet."""
        ...

    @property
    def in_place_s(self) -> float | None:
        """Seconds of a missing expert where it is computed where it lies; None: it is brought."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that computing has waited for experts so far."""
        ...


@dataclass(slots=True)
class _Mean:
    """A mean in which recent values count more; None before the first."""

    value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _NEWEST * (value - self.value)


class Foresight:
    """Between one draft model and one cache of experts. For the thread that drafts and computes."""

    def __init__(self, cache: Foreseen, *, spec: ModelSpec) -> None:
        """`spec` is the target's."""
        self._cache, self._spec = cache, spec
        self.fixed: int | None = None  # a cutoff to keep to, whatever is measured
        self.cutoff = 0
        self._reached: dict[int, list[int]] = {}
        self._named: dict[int, Counter[int]] = {}
        self._lacked: dict[int, set[int]] = {}  # of those named, who was not there
        self._sparse = sum(spec.experts_in(i) > 0 for i in range(spec.num_layers))
        self._own_s = 0.0
        self._stages, self._drafts, self._draft_layers = 0, 0, 0
        self._drafting = self._staged = False
        self._looked_at: frozenset[int] = frozenset()
        self._draft_layer_s, self._target_layer_s = _Mean(), _Mean()
        self._missing, self._accuracy, self._cutoffs = _Mean(), _Mean(), _Mean()
        self._before = (0, 0.0)

    def begin(self, draft: ModelSpec, *, drafts: int) -> bool:
        """A stage of so many drafts begins; whether this draft model tells anything."""
        spec = self._spec
        if draft.hidden_size != spec.hidden_size or not spec.has_router:
            return False
        if self._draft_layers != draft.num_layers:
            self._draft_layers = draft.num_layers
            self._reached = _reached(spec, draft.num_layers)
        self._drafts = drafts
        self._named.clear()
        self._lacked.clear()
        self._own_s = 0.0
        self._drafting = self._staged = True
        self.cutoff = self._chosen() if self.fixed is None else self.fixed
        self._cutoffs.add(self.cutoff)
        every = self._stages % _LOOK_EVERY == 0
        self._looked_at = frozenset(
            i for i in range(spec.num_layers) if every or i < self.cutoff
        )  # fmt: skip
        self._stages += 1
        self._before = (_needed(self._cache.counts), self._cache.waited_s)
        return True

    def attended(self, layer: int, states: Tensor) -> None:
        """Layer `layer` of the draft model has these hidden states [T, D] after its attention."""
        if not self._drafting:
            return
        start, found = time.perf_counter(), False
        for i in self._reached.get(layer, ()):
            if i in self._looked_at:
                found = self._name(i, self._cache.routed(i, states)) or found
        if found:
            self._cache.bring(
                [
                    (i, expert)
                    for i in sorted(self._named)
                    if i < self.cutoff
                    for expert, _ in self._named[i].most_common()
                ]
            )
        self._own_s += time.perf_counter() - start

    def _name(self, layer: int, tokens: Mapping[int, int]) -> bool:
        """Experts that a layer is going to ask for; whether any is new that should be brought."""
        named = self._named.setdefault(layer, Counter())
        new = [expert for expert in tokens if expert not in named]
        named.update(tokens)
        lacked = {expert for expert in new if not self._cache.holds((layer, expert))}
        self._lacked.setdefault(layer, set()).update(lacked)
        return bool(new) and layer < self.cutoff

    def drafted(self, seconds: float, steps: int) -> None:
        """The stage is over; its steps took so long, what was done here among it."""
        self._drafting = False
        if steps:
            own = max(0.0, seconds - self._own_s)
            self._draft_layer_s.add(own / steps / self._draft_layers)

    def came(self, layer: int, experts: Sequence[int]) -> None:
        """The target's layer asks for these experts."""
        self._named.pop(layer, None)
        if lacked := self._lacked.pop(layer, None):
            self._accuracy.add(len(lacked & set(experts)) / len(lacked))

    def passed(self, seconds: float, *, prompts: bool = False) -> None:
        """The target's pass took so long, with what it waited for experts.

        Only one that follows a stage, and carries no prompts, tells something of the next.
        """
        staged, self._staged = self._staged, False
        if not staged or prompts:
            return
        needed, waited = self._before
        self._missing.add((_needed(self._cache.counts) - needed) / max(1, self._sparse))
        computed = max(0.0, seconds - (self._cache.waited_s - waited))
        self._target_layer_s.add(computed / max(1, self._sparse))

    def describe(self) -> dict[str, Any] | None:
        """For a report: the mean cutoff layer, and the share of named experts that was needed.

        None where no draft model has told anything.
        """
        if not self._stages:
            return None
        return {"cutoff_layer": self._cutoffs.value, "named_needed": self._accuracy.value}

    def _chosen(self) -> int:
        """The cutoff with which the step ends first, by what was measured; 0 before that."""
        costs = self._costs()
        return 0 if costs is None else cutoff_layer(costs)

    def _costs(self) -> StepCosts | None:
        draft, target = self._draft_layer_s.value, self._target_layer_s.value
        missing, accuracy = self._missing.value, self._accuracy.value
        expert_s = self._cache.expert_s
        if draft is None or target is None or missing is None or accuracy is None or not expert_s:
            return None
        return StepCosts(
            draft_layer_s=draft,
            target_layer_s=target,
            expert_s=expert_s,
            layers=self._sparse,
            draft_layers=self._draft_layers,
            draft_tokens=self._drafts,
            experts=missing,
            accuracy=accuracy,
            slots=self._cache.room,
            in_place_s=self._cache.in_place_s,
        )


def _needed(counts: CacheCounts) -> int:
    """Experts that were asked for and would not have been there."""
    return counts.misses + counts.prefetch_hits


def _reached(spec: ModelSpec, draft_layers: int) -> dict[int, list[int]]:
    """By layer of the draft model, the target's sparse layers that it speaks for."""
    found: dict[int, list[int]] = {}
    for i in range(spec.num_layers):
        if spec.experts_in(i):
            found.setdefault(i * draft_layers // spec.num_layers, []).append(i)
    return found
