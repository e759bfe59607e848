"""All experts of a model in pinned host memory, and some of them in slots of accelerator memory.

Knows no policy: who decides what a slot holds is `expert_slots`. An expert's image is the same bytes
in both places, and computed with in place in both.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.experts import Expert
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType, Linear, in_place
from moebatch.model.weights import MATRICES, expert_of
from moebatch.plan.eviction import ExpertId
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.schedule import Lane, Op, Task
from moebatch.plan.stream import ALIGN
from moebatch.runtime.device import Device
from moebatch.runtime.executor import Queue, ThreadQueue
from moebatch.runtime.page_reader import PageReader

MakeLinear = Callable[[Tensor], Linear]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldExperts:
    """Experts' bytes, as a checkpoint's page has them: in host memory, or in the device's alone."""

    on_host: Mapping[ExpertId, Tensor] = field(default_factory=dict)
    on_device: Mapping[ExpertId, Tensor] = field(default_factory=dict)


class PinnedExperts:
    """The experts of one model; `load` reads those into host memory that are not there."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, device: Device,
                 num_slots: int, compute: ComputeType,
                 held: HeldExperts | None = None) -> None:  # fmt: skip
        """Take pinned memory for all experts and the device's memory for the slots.

        Of those that are `held`, memory on the host is taken over; from the device they are copied,
        at once.
        Raises: NoFeasiblePolicy when the device's memory does not do.
        """
        self._spec, self._device = spec, device
        self._reader = PageReader(checkpoint, weight_dtype=spec.weight_dtype)
        self.experts: list[ExpertId] = [
            (i, e) for i in range(spec.num_layers) for e in range(spec.experts_in(i))
        ]
        self._plans = {
            (i, e): self._reader.plan(family.expert_parts(spec, i, e)) for i, e in self.experts
        }
        self.slot_bytes = _aligned(max((p.num_bytes for p in self._plans.values()), default=0))
        self._slots: list[Tensor] = []
        self.add_slots(num_slots)
        held = held or HeldExperts()
        self._images = self._make_images(held.on_host)
        self._copy_out(held.on_device)
        here = held.on_host.keys() | held.on_device.keys()
        self._missing = [which for which in self.experts if which not in here]
        self._on_host: dict[ExpertId, Expert] = {}
        self._in_slot: dict[int, tuple[ExpertId, Expert]] = {}
        self._on_device: MakeLinear = lambda weight: device.linear(weight, compute)
        self._in_host_memory: MakeLinear = lambda weight: in_place(weight, compute)

    def load(self, *, threads: int, progress: Callable[[int, int], None]) -> None:
        """Read every expert that is not there; `progress(done, total)` counts them."""
        with ThreadPoolExecutor(max_workers=threads) as pool:
            for done, _ in enumerate(pool.map(self._load_one, self._missing), start=1):
                progress(done, len(self._missing))

    def add_slots(self, count: int) -> None:
        """Take the device's memory for so many more slots.

        Raises: NoFeasiblePolicy when it does not do.
        """
        empty = self._device.empty
        self._slots += [empty((self.slot_bytes,), torch.uint8) for _ in range(count)]

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint so far."""
        return self._reader.bytes_read

    def image(self, which: ExpertId) -> Tensor:
        """An expert's bytes in pinned memory."""
        return self._images[which]

    def slot(self, number: int, which: ExpertId) -> Tensor:
        """The bytes of a slot that an expert takes."""
        return self._slots[number][: self._images[which].numel()]

    def clear(self, number: int) -> None:
        """What a slot holds will not be read again; its views die."""
        self._in_slot.pop(number, None)
        self._device.spoil(self._slots[number])

    def on_host(self, which: ExpertId) -> Expert:
        """An expert where it lies in host memory."""
        if which not in self._on_host:
            self._on_host[which] = self._view(which, self._images[which], self._in_host_memory)
        return self._on_host[which]

    def on_device(self, number: int, which: ExpertId) -> Expert:
        """An expert in a slot that holds it; valid until `clear`."""
        held = self._in_slot.get(number)
        if held is None or held[0] != which:
            view = self._view(which, self.slot(number, which), self._on_device)
            held = self._in_slot[number] = (which, view)
        return held[1]

    def _view(self, which: ExpertId, memory: Tensor, make: MakeLinear) -> Expert:
        spec = self._spec
        found: dict[str, Linear | Tensor] = {
            name: make(tensor) if name in MATRICES else tensor.float()
            for name, tensor in self._reader.views(self._plans[which], memory).items()
        }
        return expert_of(found, index=which[1], size=spec.expert_size, limit=spec.swiglu_limit)

    def _load_one(self, which: ExpertId) -> None:
        self._reader.read(self._plans[which], self._images[which])

    def _make_images(self, on_host: Mapping[ExpertId, Tensor]) -> dict[ExpertId, Tensor]:
        """A piece of pinned memory for each layer, cut into its experts that are not on the host."""
        images = dict(on_host)
        for layer in range(self._spec.num_layers):
            every = [(layer, expert) for expert in range(self._spec.experts_in(layer))]
            missing = [which for which in every if which not in on_host]
            if not missing:
                continue
            memory = self._device.pinned(len(missing) * self.slot_bytes)
            for k, which in enumerate(missing):
                start = k * self.slot_bytes
                images[which] = memory[start : start + self._plans[which].num_bytes]
        return images

    def _copy_out(self, on_device: Mapping[ExpertId, Tensor]) -> None:
        """Fill the images of experts that lie on the device alone."""
        queue: Queue = self._device.queues.get(Lane.D2H, ThreadQueue())
        for (layer, expert), memory in on_device.items():
            image = self._images[layer, expert]
            task = Task(Op.LOAD_PAGE, Lane.D2H, layer, page=expert + 1)
            signal = queue.launch(lambda _, i=image, m=memory: self._device.copy_out(i, m), task)  # type: ignore[misc]
            signal.wait()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
