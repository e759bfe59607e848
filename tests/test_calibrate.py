"""Durations from timelines: means of a kind, and a prediction that agrees where nothing waits."""

import pytest
from test_pipeline import step_of
from test_timeline import cost

from moebatch.plan.calibrate import measured_seconds, predicted
from moebatch.plan.pipeline import pass_tasks, stream_prologue
from moebatch.plan.schedule import Lane, Op, Task
from moebatch.plan.timeline import Span, Timeline, simulate_steps


def test_mean_of_a_kind_then_of_its_op() -> None:
    spans = tuple(
        Span(Task(Op.FFN, Lane.GPU, layer, j), 0.0, seconds)
        for layer, j, seconds in ((0, 0, 1.0), (1, 0, 3.0), (0, 1, 8.0))
    )
    seconds = measured_seconds([Timeline(spans=spans, start_s=0.0, end_s=8.0)])
    assert seconds(Task(Op.FFN, Lane.GPU, 7, 0)) == 2.0
    assert seconds(Task(Op.FFN, Lane.GPU, 7, 9)) == 4.0
    assert seconds(Task(Op.CPU_ATTN, Lane.CPU, 0, 0)) == 0.0


def test_a_prediction_from_a_simulated_run_is_that_run() -> None:
    step = step_of(num_micro_batches=3, num_layers=5)
    tasks = pass_tasks("cgopipe", step)
    runs = simulate_steps(stream_prologue(step.stream), tasks, cost(step, 2.5), num_steps=4)
    again = predicted([(tasks, timeline) for timeline in runs[1:]])
    for expected, found in zip(runs[2:], again[1:], strict=True):
        assert found.makespan_s == pytest.approx(expected.makespan_s, rel=1e-6)
