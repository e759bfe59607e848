"""What happened when: one type for measured time and for predicted time, and the simulator."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebatch.plan.schedule import PAGE_OPS, Key, Lane, Task

_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Span:
    """One task's run on its lane, in seconds of one clock."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of one pass, in the order in which they ended."""

    spans: tuple[Span, ...]
    start_s: float
    end_s: float

    @property
    def makespan_s(self) -> float:
        """From the launch of the pass until all that it computes is done."""
        return self.end_s - self.start_s

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that did anything."""
        used = {span.task.lane for span in self.spans}
        return tuple(lane for lane in Lane if lane in used)

    def busy_s(self, lane: Lane) -> float:
        """Seconds in which the lane worked."""
        return sum(span.end_s - span.start_s for span in self.spans if span.task.lane is lane)

    def utilization(self, lane: Lane) -> float:
        """Share of the pass in which the lane worked; traffic beyond the end of the pass is cut off."""
        inside = sum(
            max(0.0, min(span.end_s, self.end_s) - max(span.start_s, self.start_s))
            for span in self.spans
            if span.task.lane is lane
        )
        return inside / self.makespan_s if self.makespan_s > 0 else 0.0

    def grid(self, width: int = 100) -> str:
        """A row of text per lane; a column shows the layer (mod 36) it worked for."""
        if not self.spans:
            return ""
        first = min(span.start_s for span in self.spans)
        step = (max(span.end_s for span in self.spans) - first) / width or 1.0
        rows = {lane: ["."] * width for lane in self.lanes}
        for span in self.spans:
            begin = min(int((span.start_s - first) / step), width - 1)
            for k in range(begin, min(max(int((span.end_s - first) / step), begin + 1), width)):
                rows[span.task.lane][k] = _MARKS[span.task.layer % len(_MARKS)]
        return "\n".join(f"{lane.value:>5} {''.join(row)}" for lane, row in rows.items())


def simulate(tasks: Sequence[Task], seconds_of: Callable[[Task], float], *,
             carried_done: Mapping[Key, float] | None = None,
             lane_free: Mapping[Lane, float] | None = None,
             start_s: float = 0.0) -> Timeline:  # fmt: skip
    """Predict one pass: each lane takes its tasks in list order, each as soon as its deps have ended.

    `carried_done` says when tasks of the pass before ended and `lane_free` until when lanes are still
    busy with them; what is not named is done at the start. The end is that of the last task but page
    traffic, which runs on.
    """
    before, free = carried_done or {}, dict(lane_free or {})
    done: dict[Key, float] = {}
    spans = []
    for task in tasks:
        start = max(
            start_s,
            free.get(task.lane, start_s),
            *(done[dep] for dep in task.deps),
            *(before.get(dep, start_s) for dep in task.carried),
        )
        done[task.key] = free[task.lane] = start + seconds_of(task)
        spans.append(Span(task, start, done[task.key]))
    end = max((s.end_s for s in spans if s.task.op not in PAGE_OPS), default=start_s)
    spans.sort(key=lambda span: span.end_s)
    return Timeline(spans=tuple(spans), start_s=start_s, end_s=end)


def simulate_steps(prologue: Sequence[Task], tasks: Sequence[Task],
                   seconds_of: Callable[[Task], float], *, num_steps: int,
                   between_s: float = 0.0) -> list[Timeline]:  # fmt: skip
    """The passes of a steady state, one after the other; `between_s` is sampling and the like.

    The prologue's traffic and each pass's run on into the next pass, as they do in the executor.
    """
    timelines: list[Timeline] = []
    before = simulate(prologue, seconds_of)
    # The prologue is page traffic alone: the first pass may begin while it is under way.
    start = 0.0
    for _ in range(num_steps):
        carried = {span.task.key: span.end_s for span in before.spans}
        busy = {lane: max(s.end_s for s in before.spans if s.task.lane is lane)
                for lane in before.lanes}  # fmt: skip
        before = simulate(tasks, seconds_of, carried_done=carried, lane_free=busy, start_s=start)
        timelines.append(before)
        start = before.end_s + between_s
    return timelines


def steady_step_s(prologue: Sequence[Task], tasks: Sequence[Task],
                  seconds_of: Callable[[Task], float], *, between_s: float = 0.0) -> float:  # fmt: skip
    """Seconds of one pass in the steady state, sampling included: the last of a few."""
    last = simulate_steps(prologue, tasks, seconds_of, num_steps=4, between_s=between_s)[-1]
    return last.makespan_s + between_s


def check_executed(passes: Iterable[tuple[Sequence[Task], Timeline]], slack_s: float = 0.0) -> None:
    """Assert that what was executed kept to its schedule: pairs of a list and what came of it.

    Every task ran once, lanes kept their order and ran one task at a time, and nothing began before
    what it needs had ended. The first pair is the prologue. Page traffic may be in a later timeline.
    """
    lists: list[Sequence[Task]] = []
    spans: list[Span] = []
    for tasks, timeline in passes:
        lists.append(tasks)
        spans += timeline.spans
    by_key: dict[Key, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        by_key.setdefault(span.task.key, []).append(span)
    before: dict[Key, Span] = {}
    on_lane: dict[Lane, Span] = {}
    for tasks in lists:
        here: dict[Key, Span] = {}
        for task in tasks:
            if not by_key.get(task.key):
                # `close` may drop traffic for a pass that never comes
                assert task.op in PAGE_OPS and tasks is lists[-1], f"{task.key} did not run"
                continue
            span = here[task.key] = by_key[task.key].pop(0)
            previous = on_lane.get(task.lane)
            ends = [here[dep] for dep in task.deps] + [before[dep] for dep in task.carried]
            for other in [*ends, *([previous] if previous else [])]:
                assert span.start_s >= other.end_s - slack_s, (
                    f"{task.key} began {other.end_s - span.start_s:.6f} s before {other.task.key} ended"
                )
            on_lane[task.lane] = span
        before = here
    left = [key for key, rest in by_key.items() if rest]
    assert not left, f"{left[0]} ran more often than it should"


def chrome_trace(processes: Mapping[str, Sequence[Timeline]]) -> str:
    """JSON for chrome://tracing or Perfetto: a process for each name, one row per lane.

    Each process's clock starts at its first timeline, so that prediction and measurement align.
    Format: the Trace Event Format's complete ("X") and metadata ("M") events, in microseconds.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timelines) in enumerate(processes.items()):
        events.append(_named("process_name", pid, 0, name))
        lanes = [lane for lane in Lane if any(lane in t.lanes for t in timelines)]
        for tid, lane in enumerate(lanes):
            events.append(_named("thread_name", pid, tid, lane.value))
        origin = timelines[0].start_s if timelines else 0.0
        for number, timeline in enumerate(timelines):
            for span in timeline.spans:
                events.append(_event(span, pid, lanes.index(span.task.lane), origin, number))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: Span, pid: int, tid: int, origin: float, number: int) -> dict[str, Any]:
    task = span.task
    return {
        "ph": "X",
        "name": task.op.value,
        "pid": pid,
        "tid": tid,
        "ts": (span.start_s - origin) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {
            "pass": number,
            "layer": task.layer,
            "micro_batch": task.micro_batch,
            "page": task.page,
        },
    }
