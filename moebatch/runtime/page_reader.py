"""Reads the parts of a page from the checkpoint into a buffer, in our layout.

What goes where is planned once; a page that is streamed is read by its plan in every pass.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint, Run, goes_direct, runs_of
from moebatch.model.direct_io import Take
from moebatch.model.families.parts import Layout, Part
from moebatch.model.panels import PanelWriter, place
from moebatch.model.quant import arrange, decode
from moebatch.model.stored import Stored, TensorEntry, locate
from moebatch.native.rounding import PANEL

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
class _Run:
    """Sources that lie side by side in the file and go into the page as they are, or a single one."""

    parts: tuple[_PlannedPart, ...]  # of each
    fills: tuple[_Fill, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def as_it_lies(self) -> bool:
        """As that of each of its sources."""
        return self.fills[0].as_it_lies


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """All parts of a page, and the bytes that it takes in memory."""

    parts: tuple[_PlannedPart, ...]
    num_bytes: int
    runs: tuple[_Run, ...]  # in the order in which they are read

    def requests(self) -> Iterator[tuple[TensorEntry, ...]]:
        """What is read at once, in this order."""
        for run in self.runs:
            if run.as_it_lies:
                yield run.entries
            else:
                yield from ((entry,) for entry in run.entries)


class PageReader:
    """Plans and reads pages; several threads may read at once."""

    def __init__(self, checkpoint: Checkpoint, *, weight_dtype: str,
                 panels: PanelWriter | None = None) -> None:  # fmt: skip
        """`weight_dtype` is what quantised matrices are held in.

        With `panels` all matrices that it takes have panels in place of rows once they are read.
        """
        self._checkpoint, self._weight_dtype, self._panels = checkpoint, weight_dtype, panels
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
        return PagePlan(parts=tuple(planned), num_bytes=end, runs=tuple(_runs(planned)))

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
        """The same, one run of sources after the other: who reads may stop between them.

        Raises: ModelError when a file cannot be read.
        """
        memory, tensors = _bytes_of(buffer), self.views(plan, buffer)
        coming = deque(plan.requests())
        coming.extend(() if following is None else following.requests())

        def fill_in(run: Run, targets: Sequence[memoryview], take: Take | None = None) -> None:
            coming.popleft()
            after = next((later for later in coming if goes_direct(later)), ())
            self._checkpoint.read_run(run, targets, cached=cached, following=after, take=take)

        for run in plan.runs:
            self.bytes_read += sum(fill.stored.num_bytes for fill in run.fills)
            if run.as_it_lies:
                targets = [memory[fill.begin : fill.end] for fill in run.fills]
                fill_in(run.entries, targets, self._take(run, targets))
            else:
                fill = run.fills[0]
                self._decode(fill, tensors[run.parts[0].name][fill.first : fill.last], fill_in)
            yield
        for part in plan.parts:
            if self._in_panels(part) and not self._as_it_comes(part):
                assert self._panels is not None
                self._panels.pack(tensors[part.name])

    def _in_panels(self, part: _PlannedPart) -> bool:
        return self._panels is not None and self._panels.takes(part.name, part.shape, part.dtype)

    def _as_it_comes(self, part: _PlannedPart) -> bool:
        """Whether a part's sources become panels one by one, piece by piece."""
        return self._in_panels(part) and all(
            fill.as_it_lies and fill.first % PANEL == 0 for fill in part.fills
        )

    def _take(self, run: _Run, targets: Sequence[memoryview]) -> Take | None:
        """What puts a run's bytes into the page, where a copy is not all there is to do."""
        kinds = [part if self._as_it_comes(part) else None for part in run.parts]
        if not any(kinds):
            return None
        memory, panels = [np.frombuffer(one, dtype=np.uint8) for one in targets], self._panels

        def take(which: int, found: np.ndarray, at: int) -> None:
            part = kinds[which]
            if part is not None:
                assert panels is not None
                panels.put(memory[which], found, at, inputs=part.shape[1], dtype=part.dtype)
            else:
                place(memory[which][at : at + found.size], found)

        return take

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
                fill_in: Callable[[Run, Sequence[memoryview]], None]) -> None:  # fmt: skip
        """Read a source that is quantised or laid out otherwise, by way of memory of its own."""
        raw = []
        for entry in fill.stored.entries:
            tensor = torch.empty(entry.shape, dtype=_TORCH_DTYPES[entry.dtype])
            fill_in((entry,), (_bytes_of(tensor),))
            raw.append(tensor)
        matrix = decode(fill.stored, raw, self._checkpoint.quantization)
        arrange(out, matrix, fill.stored.arrangement(fill.layout))


def _runs(parts: Sequence[_PlannedPart]) -> Iterator[_Run]:
    """All sources of a page: first those that can be read as they lie, by where they lie."""
    fills = [(part, fill) for part in parts for fill in part.fills]
    plain = {fill.stored.entries[0]: (part, fill) for part, fill in fills if fill.as_it_lies}
    assert len(plain) == sum(fill.as_it_lies for _, fill in fills), (
        "a tensor stands twice in a page"
    )
    for run in runs_of(plain):
        parts_of_run, fills_of_run = zip(*(plain[entry] for entry in run), strict=True)
        yield _Run(parts=parts_of_run, fills=fills_of_run, entries=tuple(run))
    for part, fill in fills:
        if not fill.as_it_lies:
            yield _Run(parts=(part,), fills=(fill,), entries=fill.stored.entries)


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory as bytes."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy 2 arrays are buffers
