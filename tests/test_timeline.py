"""The simulator: bounds, in-order lanes, steady state; the grid and the trace file."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline import named, step_of

from moebatch.plan.pipeline import STYLES, pass_tasks, stream_prologue
from moebatch.plan.schedule import Lane, Op, Task
from moebatch.plan.timeline import (
    Span,
    Timeline,
    check_executed,
    chrome_trace,
    simulate,
    simulate_steps,
    steady_step_s,
)

COST = dict.fromkeys(Op, 0.1) | {Op.CPU_ATTN: 0.7, Op.FFN: 0.4, Op.LOAD_HIDDEN: 0.02}


def cost(step, layer_s):
    """Seconds of a task where a whole layer takes `layer_s` to load."""

    def seconds(task):
        if task.op is Op.LOAD_PAGE:
            cut = step.stream.layers[task.layer]
            return layer_s * cut.page_bytes(task.page) / cut.num_bytes
        return COST[task.op]

    return seconds


@settings(max_examples=200, deadline=None)
@given(named, st.integers(0, 10**6))
def test_busiest_lane_to_sum_of_lanes(case, salt) -> None:
    name, step = case
    tasks = pass_tasks(name, step)
    seconds = {task.key: ((hash(task.key) ^ salt) % 97) / 10 for task in tasks}
    timeline = simulate(tasks, lambda task: seconds[task.key])
    busy = [timeline.busy_s(lane) for lane in timeline.lanes]
    until = max(span.end_s for span in timeline.spans)
    assert max(busy) - 1e-9 <= until <= sum(busy) + 1e-9
    check_executed([(stream_prologue(step.stream), simulate(stream_prologue(step.stream), lambda t: 0)),
                    (tasks, timeline)], slack_s=1e-9)  # fmt: skip
    for lane in timeline.lanes:
        spans = sorted((s for s in timeline.spans if s.task.lane is lane), key=lambda s: s.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(spans))
        assert [t.key for t in tasks if t.lane is lane] == sorted(
            (s.task.key for s in spans), key=[t.key for t in tasks].index
        )


def test_link_bound_steps_keep_the_link_busy() -> None:
    """Where the link binds, a steady step of cgopipe is one crossing of the weights and little more."""
    step = step_of(num_micro_batches=4, num_layers=8)
    tasks, seconds = pass_tasks("cgopipe", step), cost(step, 6.0)
    last = simulate_steps(stream_prologue(step.stream), tasks, seconds, num_steps=4)[-1]
    assert last.utilization(Lane.H2D) > 0.95
    assert steady_step_s(stream_prologue(step.stream), tasks, seconds) == pytest.approx(
        last.makespan_s
    )


def test_the_order_of_the_papers_schedules() -> None:
    """Figure 6: where host attention and link are about even, S1 is fastest and S3 slowest."""
    found = {}
    for name in ("cgopipe", "fastdecode", "flexgen-cpu"):
        step = step_of(num_micro_batches=4, num_layers=8, num_pages=STYLES[name].num_pages(4))
        found[name] = steady_step_s(
            stream_prologue(step.stream), pass_tasks(name, step), cost(step, 2.9)
        )
    assert found["cgopipe"] < 0.8 * found["fastdecode"]
    assert found["fastdecode"] < found["flexgen-cpu"]


def test_trap_attention_in_a_later_page_costs_time() -> None:
    """The step is longer when attention's weights do not come first."""
    step = step_of(num_micro_batches=3, num_layers=8)
    tasks, seconds = pass_tasks("cgopipe", step), cost(step, 2.2)

    def later_page(task):
        def move(keys):
            return tuple((k[0], k[1], k[2], 1) if k[0] is Op.LOAD_PAGE else k for k in keys)

        if task.op is not Op.PRE_ATTN:
            return task
        return replace(task, deps=move(task.deps), carried=move(task.carried))

    prologue = stream_prologue(step.stream)
    good = steady_step_s(prologue, tasks, seconds)
    late = steady_step_s(prologue, [later_page(t) for t in tasks], seconds)
    assert late > 1.02 * good


def test_traffic_of_the_pass_before_delays_the_next() -> None:
    load, use = Task(Op.LOAD_PAGE, Lane.H2D, 0), Task(Op.FFN, Lane.GPU, 0)
    tasks = [replace(use, carried=(load.key,)), load]
    first, second = simulate_steps([load], tasks, lambda t: 5.0 if t is load else 1.0, num_steps=2)
    assert (first.start_s, first.end_s) == (0.0, 6.0)
    assert (second.start_s, second.end_s) == (6.0, 11.0)
    assert first.busy_s(Lane.H2D) == 5.0
    assert first.utilization(Lane.H2D) == pytest.approx(1 / 6)


def test_sampling_between_steps_counts() -> None:
    task = Task(Op.FFN, Lane.GPU, 0)
    assert steady_step_s([], [task], lambda t: 2.0, between_s=0.5) == 2.5


def test_grid_has_a_row_per_lane() -> None:
    a, b = Task(Op.FFN, Lane.GPU, 0), Task(Op.CPU_ATTN, Lane.CPU, 1)
    timeline = simulate([a, replace(b, deps=(a.key,))], lambda t: 1.0)
    assert timeline.grid(10) == "  gpu 00000.....\n  cpu .....11111"
    assert simulate([], lambda t: 1.0).grid() == ""


def test_chrome_trace_has_a_process_per_name_and_a_row_per_lane() -> None:
    step = step_of(num_micro_batches=2)
    tasks = pass_tasks("cgopipe", step)
    predicted = simulate_steps(stream_prologue(step.stream), tasks, cost(step, 1.0), num_steps=2)
    shifted = [Timeline(spans=tuple(Span(s.task, s.start_s + 7, s.end_s + 7) for s in t.spans),
                        start_s=t.start_s + 7, end_s=t.end_s + 7) for t in predicted]  # fmt: skip
    trace = json.loads(chrome_trace({"predicted": predicted, "measured": shifted}))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["predicted", "measured"]
    events = {pid: [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
              for pid in (0, 1)}  # fmt: skip
    assert len(events[0]) == 2 * len(tasks)
    for a, b in zip(events[0], events[1], strict=True):  # each clock starts at zero
        assert a["name"] == b["name"]
        assert a["ts"] == pytest.approx(b["ts"], abs=1e-3)
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert list(rows.values()) == ["gpu", "cpu", "h2d", "d2h"]


def test_check_executed_sees_what_is_wrong() -> None:
    a, b = Task(Op.FFN, Lane.GPU, 0), Task(Op.CPU_ATTN, Lane.CPU, 0)
    tasks = [a, replace(b, deps=(a.key,))]

    def ran(*times):
        spans = tuple(Span(t, *x) for t, x in zip(tasks, times, strict=False))
        return [(tasks, Timeline(spans=spans, start_s=0.0, end_s=9.0))]

    check_executed(ran((0, 1), (1, 2)))
    with pytest.raises(AssertionError, match="before"):
        check_executed(ran((0, 1), (0.5, 2)))
    with pytest.raises(AssertionError, match="did not run"):
        check_executed(ran((0, 1)))
    with pytest.raises(AssertionError, match="more often"):
        check_executed([([a], ran((0, 1), (1, 2))[0][1])])
