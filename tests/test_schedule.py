"""Schedules: each op once, no deadlock with in-order lanes, never more pages than slots."""

import random
from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.plan.pages import ATTENTION_PAGE, page_table
from moebatch.plan.schedule import Lane, Op, Task, check, prologue, zigzag

PER_MICRO_BATCH = (Op.PRE_ATTN, Op.CPU_ATTN, Op.POST_ATTN)


class Lanes:
    """Runs passes with in-order lanes, in an order that a random generator chooses.

    A lane begins its next task when all that the task needs has ended; which lane moves first is
    random, so every delay of every lane is possible. Pages are watched on the way.
    """

    def __init__(self, passes, slots, rng):
        self.rng, self.slots = rng, slots
        self.done = [set() for _ in passes]
        numbered = [(k, task) for k, tasks in enumerate(passes) for task in tasks]
        self.queues = {
            lane: deque((k, task) for k, task in numbered if task.lane is lane) for lane in Lane
        }
        self.running = dict.fromkeys(Lane)
        self.streamed = {
            (t.layer, t.page) for tasks in passes for t in tasks if t.op is Op.LOAD_PAGE
        }
        self.held, self.ready, self.peak = set(), set(), 0

    def run(self):
        """Until all is done; AssertionError at a deadlock or when a page is not in its place."""
        while movable := [lane for lane in Lane if self.running[lane] or self._can_start(lane)]:
            lane = self.rng.choice(movable)
            if self.running[lane]:
                self._end(lane)
            else:
                self._start(lane)
        assert not any(self.queues.values()), "deadlock"
        return self.peak

    def _can_start(self, lane):
        if not self.queues[lane]:
            return False
        k, task = self.queues[lane][0]
        before = self.done[k - 1] if k else set()
        return self.done[k].issuperset(task.deps) and before.issuperset(task.carried)

    def _start(self, lane):
        self.running[lane] = self.queues[lane].popleft()
        task = self.running[lane][1]
        where = (task.layer, task.page)
        if task.op is Op.LOAD_PAGE:
            assert where not in self.held, f"{where} is loaded a second time"
            self.held.add(where)
            self.peak = max(self.peak, len(self.held))
            assert len(self.held) <= self.slots, "no slot is free"
        elif where in self.streamed:
            assert where in self.ready, f"{task.key} without its page"

    def _end(self, lane):
        k, task = self.running[lane]
        self.running[lane] = None
        self.done[k].add(task.key)
        where = (task.layer, task.page)
        if task.op is Op.LOAD_PAGE:
            self.ready.add(where)
        elif task.op is Op.FREE_PAGE:
            self.held.remove(where)
            self.ready.remove(where)


@st.composite
def tables(draw, max_layers=6, max_experts=6):
    layers, experts = draw(st.integers(1, max_layers)), draw(st.integers(1, max_experts))
    return page_table(
        layers,
        experts,
        resident_experts=draw(st.integers(0, layers * experts)),
        resident_attention=draw(st.integers(0, layers)),
    )


cases = {
    "table": tables(),
    "micro_batches": st.lists(st.integers(1, 5), min_size=1, max_size=3),
    "page_slots": st.integers(1, 60),
}


def passes_of(table, micro_batches, page_slots):
    """The prologue and one pass for each number of micro-batches."""
    return [
        prologue(table, page_slots=page_slots),
        *(zigzag(table, num_micro_batches=n, page_slots=page_slots) for n in micro_batches),
    ]


@settings(max_examples=150, deadline=None)
@given(**cases)
def test_check_passes(table, micro_batches, page_slots) -> None:
    """Zigzag after the prologue, and after a zigzag of another number of micro-batches."""
    passes = passes_of(table, micro_batches, page_slots)
    check(passes[0], [])
    for before, tasks in pairwise(passes):
        check(tasks, before)


@settings(max_examples=150, deadline=None)
@given(table=tables(), micro_batches=st.integers(1, 5), page_slots=st.integers(1, 60))
def test_each_op_once(table, micro_batches, page_slots) -> None:
    tasks = zigzag(table, num_micro_batches=micro_batches, page_slots=page_slots)
    expected = Counter(
        {
            (op, layer, j, 0): 1
            for op in PER_MICRO_BATCH
            for layer in range(table.num_layers)
            for j in range(micro_batches)
        }
    )
    for layer in range(table.num_layers):
        expected.update((Op.FFN, layer, 0, page) for page in range(1, table.num_pages))
    for layer, page in table.streamed:
        expected.update([(Op.LOAD_PAGE, layer, 0, page), (Op.FREE_PAGE, layer, 0, page)])
    assert expected == Counter(task.key for task in tasks)
    assert all((task.lane is Lane.DISK) == (task.op is Op.LOAD_PAGE) for task in tasks)


@settings(max_examples=100, deadline=None)
@given(**cases)
def test_the_order_of_the_mathematics(table, micro_batches, page_slots) -> None:
    """Within a micro-batch attention in order; experts ascending and after all of the attention."""
    for tasks in passes_of(table, micro_batches, page_slots)[1:]:
        at = {task.key: k for k, task in enumerate(tasks)}
        num = 1 + max(task.micro_batch for task in tasks)
        for layer in range(table.num_layers):
            for j in range(num):
                steps = [at[(op, layer, j, 0)] for op in PER_MICRO_BATCH]
                assert sorted(steps) == steps
                assert steps[-1] < at[(Op.FFN, layer, 0, 1)]
                if layer:
                    assert at[(Op.FFN, layer - 1, 0, table.num_pages - 1)] < steps[0]
            experts = [at[(Op.FFN, layer, 0, page)] for page in range(1, table.num_pages)]
            assert sorted(experts) == experts


@settings(max_examples=60, deadline=None)
@given(table=tables(), micro_batches=st.integers(1, 4), page_slots=st.integers(1, 60))
def test_dependencies_are_complete_without_the_order_of_a_lane(
    table, micro_batches, page_slots
) -> None:
    """What a task needs follows from its deps alone, so an op may move to another lane."""
    tasks = zigzag(table, num_micro_batches=micro_batches, page_slots=page_slots)
    needs = {}  # all that must have ended before a task, directly or not
    for task in tasks:
        needs[task.key] = set(task.deps).union(*(needs[dep] for dep in task.deps))
    for layer in range(table.num_layers):
        attention = {(op, layer, j, 0) for op in PER_MICRO_BATCH for j in range(micro_batches)}
        experts = {(Op.FFN, layer, 0, page) for page in range(1, table.num_pages)}
        for ffn in experts:
            assert attention <= needs[ffn]
        for key in attention:
            before = {k for k in needs if k[0] is Op.FFN and k[1] < layer}
            assert before <= needs[key]
            steps = PER_MICRO_BATCH[: PER_MICRO_BATCH.index(key[0])]
            assert {(op, layer, key[2], 0) for op in steps} <= needs[key]
        for _, page in (where for where in table.streamed if where[0] == layer):
            users = {(Op.FFN, layer, 0, page)} if page else attention
            assert users <= needs[(Op.FREE_PAGE, layer, 0, page)]


@settings(max_examples=150, deadline=None)
@given(**cases, seed=st.integers(0, 10**6))
def test_no_deadlock_and_no_more_pages_than_slots(
    *, table, micro_batches, page_slots, seed
) -> None:
    passes = passes_of(table, micro_batches, page_slots)
    peak = Lanes(passes, page_slots, random.Random(seed)).run()
    assert peak == min(page_slots, len(table.streamed))


@settings(max_examples=100, deadline=None)
@given(table=tables(), page_slots=st.integers(1, 60))
def test_prologue_loads_the_first_pages(table, page_slots) -> None:
    loaded = [(task.layer, task.page) for task in prologue(table, page_slots=page_slots)]
    assert list(table.streamed[:page_slots]) == loaded


def test_more_slots_than_pages_is_as_many_as_pages() -> None:
    """Guards: with more slots than streamed pages, a page was loaded while it was still in use."""
    table = page_table(1, 3, resident_experts=1, resident_attention=0)
    exact = zigzag(table, num_micro_batches=2, page_slots=len(table.streamed))
    assert exact == zigzag(table, num_micro_batches=2, page_slots=len(table.streamed) + 1)


def test_all_resident_needs_no_disk() -> None:
    table = page_table(3, 4, resident_experts=12, resident_attention=3)
    assert prologue(table, page_slots=2) == []
    tasks = zigzag(table, num_micro_batches=2, page_slots=2)
    assert {task.lane for task in tasks} == {Lane.CPU}
    assert not any(task.carried for task in tasks)


def small():
    table = page_table(2, 2, resident_experts=1, resident_attention=0)
    return passes_of(table, [2], 2)


def test_check_rejects_a_dependency_that_stands_later() -> None:
    first, tasks = small()
    for k, task in enumerate(tasks):
        if task.deps:
            with pytest.raises(AssertionError, match="does not stand before"):
                check([task, *tasks[:k], *tasks[k + 1 :]], first)


def test_check_rejects_a_missing_task() -> None:
    first, tasks = small()
    needed = {dep for task in tasks for dep in task.deps}
    for k, task in enumerate(tasks):
        if task.key in needed:
            with pytest.raises(AssertionError, match="does not stand before"):
                check(tasks[:k] + tasks[k + 1 :], first)


def test_check_rejects_a_task_that_stands_twice() -> None:
    first, tasks = small()
    for task in tasks:
        with pytest.raises(AssertionError, match="stands twice"):
            check([*tasks, task], first)


def test_check_rejects_what_the_pass_before_did_not_do() -> None:
    first, tasks = small()
    for k in range(len(first)):
        with pytest.raises(AssertionError, match="of the pass before"):
            check(tasks, first[:k] + first[k + 1 :])
    with pytest.raises(AssertionError, match="of the pass before"):
        check(tasks, [])


def test_check_rejects_a_task_that_needs_itself() -> None:
    task = Task(Op.FFN, Lane.CPU, 0, page=1)
    with pytest.raises(AssertionError):
        check([replace(task, deps=(task.key,))], [])


def test_the_simulator_sees_what_it_is_there_for() -> None:
    """Broken schedules that `check` cannot know: waits left out, lanes in a circle."""
    first, tasks = small()

    def simulate(passes):
        for seed in range(30):
            Lanes(passes, 2, random.Random(seed)).run()

    simulate([first, tasks])
    careless = [replace(t, deps=(), carried=()) if t.op is Op.LOAD_PAGE else t for t in tasks]
    with pytest.raises(AssertionError, match=r"no slot|second time"):
        simulate([first, careless])
    hasty = [replace(t, carried=()) if t.page == ATTENTION_PAGE else t for t in tasks]
    with pytest.raises(AssertionError, match="without its page"):
        simulate([first, hasty])
    a, b = Task(Op.FFN, Lane.CPU, 0, page=1), Task(Op.LOAD_PAGE, Lane.DISK, 0, page=1)
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([[], [replace(a, deps=(b.key,)), replace(b, deps=(a.key,))]])
