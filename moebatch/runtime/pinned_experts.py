"""All experts of a model in pinned host memory, and some of them in slots of accelerator memory.

Knows no policy: who decides what a slot holds is `expert_slots`. An expert's image is the same bytes
in both places, and computed with in place in both.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.experts import Expert
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType, Linear, in_place
from moebatch.model.weights import MATRICES, expert_of
from moebatch.plan.eviction import ExpertId
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.stream import ALIGN
from moebatch.runtime.device import Device
from moebatch.runtime.page_reader import PageReader

MakeLinear = Callable[[Tensor], Linear]


class PinnedExperts:
    """The experts of one model; `load` reads them all into host memory."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, device: Device,
                 num_slots: int, compute: ComputeType) -> None:  # fmt: skip
        """Take pinned memory for all experts and the device's memory for the slots.

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
        self._slots = [device.empty((self.slot_bytes,), torch.uint8) for _ in range(num_slots)]
        self._images = self._make_images()
        self._on_host: dict[ExpertId, Expert] = {}
        self._in_slot: dict[int, tuple[ExpertId, Expert]] = {}
        self._on_device: MakeLinear = lambda weight: device.linear(weight, compute)
        self._in_host_memory: MakeLinear = lambda weight: in_place(weight, compute)

    def load(self, *, threads: int, progress: Callable[[int, int], None]) -> None:
        """Read every expert; `progress(done, total)` counts them."""
        with ThreadPoolExecutor(max_workers=threads) as pool:
            for done, _ in enumerate(pool.map(self._load_one, self.experts), start=1):
                progress(done, len(self.experts))

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

    def _make_images(self) -> dict[ExpertId, Tensor]:
        """A piece of pinned memory for each layer, cut into its experts."""
        images: dict[ExpertId, Tensor] = {}
        for layer in range(self._spec.num_layers):
            count = self._spec.experts_in(layer)
            if not count:
                continue
            memory = self._device.pinned(count * self.slot_bytes)
            for expert in range(count):
                start = expert * self.slot_bytes
                size = self._plans[layer, expert].num_bytes
                images[layer, expert] = memory[start : start + size]
        return images


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
