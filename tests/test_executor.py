"""Lanes keep their order, wait for each other, and neither failure nor `close` makes them hang."""

import random
import threading
import time
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.errors import Interrupted
from moebatch.plan.pages import page_table
from moebatch.plan.schedule import Lane, Op, Task, prologue, zigzag
from moebatch.runtime.executor import Executor

PATIENCE_S = 20  # what hangs, hangs longer


def within_patience(function):
    """Call in a thread of its own; fails instead of hanging."""
    outcome = []

    def call():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert outcome, "hangs"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


class Recorder:
    """Handlers that note when they begin and end, and sleep a random while of up to `pause_s`."""

    def __init__(self, *, pause_s=0.0, seed=0, fail=None):
        self.events, self.lock = [], threading.Lock()
        self.rng, self.pause_s, self.fail = random.Random(seed), pause_s, fail
        self.threads = defaultdict(set)

    def __call__(self, task):
        with self.lock:
            pause = self.rng.random() * self.pause_s
            self.events.append(("begin", task))
        self.threads[task.lane].add(threading.get_ident())
        if pause:
            time.sleep(pause)
        if self.fail is not None:
            self.fail(task)
        with self.lock:
            self.events.append(("end", task))

    @property
    def handlers(self):
        return dict.fromkeys(Op, self)

    def executor(self):
        return Executor(self.handlers, background=[Lane.DISK])

    def ended(self, lane):
        return [task for what, task in self.events if what == "end" and task.lane is lane]


def passes_of(table, *, num_passes=3, num_micro_batches=2, page_slots=2):
    one = zigzag(table, num_micro_batches=num_micro_batches, page_slots=page_slots)
    return [prologue(table, page_slots=page_slots), *[one] * num_passes]


TABLE = page_table(3, 3, resident_experts=3, resident_attention=1)


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(1, 3),
    experts=st.integers(1, 4),
    resident=st.floats(0, 1),
    num_micro_batches=st.integers(1, 3),
    page_slots=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    pause_s=st.sampled_from([0.0, 0.0002, 0.001]),
)
def test_random_schedules_with_random_delays(
    *, layers, experts, resident, num_micro_batches, page_slots, seed, pause_s
) -> None:
    table = page_table(
        layers,
        experts,
        resident_experts=int(resident * layers * experts),
        resident_attention=int(resident * layers),
    )
    passes = passes_of(table, num_micro_batches=num_micro_batches, page_slots=page_slots)
    recorder = Recorder(pause_s=pause_s, seed=seed)
    executor = recorder.executor()

    def run_all():
        for tasks in passes:
            executor.run(tasks)
        executor.close()

    within_patience(run_all)
    for lane in Lane:
        wanted = [task for tasks in passes for task in tasks if task.lane is lane]
        ended = recorder.ended(lane)
        # What the last pass loads for a pass that never comes may be dropped by `close`.
        assert ended == wanted[: len(ended)]
        assert lane is Lane.DISK or len(ended) == len(wanted)
    check_order(recorder.events, passes[0])


def check_order(events, first):
    """Nothing begins before all it needs has ended; counted, since a key comes in every pass."""
    ended, begun = defaultdict(int), defaultdict(int)
    for task in first:  # the prologue's loads belong to no pass: those of pass k are number k + 1
        begun[task.key] = -1
    for what, task in events:
        if what == "end":
            ended[task.key] += 1
            continue
        begun[task.key] += 1
        assert all(ended[dep] >= begun[task.key] for dep in (*task.deps, *task.carried))


def test_background_lane_has_one_thread_of_its_own() -> None:
    recorder = Recorder()
    executor = recorder.executor()
    for tasks in passes_of(TABLE):
        executor.run(tasks)
    executor.close()
    assert recorder.threads[Lane.CPU] == {threading.get_ident()}
    assert len(recorder.threads[Lane.DISK]) == 1
    assert recorder.threads[Lane.DISK].isdisjoint(recorder.threads[Lane.CPU])


def test_close_ends_the_threads_and_may_be_called_twice() -> None:
    before = threading.active_count()
    executor = Recorder().executor()
    assert threading.active_count() == before + 1
    within_patience(executor.close)
    within_patience(executor.close)
    assert threading.active_count() == before


def test_waits_for_the_pass_before() -> None:
    """A page that the pass before began to load: the next pass waits for it, `run` did not."""
    load = Task(Op.LOAD_PAGE, Lane.DISK, 0, page=1)
    use = Task(Op.FFN, Lane.CPU, 0, page=1, carried=(load.key,))
    go, order = threading.Event(), []

    def slow_load(task):
        assert go.wait(PATIENCE_S)
        order.append("loaded")

    handlers = {Op.LOAD_PAGE: slow_load, Op.FFN: lambda task: order.append("used")}
    executor = Executor(handlers, background=[Lane.DISK])
    first = within_patience(lambda: executor.run([load]))
    assert (first.spans, order) == ((), [])
    threading.Timer(0.005, go.set).start()
    second = within_patience(lambda: executor.run([use]))
    assert order == ["loaded", "used"]
    assert [span.task for span in second.spans] == [load, use]
    executor.close()


def test_no_barrier_between_lanes() -> None:
    """The disk lane goes on while the caller computes: neither waits for the end of a layer."""
    met = threading.Barrier(2)

    def meet(task):
        met.wait(PATIENCE_S)

    executor = Executor({Op.LOAD_PAGE: meet, Op.FFN: meet}, background=[Lane.DISK])
    tasks = [Task(Op.LOAD_PAGE, Lane.DISK, 0, page=1), Task(Op.FFN, Lane.CPU, 0, page=1)]
    within_patience(lambda: executor.run(tasks))
    executor.close()


class Broken(Exception):
    """What a handler raises."""


@pytest.mark.parametrize("lane", [Lane.CPU, Lane.DISK])
@pytest.mark.parametrize("nth", [0, 1, 5])
def test_a_failure_reaches_the_caller(lane, nth) -> None:
    """On either lane, and `run` never hangs afterwards: it raises again."""
    seen = []

    def fail(task):
        if task.lane is lane:
            seen.append(task)
            if len(seen) > nth:
                raise Broken(task.op)

    recorder = Recorder(fail=fail, pause_s=0.0005)
    executor = recorder.executor()

    def run_all():
        for tasks in passes_of(TABLE):
            executor.run(tasks)

    with pytest.raises(Broken) as first:
        within_patience(run_all)
    for _ in range(2):
        with pytest.raises(Broken) as again:
            within_patience(lambda: executor.run(passes_of(TABLE)[1]))
        assert again.value is first.value
    assert len(seen) == nth + 1
    within_patience(executor.close)


def test_a_failure_while_the_caller_waits() -> None:
    load = Task(Op.LOAD_PAGE, Lane.DISK, 0, page=1)
    use = Task(Op.FFN, Lane.CPU, 0, page=1, deps=(load.key,))

    def fail(task):
        time.sleep(0.001)
        raise Broken

    executor = Executor({Op.LOAD_PAGE: fail, Op.FFN: lambda task: None}, background=[Lane.DISK])
    with pytest.raises(Broken):
        within_patience(lambda: executor.run([load, use]))
    within_patience(executor.close)


def test_a_failure_of_a_late_load_comes_with_the_next_pass() -> None:
    def fail(task):
        raise Broken

    def run_until_it_comes():
        executor.run([Task(Op.LOAD_PAGE, Lane.DISK, 0)])
        while True:
            executor.run([Task(Op.FFN, Lane.CPU, 0)])

    executor = Executor({Op.LOAD_PAGE: fail, Op.FFN: lambda task: None}, background=[Lane.DISK])
    with pytest.raises(Broken):
        within_patience(run_until_it_comes)
    within_patience(executor.close)


def test_an_interrupt_on_the_callers_lane_is_passed_on() -> None:
    def interrupt(task):
        raise KeyboardInterrupt

    recorder = Recorder()
    executor = Executor({**recorder.handlers, Op.FFN: interrupt}, background=[Lane.DISK])
    first, tasks = passes_of(TABLE)[:2]
    with pytest.raises(KeyboardInterrupt):
        within_patience(lambda: [executor.run(first), executor.run(tasks)])
    within_patience(executor.close)


def test_close_while_the_background_lane_waits() -> None:
    """It waits for a task of the caller's lane that never comes."""
    never = Task(Op.FREE_PAGE, Lane.CPU, 0)
    executor = Recorder().executor()
    within_patience(lambda: executor.run([Task(Op.LOAD_PAGE, Lane.DISK, 0, deps=(never.key,))]))
    within_patience(executor.close)


def test_close_while_the_callers_lane_waits() -> None:
    never = Task(Op.LOAD_PAGE, Lane.DISK, 0)
    executor = Recorder().executor()
    threading.Timer(0.005, executor.close).start()
    within_patience(lambda: executor.run([Task(Op.FFN, Lane.CPU, 0, deps=(never.key,))]))


def test_close_drops_what_has_not_begun() -> None:
    begun, go, ran = threading.Event(), threading.Event(), []

    def slow(task):
        ran.append(task.page)
        begun.set()
        assert go.wait(PATIENCE_S)

    executor = Executor({Op.LOAD_PAGE: slow}, background=[Lane.DISK])
    executor.run([Task(Op.LOAD_PAGE, Lane.DISK, 0, page=page) for page in range(9)])
    assert begun.wait(PATIENCE_S)
    threading.Timer(0.005, go.set).start()
    within_patience(executor.close)
    assert ran == [0]


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
def test_timelines_are_sane(pause_s) -> None:
    """Spans of a lane do not overlap, follow what they need, and none is lost or told twice."""
    recorder = Recorder(pause_s=pause_s)
    executor = recorder.executor()
    passes = passes_of(TABLE)
    timelines = [within_patience(lambda tasks=tasks: executor.run(tasks)) for tasks in passes]
    executor.close()
    last = {}
    for tasks, timeline in zip(passes, timelines, strict=True):
        assert timeline.start_s <= timeline.end_s
        assert timeline.makespan_s == timeline.end_s - timeline.start_s
        own = [span for span in timeline.spans if span.task.lane is Lane.CPU]
        assert [span.task for span in own] == [task for task in tasks if task.lane is Lane.CPU]
        assert all(timeline.start_s <= span.start_s for span in own)
        assert all(span.end_s <= timeline.end_s for span in timeline.spans)
        assert 0 <= timeline.busy_s(Lane.CPU) <= timeline.makespan_s
        for span in timeline.spans:
            assert span.start_s <= span.end_s
            for dep in (*span.task.deps, *span.task.carried):
                assert last[dep] <= span.start_s
            last[span.task.key] = span.end_s
    for lane in Lane:
        spans = [
            span for timeline in timelines for span in timeline.spans if span.task.lane is lane
        ]
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
        wanted = [task for tasks in passes for task in tasks if task.lane is lane]
        assert [span.task for span in spans] == wanted[: len(spans)]


def test_an_empty_pass() -> None:
    executor = Recorder().executor()
    assert within_patience(lambda: executor.run([])).spans == ()
    executor.close()


def test_an_interrupt_ends_a_pass_also_while_it_waits() -> None:
    """The page never comes; the caller's thread looks up and leaves."""
    stop = threading.Event()
    started = threading.Event()

    def load(task: Task) -> None:
        started.set()
        stop.wait(10)

    handlers = dict.fromkeys(Op, lambda task: None) | {Op.LOAD_PAGE: load}
    executor = Executor(handlers, background=[Lane.DISK], interrupted=started.is_set)
    try:
        load_page = Task(Op.LOAD_PAGE, Lane.DISK, 0)
        with pytest.raises(Interrupted):
            executor.run([load_page, Task(Op.FFN, Lane.CPU, 0, deps=(load_page.key,))])
    finally:
        stop.set()
        executor.close()


def test_an_interrupt_ends_a_pass_whose_last_task_is_of_another_lane() -> None:
    """The caller's thread has nothing left to do but to wait for it."""
    stop, started = threading.Event(), threading.Event()

    def attend(task: Task) -> None:
        started.set()
        assert stop.wait(PATIENCE_S)

    handlers = dict.fromkeys(Op, lambda task: None) | {Op.CPU_ATTN: attend}
    executor = Executor(handlers, background=[Lane.CPU], interrupted=started.is_set)
    try:
        with pytest.raises(Interrupted):
            within_patience(lambda: executor.run([Task(Op.CPU_ATTN, Lane.CPU, 0)]))
    finally:
        stop.set()
        executor.close()


def test_a_closed_executor_refuses_work() -> None:
    executor = Executor(dict.fromkeys(Op, lambda task: None), background=[Lane.DISK])
    executor.close()
    with pytest.raises(AssertionError, match="closed"):
        executor.run([])
