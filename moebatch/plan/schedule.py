"""Schedules: one pass over the layers as a list of tasks. Data, not loops: run, simulate or draw it.

A task names what must have ended before it starts: `deps` in the same list, earlier; `carried` in
the list of the pass before, or its prologue. Lanes run their own tasks in list order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from moebatch.plan.pages import ATTENTION_PAGE, PageTable

Processor = Literal["cpu", "gpu"]


class Op(StrEnum):
    """Kinds of task. The names are those of MoE-Lightning's Algorithm 1 where it has one."""

    STAGE_PAGE = "stage_page"  # into staging memory (the paper's W_CtoPin)
    LOAD_PAGE = "load_page"  # into the top tier (W_PintoG)
    FREE_PAGE = "free_page"
    FREE_LAYER = "free_layer"
    PRE_ATTN = "pre_attn"
    OFFLOAD_QKV = "offload_qkv"
    CPU_ATTN = "cpu_attn"
    LOAD_HIDDEN = "load_hidden"
    STAGE_KV = "stage_kv"  # a micro-batch's context, from the host's cache into staging memory
    LOAD_KV = "load_kv"
    GPU_ATTN = "gpu_attn"
    OFFLOAD_KV = "offload_kv"
    STORE_KV = "store_kv"  # new keys and values, into the host's cache
    POST_ATTN = "post_attn"
    OFFLOAD_NORMED = "offload_normed"  # what the experts read, where they run on the host
    FFN = "ffn"
    LOAD_FFN = "load_ffn"
    ADD_FFN = "add_ffn"


# Traffic of weights runs on across the end of a pass, everything else ends with it.
PAGE_OPS = frozenset({Op.STAGE_PAGE, Op.LOAD_PAGE})


class Lane(StrEnum):
    """What executes tasks, one after the other."""

    GPU = "gpu"
    CPU = "cpu"
    H2D = "h2d"
    D2H = "d2h"
    STAGE = "stage"  # host memory to pinned memory
    DISK = "disk"


Key = tuple[Op, int, int, int]


@dataclass(frozen=True, slots=True)
class Task:
    """One entry of a schedule. `micro_batch` and `page` are 0 where they mean nothing."""

    op: Op
    lane: Lane
    layer: int
    micro_batch: int = 0
    page: int = 0
    deps: tuple[Key, ...] = ()
    carried: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        """What other tasks call this one; unique in a list."""
        return (self.op, self.layer, self.micro_batch, self.page)


def prologue(table: PageTable, *, page_slots: int) -> list[Task]:
    """What must run once before the first pass: the first pages fill the buffer."""
    first = table.streamed[:page_slots]
    return [Task(Op.LOAD_PAGE, Lane.DISK, layer, page=page) for layer, page in first]


def zigzag(table: PageTable, *, num_micro_batches: int, page_slots: int) -> list[Task]:
    """Layer by layer, every micro-batch through attention, then each expert once over all of them.

    The FFN of every token, which lies in page 0, comes before the experts: FFN of page 0.

    While pages are used, the next ones come in: page k + page_slots is loaded into the slot that page
    k leaves, across the end of the pass into the next one. Buffer need: `page_slots` pages.
    """
    order = {where: k for k, where in enumerate(table.streamed)}
    page_slots = min(page_slots, len(order))  # else a page would be loaded while it is in use
    tasks: list[Task] = []
    last: tuple[Key, ...] = ()
    for layer in range(table.num_layers):
        wait, carried = _arrival(order, (layer, ATTENTION_PAGE), page_slots)
        for j in range(num_micro_batches):
            tasks.append(Task(Op.PRE_ATTN, Lane.CPU, layer, j, deps=last + wait, carried=carried))
            tasks.append(Task(Op.CPU_ATTN, Lane.CPU, layer, j, deps=(tasks[-1].key,)))
            tasks.append(Task(Op.POST_ATTN, Lane.CPU, layer, j, deps=(tasks[-1].key,)))
        routed = tuple((Op.POST_ATTN, layer, j, 0) for j in range(num_micro_batches))
        ffns: tuple[Key, ...] = ()
        if layer in table.base_ffn:
            tasks.append(Task(Op.FFN, Lane.CPU, layer, page=ATTENTION_PAGE, deps=routed))
            ffns = (tasks[-1].key,)
        tasks += _turn_over(table, order, (layer, ATTENTION_PAGE), page_slots, routed + ffns)
        for page in table.expert_pages(layer):
            wait, carried = _arrival(order, (layer, page), page_slots)
            ffn = Task(Op.FFN, Lane.CPU, layer, page=page, deps=routed + wait, carried=carried)
            tasks.append(ffn)
            tasks += _turn_over(table, order, (layer, page), page_slots, (ffn.key,))
        last = ffns + tuple((Op.FFN, layer, 0, page) for page in table.expert_pages(layer))
    return tasks


def _arrival(order: dict[tuple[int, int], int], where: tuple[int, int],
             page_slots: int) -> tuple[tuple[Key, ...], tuple[Key, ...]]:  # fmt: skip
    """What a user of a page waits for: (in this pass, in the pass before)."""
    if where not in order:
        return (), ()
    load = ((Op.LOAD_PAGE, where[0], 0, where[1]),)
    return (load, ()) if order[where] >= page_slots else ((), load)


def _turn_over(table: PageTable, order: dict[tuple[int, int], int], where: tuple[int, int],
               page_slots: int, users: tuple[Key, ...]) -> list[Task]:  # fmt: skip
    """Free a streamed page after its last user, and load the page that comes into its slot."""
    if where not in order:
        return []
    layer, page = where
    free = Task(Op.FREE_PAGE, Lane.CPU, layer, page=page, deps=users)
    streamed = table.streamed
    next_layer, next_page = streamed[(order[where] + page_slots) % len(streamed)]
    load = Task(Op.LOAD_PAGE, Lane.DISK, next_layer, page=next_page, deps=(free.key,))
    return [free, load]


def check(tasks: Sequence[Task], before: Iterable[Task]) -> None:
    """Assert that a schedule can run: `before` is the pass (or prologue) that precedes it.

    Every task is there once, its deps stand earlier in the list, what it carries over was done before.
    """
    earlier: set[Key] = set()
    loaded_before = {task.key for task in before}
    for task in tasks:
        assert task.key not in earlier, f"{task.key} stands twice"
        for dep in task.deps:
            assert dep in earlier, f"{task.key} needs {dep}, which does not stand before it"
        for dep in task.carried:
            assert dep in loaded_before, f"{task.key} needs {dep} of the pass before"
        earlier.add(task.key)
