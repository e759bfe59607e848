"""Weights in their tier: resident pages in memory, streamed pages read from the checkpoint file.

A page buffer has a fixed number of slots. `load_page` (reader thread) fills a free slot, `free_page`
(caller's thread) gives it back; the schedule guarantees that a slot is free when a load starts.
Views of a streamed page are valid until its `free_page`.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.experts import Expert
from moebatch.model.families import Family
from moebatch.model.families.parts import Part
from moebatch.model.linear import (
    ComputeType,
    Linear,
    NativeLinear,
    Quantization,
    in_place,
    pack,
    quantize,
)
from moebatch.model.panels import PanelWriter
from moebatch.model.weights import (
    MATRICES,
    SMALL_MATRICES,
    AttentionWeights,
    BaseFFN,
    Vocabulary,
    attention_weights,
    base_ffn,
    expert_of,
    norm_of,
)
from moebatch.native.kernels import Kernels
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.pages import ATTENTION_PAGE, PageTable
from moebatch.runtime.page_reader import PageReader

Where = tuple[int, int]


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
        self._spec, self._family = spec, family
        self._table, self._compute = table, compute
        self._kernels, self._quantization = kernels, quantization
        self._experts: dict[Where, Expert] = {}
        self.panels = PanelWriter(kernels) if kernels and quantization == "none" else None
        self._reader = PageReader(checkpoint, weight_dtype=spec.weight_dtype)
        self._streamer = PageReader(checkpoint, weight_dtype=spec.weight_dtype, panels=self.panels)
        self._pages: dict[Where, dict[str, Linear | Tensor]] = {}
        self._attention: dict[int, AttentionWeights] = {}
        self._base_ffns: dict[int, BaseFFN] = {}
        self._slot_of: dict[Where, Tensor] = {}
        self._plans = {w: self._reader.plan(self._parts(w)) for w in table.streamed}
        self._make_buffer(page_slots)

    def _make_buffer(self, page_slots: int) -> None:
        streamed = self._table.streamed
        slot_bytes = max((self._plans[where].num_bytes for where in streamed), default=0)
        slots = min(page_slots, len(streamed))
        self._free_slots = deque(_buffer(slot_bytes) for _ in range(slots))
        self._after = dict(zip(streamed, (*streamed[1:], *streamed[:1]), strict=True))

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read from the checkpoint so far."""
        return self._reader.bytes_read + self._streamer.bytes_read

    def load_resident(self, *, threads: int, progress: Callable[[int, int], None]) -> None:
        """Read the vocabulary and every resident page; `progress(done, total)` counts pages.

        At most `threads` pages are under way at once, each in a reusable buffer.
        """
        where = self._table.resident
        self._vocabulary = self._load_vocabulary()
        scratch = local()  # one staging buffer a worker, as large as the largest page it met

        def load(one: Where) -> None:
            plan = self._reader.plan(self._parts(one))
            if getattr(scratch, "buffer", None) is None or scratch.buffer.numel() < plan.num_bytes:
                scratch.buffer = _buffer(plan.num_bytes)
            tensors = self._reader.read(plan, scratch.buffer)
            self._pages[one] = {name: self._keep(name, tensor) for name, tensor in tensors.items()}

        with ThreadPoolExecutor(max_workers=threads) as pool:
            for done, _ in enumerate(pool.map(load, where), start=1):
                progress(done, len(where))

    def load_page(self, layer: int, page: int) -> None:
        """Fill a free slot with a streamed page. Runs on the reader's thread."""
        where = (layer, page)
        slot, plan = self._free_slots.popleft(), self._plans[where]
        after = self._plans[self._after[where]]
        tensors = self._streamer.read(plan, slot, cached=False, following=after)
        self._slot_of[where] = slot
        self._pages[where] = {name: self.view(name, tensor) for name, tensor in tensors.items()}

    def free_page(self, layer: int, page: int) -> None:
        """Give a streamed page's slot back; its views die."""
        del self._pages[(layer, page)]
        if page == ATTENTION_PAGE:
            self._attention.pop(layer, None)
            self._base_ffns.pop(layer, None)
        self._experts.pop((layer, page), None)
        self._free_slots.append(self._slot_of.pop((layer, page)))

    def give_up_experts(self, table: PageTable, *, page_slots: int) -> dict[Where, Expert]:
        """Go on with a table without experts; those that stayed in memory are now the caller's.

        No page may be on its way. Streamed pages are gone; the buffer is made anew for the table's.
        """
        for layer, page in list(self._slot_of):
            self.free_page(layer, page)
        experts = {
            (layer, page - 1): self.expert(layer, page)
            for layer, page in self._pages
            if page != ATTENTION_PAGE
        }
        for layer, expert in experts:
            del self._pages[(layer, expert + 1)]
        self._experts.clear()
        self._table = table
        self._make_buffer(page_slots)
        return experts

    def attention(self, layer: int) -> AttentionWeights:
        """The weights of a layer's attention page, which must be there."""
        found = self._attention.get(layer)
        if found is None:
            found = attention_weights(self._pages[(layer, ATTENTION_PAGE)], self._spec)
            self._attention[layer] = found
        return found

    def try_attention(self, layer: int) -> AttentionWeights | None:
        """The same, or None where the page is not there."""
        return self.attention(layer) if (layer, ATTENTION_PAGE) in self._pages else None

    def base_ffn(self, layer: int) -> BaseFFN:
        """The FFN of every token in a layer's attention page, which must be there and have one."""
        found = self._base_ffns.get(layer)
        if found is None:
            size = self._spec.base_ffn_size(layer)
            found = base_ffn(self._pages[(layer, ATTENTION_PAGE)], size=size)
            self._base_ffns[layer] = found
        return found

    def expert(self, layer: int, page: int) -> Expert:
        """The expert of an expert page, which must be there."""
        found = self._experts.get((layer, page))
        if found is None:
            spec, parts = self._spec, self._pages[(layer, page)]
            found = expert_of(parts, index=page - 1, size=spec.expert_size, limit=spec.swiglu_limit)
            self._experts[(layer, page)] = found
        return found

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

    @property
    def rounds_x(self) -> bool:
        """Whether the native kernels may round what weights and cached values are multiplied with."""
        return self._kernels is not None and self._compute == "bfloat16"

    @property
    def copies(self) -> bool:
        """Whether `view` gives memory of its own, so that what it was made of may be used again."""
        return self._quantization != "none"

    def _parts(self, where: Where) -> tuple[Part, ...]:
        layer, page = where
        if page == ATTENTION_PAGE:
            return self._family.attention_parts(self._spec, layer)
        return self._family.expert_parts(self._spec, layer, page - 1)

    def _read_now(self, *parts: Part) -> dict[str, Tensor]:
        plan = self._reader.plan(parts)
        return self._reader.read(plan, _buffer(plan.num_bytes))

    def _keep(self, name: str, tensor: Tensor) -> Linear | Tensor:
        """The form in which a part stays in memory: a copy, since the buffer is used again."""
        if name in MATRICES and self._quantization != "none" and self._kernels is not None:
            return quantize(tensor, self._compute, self._kernels, self._quantization)
        if name in MATRICES:
            return pack(tensor, self._compute, self._kernels)
        return self._small(name, tensor, copy=True)

    def view(self, name: str, tensor: Tensor) -> Linear | Tensor:
        """The form in which a streamed part is used: the matrices in place, or quantised anew.

        With `panels` the matrices have been read by way of it.
        """
        if name in MATRICES and self._quantization != "none":
            return self._keep(name, tensor)
        if name in MATRICES:
            return in_place(tensor, self._compute, self._kernels, panels=self.panels is not None)
        return self._small(name, tensor, copy=False)

    def _small(self, name: str, tensor: Tensor, *, copy: bool) -> Linear | Tensor:
        """All other parts are held in float32."""
        values = tensor.to(torch.float32, copy=copy)
        if name in SMALL_MATRICES and self._kernels is not None:
            return NativeLinear(values, self._kernels, round_x=False)
        return values

    def _load_vocabulary(self) -> Vocabulary:
        parts = {part.name: part for part in self._family.vocabulary_parts(self._spec)}
        embedding: Tensor | NativeLinear
        embedding = table = self._read_now(parts["embedding"])["embedding"]
        if self._spec.tie_embeddings:
            head = in_place(table, self._compute, self._kernels)
            if isinstance(head, NativeLinear):  # the table's own memory, or a copy of it
                embedding = head
        else:
            head = pack(self._read_now(parts["head"])["head"], self._compute, self._kernels)
        small = [part for name, part in parts.items() if name not in ("embedding", "head")]
        vectors = {
            name: tensor.to(torch.float32, copy=True)
            for name, tensor in self._read_now(*small).items()
        }
        return Vocabulary(
            embedding=embedding,
            final_norm=norm_of(vectors, "final_norm", self._spec),
            head=head,
            head_bias=vectors.get("head_bias"),
        )


def _buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)
