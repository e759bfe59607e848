"""A machine without accelerator and few rows: host memory is a cache of experts over the disk."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.layers import Rope
from moebatch.model.linear import ComputeType, Quantization
from moebatch.native.kernels import Kernels
from moebatch.plan.eviction import eviction, preload_order, shares_of
from moebatch.plan.expert_cache import CacheCounts
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import table_of
from moebatch.plan.pages import ATTENTION_PAGE, PageTable
from moebatch.plan.policy import Policy
from moebatch.plan.schedule import Lane, Task, prologue, zigzag
from moebatch.runtime.backend import HostBackend, PassResult, Progress, host_cache
from moebatch.runtime.batch import Segment, build_pass, has_prompts
from moebatch.runtime.cached_forward import CachedForward
from moebatch.runtime.executor import Executor
from moebatch.runtime.expert_store import ExpertStore
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.native_attention import attends_natively
from moebatch.runtime.routing_log import RoutingLog
from moebatch.runtime.weight_store import WeightStore

Profile = Sequence[Sequence[int]]


class CachedHostBackend:
    """Attention from memory, or streamed where it does not fit; of the experts what tokens ask for."""

    one_by_one = True

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 compute: ComputeType, kernels: Kernels | None = None,
                 quantization: Quantization = "none", profile: Profile | None = None,
                 log: RoutingLog | None = None, before: HostBackend | None = None,
                 interrupted: Callable[[], bool] = lambda: False) -> None:  # fmt: skip
        """Reserve the KV cache; weights take their memory as they are read.

        `profile` [L, E] are tokens that experts computed in earlier runs. `log` records the routing.
        `before`: a closed backend to go on from, with its KV cache and the weights it holds; its
        resident experts are the first content of the cache. There is nothing to load then.
        """
        self._spec, self._profile, self._log = spec, profile, log
        self._table = attention_only(table_of(spec, policy))
        self._page_slots = max(1, min(policy.page_slots, len(self._table.streamed)))
        self._store = WeightStore(
            checkpoint, spec=spec, family=family, table=self._table, page_slots=self._page_slots,
            compute=compute, kernels=kernels, quantization=quantization,
        ) if before is None else before.store  # fmt: skip
        self._experts = ExpertStore(
            checkpoint, spec=spec, family=family, view=self._store.view, copies=self._store.copies,
            panels=self._store.panels, capacity=policy.expert_slots, spare=policy.page_slots,
            interrupted=interrupted,
            eviction=eviction(policy.eviction, num_layers=spec.num_layers,
                              num_experts=spec.num_experts),
        )  # fmt: skip
        self.kv = before.kv if before else host_cache(spec, policy, windows=spec.layer_windows)
        self._rope = Rope(spec.rope, spec.head_dim)
        self._native = attends_natively(spec, kernels)
        self._forward = CachedForward(
            spec=spec, store=self._store, kv=self.kv, experts=self._experts, kernels=kernels,
            prefetch_layers=policy.prefetch_layers, routed=None if log is None else log.routed,
        )  # fmt: skip
        self._executor = Executor(self._forward.handlers, background=[Lane.DISK],
                                  interrupted=interrupted)  # fmt: skip
        self._schedules: dict[int, list[Task]] = {}
        if before is not None:
            self._take_over(before)

    def _take_over(self, before: HostBackend) -> None:
        """Go on with another backend's weights, the most used experts first."""
        held = self._store.give_up_experts(self._table, page_slots=self._page_slots)
        self._forward.expert_tokens = before.expert_tokens
        shares = shares_of(before.expert_tokens.tolist())
        self._experts.cache.seed(shares)
        order = preload_order(shares, without=self._spec.dense_layers)
        self._experts.adopt({which: held[which] for which in order if which in held})
        self._executor.run(prologue(self._table, page_slots=self._page_slots))

    def load(self, *, threads: int, progress: Progress) -> None:
        """See Backend. The most used experts are read first."""
        kept = len(self._table.resident)
        self._store.load_resident(threads=threads, progress=lambda done, total: None)
        self._executor.run(prologue(self._table, page_slots=self._page_slots))
        spec = self._spec
        counts = self._profile or [[0] * spec.num_experts] * spec.num_layers
        shares = shares_of(counts)
        self._experts.cache.seed(shares)
        self._experts.load(
            preload_order(shares, without=spec.dense_layers),
            progress=lambda done, total: progress(kept + done, kept + total),
        )

    def compute(
        self, groups: Sequence[Sequence[Segment]], *, all_logits: bool = False
    ) -> PassResult:
        """See Backend."""
        one = build_pass(groups, kv=self.kv, rope=self._rope, windows=self._spec.layer_windows,
                         native=self._native)  # fmt: skip
        self._forward.begin(one, wanted=None if all_logits else one.wanted)
        tasks = self._schedule(len(groups))
        start = time.perf_counter()
        timeline = self._executor.run(tasks)
        if self.foresight is not None:
            self.foresight.passed(time.perf_counter() - start, prompts=has_prompts(groups))
        if self._log is not None:
            self._log.end_pass()
        spans = sorted((*timeline.spans, *self._experts.take_spans()), key=lambda s: s.end_s)
        return PassResult(num_tokens=one.token_ids.numel(), last_tokens=one.last_tokens,
                          tasks=tasks, timeline=replace(timeline, spans=tuple(spans)))  # fmt: skip

    def logits(self, tokens: Tensor) -> Tensor:
        """See Backend."""
        return self._forward.logits(tokens)

    @property
    def bytes_read(self) -> int:
        """See Backend."""
        return self._store.bytes_read + self._experts.bytes_read

    @property
    def expert_tokens(self) -> Tensor:
        """See Backend."""
        return self._forward.expert_tokens

    @property
    def foresight(self) -> Foresight | None:
        """See Backend; None where nothing is to be read ahead."""
        return self._forward.foresight

    @property
    def counts(self) -> CacheCounts:
        """Hits and misses of the expert cache."""
        return self._experts.counts

    def close(self) -> None:
        """See Backend."""
        self._executor.close()
        self._experts.close()

    def _schedule(self, num_micro_batches: int) -> list[Task]:
        """The pass's schedule: that of streaming, with one page for all experts of a layer."""
        if num_micro_batches not in self._schedules:
            self._schedules[num_micro_batches] = zigzag(
                replace(self._table, num_experts=1), num_micro_batches=num_micro_batches,
                page_slots=self._page_slots,
            )  # fmt: skip
        return self._schedules[num_micro_batches]


def attention_only(table: PageTable) -> PageTable:
    """The same table without its experts."""
    streamed = tuple(where for where in table.streamed if where[1] == ATTENTION_PAGE)
    return replace(table, num_experts=0, streamed=streamed)
