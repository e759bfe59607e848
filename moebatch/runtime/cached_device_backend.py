"""The cache regime on an accelerator: all but the experts lives there, and as many experts as fit.

Passes run under a plain schedule of the pipeline without weights to stream; the experts of each layer
are scheduled as their routing becomes known.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from moebatch.errors import Interrupted, NoFeasiblePolicy
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType
from moebatch.plan.cached_fit import cached_policy, slot_bytes, tail_policy, tail_working_bytes
from moebatch.plan.eviction import eviction, preload_order, shares_of
from moebatch.plan.expert_cache import CacheCounts, ExpertCache
from moebatch.plan.hybrid import ExpertCosts
from moebatch.plan.memory import LOADERS
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.pages import PageTable
from moebatch.plan.policy import Policy
from moebatch.runtime.backend import PassResult, Progress
from moebatch.runtime.batch import Segment, has_prompts
from moebatch.runtime.cached_backend import Profile
from moebatch.runtime.device import Device
from moebatch.runtime.device_backend import DeviceBackend
from moebatch.runtime.device_forward import Routers
from moebatch.runtime.expert_slots import ExpertSlots, Urgency
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.hybrid_experts import HybridExperts
from moebatch.runtime.pinned_experts import PinnedExperts
from moebatch.runtime.warm_up import measured_costs

_HINT = "raise --gpu-memory, lower --expert-cache, or use --regime stream"
_CHUNKS = 8  # pieces of an expert on the link: between two of them something urgent may go first
_LEAST_CHUNK = 1 << 20
# Until they are measured: as if all lanes were equally fast.
_UNKNOWN = ExpertCosts(device_expert_s=1.0, host_expert_s=1.0, host_token_s=0.0, transfer_s=1.0)


class CachedDeviceBackend:
    """Weights, expert cache and lanes of one model on one device; see `Backend`."""

    one_by_one = False

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 device: Device, compute: ComputeType, profile: Profile | None = None,
                 costs: ExpertCosts | None = None, chunk_bytes: int | None = None,
                 interrupted: Callable[[], bool] = lambda: False,
                 before: DeviceBackend | None = None) -> None:  # fmt: skip
        """Take the device's memory.

        `policy` is made fit for the regime, see `cached_policy`. `profile`: tokens of each expert
        [L, E] in earlier runs, by which the cache is filled at first. `costs`: of the lanes; None:
        they are measured in `load`. `chunk_bytes`: of an expert that cross the link at a time.
        `before`: a closed backend to go on from, under its `policy`, with its KV cache and the weights
        in host memory; as many experts get a slot as the device has room for. There is nothing to
        load then.
        Raises: NoFeasiblePolicy when the device's memory does not do; of one to go on from, also
        ModelError when a file cannot be read, and Interrupted.
        """
        slots = min(policy.expert_slots, spec.num_expert_pages)
        fitted = (cached_policy if before is None else tail_policy)(policy)
        self._policy = replace(fitted, expert_slots=slots)
        self._spec, self._device = spec, device
        self._profile, self._costs, self._chunk_bytes = profile, costs, chunk_bytes
        try:
            self._store = PinnedExperts(
                checkpoint, spec=spec, family=family, device=device, compute=compute,
                num_slots=0 if before else slots,
                # No name for these: it would keep the device's memory when it is given back.
                held=None if before is None else before.store.held_experts(),
            )  # fmt: skip
            if before is not None:
                self._take_over(before, tail_working_bytes(spec, policy), interrupted)
            self._inner = DeviceBackend(
                checkpoint,
                spec=spec,
                family=family,
                policy=self._policy,
                device=device,
                compute=compute,
                interrupted=interrupted,
                table=_without_experts(spec),
                experts=self._make_experts,
                before=before,
            )
        except NoFeasiblePolicy as error:
            error.hint = _HINT
            raise
        self.kv = self._inner.kv
        if before is not None:
            self._inner.start()
            self._fill(before.expert_tokens.tolist())

    def _take_over(self, before: DeviceBackend, working_bytes: int,
                   interrupted: Callable[[], bool]) -> None:  # fmt: skip
        """Have all experts on the host, and as many slots on the device as there is room for beside
        the `working_bytes` of passes."""

        def look_up(done: int, total: int) -> None:
            if interrupted():
                raise Interrupted

        spec, memory = self._spec, self._device.memory
        before.give_up(_without_experts(spec))
        room = memory.limit - memory.used - working_bytes
        slots = min(self._policy.expert_slots, max(0, room // slot_bytes(spec)))
        self._policy = replace(self._policy, expert_slots=slots)
        self._store.add_slots(slots)
        self._store.load(threads=LOADERS, progress=look_up)

    def load(self, *, threads: int, progress: Progress) -> None:
        """See Backend. Then the cache is filled and the lanes are timed."""
        self._store.load(threads=threads, progress=progress)
        self._inner.load(threads=threads, progress=progress)
        self._fill(self._profile)

    def _fill(self, profile: Profile | None) -> None:
        """Bring the most used experts to the device and time the lanes."""
        spec = self._spec
        shares = shares_of(profile or [[0] * spec.num_experts] * spec.num_layers)
        if profile is not None:
            self._slots.cache.seed(shares)
        self._slots.preload(preload_order(shares, without=spec.dense_layers))
        if self._costs is None:
            self._experts.costs = measured_costs(
                self._store, self._slots.held, device=self._device, spec=spec
            )

    def compute(
        self, groups: Sequence[Sequence[Segment]], *, all_logits: bool = False
    ) -> PassResult:
        """See Backend."""
        start = time.perf_counter()
        done = self._inner.compute(groups, all_logits=all_logits)
        if self.foresight is not None:
            self.foresight.passed(time.perf_counter() - start, prompts=has_prompts(groups))
        spans = sorted([*done.timeline.spans, *self._experts.pass_ends()], key=lambda s: s.end_s)
        return replace(done, timeline=replace(done.timeline, spans=tuple(spans)))

    def logits(self, tokens: Tensor) -> Tensor:
        """See Backend."""
        return self._inner.logits(tokens)

    @property
    def bytes_read(self) -> int:
        """See Backend."""
        return self._inner.bytes_read + self._store.bytes_read

    @property
    def expert_tokens(self) -> Tensor:
        """See Backend."""
        return self._inner.expert_tokens

    @property
    def foresight(self) -> Foresight | None:
        """See Backend; None where nothing is to be brought ahead."""
        return self._experts.foresight

    @property
    def counts(self) -> CacheCounts:
        """Hits and misses of the expert cache."""
        return self._slots.cache.counts

    @property
    def costs(self) -> ExpertCosts:
        """What the lanes take for an expert."""
        return self._experts.costs

    @property
    def num_slots(self) -> int:
        """Experts that the accelerator has room for."""
        return self._policy.expert_slots

    @property
    def lane_facts(self) -> dict[str, Any]:
        """For the report: who computed how many experts, what crossed the link, the lanes' costs."""
        moved = self._slots.moved
        return {
            "computed": asdict(self._experts.lanes),
            "link_bytes": self._slots.bytes_moved,
            "brought": {u.name.lower(): moved[u] for u in Urgency},
            "costs_s": {k.removesuffix("_s"): v for k, v in asdict(self.costs).items()},
        }

    def close(self) -> None:
        """See Backend."""
        self._inner.close()
        self._experts.close()

    def _make_experts(self, routers: Routers) -> HybridExperts:
        spec, policy, store = self._spec, self._policy, self._store
        worth = eviction(policy.eviction, num_layers=spec.num_layers,
                         num_experts=spec.num_experts)  # fmt: skip
        # What is fetched replaces another whatever it is worth: it is needed now.
        cache = ExpertCache(policy.expert_slots, worth, keep_always=True)
        self._slots = ExpertSlots(
            store,
            cache=cache,
            device=self._device,
            num_slots=policy.expert_slots,
            chunk_bytes=self._chunk_bytes or max(_LEAST_CHUNK, store.slot_bytes // _CHUNKS),
        )
        self._experts = HybridExperts(
            spec=spec,
            store=store,
            slots=self._slots,
            device=self._device,
            routers=routers,
            policy=policy,
            costs=self._costs or _UNKNOWN,
        )
        return self._experts


def _without_experts(spec: ModelSpec) -> PageTable:
    """A table of resident attention pages alone."""
    return PageTable(
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        streamed=(),
        dense=frozenset(range(spec.num_layers)),
        base_ffn=frozenset(i for i in range(spec.num_layers) if spec.base_ffn_size(i)),
    )
