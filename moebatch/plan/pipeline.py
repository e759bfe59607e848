"""Schedules for an accelerator: CGOPipe and those it is compared with, as lists of tasks.

A pass visits layer by layer (zigzag order): while the micro-batches of one layer are computed, the
pages of the next one cross the link. The schedules differ in when a micro-batch's attention is
launched, how a layer is cut, and what stands before what on the link.

Buffer need of every schedule: two layers' streamed bytes, `STAGING_SLOTS` pages of staging memory,
and where the device attends a cache that lies on the host, `kv_slots` contexts of a micro-batch.
Source: MoE-Lightning (2411.11217), section 4.1, Algorithm 1, figure 6.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from moebatch.plan.schedule import Key, Lane, Op, Processor, Task
from moebatch.plan.stream import StreamPlan

WEIGHT_BUFFERS = 2  # layers whose streamed bytes are on the device at once
STAGING_SLOTS = 2  # one page is copied to the device while the next one is staged


class Phase(StrEnum):
    """What the rows of a micro-batch do in a pass."""

    DECODE = "decode"  # one token each, against their cache
    PREFILL = "prefill"  # prompts from their first token on: their context is in the pass
    RESUME = "resume"  # prompts whose first part is in the cache already


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a pass has to do, whatever the schedule.

    `kv_on_gpu[i]`: layer i's cache lies in accelerator memory (only where attention runs there).
    `group`: micro-batches whose tokens go through the experts together.
    """

    stream: StreamPlan
    micro_batches: tuple[Phase, ...]
    attention: Processor = "cpu"
    ffn: Processor = "gpu"
    kv_on_gpu: tuple[bool, ...]
    group: int = 1

    def __post_init__(self) -> None:
        assert len(self.kv_on_gpu) == len(self.stream.layers)
        assert self.micro_batches and self.group >= 1
        assert self.attention == "gpu" or not any(self.kv_on_gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How one schedule differs from the others. `lookahead` counts groups of micro-batches."""

    summary: str
    lookahead: int = 0
    paged: bool = (
        False  # a layer is cut into one page per micro-batch, else it crosses as one block
    )
    weights_first: bool = False  # the next layer's weights stand before this one's activations
    grouped: bool = False  # half of the micro-batches share an expert call

    def num_pages(self, num_micro_batches: int) -> int:
        """Pages into which this schedule wants a layer to be cut."""
        return num_micro_batches if self.paged else 1

    def group(self, num_micro_batches: int) -> int:
        """Micro-batches that go through the experts together: two groups keep both processors busy."""
        return -(-num_micro_batches // 2) if self.grouped else 1


STYLES: dict[str, Style] = {
    "cgopipe": Style(summary="paged weights, host attention two ahead", lookahead=2, paged=True),
    "cgopipe-grouped": Style(
        summary="cgopipe, each expert once for half of the batch",
        lookahead=2,
        paged=True,
        grouped=True,
    ),
    "fastdecode": Style(summary="host attention two ahead, weights as one block", lookahead=2),
    "flexgen-cpu": Style(summary="host attention, not overlapped", weights_first=True),
    "flexgen": Style(summary="attention on the gpu, KV cache one micro-batch ahead",
                     lookahead=1, weights_first=True),
    "layerwise": Style(summary="plain layer streaming, weights one layer ahead",
                       weights_first=True),
}  # fmt: skip


def pass_tasks(name: str, step: Step) -> list[Task]:
    """One pass as the named schedule launches it; `stream_prologue` must have run before the first."""
    return _Pass(step, STYLES[name]).tasks()


def kv_slots(name: str, attention: Processor, group: int) -> int:
    """Contexts of a micro-batch that the device holds at once where the cache lies on the host."""
    return (_lookahead(STYLES[name], attention) + 1) * group


def _lookahead(style: Style, attention: Processor) -> int:
    # A context is large and needs no processor: one ahead hides it, two would take another buffer.
    return min(1, style.lookahead) if attention == "gpu" else style.lookahead


def stream_prologue(stream: StreamPlan) -> list[Task]:
    """What runs once: the first streamed layer comes in, and staging begins with the next pages."""
    traffic = _Traffic(stream, first_pass=True)
    first = stream.layers[stream.streamed[0]].num_pages if stream.streamed else 0
    tasks = [task for k in range(traffic.ahead) for task in traffic.stage(k)]
    for k in range(first):
        tasks += traffic.load(k, ())
    return tasks


class _Traffic:
    """The endless sequence of pages over the passes: page number k is `pages[k % len(pages)]`.

    A page that takes the staging hop is staged `ahead` pages before it is loaded, into the slot that
    the page loaded then has left. Ahead never reaches the pages that a pass begins with, since a
    task may stand only once in a list: with one streamed layer a page is staged when it is loaded.
    """

    def __init__(self, stream: StreamPlan, *, first_pass: bool = False) -> None:
        self._stream, self._pages, self._first_pass = stream, stream.pages, first_pass
        self._slots = min(STAGING_SLOTS, len(self._pages))
        first = stream.layers[stream.streamed[0]].num_pages if stream.streamed else 0
        self.ahead = min(STAGING_SLOTS, len(self._pages) - first)
        self._here: set[Key] = set()

    def load(self, k: int, free: tuple[Key, ...]) -> Iterator[Task]:
        """The copy of page k to the device, once its layer buffer is `free`, and the staging ahead."""
        layer, page = self._at(k)
        if self.ahead == 0:
            yield from self.stage(k)
        staged = [(Op.STAGE_PAGE, layer, 0, page)] if self._takes_staging(layer) else []
        yield self._task(Op.LOAD_PAGE, Lane.H2D, k, free, staged)
        if self.ahead:
            yield from self.stage(k + self.ahead)

    def stage(self, k: int) -> Iterator[Task]:
        """The first hop of page k, into the slot of an earlier page."""
        layer = self._at(k)[0]
        if self._takes_staging(layer):
            lane = Lane.DISK if self._stream.homes[layer] == "disk" else Lane.STAGE
            before, page = self._at(k - (self.ahead or self._slots))
            yield self._task(Op.STAGE_PAGE, lane, k, (), [(Op.LOAD_PAGE, before, 0, page)])

    def _at(self, k: int) -> tuple[int, int]:
        return self._pages[k % len(self._pages)]

    def _takes_staging(self, layer: int) -> bool:
        return self._stream.homes[layer] != "pinned"

    def _task(self, op: Op, lane: Lane, k: int, deps: tuple[Key, ...],
              needs: Sequence[Key]) -> Task:  # fmt: skip
        """`needs` are of this list, or else of the one before; before the first there is none."""
        here = tuple(key for key in needs if key in self._here)
        carried = () if self._first_pass else tuple(key for key in needs if key not in self._here)
        layer, page = self._at(k)
        self._here.add((op, layer, 0, page))
        return Task(op, lane, layer, page=page, deps=(*deps, *here), carried=carried)


class _Pass:
    """Builds the list of one pass, task by task in launch order."""

    def __init__(self, step: Step, style: Style) -> None:
        self._step, self._style = step, style
        self._num_layers = len(step.stream.layers)
        count = len(step.micro_batches)
        self._groups = [
            range(first, min(first + step.group, count)) for first in range(0, count, step.group)
        ]
        self._ahead = min(_lookahead(style, step.attention), len(self._groups))
        self._first_of = {j: group[0] for group in self._groups for j in group}
        self._tasks: list[Task] = []
        self._kv_loads: list[Key] = []
        self._traffic = _Traffic(step.stream)
        self._loads = self._load_slots()

    def tasks(self) -> list[Task]:
        """The list."""
        for u in range(self._ahead):
            self._fetch(0, u)
            self._attend(0, u)
        for i in range(self._num_layers):
            for u, group in enumerate(self._groups):
                self._fetch(i, u + self._ahead)
                if self._ahead == 0:
                    self._attend(i, u)
                for j in group:
                    self._micro_batch(i, j)
                self._experts(i, group)
                if u == len(self._groups) - 1:
                    self._free(i)
                if self._ahead:
                    self._attend(i, u + self._ahead)
        for group in self._groups if self._step.ffn == "cpu" else ():
            self._add_experts(self._num_layers - 1, group)
        return self._tasks

    def _micro_batch(self, i: int, j: int) -> None:
        """The rest of a micro-batch's attention, and the pages whose turn it is."""
        if self._style.weights_first:
            self._load_pages(i, j)
        if self._attends_on_host(j):
            self._add(Op.LOAD_HIDDEN, Lane.H2D, i, j, [(Op.CPU_ATTN, i, j, 0)])
        if not self._style.weights_first:
            self._load_pages(i, j)
        if not self._attends_on_host(j):
            self._pre_attn(i, j)
            self._attend_on_device(i, j)
        attended = Op.LOAD_HIDDEN if self._attends_on_host(j) else Op.GPU_ATTN
        self._add(Op.POST_ATTN, Lane.GPU, i, j, [(attended, i, j, 0)])

    def _attends_on_host(self, j: int) -> bool:
        return self._step.attention == "cpu" and self._step.micro_batches[j] is Phase.DECODE

    def _reads_host_cache(self, i: int, j: int) -> bool:
        """Whether the device attends tokens whose keys and values lie on the host."""
        phase = self._step.micro_batches[j]
        on_device = self._step.kv_on_gpu[i] or self._attends_on_host(j)
        return phase is not Phase.PREFILL and not on_device

    def _position(self, i: int, u: int) -> tuple[int, range] | None:
        """(layer, group) of the u-th group counted from layer i on; None beyond the pass."""
        i, u = i + u // len(self._groups), u % len(self._groups)
        return (i, self._groups[u]) if i < self._num_layers else None

    def _attend(self, i: int, u: int) -> None:
        """Launch what comes before the softmax of a group that the host attends."""
        if (position := self._position(i, u)) is None:
            return
        layer, group = position
        self._add_experts(layer - 1, group)
        for j in group:
            if self._attends_on_host(j):
                self._pre_attn(layer, j)
                self._add(Op.OFFLOAD_QKV, Lane.D2H, layer, j, [(Op.PRE_ATTN, layer, j, 0)])
                self._add(Op.CPU_ATTN, Lane.CPU, layer, j, [(Op.OFFLOAD_QKV, layer, j, 0)])

    def _fetch(self, i: int, u: int) -> None:
        """Launch the transfer of the contexts that the device will attend."""
        if (position := self._position(i, u)) is None:
            return
        layer, group = position
        for j in group:
            if not self._reads_host_cache(layer, j):
                continue
            slots = (self._ahead + 1) * self._step.group
            leaver = self._kv_loads[-slots] if len(self._kv_loads) >= slots else None
            self._kv_loads.append((Op.LOAD_KV, layer, j, 0))
            self._add(Op.STAGE_KV, Lane.STAGE, layer, j, [leaver] if leaver else [])
            free = [(Op.GPU_ATTN, leaver[1], leaver[2], 0)] if leaver else []
            self._add(Op.LOAD_KV, Lane.H2D, layer, j, [(Op.STAGE_KV, layer, j, 0), *free])

    def _pre_attn(self, i: int, j: int) -> None:
        """Norm and QKV projection, as soon as the layer's first page is there."""
        before: list[Key] = []
        if i:
            done = Op.FFN if self._step.ffn == "gpu" else Op.ADD_FFN
            before.append((done, i - 1, self._first_of[j], 0))
            if not self._attends_on_host(j) and not self._step.kv_on_gpu[i - 1]:
                before.append((Op.OFFLOAD_KV, i - 1, j, 0))  # it reads what this one overwrites
        pages = self._step.stream.layers[i].attention_pages
        self._add(Op.PRE_ATTN, Lane.GPU, i, j, before, pages=pages)

    def _attend_on_device(self, i: int, j: int) -> None:
        pre = (Op.PRE_ATTN, i, j, 0)
        context = [(Op.LOAD_KV, i, j, 0)] if self._reads_host_cache(i, j) else []
        self._add(Op.GPU_ATTN, Lane.GPU, i, j, [pre, *context])
        if not self._step.kv_on_gpu[i]:
            last = [k for k in range(i) if not self._step.kv_on_gpu[k]][-1:]
            stored = [(Op.STORE_KV, k, j, 0) for k in last]
            self._add(Op.OFFLOAD_KV, Lane.D2H, i, j, [pre, *stored])
            self._add(Op.STORE_KV, Lane.CPU, i, j, [(Op.OFFLOAD_KV, i, j, 0)])

    def _experts(self, i: int, group: range) -> None:
        routed: list[Key] = [(Op.POST_ATTN, i, j, 0) for j in group]
        first = group[0]
        if self._step.ffn == "gpu":
            pages = tuple(range(self._step.stream.layers[i].num_pages))
            self._add(Op.FFN, Lane.GPU, i, first, routed, pages=pages)
            return
        self._add(Op.OFFLOAD_NORMED, Lane.D2H, i, first, routed)
        self._add(Op.FFN, Lane.CPU, i, first, [(Op.OFFLOAD_NORMED, i, first, 0)])

    def _add_experts(self, i: int, group: range) -> None:
        """Bring back what the host's experts computed: as late as possible, the gpu must not wait."""
        if self._step.ffn == "gpu" or i < 0:
            return
        first = group[0]
        self._add(Op.LOAD_FFN, Lane.H2D, i, first, [(Op.FFN, i, first, 0)])
        self._add(Op.ADD_FFN, Lane.GPU, i, first, [(Op.LOAD_FFN, i, first, 0)])

    def _free(self, i: int) -> None:
        if self._step.stream.layers[i].num_pages == 0:
            return
        users: list[Key] = [(Op.POST_ATTN, i, j, 0) for j in self._first_of]
        if self._step.ffn == "gpu":
            users += [(Op.FFN, i, group[0], 0) for group in self._groups]
        self._add(Op.FREE_LAYER, Lane.GPU, i, 0, users)

    def _load_slots(self) -> dict[tuple[int, int], list[tuple[int, tuple[Key, ...]]]]:
        """Which pages, by their number in the sequence, are launched with which micro-batch.

        While layer s[a] is computed the pages of s[a+1] come in, evenly over the micro-batches, into
        the buffer that s[a-1] left; after the last one those of s[0] for the next pass.
        """
        streamed, count = self._step.stream.streamed, len(self._step.micro_batches)
        slots: dict[tuple[int, int], list[tuple[int, tuple[Key, ...]]]] = defaultdict(list)
        if not streamed:
            return slots
        number = self._step.stream.layers[streamed[0]].num_pages
        for a, layer in enumerate(streamed):
            until = streamed[a + 1] if a + 1 < len(streamed) else self._num_layers
            places = [(i, j) for i in range(layer, until) for j in range(count)]
            coming = self._step.stream.layers[streamed[(a + 1) % len(streamed)]].num_pages
            free: tuple[Key, ...] = ((Op.FREE_LAYER, streamed[a - 1], 0, 0),) if a else ()
            for p in range(coming):
                slots[places[p * len(places) // coming]].append((number, free))
                number += 1
        return slots

    def _load_pages(self, i: int, j: int) -> None:
        for k, free in self._loads.get((i, j), ()):
            self._tasks += self._traffic.load(k, free)

    def _add(self, op: Op, lane: Lane, i: int, j: int, deps: Sequence[Key],
             *, pages: tuple[int, ...] = ()) -> None:  # fmt: skip
        """Append a task; pages of the first streamed layer came with the pass before."""
        loads: tuple[Key, ...] = tuple((Op.LOAD_PAGE, i, 0, page) for page in pages)
        first = bool(self._step.stream.streamed) and i == self._step.stream.streamed[0]
        here, carried = ((), loads) if first else (loads, ())
        self._tasks.append(Task(op, lane, i, j, deps=(*deps, *here), carried=carried))
