"""Computes passes on an accelerator, under any of the pipeline's schedules."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.layers import Rope
from moebatch.model.linear import ComputeType
from moebatch.plan.device_fit import disk_layers
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import table_of
from moebatch.plan.pages import PageTable, share
from moebatch.plan.pipeline import STYLES, Phase, Step, kv_slots, pass_tasks, stream_prologue
from moebatch.plan.policy import Policy
from moebatch.plan.schedule import Task
from moebatch.plan.stream import Home, StreamPlan
from moebatch.runtime.backend import PassResult, Progress, host_cache
from moebatch.runtime.batch import Segment, build_pass
from moebatch.runtime.device import BACKGROUND_LANES, Device
from moebatch.runtime.device_batch import phase_of
from moebatch.runtime.device_forward import DeviceForward, Experts, Routers
from moebatch.runtime.device_store import DeviceStore
from moebatch.runtime.executor import Executor
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.kv_cache import KVCache


class DeviceBackend:
    """Weights, caches and lanes of one model on one device; see `Backend`.

    A micro-batch of the engine becomes up to two here: its rows that decode, and its prompts, which
    are always attended on the device. Prompts so share a pass, and its weights, with decode.
    A row that decodes brings its own key only: what else it attends to is from earlier passes.
    """

    one_by_one = False
    foresight: Foresight | None = None

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 device: Device, compute: ComputeType, homes: tuple[Home, ...] | None = None,
                 interrupted: Callable[[], bool] = lambda: False,
                 table: PageTable | None = None,
                 experts: Callable[[Routers], Experts] | None = None,
                 before: "DeviceBackend | None" = None) -> None:  # fmt: skip
        """Take the device's memory for weights and caches.

        `homes`: where each layer's streamed weights lie; None: in pinned memory, but for the policy's
        share on disk. `interrupted`: see `Executor`. `table` replaces the policy's, and `experts` makes
        what computes the experts that are not in it. `before`: a backend that was given up, to go on
        from with its weights and caches; there is nothing to load then.
        Raises: NoFeasiblePolicy when the device's memory does not do.
        """
        self._spec, self._policy, self._device = spec, policy, device
        style = STYLES[policy.schedule]
        self._group = max(policy.experts_grouped, style.group(policy.num_micro_batches))
        self.store: DeviceStore = before.store if before else DeviceStore(
            checkpoint,
            spec=spec,
            family=family,
            table=table or table_of(spec, policy),
            device=device,
            num_pages=style.num_pages(policy.num_micro_batches),
            homes=homes or layer_homes(spec, policy),
            ffn=policy.ffn,
            compute=compute,
        )  # fmt: skip
        self._take_caches(before)
        self._rope = Rope(spec.rope, spec.head_dim)
        self._forward = DeviceForward(
            spec=spec,
            store=self.store,
            kv=self.kv,
            device=device,
            device_kv=self._device_kv,
            kv_slots=kv_slots(policy.schedule, policy.attention, self._group),
            experts=None if experts is None else experts(self.store),
        )
        if before is not None:
            self._forward.expert_tokens = before.expert_tokens
        self._expert_tokens = self._forward.expert_tokens
        self._executor = Executor(
            self._forward.handlers, background=BACKGROUND_LANES, queues=device.queues,
            interrupted=interrupted,
        )  # fmt: skip
        self._schedules: dict[tuple[Phase, ...], tuple[Step, list[Task]]] = {}

    @property
    def stream(self) -> StreamPlan:
        """How the layers are cut."""
        return self.store.plan

    def load(self, *, threads: int, progress: Progress) -> None:
        """See Backend."""
        self.store.load_resident(threads=threads, progress=progress)
        self.start()

    def start(self) -> None:
        """Begin to stream; for what goes on from another backend, in place of `load`."""
        self.prologue = stream_prologue(self.store.plan)
        self.prologue_timeline = self._executor.run(self.prologue)

    def compute(self, groups: Sequence[Sequence[Segment]], *, all_logits: bool = False,
                ) -> PassResult:  # fmt: skip
        """See Backend."""
        places = [
            [(g, k) for k, segment in enumerate(group) if (len(segment.token_ids) == 1) == single]
            for single in (True, False)
            for g, group in enumerate(groups)
        ]
        places = [place for place in places if place]
        split = [[groups[g][k] for g, k in place] for place in places]
        one = build_pass(split, kv=self.kv, rope=self._rope, windows=self._spec.layer_windows)
        step, tasks = self._schedule(tuple(phase_of(segments) for segments in split))
        self._forward.begin(one, step, wanted=None if all_logits else one.wanted)
        timeline = self._executor.run(tasks)
        last = {
            where: token
            for place, tokens in zip(places, one.last_tokens, strict=True)
            for where, token in zip(place, tokens, strict=True)
        }
        return PassResult(
            num_tokens=one.token_ids.numel(),
            last_tokens=tuple(
                tuple(last[(g, k)] for k in range(len(group))) for g, group in enumerate(groups)
            ),
            tasks=tasks,
            timeline=timeline,
        )

    def logits(self, tokens: Tensor) -> Tensor:
        """See Backend."""
        return self._forward.logits(tokens)

    @property
    def bytes_read(self) -> int:
        """See Backend."""
        return self.store.bytes_read

    @property
    def expert_tokens(self) -> Tensor:
        """See Backend."""
        return self._expert_tokens

    def close(self) -> None:
        """See Backend. The device is the caller's to close."""
        self._executor.close()

    def give_up(self, table: PageTable) -> None:
        """Keep caches, and of the weights those of `table`: all but the experts, now resident.

        All other memory of the device is given back. The backend must be closed; another may go on.
        Raises: DeviceMemoryFull.
        """
        self._forward.free()
        del self._forward  # its views would keep what was given back
        self.store.give_up_experts(table)

    def _schedule(self, phases: tuple[Phase, ...]) -> tuple[Step, list[Task]]:
        """A pass's step and its tasks; built once for each kind of pass."""
        if phases not in self._schedules:
            step = Step(
                stream=self.store.plan,
                micro_batches=phases,
                attention=self._policy.attention,
                ffn=self._policy.ffn,
                kv_on_gpu=self._kv_on_gpu,
                group=self._group,
            )
            self._schedules[phases] = (step, pass_tasks(self._policy.schedule, step))
        return self._schedules[phases]

    def _take_caches(self, before: "DeviceBackend | None") -> None:
        """The host's cache and what of it lies on the device; those of `before` where there is one."""
        self.kv: KVCache
        self._device_kv: KVCache | None
        self._kv_on_gpu: tuple[bool, ...]
        if before is not None:
            self.kv, self._device_kv = before.kv, before._device_kv
            self._kv_on_gpu = before._kv_on_gpu
            return
        self.kv = host_cache(self._spec, self._policy)
        self._kv_on_gpu = kv_layers(self._spec, self._policy)
        self._device_kv = self._device_cache() if any(self._kv_on_gpu) else None
        self.kv.followers += [self._device_kv] if self._device_kv is not None else []

    def _device_cache(self) -> KVCache:
        """The layers of the KV cache that stay on the device; the others take nothing."""

        def empty(layer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if not self._kv_on_gpu[layer]:
                return torch.empty(0)
            return self._device.empty(shape, dtype).zero_()

        spec, policy = self._spec, self._policy
        return KVCache(
            num_layers=spec.num_layers,
            num_blocks=policy.kv_blocks,
            num_kv_heads=spec.cache_heads,
            head_dim=spec.cache_head_dim,
            value_dim=spec.cache_value_dim,
            dtype=policy.kv_dtype,
            empty=empty,
        )


def kv_layers(spec: ModelSpec, policy: Policy) -> tuple[bool, ...]:
    """Which layers' KV cache stays on the device: `kv_resident` of them, spread evenly."""
    if policy.attention == "cpu":
        return (False,) * spec.num_layers
    kept = round(policy.kv_resident * spec.num_layers)
    return tuple(share(i, kept, spec.num_layers) == 1 for i in range(spec.num_layers))


def layer_homes(spec: ModelSpec, policy: Policy) -> tuple[Home, ...]:
    """Where each layer's streamed weights lie: some on disk, spread evenly, the others pinned."""
    count = disk_layers(spec, policy)
    return tuple(
        "disk" if share(i, count, spec.num_layers) else "pinned" for i in range(spec.num_layers)
    )
