"""What computes passes for the engine: weights, cache, schedule and executor behind three verbs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.layers import Rope
from moebatch.model.linear import ComputeType, Quantization
from moebatch.native.kernels import Kernels
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import table_of
from moebatch.plan.policy import Policy
from moebatch.plan.schedule import Lane, Task, prologue, zigzag
from moebatch.plan.timeline import Timeline
from moebatch.runtime.batch import Segment, build_pass
from moebatch.runtime.executor import Executor
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.forward import Attended, Forward
from moebatch.runtime.kv_cache import KVCache
from moebatch.runtime.native_attention import attends_natively
from moebatch.runtime.routing_log import RoutingLog
from moebatch.runtime.weight_store import WeightStore

Progress = Callable[[int, int], None]
LastTokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """A pass that was computed: its tokens, the last one of each segment, and what took how long."""

    num_tokens: int
    last_tokens: LastTokens
    tasks: Sequence[Task]
    timeline: Timeline


class Backend(Protocol):
    """Computes passes. Close it when the last one is done."""

    kv: KVCache
    one_by_one: bool  # whether a pass may have several segments of one sequence

    @property
    def foresight(self) -> Foresight | None:
        """Where a draft model tells what experts are to come; None where nothing is cached."""
        ...

    def load(self, *, threads: int, progress: Progress) -> None:
        """Read what stays in memory and start streaming the rest."""
        ...

    def compute(
        self, groups: Sequence[Sequence[Segment]], *, all_logits: bool = False
    ) -> PassResult:
        """One pass over the layers; `groups` are the segments of each micro-batch.

        `all_logits`: the logits of every token will be asked for, not only of last ones.
        """
        ...

    def logits(self, tokens: Tensor) -> Tensor:
        """float32 logits [S, V] of tokens [S] of the last pass, in host memory."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read from the checkpoint so far."""
        ...

    @property
    def expert_tokens(self) -> Tensor:
        """Tokens that each expert of each layer has computed."""
        ...

    def close(self) -> None:
        """Stop the lanes."""
        ...


class HostBackend:
    """A machine without accelerator: host memory is the top tier, zigzag the schedule."""

    one_by_one = True
    foresight: Foresight | None = None

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 compute: ComputeType, kernels: Kernels | None = None,
                 quantization: Quantization = "none", log: RoutingLog | None = None,
                 attended: Attended | None = None,
                 interrupted: Callable[[], bool] = lambda: False) -> None:  # fmt: skip
        """Allocate the page buffer and the KV cache. `interrupted`: see `Executor`.

        Without native kernels PyTorch computes everything. `log` records the routing, `attended` is
        told the hidden states after each layer's attention.
        """
        self._spec = spec
        self._table = table_of(spec, policy)
        self._page_slots = max(1, min(policy.page_slots, len(self._table.streamed)))
        self._store = WeightStore(
            checkpoint,
            spec=spec,
            family=family,
            table=self._table,
            page_slots=self._page_slots,
            compute=compute,
            kernels=kernels,
            quantization=quantization,
        )
        self.kv = host_cache(spec, policy, windows=spec.layer_windows)
        self._rope = Rope(spec.rope, spec.head_dim)
        self._native, self._log = attends_natively(spec, kernels), log
        self._forward = Forward(spec=spec, store=self._store, kv=self.kv, kernels=kernels,
                                routed=None if log is None else log.routed,
                                attended=attended)  # fmt: skip
        self._executor = Executor(self._forward.handlers, background=[Lane.DISK],
                                  interrupted=interrupted)  # fmt: skip
        self._schedules: dict[int, list[Task]] = {}

    def load(self, *, threads: int, progress: Progress) -> None:
        """See Backend."""
        self._store.load_resident(threads=threads, progress=progress)
        self._executor.run(prologue(self._table, page_slots=self._page_slots))

    def compute(
        self, groups: Sequence[Sequence[Segment]], *, all_logits: bool = False
    ) -> PassResult:
        """See Backend."""
        one = build_pass(groups, kv=self.kv, rope=self._rope, windows=self._spec.layer_windows,
                         native=self._native)  # fmt: skip
        self._forward.begin(one, wanted=None if all_logits else one.wanted)
        tasks = self._schedule(len(groups))
        timeline = self._executor.run(tasks)
        if self._log is not None:
            self._log.end_pass()
        return PassResult(num_tokens=one.token_ids.numel(), last_tokens=one.last_tokens,
                          tasks=tasks, timeline=timeline)  # fmt: skip

    def logits(self, tokens: Tensor) -> Tensor:
        """See Backend."""
        return self._forward.logits(tokens)

    @property
    def bytes_read(self) -> int:
        """See Backend."""
        return self._store.bytes_read

    @property
    def expert_tokens(self) -> Tensor:
        """See Backend."""
        return self._forward.expert_tokens

    def close(self) -> None:
        """See Backend."""
        self._executor.close()

    @property
    def store(self) -> WeightStore:
        """The weights; who takes over from a closed backend goes on with them."""
        return self._store

    def _schedule(self, num_micro_batches: int) -> list[Task]:
        """The pass's schedule; built once for each number of micro-batches."""
        if num_micro_batches not in self._schedules:
            self._schedules[num_micro_batches] = zigzag(
                self._table, num_micro_batches=num_micro_batches, page_slots=self._page_slots
            )
        return self._schedules[num_micro_batches]


def host_cache(spec: ModelSpec, policy: Policy, *, windows: Sequence[int | None] = ()) -> KVCache:
    """The KV cache in host memory; layers with one of the `windows` named keep no more than that."""
    return KVCache(
        num_layers=spec.num_layers,
        num_blocks=policy.kv_blocks,
        num_kv_heads=spec.cache_heads,
        head_dim=spec.cache_head_dim,
        value_dim=spec.cache_value_dim,
        dtype=policy.kv_dtype,
        windows=windows,
        max_sequences=policy.batch_size,
        draft_tokens=policy.draft_tokens,
    )
