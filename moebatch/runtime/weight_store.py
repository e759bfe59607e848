"""Weights in their tier: resident pages in memory, streamed pages read from the checkpoint file.

A page buffer has a fixed number of slots. `load_page` (reader thread) fills a free slot, `free_page`
(caller's thread) gives it back; the schedule guarantees that a slot is free when a load starts.
Views of a streamed page are valid until its `free_page`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from threading import local

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.experts import Expert
from moebatch.model.families import Family
from moebatch.model.families.parts import Layout, Part
from moebatch.model.linear import ComputeType, Linear, in_place, pack
from moebatch.model.quant import arrange, decode
from moebatch.model.stored import Stored, locate, sources_of
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
from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec
from moebatch.plan.pages import ATTENTION_PAGE, PageTable

_ALIGN = 64  # a cache line; also the widest SIMD load
Where = tuple[int, int]
_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}


class WeightStore:
    """The weights of one model under one page table."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family,
                 table: PageTable, page_slots: int, compute: ComputeType) -> None:  # fmt: skip
        """Allocate the page buffer; nothing is read yet."""
        self._checkpoint, self._spec, self._family = checkpoint, spec, family
        self._table, self._compute = table, compute
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
            self._pages[one] = {
                name: _keep(name, tensor, self._compute) for name, tensor in tensors.items()
            }

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
            for stored in sources_of(self._checkpoint, part):
                for entry in stored.entries:
                    self._checkpoint.forget(entry)
        self._slot_of[where] = slot
        self._pages[where] = {
            name: _view(name, tensor, self._compute) for name, tensor in tensors.items()
        }

    def free_page(self, layer: int, page: int) -> None:
        """Give a streamed page's slot back; its views die."""
        del self._pages[(layer, page)]
        self._free_slots.append(self._slot_of.pop((layer, page)))

    def attention(self, layer: int) -> AttentionWeights:
        """The weights of a layer's attention page, which must be there."""
        return attention_weights(self._pages[(layer, ATTENTION_PAGE)], self._spec)

    def base_ffn(self, layer: int) -> BaseFFN:
        """The FFN of every token in a layer's attention page, which must be there and have one."""
        size = self._spec.base_ffn_size(layer)
        return base_ffn(self._pages[(layer, ATTENTION_PAGE)], size=size)

    def expert(self, layer: int, page: int) -> Expert:
        """The expert of an expert page, which must be there."""
        spec, parts = self._spec, self._pages[(layer, page)]
        return expert_of(parts, index=page - 1, size=spec.expert_size, limit=spec.swiglu_limit)

    @property
    def vocabulary(self) -> Vocabulary:
        """Embedding, final norm and head; there once `load_resident` has run."""
        return self._vocabulary

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the experts compute, and want their inputs."""
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
            item = DTYPE_BYTES[self._dtype_of(part)]
            end += -(-prod(part.shape) * item // _ALIGN) * _ALIGN
        return offsets, end

    def _dtype_of(self, part: Part) -> str:
        """The type in which a part is held: the checkpoint's, unless it is quantised there."""
        stored = locate(self._checkpoint, part.sources[0])
        return stored.entries[0].dtype if stored.kind == "plain" else self._spec.weight_dtype

    def _read(self, parts: Sequence[Part], buffer: Tensor) -> dict[str, Tensor]:
        """Read parts into a byte buffer in our layout; views of it, in the types they are held in."""
        tensors = {}
        for part, offset in zip(parts, self._layout(parts)[0], strict=True):
            dtype = _TORCH_DTYPES[self._dtype_of(part)]
            count = prod(part.shape)
            tensor = buffer[offset : offset + count * dtype.itemsize].view(dtype).view(part.shape)
            first = 0
            for source in part.sources:
                stored = locate(self._checkpoint, source)
                rows = part.shape[0] * prod(stored.shape) // count
                self._fill(tensor[first : first + rows], stored, part.layout)
                first += rows
            tensors[part.name] = tensor
        return tensors

    def _read_one(self, part: Part) -> Tensor:
        return self._read([part], _buffer(self._layout([part])[1]))[part.name]

    def _fill(self, out: Tensor, stored: Stored, layout: Layout) -> None:
        """Read one source into its rows of a part, at once where it lies as we hold it."""
        self.bytes_read += stored.num_bytes
        if stored.kind == "plain" and layout == "rows":
            self._checkpoint.read_into(stored.entries[0], _bytes_of(out))
            return
        raw = []
        for entry in stored.entries:
            tensor = torch.empty(entry.shape, dtype=_TORCH_DTYPES[entry.dtype])
            self._checkpoint.read_into(entry, _bytes_of(tensor))
            raw.append(tensor)
        matrix = decode(stored, raw, self._checkpoint.quantization)
        arrange(out, matrix, stored.arrangement(layout))

    def _load_vocabulary(self) -> Vocabulary:
        parts = {part.name: part for part in self._family.vocabulary_parts(self._spec)}
        embedding = self._read_one(parts["embedding"])
        if self._spec.tie_embeddings:
            head = in_place(embedding, self._compute)
        else:
            head = pack(self._read_one(parts["head"]), self._compute)
        small = [part for name, part in parts.items() if name not in ("embedding", "head")]
        vectors = {
            name: tensor.to(torch.float32, copy=True)
            for name, tensor in self._read(small, _buffer(self._layout(small)[1])).items()
        }
        return Vocabulary(
            embedding=embedding,
            final_norm=norm_of(vectors, "final_norm", self._spec),
            head=head,
            head_bias=vectors.get("head_bias"),
        )


def _buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory as bytes."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy 2 arrays are buffers


def _keep(name: str, tensor: Tensor, compute: ComputeType) -> Linear | Tensor:
    """The form in which a part stays in memory: a copy, since the buffer is used again."""
    return pack(tensor, compute) if name in MATRICES else tensor.to(torch.float32, copy=True)


def _view(name: str, tensor: Tensor, compute: ComputeType) -> Linear | Tensor:
    """The form in which a streamed part is used: the matrices in place."""
    return in_place(tensor, compute) if name in MATRICES else tensor.float()
