"""Which backend computes on the host: streaming whole layers, a cache of experts, or one and then the
other at the tail of a job."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType, Quantization
from moebatch.native.kernels import Kernels
from moebatch.plan.expert_cache import CacheCounts
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.runtime.admission import Remainder
from moebatch.runtime.backend import Backend, HostBackend, PassResult, Progress
from moebatch.runtime.batch import Segment
from moebatch.runtime.cached_backend import CachedHostBackend, Profile
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.routing_log import RoutingLog


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeFacts:
    """What a report says: the regime that was begun with, the pass before which it was left for the
    cache (0 is the first; None: never), and what the cache found. `lanes`: who computed the experts,
    where there is an accelerator."""

    regime: str
    changed_before_pass: int | None = None
    counts: CacheCounts | None = None
    expert_slots: int = 0
    lanes: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what the cache found only where there was one."""
        found: dict[str, Any] = {
            "regime": self.regime,
            "changed_before_pass": self.changed_before_pass,
        }
        if self.counts is None:
            return found
        return {**found, "expert_slots": self.expert_slots, **asdict(self.counts),
                "hit_rate": self.counts.hit_rate, **(self.lanes or {})}  # fmt: skip


class CachedBackend(Backend, Protocol):
    """A backend of the cache regime."""

    @property
    def counts(self) -> CacheCounts:
        """Hits and misses of its expert cache."""
        ...


Streaming = TypeVar("Streaming", bound=Backend)


class TailBackend(Generic[Streaming]):
    """Streams until the tail of the job, then goes on with a cache of experts; see Backend.

    Nothing is lost: the KV cache stays where it is, and so does what is needed of the weights. The
    memory of buffers, and of KV blocks that nobody will need, is room for more experts.
    """

    def __init__(self, streaming: Streaming, *, policy: Policy,
                 cached: Callable[[Streaming], CachedBackend]) -> None:  # fmt: skip
        """`cached` makes the second backend of the first one, once that is closed."""
        self.streaming, self._make_cached, self._policy = streaming, cached, policy
        self.cached: CachedBackend | None = None
        self._now: Backend = streaming
        self._passes = 0
        self.kv, self.one_by_one = streaming.kv, streaming.one_by_one
        self.changed_before_pass: int | None = None

    @property
    def foresight(self) -> Foresight | None:
        """See Backend."""
        return self._now.foresight

    @property
    def counts(self) -> CacheCounts | None:
        """Hits and misses since the change."""
        return None if self.cached is None else self.cached.counts

    def look(self, left: Remainder) -> None:
        """The tail has begun: change over if so few rows are left that it pays, for long enough."""
        few = left.rows <= self._policy.tail_rows and left.passes >= self._policy.tail_passes
        if self.cached is not None or not few:
            return
        self.streaming.close()
        self.kv.give_back(self.kv.num_blocks - left.reserved_blocks)
        self._now = self.cached = self._make_cached(self.streaming)
        self.changed_before_pass = self._passes

    def load(self, *, threads: int, progress: Progress) -> None:
        """See Backend."""
        self._now.load(threads=threads, progress=progress)

    def compute(
        self, groups: Sequence[Sequence[Segment]], *, all_logits: bool = False
    ) -> PassResult:
        """See Backend."""
        self._passes += 1
        return self._now.compute(groups, all_logits=all_logits)

    def logits(self, tokens: Tensor) -> Tensor:
        """See Backend."""
        return self._now.logits(tokens)

    @property
    def bytes_read(self) -> int:
        """See Backend."""
        return self._now.bytes_read

    @property
    def expert_tokens(self) -> Tensor:
        """See Backend."""
        return self._now.expert_tokens

    def close(self) -> None:
        """See Backend."""
        self._now.close()


def look(backend: Backend, left: Remainder) -> float:
    """Let a backend see the tail of its job; the seconds that a change took, which are decoding's."""
    start = time.perf_counter()
    if isinstance(backend, TailBackend):
        backend.look(left)
    return time.perf_counter() - start


def host_backend(checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 compute: ComputeType, kernels: Kernels | None, quantization: Quantization,
                 profile: Profile | None, log: RoutingLog | None,
                 interrupted: Callable[[], bool]) -> Backend:  # fmt: skip
    """The backend for a policy's regime."""

    def cached(before: HostBackend | None) -> CachedHostBackend:
        return CachedHostBackend(
            checkpoint, spec=spec, family=family, policy=policy, compute=compute,
            kernels=kernels, quantization=quantization, profile=profile, log=log, before=before,
            interrupted=interrupted,
        )  # fmt: skip

    if policy.regime == "cache":
        return cached(None)
    streaming = HostBackend(checkpoint, spec=spec, family=family, policy=policy, compute=compute,
                            kernels=kernels, quantization=quantization, log=log,
                            interrupted=interrupted)  # fmt: skip
    if not policy.tail_rows:
        return streaming
    return TailBackend(streaming, policy=policy, cached=cached)


def regime_facts(backend: Backend, policy: Policy) -> RegimeFacts | None:
    """What there is to report of a backend of the host; None for another one."""
    if isinstance(backend, TailBackend):
        return RegimeFacts(regime="stream", changed_before_pass=backend.changed_before_pass,
                           counts=backend.counts, expert_slots=policy.expert_slots)  # fmt: skip
    if isinstance(backend, CachedHostBackend):
        return RegimeFacts(regime="cache", counts=backend.counts,
                           expert_slots=policy.expert_slots)  # fmt: skip
    return RegimeFacts(regime="stream") if isinstance(backend, HostBackend) else None
