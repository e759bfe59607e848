"""The ops of a pass whose experts come from a cache: only those that have tokens are touched.

A layer's FFN is one task here. Experts that are in memory are computed while others are read; their
results wait, so that a token's sum has the order of the streaming regime and with it its bits.
Shapes: T tokens, D hidden_size, E experts, K top_k.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence

from torch import Tensor

from moebatch.model.experts import Expert, add_experts, expert_results
from moebatch.model.router import ExpertRows, route
from moebatch.native.kernels import Kernels
from moebatch.plan.cache_time import STASH_BYTES
from moebatch.plan.eviction import ExpertId, Visit
from moebatch.plan.expert_cache import CacheCounts
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.pages import ATTENTION_PAGE
from moebatch.plan.schedule import Task
from moebatch.runtime.expert_store import ExpertStore
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.forward import Forward, Routed
from moebatch.runtime.kv_cache import KVCache
from moebatch.runtime.weight_store import WeightStore

_PREDICTED_TOKENS = 64  # passes with more touch nearly all experts: there is nothing to predict


class CachedForward(Forward):
    """Handlers for schedules in which expert page 1 of a layer stands for all of its experts."""

    def __init__(self, *, spec: ModelSpec, store: WeightStore, kv: KVCache, experts: ExpertStore,
                 prefetch_layers: int, kernels: Kernels | None = None,
                 routed: Routed | None = None) -> None:  # fmt: skip
        """`prefetch_layers`: for how many layers ahead experts are predicted."""
        super().__init__(spec=spec, store=store, kv=kv, kernels=kernels, routed=routed)
        self._expert_store, self._prefetch_layers = experts, prefetch_layers
        self.foresight = Foresight(self, spec=spec) if prefetch_layers else None
        self._wants_scores = self._wants_scores or experts.cache.eviction.needs_scores

    def _ffn(self, task: Task) -> None:
        """All experts of a layer, or the FFN of every token."""
        if task.page == ATTENTION_PAGE:
            self._base_ffn(task.layer)
            return
        layer = task.layer
        rows = self._group(layer)
        needed = [e for e in range(self._spec.num_experts) if rows.starts[e] < rows.starts[e + 1]]
        if self.foresight is not None:
            self.foresight.came(layer, needed)
        self._expert_store.visit(
            Visit(layer=layer, experts=tuple(needed), scores=self._mean_scores)
        )
        if self._prefetch_layers:
            self._expert_store.wish(self._predicted(layer))
        self._run_experts(layer, needed, rows)

    def _run_experts(self, layer: int, needed: Sequence[int], rows: ExpertRows) -> None:
        """Compute whichever expert is there, add the results in ascending order."""
        store = self._expert_store
        left = deque(needed)
        waiting: dict[int, list[tuple[Tensor, Tensor]]] = {}
        room = STASH_BYTES
        while left:
            if left[0] in waiting:
                for tokens, result in waiting.pop(left.popleft()):
                    self._hidden.index_add_(0, tokens, result)
                    room += result.nbytes
                continue
            if ready := self._ready(layer, left, waiting):
                add_experts(self._hidden, self._normed, rows, ready)
                for expert in ready:
                    store.release((layer, expert.index))
                    left.popleft()
                continue
            others = [e for e in left if e not in waiting and self._may_wait(rows, e, room)]
            there = ((e, store.ready((layer, e))) for e in others)
            other = next(((e, expert) for e, expert in there if expert is not None), None)
            if other is None:
                store.wait([(layer, e) for e in (left[0], *others)])
                continue
            waiting[other[0]] = list(expert_results(self._normed, rows, other[1]))
            room -= self._bytes(rows, other[0])
            store.release((layer, other[0]))

    def _ready(self, layer: int, left: Iterable[int], waiting: Container[int]) -> list[Expert]:
        """The first experts of those left, as far as all of them are there."""
        found: list[Expert] = []
        for index in left:
            expert = None if index in waiting else self._expert_store.ready((layer, index))
            if expert is None:
                break
            found.append(expert)
        return found

    def _may_wait(self, rows: ExpertRows, expert: int, room: int) -> bool:
        """Whether an expert's results may wait for those before it.

        The fused kernel adds as it computes, rounding once: there nothing can wait with the same bits.
        """
        return self._kernels is None and self._bytes(rows, expert) <= room

    def _bytes(self, rows: ExpertRows, expert: int) -> int:
        """What an expert's results take while they wait."""
        count = rows.starts[expert + 1] - rows.starts[expert]
        return count * self._spec.hidden_size * 4

    def _predicted(self, layer: int) -> list[ExpertId]:
        """Experts that the next layers will probably ask for: the nearest layer's first, in it those
        with most tokens.

        Their routers see this layer's hidden states: the residual stream changes slowly.
        Source: HybriMoE (arXiv 2504.05897), section IV.
        """
        if self._hidden.shape[0] > _PREDICTED_TOKENS:
            return []
        found: list[ExpertId] = []
        for ahead in range(
            layer + 1, min(layer + 1 + self._prefetch_layers, self._spec.num_layers)
        ):
            loads = self.routed(ahead, self._hidden)
            found += [(ahead, expert) for expert, _ in loads.most_common()]
        return found

    def routed(self, layer: int, states: Tensor) -> Counter[int]:
        """See Foreseen."""
        weights = self._store.try_attention(layer)
        if weights is None or weights.router is None:
            return Counter()
        normed = weights.post_norm(states).float()
        chosen = route(normed, weights.router, self._spec.router, top_k=self._spec.top_k)[1]
        return Counter(chosen.flatten().tolist())

    def bring(self, ranked: Sequence[ExpertId]) -> None:
        """See Foreseen."""
        self._expert_store.wish(ranked)

    def holds(self, which: ExpertId) -> bool:
        """See Foreseen."""
        return self._expert_store.holds(which)

    @property
    def counts(self) -> CacheCounts:
        """See Foreseen."""
        return self._expert_store.counts

    @property
    def room(self) -> float:
        """See Foreseen; what is there and named is kept, too, and takes of the same room."""
        return self._expert_store.most_guarded * (1.0 - self.counts.hit_rate)

    @property
    def expert_s(self) -> float:
        """See Foreseen."""
        return self._expert_store.expert_s

    @property
    def in_place_s(self) -> None:
        """See Foreseen: what is on disk cannot be computed there."""
        return None

    @property
    def waited_s(self) -> float:
        """See Foreseen."""
        return self._expert_store.waited_s
