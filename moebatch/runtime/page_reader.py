"""Reads the parts of a page from the checkpoint into a buffer, in our layout.

What goes where is planned once; a page that is streamed is read by its plan in every pass.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from moebatch.model.checkpoint import LEAST_DIRECT, Checkpoint
from moebatch.model.families.parts import Layout, Part
from moebatch.model.quant import arrange, decode
from moebatch.model.stored import Stored, TensorEntry, locate

_ALIGN = 64  # a cache line; also the widest SIMD load
_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """One source: it becomes rows [first, last) of its part, bytes [begin, end) of the page."""

    stored: Stored
    layout: Layout
    first: int
    last: int
    begin: int
    end: int

    @property
    def as_it_lies(self) -> bool:
        """Whether the bytes of the file are those of the page."""
        return self.stored.kind == "plain" and self.layout == "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedPart:
    """Where a part stands in the page, and in which type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int
    fills: tuple[_Fill, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """All parts of a page, and the bytes that it takes in memory."""

    parts: tuple[_PlannedPart, ...]
    num_bytes: int

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """What is read, in this order."""
        fills = (fill for part in self.parts for fill in part.fills)
        return tuple(entry for fill in fills for entry in fill.stored.entries)


class PageReader:
    """Plans and reads pages; several threads may read at once."""

    def __init__(self, checkpoint: Checkpoint, *, weight_dtype: str) -> None:
        """`weight_dtype` is what quantised matrices are held in."""
        self._checkpoint, self._weight_dtype = checkpoint, weight_dtype
        self.bytes_read = 0

    def plan(self, parts: Sequence[Part]) -> PagePlan:
        """Where everything goes; part after part, each aligned.

        Raises: ModelError when the checkpoint lacks something.
        """
        planned, end = [], 0
        for part in parts:
            one = self._plan_part(part, end)
            planned.append(one)
            end = -(-one.end // _ALIGN) * _ALIGN
        return PagePlan(parts=tuple(planned), num_bytes=end)

    def read(self, plan: PagePlan, buffer: Tensor, *, cached: bool = True,
             following: PagePlan | None = None) -> dict[str, Tensor]:  # fmt: skip
        """Read a page into a byte buffer that is large enough; views of it.

        What is not to be `cached` does not stay in the system's cache of the files. Of the page that
        the same thread reads next, `following`, some bytes may be fetched already.
        Raises: ModelError when a file cannot be read.
        """
        for _ in self.steps(plan, buffer, cached=cached, following=following):
            pass
        return self.views(plan, buffer)

    def steps(self, plan: PagePlan, buffer: Tensor, *, cached: bool = True,
              following: PagePlan | None = None) -> Iterator[None]:  # fmt: skip
        """The same, one source after the other: who reads may stop between them.

        Raises: ModelError when a file cannot be read.
        """
        memory, tensors = _bytes_of(buffer), self.views(plan, buffer)
        coming = deque(plan.entries + (() if following is None else following.entries))

        def fill_in(entry: TensorEntry, target: memoryview) -> None:
            coming.popleft()
            after = next((one for one in coming if one.num_bytes >= LEAST_DIRECT), None)
            self._checkpoint.read_into(entry, target, cached=cached, following=after)

        for part in plan.parts:
            for fill in part.fills:
                self.bytes_read += fill.stored.num_bytes
                if fill.as_it_lies:
                    fill_in(fill.stored.entries[0], memory[fill.begin : fill.end])
                else:
                    self._decode(fill, tensors[part.name][fill.first : fill.last], fill_in)
                yield

    @staticmethod
    def views(plan: PagePlan, buffer: Tensor) -> dict[str, Tensor]:
        """Where a page's parts lie in a byte buffer that holds it."""
        return {
            part.name: buffer[part.begin : part.end].view(part.dtype).view(part.shape)
            for part in plan.parts
        }

    def _plan_part(self, part: Part, begin: int) -> _PlannedPart:
        found = [locate(self._checkpoint, source) for source in part.sources]
        name = found[0].entries[0].dtype if found[0].kind == "plain" else self._weight_dtype
        dtype, count = _TORCH_DTYPES[name], prod(part.shape)
        row_bytes = count // part.shape[0] * dtype.itemsize
        fills, first = [], 0
        for stored in found:
            last = first + part.shape[0] * prod(stored.shape) // count
            fills.append(
                _Fill(
                    stored=stored,
                    layout=part.layout,
                    first=first,
                    last=last,
                    begin=begin + first * row_bytes,
                    end=begin + last * row_bytes,
                )
            )
            first = last
        return _PlannedPart(name=part.name, shape=part.shape, dtype=dtype, begin=begin,
                            end=begin + count * dtype.itemsize, fills=tuple(fills))  # fmt: skip

    def _decode(self, fill: _Fill, out: Tensor,
                fill_in: Callable[[TensorEntry, memoryview], None]) -> None:  # fmt: skip
        """Read a source that is quantised or laid out otherwise, by way of memory of its own."""
        raw = []
        for entry in fill.stored.entries:
            tensor = torch.empty(entry.shape, dtype=_TORCH_DTYPES[entry.dtype])
            fill_in(entry, _bytes_of(tensor))
            raw.append(tensor)
        matrix = decode(fill.stored, raw, self._checkpoint.quantization)
        arrange(out, matrix, fill.stored.arrangement(fill.layout))


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory as bytes."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy 2 arrays are buffers
