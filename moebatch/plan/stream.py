"""What crosses the link: each layer's streamed bytes, cut into pages of equal size.

A unit is what `moebatch.plan.pages` keeps or streams: 0 for all of a layer but its experts, e + 1 for
expert e. A page here is a range of bytes; it may end inside an expert, never inside unit 0, which
stands first: norms, projections and router of a layer are needed before its experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moebatch.plan.pages import ATTENTION_PAGE, PageTable

Home = Literal["pinned", "cpu", "disk"]
ALIGN = 256  # what the copy engines of GPUs like, and more than any SIMD load


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Where one unit lies among its layer's streamed bytes."""

    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCut:
    """One layer's streamed bytes: its units, and the bounds of its pages. Both empty: all resident."""

    units: tuple[Unit, ...] = ()
    bounds: tuple[int, ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages that cross the link each time the layer is used."""
        return max(0, len(self.bounds) - 1)

    @property
    def num_bytes(self) -> int:
        """Streamed bytes of the layer."""
        return self.bounds[-1] if self.bounds else 0

    def page_bytes(self, page: int) -> int:
        """Bytes of one page."""
        return self.bounds[page + 1] - self.bounds[page]

    @property
    def attention_pages(self) -> tuple[int, ...]:
        """The pages that attention waits for: the first, or none where unit 0 is resident."""
        return (0,) if self.units and self.units[0].index == ATTENTION_PAGE else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """The cut of every layer and the tier in which its streamed bytes are at home.

    "pinned" memory is copied to the device at once; "cpu" and "disk" take the staging hop.
    """

    layers: tuple[LayerCut, ...]
    homes: tuple[Home, ...]

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers of which something is streamed."""
        return tuple(i for i, cut in enumerate(self.layers) if cut.num_pages)

    @property
    def pages(self) -> tuple[tuple[int, int], ...]:
        """All (layer, page) in the order in which a pass needs them."""
        return tuple((i, p) for i, cut in enumerate(self.layers) for p in range(cut.num_pages))

    @property
    def buffer_bytes(self) -> int:
        """The streamed bytes of the largest layer: the size of one layer buffer."""
        return max((cut.num_bytes for cut in self.layers), default=0)

    @property
    def page_bytes(self) -> int:
        """The largest page: the size of one staging slot."""
        return max((self.layers[i].page_bytes(p) for i, p in self.pages), default=0)


def cut_layer(sizes: Sequence[tuple[int, int]], num_pages: int, align: int = ALIGN) -> LayerCut:
    """Cut a layer's streamed units, given as (index, bytes) in order, into at most `num_pages` pages.

    Pages are equal up to `align` bytes, unless unit 0 alone is larger than a page.
    """
    units, end = [], 0
    for index, num_bytes in sizes:
        start, end = end, end + -(-num_bytes // align) * align
        units.append(Unit(index=index, start=start, end=end))
    if not units:
        return LayerCut()
    attention = units[0].end if units[0].index == ATTENTION_PAGE else 0
    bounds = _even(0, end, num_pages, align)
    if num_pages > 1 and bounds[1] < attention:
        bounds = [0, *_even(attention, end, num_pages - 1, align)]
    return LayerCut(units=tuple(units), bounds=tuple(sorted(set(bounds))))


def _even(start: int, end: int, parts: int, align: int) -> list[int]:
    steps = [(end - start) * k // parts // align * align for k in range(1, parts)]
    return [start, *(start + step for step in steps), end]


def stream_plan(table: PageTable, unit_bytes: Mapping[tuple[int, int], int], *, num_pages: int,
                homes: Sequence[Home], align: int = ALIGN) -> StreamPlan:  # fmt: skip
    """The plan for the pages that a table streams; `unit_bytes[(layer, unit)]` are their sizes."""
    sizes: list[list[tuple[int, int]]] = [[] for _ in range(table.num_layers)]
    for layer, unit in table.streamed:
        sizes[layer].append((unit, unit_bytes[(layer, unit)]))
    cuts = tuple(cut_layer(one, num_pages, align) for one in sizes)
    return StreamPlan(layers=cuts, homes=tuple(homes))
