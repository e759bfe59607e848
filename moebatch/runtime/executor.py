"""Runs a schedule: each lane takes its tasks in order and waits for exactly what they depend on.

The caller's own thread is the lane of computation, so that all arithmetic shares one OpenMP pool.
Other lanes have a thread each, which goes on across passes: a page for the next pass may still be
under way when a pass returns. There is no barrier inside a pass.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from moebatch.errors import Interrupted
from moebatch.plan.schedule import Key, Lane, Op, Task
from moebatch.plan.timeline import Span, Timeline

Handler = Callable[[Task], None]

_LOOK_UP_S = 0.25


class Executor:
    """Lanes and the record of what has ended. Close it when the last pass is done."""

    def __init__(self, handlers: Mapping[Op, Handler], *, background: Iterable[Lane],
                 interrupted: Callable[[], bool] = lambda: False) -> None:  # fmt: skip
        """`background` lanes get a thread each; every other task runs in the caller's thread.

        `interrupted` is asked before each task of the caller's thread; True ends the pass.
        """
        self._handlers = dict(handlers)
        self._interrupted = interrupted
        self._done: set[Key] = set()
        self._before: set[Key] = set()
        self._spans: list[Span] = []
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._queues: dict[Lane, queue.SimpleQueue[_Work | None]] = {}
        self._threads: list[threading.Thread] = []
        for lane in background:
            work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(work,), name=f"moebatch-{lane}", daemon=True
            )
            self._queues[lane] = work
            self._threads.append(thread)
            thread.start()

    def run(self, tasks: Sequence[Task]) -> Timeline:
        """Execute one pass; returns when the caller's lane has run all of its tasks.

        The timeline holds what ended since the last call, so also late loads of the pass before.
        Raises: Interrupted, or whatever a task raised, on any lane; the executor is then of no
        further use.
        """
        assert not self._closing, "the executor is closed"
        self._before, self._done = self._done, set()
        start = time.perf_counter()
        work = _Work(tasks, self._done, self._before)
        for lane, lane_queue in self._queues.items():
            lane_queue.put(_Work([t for t in tasks if t.lane is lane], work.done, work.before))
        own = [t for t in tasks if t.lane not in self._queues]
        try:
            self._drain(_Work(own, work.done, work.before, own=True))
        except BaseException as error:  # a later run must not wait for what will never end
            self._fail(error)
            raise
        if self._failure is not None:
            raise self._failure
        with self._changed:
            spans, self._spans = self._spans, []
        return Timeline(spans=tuple(spans), start_s=start, end_s=time.perf_counter())

    def close(self) -> None:
        """Stop the lanes; tasks that have not started are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for lane_queue in self._queues.values():
            lane_queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, work_queue: "queue.SimpleQueue[_Work | None]") -> None:
        while (work := work_queue.get()) is not None:
            try:
                self._drain(work)
            except BaseException as error:  # handed to the caller, who raises it
                self._fail(error)
                return

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _drain(self, work: "_Work") -> None:
        for task in work.tasks:
            self._wait(task, work)
            if self._closing or self._failure is not None:
                return
            start = time.perf_counter()
            self._handlers[task.op](task)
            span = Span(task, start, time.perf_counter())
            with self._changed:
                work.done.add(task.key)
                self._spans.append(span)
                self._changed.notify_all()

    def _wait(self, task: Task, work: "_Work") -> None:
        """Until the task may start; the caller's thread looks up now and then for an interrupt."""
        while not (work.own and self._interrupted()):
            if work.ready(task):
                return
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._closing or self._failure is not None or work.ready(task),
                    timeout=_LOOK_UP_S if work.own else None,
                ):
                    return
        raise Interrupted


class _Work:
    """A lane's share of a pass, with the records that its dependencies are looked up in."""

    __slots__ = ("before", "done", "own", "tasks")

    def __init__(self, tasks: Sequence[Task], done: set[Key], before: set[Key], *,
                 own: bool = False) -> None:  # fmt: skip
        """`own`: the share of the caller's thread."""
        self.tasks, self.done, self.before, self.own = tasks, done, before, own

    def ready(self, task: Task) -> bool:
        return self.done.issuperset(task.deps) and self.before.issuperset(task.carried)
