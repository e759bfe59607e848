"""Runs a schedule: each lane takes its tasks in order and waits for exactly what they depend on.

The caller's own thread is one of the lanes, the main one of computation. Others have a thread each,
which goes on across passes: a page for the next pass may still be under way when a pass returns.
There is no barrier inside a pass. A lane may launch work that runs on by itself (a CUDA stream); what
others wait for is then its signal, not the return of its handler.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from moebatch.errors import Interrupted
from moebatch.plan.schedule import PAGE_OPS, Key, Lane, Op, Task
from moebatch.plan.timeline import Span, Timeline

Handler = Callable[[Task], None]

_LOOK_UP_S = 0.25


class Signal(Protocol):
    """That a task has ended; the task may still be running when the signal is made."""

    def wait(self) -> None:
        """Block the calling thread until the task has ended."""
        ...

    def ended(self) -> bool:
        """Whether it has ended."""
        ...

    def times(self) -> tuple[float, float]:
        """Begin and end in seconds of `time.perf_counter`, once it has ended."""
        ...


class Queue(Protocol):
    """What executes a lane's tasks, one after the other."""

    def follow(self, signal: Signal) -> None:
        """Let what is launched from now on begin after the signal; may block, need not."""
        ...

    def launch(self, handler: Handler, task: Task) -> Signal:
        """Run a handler, or have it run."""
        ...


class Ended:
    """The signal of a task that ran in the thread of its lane."""

    __slots__ = ("_times",)

    def __init__(self, start_s: float, end_s: float) -> None:
        self._times = (start_s, end_s)

    def wait(self) -> None:
        """Nothing to wait for."""

    def ended(self) -> bool:
        """It has."""
        return True

    def times(self) -> tuple[float, float]:
        """Begin and end."""
        return self._times


class ThreadQueue:
    """A lane whose tasks run in the thread that launches them."""

    def follow(self, signal: Signal) -> None:
        """Wait for it."""
        signal.wait()

    def launch(self, handler: Handler, task: Task) -> Signal:
        """Run it."""
        start = time.perf_counter()
        handler(task)
        return Ended(start, time.perf_counter())


class Executor:
    """Lanes and the record of what has been launched. Close it when the last pass is done."""

    def __init__(self, handlers: Mapping[Op, Handler], *, background: Iterable[Lane],
                 queues: Mapping[Lane, Queue] | None = None,
                 interrupted: Callable[[], bool] = lambda: False) -> None:  # fmt: skip
        """`background` lanes get a thread each; every other task runs in the caller's thread.

        `queues` are the lanes that are more than their thread.
        `interrupted` is asked before each task of the caller's thread, and while it waits for the
        others; True ends the pass.
        """
        self._interrupted = interrupted
        self._handlers = dict(handlers)
        self._queues = dict(queues or {})
        self._default = ThreadQueue()
        self._done: dict[Key, Signal] = {}
        self._before: dict[Key, Signal] = {}
        self._launched: list[tuple[Task, Signal]] = []
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._inboxes: dict[Lane, queue.SimpleQueue[_Work | None]] = {}
        self._threads: list[threading.Thread] = []
        for lane in background:
            inbox: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(inbox,), name=f"moebatch-{lane}", daemon=True
            )
            self._inboxes[lane] = inbox
            self._threads.append(thread)
            thread.start()

    def run(self, tasks: Sequence[Task]) -> Timeline:
        """Execute one pass; returns when all of its tasks but the page traffic have ended.

        The timeline holds what ended since the last call, so also late loads of the pass before.
        Raises: Interrupted, or whatever a task raised, on any lane; the executor is then of no
        further use.
        """
        assert not self._closing, "the executor is closed"
        self._before, self._done = self._done, {}
        start = time.perf_counter()
        done, before = self._done, self._before
        for lane, inbox in self._inboxes.items():
            inbox.put(_Work([t for t in tasks if t.lane is lane], done, before))
        own = [t for t in tasks if t.lane not in self._inboxes]
        try:
            self._drain(_Work(own, done, before, own=True))
            self._finish([task.key for task in tasks if task.op not in PAGE_OPS], done)
        except BaseException as error:  # a later run must not wait for what will never end
            self._fail(error)
            raise
        if self._failure is not None:
            raise self._failure
        end = time.perf_counter()
        return Timeline(spans=tuple(self._take_spans(end)), start_s=start, end_s=end)

    def close(self) -> None:
        """Stop the lanes; tasks that have not started are dropped, and so is what handlers hold."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._handlers.clear()

    def _finish(self, keys: Sequence[Key], done: dict[Key, Signal]) -> None:
        """Wait until these tasks have been launched and have ended."""
        needed = set(keys)
        self._await(lambda: done.keys() >= needed)
        if not self._stopped:
            for key in keys:
                done[key].wait()

    def _take_spans(self, until_s: float) -> list[Span]:
        """Spans of what has ended; page traffic under way is told with a later pass."""
        with self._changed:
            launched, self._launched = self._launched, []
            spans = []
            for task, signal in launched:
                if signal.ended() and (span := Span(task, *signal.times())).end_s <= until_s:
                    spans.append(span)
                else:
                    self._launched.append((task, signal))
        return sorted(spans, key=lambda span: span.end_s)

    @property
    def _stopped(self) -> bool:
        return self._closing or self._failure is not None

    def _serve(self, inbox: "queue.SimpleQueue[_Work | None]") -> None:
        while (work := inbox.get()) is not None:
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
            if self._stopped:
                return
            lane = self._queues.get(task.lane, self._default)
            for signal in work.signals(task):
                lane.follow(signal)
            signal = lane.launch(self._handlers[task.op], task)
            with self._changed:
                work.done[task.key] = signal
                self._launched.append((task, signal))
                self._changed.notify_all()

    def _wait(self, task: Task, work: "_Work") -> None:
        """Until the task may start; see `_await`."""
        if work.own:
            self._await(lambda: work.ready(task))
        elif not work.ready(task):
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or work.ready(task))

    def _await(self, ready: Callable[[], bool]) -> None:
        """Keep the caller's thread until then; it looks up now and then for an interrupt."""
        while not self._interrupted():
            if ready():
                return
            with self._changed:
                if self._changed.wait_for(lambda: self._stopped or ready(), timeout=_LOOK_UP_S):
                    return
        raise Interrupted


class _Work:
    """A lane's share of a pass, with the records that its dependencies are looked up in."""

    __slots__ = ("before", "done", "own", "tasks")

    def __init__(self, tasks: Sequence[Task], done: dict[Key, Signal],
                 before: dict[Key, Signal], *, own: bool = False) -> None:  # fmt: skip
        """`own`: the share of the caller's thread."""
        self.tasks, self.done, self.before, self.own = tasks, done, before, own

    def ready(self, task: Task) -> bool:
        """Whether all that the task needs has been launched."""
        return all(dep in self.done for dep in task.deps) and all(
            dep in self.before for dep in task.carried
        )

    def signals(self, task: Task) -> list[Signal]:
        """The signals of all that the task needs."""
        here = [self.done[dep] for dep in task.deps]
        return here + [self.before[dep] for dep in task.carried]
