"""Weights in their tier: resident pages in memory, streamed pages read from the checkpoint file.

A page buffer has a fixed number of slots. `load_page` (reader thread) fills a free slot, `free_page`
(caller's thread) gives it back; the schedule guarantees that a slot is free when a load starts.
Views of a streamed page are valid until its `free_page`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from threading import local

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.experts import Expert, make_expert
from moebatch.model.families import Family
from moebatch.model.families.base import Part
from moebatch.model.linear import (
    ComputeType,
    Linear,
    NativeLinear,
    Quantization,
    in_place,
    pack,
    quantize,
)
from moebatch.native.kernels import Kernels
from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec
from moebatch.plan.pages import ATTENTION_PAGE, PageTable

_ALIGN = 64  # a cache line; also the widest SIMD load
Where = tuple[int, int]
_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """All of a layer but its experts; vectors and the router in float32."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    output: Linear
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    router: Tensor | Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Embedding table [V, D] in the checkpoint's type, to be indexed; final norm and LM head."""

    embedding: Tensor | NativeLinear
    final_norm: Tensor
    head: Linear


class WeightStore:
    """The weights of one model under one page table."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family,
                 table: PageTable, page_slots: int, compute: ComputeType,
                 kernels: Kernels | None = None,
                 quantization: Quantization = "none") -> None:  # fmt: skip
        """Allocate the page buffer; nothing is read yet. Without kernels PyTorch computes.

        Quantisation needs kernels; it takes the matrices of the pages, not the vocabulary's.
        """
        assert quantization == "none" or kernels is not None
        self._quantization = quantization
        self._checkpoint, self._spec, self._family = checkpoint, spec, family
        self._table, self._compute, self._kernels = table, compute, kernels
        self._experts: dict[Where, Expert] = {}
        self._pages: dict[Where, dict[str, Linear | Tensor]] = {}
        self._slot_of: dict[Where, Tensor] = {}
        sizes = {w: self._layout(self._parts(w))[1] for w in table.streamed}
        slot_bytes = max(sizes.values(), default=0)
        slots = min(page_slots, len(table.streamed))
        self._free_slots = deque(_buffer(slot_bytes) for _ in range(slots))
        self.bytes_read = 0

    def load_resident(self, *, threads: int, progress: Callable[[int, int], None]) -> None:
        """Read the vocabulary and every resident page; `progress(done, total)` counts pages.

        At most `threads` pages are under way at once, each in a reusable buffer.
        """
        where = self._table.resident
        self._vocabulary = self._load_vocabulary()
        scratch = local()  # one staging buffer a worker, as large as the largest page it met

        def load(one: Where) -> None:
            parts = self._parts(one)
            size = self._layout(parts)[1]
            if getattr(scratch, "buffer", None) is None or scratch.buffer.numel() < size:
                scratch.buffer = _buffer(size)
            tensors = self._read(parts, scratch.buffer)
            self._put(one, {name: self._keep(name, tensor) for name, tensor in tensors.items()})

        with ThreadPoolExecutor(max_workers=threads) as pool:
            for done, _ in enumerate(pool.map(load, where), start=1):
                progress(done, len(where))

    def load_page(self, layer: int, page: int) -> None:
        """Fill a free slot with a streamed page. Runs on the reader's thread."""
        where = (layer, page)
        slot = self._free_slots.popleft()
        parts = self._parts(where)
        tensors = self._read(parts, slot)
        for part in parts:
            for name in part.sources:
                self._checkpoint.forget(self._checkpoint.entry(name))
        self._slot_of[where] = slot
        self._put(where, {name: self._view(name, tensor) for name, tensor in tensors.items()})

    def free_page(self, layer: int, page: int) -> None:
        """Give a streamed page's slot back; its views die."""
        del self._pages[(layer, page)]
        self._experts.pop((layer, page), None)
        self._free_slots.append(self._slot_of.pop((layer, page)))

    def attention(self, layer: int) -> AttentionWeights:
        """The weights of a layer's attention page, which must be there."""
        page = self._pages[(layer, ATTENTION_PAGE)]
        return AttentionWeights(
            input_norm=_tensor(page["input_norm"]),
            post_norm=_tensor(page["post_norm"]),
            qkv=_linear(page["qkv"]),
            output=_linear(page["output"]),
            qkv_bias=_optional(page.get("qkv_bias")),
            output_bias=_optional(page.get("output_bias")),
            q_norm=_optional(page.get("q_norm")),
            k_norm=_optional(page.get("k_norm")),
            router=page.get("router"),
        )

    def expert(self, layer: int, page: int) -> Expert:
        """The expert of an expert page, which must be there."""
        return self._experts[(layer, page)]

    def is_resident(self, layer: int, page: int) -> bool:
        """Whether a page stays in memory for good."""
        return (layer, page) not in self._slot_of

    @property
    def vocabulary(self) -> Vocabulary:
        """Embedding, final norm and head; there once `load_resident` has run."""
        return self._vocabulary

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the experts want their inputs."""
        if self._kernels is not None:
            return torch.float32  # they round x themselves
        return torch.bfloat16 if self._compute == "bfloat16" else torch.float32

    def _parts(self, where: Where) -> tuple[Part, ...]:
        layer, page = where
        if page == ATTENTION_PAGE:
            return self._family.attention_parts(self._spec, layer)
        return self._family.expert_parts(self._spec, layer, page - 1)

    def _layout(self, parts: Sequence[Part]) -> tuple[list[int], int]:
        """Offset of each part in a page buffer, and the bytes of all."""
        offsets, end = [], 0
        for part in parts:
            offsets.append(end)
            item = DTYPE_BYTES[self._checkpoint.entry(part.sources[0]).dtype]
            end += -(-prod(part.shape) * item // _ALIGN) * _ALIGN
        return offsets, end

    def _read(self, parts: Sequence[Part], buffer: Tensor) -> dict[str, Tensor]:
        """Read parts into a byte buffer; views of it, in the checkpoint's types."""
        memory = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy 2 arrays are buffers
        tensors = {}
        for part, offset in zip(parts, self._layout(parts)[0], strict=True):
            end = offset
            for name in part.sources:
                entry = self._checkpoint.entry(name)
                self._checkpoint.read_into(entry, memory[end : end + entry.num_bytes])
                end += entry.num_bytes
                dtype = _TORCH_DTYPES[entry.dtype]
            self.bytes_read += end - offset
            tensors[part.name] = buffer[offset:end].view(dtype).view(part.shape)
        return tensors

    def _put(self, where: Where, parts: dict[str, Linear | Tensor]) -> None:
        """Make a page available."""
        self._pages[where] = parts
        if where[1] != ATTENTION_PAGE:
            self._experts[where] = make_expert(
                where[1] - 1,
                size=self._spec.expert_size,
                gate_up=_linear(parts["gate_up"]),
                down=_linear(parts["down"]),
            )

    def _keep(self, name: str, tensor: Tensor) -> Linear | Tensor:
        """The form in which a part stays in memory: a copy, since the buffer is used again."""
        if _is_matrix(name) and self._quantization == "int8" and self._kernels is not None:
            return quantize(tensor, self._compute, self._kernels)
        if _is_matrix(name):
            return pack(tensor, self._compute, self._kernels)
        return self._small(name, tensor, copy=True)

    def _view(self, name: str, tensor: Tensor) -> Linear | Tensor:
        """The form in which a streamed part is used: the matrices in place, or quantised anew."""
        if _is_matrix(name) and self._quantization != "none":
            return self._keep(name, tensor)
        if _is_matrix(name):
            return in_place(tensor, self._compute, self._kernels)
        return self._small(name, tensor, copy=False)

    def _small(self, name: str, tensor: Tensor, *, copy: bool) -> Linear | Tensor:
        """Vectors and the router are held in float32."""
        values = tensor.to(torch.float32, copy=copy)
        if name == "router" and self._kernels is not None:
            return NativeLinear(values, self._kernels, round_x=False)
        return values

    def _load_vocabulary(self) -> Vocabulary:
        parts = {part.name: part for part in self._family.vocabulary_parts(self._spec)}
        loaded = {}
        for name in ("embedding", "final_norm"):
            buffer = _buffer(self._layout([parts[name]])[1])
            loaded[name] = self._read([parts[name]], buffer)[name]
        embedding: Tensor | NativeLinear = loaded["embedding"]
        if self._spec.tie_embeddings:
            head = in_place(loaded["embedding"], self._compute, self._kernels)
            embedding = head if isinstance(head, NativeLinear) else loaded["embedding"]
        else:
            buffer = _buffer(self._layout([parts["head"]])[1])
            head = pack(self._read([parts["head"]], buffer)["head"], self._compute, self._kernels)
        return Vocabulary(
            embedding=embedding,
            final_norm=loaded["final_norm"].float(),
            head=head,
        )


def _buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _is_matrix(name: str) -> bool:
    """Whether a part is applied by `Linear`; vectors and the small router stay float32 tensors."""
    return name in ("qkv", "output", "gate_up", "down")


def _tensor(part: Linear | Tensor) -> Tensor:
    assert isinstance(part, Tensor)
    return part


def _linear(part: Linear | Tensor) -> Linear:
    assert not isinstance(part, Tensor)
    return part


def _optional(part: Linear | Tensor | None) -> Tensor | None:
    return None if part is None else _tensor(part)
