"""Reads pages of a checkpoint into byte buffers, in the layout in which they are computed with."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.families.parts import Layout, Part
from moebatch.model.quant import arrange, decode
from moebatch.model.stored import Stored, locate, sources_of
from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec
from moebatch.plan.pages import ATTENTION_PAGE

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


class PageReader:
    """The pages of one model's checkpoint, as parts with a place in a buffer."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family) -> None:
        """Nothing is read yet."""
        self._checkpoint, self._spec, self._family = checkpoint, spec, family
        self.bytes_read = 0

    def parts(self, where: Where) -> tuple[Part, ...]:
        """What a page is made of."""
        layer, page = where
        if page == ATTENTION_PAGE:
            return self._family.attention_parts(self._spec, layer)
        return self._family.expert_parts(self._spec, layer, page - 1)

    def layout(self, parts: Sequence[Part]) -> tuple[list[int], int]:
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

    def views(self, parts: Sequence[Part], buffer: Tensor) -> dict[str, Tensor]:
        """Where the parts lie in a byte buffer, in the types they are held in."""
        tensors = {}
        for part, offset in zip(parts, self.layout(parts)[0], strict=True):
            dtype = _TORCH_DTYPES[self._dtype_of(part)]
            end = offset + prod(part.shape) * dtype.itemsize
            tensors[part.name] = buffer[offset:end].view(dtype).view(part.shape)
        return tensors

    def read(self, parts: Sequence[Part], buffer: Tensor) -> dict[str, Tensor]:
        """Read parts into a byte buffer in our layout; views of it, in the types they are held in."""
        tensors = self.views(parts, buffer)
        for part in parts:
            tensor, first = tensors[part.name], 0
            for source in part.sources:
                stored = locate(self._checkpoint, source)
                rows = part.shape[0] * prod(stored.shape) // prod(part.shape)
                self._fill(tensor[first : first + rows], stored, part.layout)
                first += rows
        return tensors

    def read_one(self, part: Part) -> Tensor:
        """Read one part into memory of its own."""
        return self.read([part], byte_buffer(self.layout([part])[1]))[part.name]

    def forget(self, parts: Sequence[Part]) -> None:
        """Let the system's file cache drop them."""
        for part in parts:
            for stored in sources_of(self._checkpoint, part):
                for entry in stored.entries:
                    self._checkpoint.forget(entry)

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


def byte_buffer(num_bytes: int) -> Tensor:
    """Host memory [num_bytes] uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory as bytes."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy 2 arrays are buffers
