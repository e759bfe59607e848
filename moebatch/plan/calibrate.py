"""Durations of tasks from measured timelines, for the simulator.

What a task takes is the mean of its kind: the same op, lane and place in its layer, over all layers.
Waits are not taken over, they are what the simulator is asked for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from moebatch.plan.schedule import Key, Lane, Op, Task
from moebatch.plan.timeline import Timeline, simulate

Kind = tuple[Op, Lane, int, int]


def _kind(task: Task) -> Kind:
    return (task.op, task.lane, task.micro_batch, task.page)


def measured_seconds(timelines: Iterable[Timeline]) -> Callable[[Task], float]:
    """Mean seconds of a task's kind; of its op where the kind was never seen, else zero."""
    by_kind: dict[Kind, list[float]] = defaultdict(list)
    by_op: dict[Op, list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            by_kind[_kind(span.task)].append(span.end_s - span.start_s)
            by_op[span.task.op].append(span.end_s - span.start_s)
    kinds = {kind: sum(found) / len(found) for kind, found in by_kind.items()}
    ops = {op: sum(found) / len(found) for op, found in by_op.items()}
    return lambda task: kinds.get(_kind(task), ops.get(task.op, 0.0))


def predicted(passes: Sequence[tuple[Sequence[Task], Timeline]]) -> list[Timeline]:
    """Each pass simulated with its own durations, begun when the measured one began.

    Page traffic of the pass before runs on as it was simulated.
    """
    timelines: list[Timeline] = []
    carried: dict[Key, float] = {}
    busy: dict[Lane, float] = {}
    for tasks, measured in passes:
        seconds = measured_seconds([measured])
        one = simulate(
            tasks, seconds, carried_done=carried, lane_free=busy, start_s=measured.start_s
        )
        timelines.append(one)
        carried = {span.task.key: span.end_s for span in one.spans}
        busy = {span.task.lane: span.end_s for span in one.spans}
    return timelines
