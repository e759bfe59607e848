"""Weights under an accelerator: resident ones in its memory, streamed ones on their way there.

A layer's streamed bytes lie in one piece: in host memory at home ("pinned", "cpu"), or read from the
checkpoint when their turn comes ("disk"); on the device in one of two layer buffers. Pages are byte
ranges of that piece. A buffer's content is valid from its layer's last load until `free_layer`.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.experts import Expert
from moebatch.model.families import Family
from moebatch.model.families.parts import Part
from moebatch.model.grouped import ExpertStack, stacked
from moebatch.model.linear import ComputeType, Linear, pack
from moebatch.model.weights import (
    MATRICES,
    AttentionWeights,
    BaseFFN,
    Vocabulary,
    attention_weights,
    base_ffn,
    expert_of,
    norm_of,
)
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.pages import ATTENTION_PAGE, PageTable
from moebatch.plan.pipeline import STAGING_SLOTS, WEIGHT_BUFFERS
from moebatch.plan.schedule import Processor
from moebatch.plan.stream import Home, StreamPlan, stream_plan
from moebatch.runtime.device import Device
from moebatch.runtime.page_reader import PageReader
from moebatch.runtime.pinned_experts import HeldExperts

Where = tuple[int, int]
Parts = dict[str, Linear | Tensor]


class _Content:
    """A layer in one of the buffers; what is made of its bytes is made when first asked for."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.parts: dict[int, Parts] = {}


class DeviceStore:
    """The weights of one model on one device."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, table: PageTable,
                 device: Device, num_pages: int, homes: tuple[Home, ...], ffn: Processor,
                 compute: ComputeType) -> None:  # fmt: skip
        """Cut the layers and take the memory for streamed weights; nothing is read yet.

        Where the experts run on the host none of them is streamed, whatever the table says.
        Raises: NoFeasiblePolicy when the device's memory does not do.
        """
        self._spec, self._family = spec, family
        self._reader = PageReader(checkpoint, weight_dtype=spec.weight_dtype)
        self._device, self._compute, self._ffn = device, compute, ffn
        self._table = table if ffn == "gpu" else _attention_only(table)
        every = (*self._table.resident, *self._table.streamed)
        self._plans = {where: self._reader.plan(self._parts(where)) for where in every}
        sizes = {where: self._plans[where].num_bytes for where in self._table.streamed}
        self.plan: StreamPlan = stream_plan(self._table, sizes, num_pages=num_pages, homes=homes)
        self._images = {
            layer: self._image(homes[layer], self.plan.layers[layer].num_bytes)
            for layer in self.plan.streamed
            if homes[layer] != "disk"
        }
        count = WEIGHT_BUFFERS if self.plan.streamed else 0
        self._free = deque(
            device.empty((self.plan.buffer_bytes,), torch.uint8) for _ in range(count)
        )
        self._contents: dict[int, deque[_Content]] = defaultdict(deque)
        staged = any(homes[layer] != "pinned" for layer in self.plan.streamed)
        self._free_slots = deque(
            device.pinned(self.plan.page_bytes) for _ in range(STAGING_SLOTS if staged else 0)
        )
        self._staged: dict[Where, Tensor] = {}
        self._resident: dict[Where, Parts] = {}
        self._memory: dict[Where, Tensor] = {}  # of the resident pages, on the device
        self._host_experts: dict[Where, Parts] = {}
        self._last_read: tuple[Where, Tensor] | None = None
        self.sinks: dict[int, Tensor] = {}

    def load_resident(self, *, threads: int, progress: Callable[[int, int], None]) -> None:
        """Read all but what stays on disk; `progress(done, total)` counts pages."""
        self._vocabulary = self._load_vocabulary()
        on_disk = {layer for layer in self.plan.streamed if layer not in self._images}
        every = [*self._table.resident, *self._table.streamed]
        where = [w for w in every if w not in set(self._table.streamed) or w[0] not in on_disk]
        with ThreadPoolExecutor(max_workers=threads) as pool:
            for done, _ in enumerate(pool.map(self._load_one, where), start=1):
                progress(done, len(where))
        if self._spec.sinks:  # the host attends, so it needs them whatever page they are in
            for layer in range(self._spec.num_layers):
                part = next(p for p in self._parts((layer, ATTENTION_PAGE)) if p.name == "sinks")
                self.sinks[layer] = self._read_now(part).float()

    def stage_page(self, layer: int, page: int) -> None:
        """Copy or read a page into a staging slot."""
        cut = self.plan.layers[layer]
        first, last = cut.bounds[page], cut.bounds[page + 1]
        slot = self._free_slots.popleft()
        if layer in self._images:
            slot[: last - first].copy_(self._images[layer][first:last])
        else:
            self._read_range(layer, first, last, slot)
        self._staged[(layer, page)] = slot

    def load_page(self, layer: int, page: int) -> None:
        """Copy a page to the device, into the layer's buffer; its first page takes a free one."""
        cut = self.plan.layers[layer]
        if page == 0:
            self._contents[layer].append(_Content(self._free.popleft()))
        first, last = cut.bounds[page], cut.bounds[page + 1]
        target = self._contents[layer][-1].buffer[first:last]
        if self.plan.homes[layer] == "pinned":
            self._device.copy_in(target, self._images[layer][first:last])
            return
        slot = self._staged.pop((layer, page))
        self._device.copy_in(target, slot[: last - first])
        self._device.spoil(slot)
        self._free_slots.append(slot)

    def free_layer(self, layer: int) -> None:
        """Give a layer's buffer back; its views die."""
        content = self._contents[layer].popleft()
        self._device.spoil(content.buffer)
        self._free.append(content.buffer)

    def held_experts(self) -> HeldExperts:
        """The experts that are in memory anyway; those on the device until `give_up_experts`."""
        on_host = {}
        for layer, image in self._images.items():
            for unit in self.plan.layers[layer].units:
                if unit.index != ATTENTION_PAGE:
                    size = self._plans[layer, unit.index].num_bytes
                    on_host[layer, unit.index - 1] = image[unit.start : unit.start + size]
        on_device = {
            (layer, page - 1): memory
            for (layer, page), memory in self._memory.items()
            if page != ATTENTION_PAGE
        }
        return HeldExperts(on_host=on_host, on_device=on_device)

    def give_up_experts(self, table: PageTable) -> None:
        """Stream nothing any more: the pages of `table`, all but the experts, become resident.

        The experts' memory on the device and the layer buffers are given back; what was streamed
        comes from its image in host memory, or from the checkpoint. Nothing may be under way.
        Raises: DeviceMemoryFull.
        """
        cuts, images = self.plan.layers, self._images
        self._free_all_but_attention()
        self._table, self._ffn, self._host_experts = table, "gpu", {}
        self.plan = stream_plan(table, {}, num_pages=1, homes=self.plan.homes)
        self._images, self._staged, self._last_read = {}, {}, None
        self._free_slots.clear()
        for layer, page in table.resident:
            if (layer, page) in self._resident:
                continue
            if layer in images:
                start, size = cuts[layer].units[0].start, self._plans[layer, page].num_bytes
                self._keep((layer, page), images[layer][start : start + size])
            else:
                self._load_one((layer, page))

    def attention(self, layer: int) -> AttentionWeights:
        """The weights of a layer's attention page, which must be on the device."""
        return attention_weights(self._parts_of((layer, ATTENTION_PAGE)), self._spec)

    def base_ffn(self, layer: int) -> BaseFFN:
        """The FFN of every token in a layer's attention page."""
        size = self._spec.base_ffn_size(layer)
        return base_ffn(self._parts_of((layer, ATTENTION_PAGE)), size=size)

    def expert(self, layer: int, page: int) -> Expert:
        """An expert where it runs: on the device, or in host memory."""
        spec = self._spec
        host = self._ffn == "cpu"
        parts = self._host_experts[(layer, page)] if host else self._parts_of((layer, page))
        return expert_of(parts, index=page - 1, size=spec.expert_size, limit=spec.swiglu_limit)

    def stack(self, layer: int) -> ExpertStack | None:
        """A layer's streamed experts as one, where the device has grouped products for them."""
        spec, cut = self._spec, self.plan.layers[layer]
        units = [unit for unit in cut.units if unit.index != ATTENTION_PAGE]
        if not self._device.grouped or self._ffn == "cpu" or len(units) < 2 or spec.swiglu_limit:
            return None
        plan = {part.name: part for part in self._plans[(layer, units[0].index)].parts}
        gate_up, down = plan["gate_up"], plan["down"]
        if gate_up.dtype != down.dtype or len(plan) != 2:  # biases
            return None
        return stacked(
            self._contents[layer][0].buffer[units[0].start :],
            tuple(unit.index - 1 for unit in units),
            stride=units[1].start - units[0].start,
            gate_up=(gate_up.begin, gate_up.shape),
            down=(down.begin, down.shape),
            dtype=down.dtype,
        )

    def expert_pages(self, layer: int) -> range:
        """The pages of a layer's experts."""
        return self._table.expert_pages(layer)

    @property
    def vocabulary(self) -> Vocabulary:
        """Embedding in host memory; final norm and head on the device."""
        return self._vocabulary

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the experts compute, and want their inputs."""
        return torch.bfloat16 if self._compute == "bfloat16" else torch.float32

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read from the checkpoint so far."""
        return self._reader.bytes_read

    def _parts(self, where: Where) -> tuple[Part, ...]:
        layer, page = where
        if page == ATTENTION_PAGE:
            return self._family.attention_parts(self._spec, layer)
        return self._family.expert_parts(self._spec, layer, page - 1)

    def _read_now(self, part: Part) -> Tensor:
        plan = self._reader.plan([part])
        return self._reader.read(plan, _host_bytes(plan.num_bytes))[part.name]

    def _parts_of(self, where: Where) -> Parts:
        if where in self._resident:
            return self._resident[where]
        content = self._contents[where[0]][0]
        if where[1] not in content.parts:
            unit = next(u for u in self.plan.layers[where[0]].units if u.index == where[1])
            content.parts[where[1]] = self._views(where, content.buffer[unit.start : unit.end])
        return content.parts[where[1]]

    def _views(self, where: Where, memory: Tensor) -> Parts:
        """A page's parts as they are computed with, from its bytes in device memory."""
        found: Parts = {}
        for name, tensor in self._reader.views(self._plans[where], memory).items():
            linear = name in MATRICES
            found[name] = self._device.linear(tensor, self._compute) if linear else tensor.float()
        return found

    def _load_one(self, where: Where) -> None:
        layer, page = where
        plan = self._plans[where]
        unit = next((u for u in self.plan.layers[layer].units if u.index == page), None)
        if unit is not None:
            self._reader.read(plan, self._images[layer][unit.start : unit.end])
            return
        memory = _host_bytes(plan.num_bytes)
        tensors = self._reader.read(plan, memory)
        if page != ATTENTION_PAGE and self._ffn == "cpu":
            self._host_experts[where] = {
                name: pack(t, self._compute) if name in MATRICES else t.float()
                for name, t in tensors.items()
            }
            return
        self._keep(where, memory)

    def _keep(self, where: Where, memory: Tensor) -> None:
        """Bring a page to the device, to stay there."""
        held = self._device.empty((memory.numel(),), torch.uint8)
        held.copy_(memory)
        self._memory[where] = held
        self._resident[where] = self._views(where, held)

    def _free_all_but_attention(self) -> None:
        """Give back the device's memory of layer buffers and experts; nothing refers to it any more."""
        for contents in self._contents.values():
            self._free.extend(content.buffer for content in contents)
        self._contents.clear()
        while self._free:
            self._device.free(self._free.pop())
        for where in [w for w in self._memory if w[1] != ATTENTION_PAGE]:
            self._resident.pop(where)
            self._device.free(self._memory.pop(where))

    def _image(self, home: Home, num_bytes: int) -> Tensor:
        return self._device.pinned(num_bytes) if home == "pinned" else _host_bytes(num_bytes)

    def _read_range(self, layer: int, first: int, last: int, out: Tensor) -> None:
        """Bytes [first, last) of a layer that lies on disk; units are read whole, each once."""
        for unit in self.plan.layers[layer].units:
            begin, end = max(first, unit.start), min(last, unit.end)
            if begin >= end:
                continue
            where = (layer, unit.index)
            if self._last_read is None or self._last_read[0] != where:
                memory = _host_bytes(unit.end - unit.start)
                self._reader.read(self._plans[where], memory, cached=False)
                self._last_read = (where, memory)
            source = self._last_read[1][begin - unit.start : end - unit.start]
            out[begin - first : end - first].copy_(source)

    def _load_vocabulary(self) -> Vocabulary:
        parts = {part.name: part for part in self._family.vocabulary_parts(self._spec)}
        embedding = self._read_now(parts["embedding"])
        head = embedding if self._spec.tie_embeddings else self._read_now(parts["head"])
        vectors = {
            name: self._upload(self._read_now(part).float())
            for name, part in parts.items()
            if name not in ("embedding", "head")
        }
        return Vocabulary(
            embedding=embedding,
            final_norm=norm_of(vectors, "final_norm", self._spec),
            head=self._device.linear(self._upload(head), self._compute),
            head_bias=vectors.get("head_bias"),
        )

    def _upload(self, tensor: Tensor) -> Tensor:
        held = self._device.empty(tuple(tensor.shape), tensor.dtype)
        held.copy_(tensor)
        return held


def _host_bytes(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _attention_only(table: PageTable) -> PageTable:
    """The table without its experts."""
    kept = tuple(where for where in table.streamed if where[1] == ATTENTION_PAGE)
    return PageTable(num_layers=table.num_layers, num_experts=table.num_experts, streamed=kept,
                     dense=table.dense, base_ffn=table.base_ffn)  # fmt: skip
