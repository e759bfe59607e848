"""The cutoff layer of expert prefetch: against a sweep over a simulation with single experts."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.plan.cutoff import (
    StepCosts,
    cutoff_layer,
    fetched_at,
    hidden_layers,
    most_layers,
    step_seconds,
)

COSTS = StepCosts(draft_layer_s=1.0, target_layer_s=2.0, expert_s=0.25, layers=16, draft_layers=16,
                  draft_tokens=1, experts=2, accuracy=0.9, slots=1000)  # fmt: skip


def simulated(costs: StepCosts, cutoff: int, *, steps: int = 60, seed: int = 0) -> float:
    """Mean seconds of steps in which each named expert is right or wrong, fetched one by one."""
    rng, total = random.Random(seed), 0.0
    experts = int(costs.experts)
    for _ in range(steps):  # with the same luck for every cutoff
        right = [
            [rng.random() < costs.accuracy for _ in range(experts)] for _ in range(costs.layers)
        ]
        link, came = 0.0, {}
        for layer in range(cutoff):
            drafted = layer * costs.draft_layers // costs.layers + 1
            for k in range(experts):
                start = max(link, drafted * costs.draft_layer_s)
                if start < costs.draft_s:  # what has not begun by then is dropped
                    link = start + costs.expert_s
                    came[layer, k] = link
        now = costs.draft_s
        for layer in range(costs.layers):
            ready = now
            for k in range(experts):
                if (layer, k) in came and right[layer][k]:
                    ready = max(ready, came[layer, k])
                else:
                    link = max(link, now) + costs.expert_s
                    ready = max(ready, link)
            now = ready + costs.target_layer_s
        total += now
    return total / steps


@settings(max_examples=40, deadline=None)
@given(
    draft=st.floats(0.05, 3), target=st.floats(0.05, 3), expert=st.floats(0.02, 3),
    layers=st.integers(2, 20), drafted=st.integers(1, 4), experts=st.integers(1, 6),
    accuracy=st.floats(0.5, 1), slots=st.integers(0, 80), seed=st.integers(0, 9),
    draft_layers=st.integers(1, 24),
)  # fmt: skip
def test_the_chosen_layer_is_within_5_percent_of_the_best_of_a_sweep(
    draft, target, expert, layers, drafted, experts, accuracy, slots, seed, draft_layers
) -> None:
    costs = StepCosts(draft_layer_s=draft, target_layer_s=target, expert_s=expert, layers=layers,
                      draft_layers=draft_layers, draft_tokens=drafted, experts=experts,
                      accuracy=accuracy, slots=slots)  # fmt: skip
    sweep = [simulated(costs, cutoff, seed=seed) for cutoff in range(most_layers(costs) + 1)]
    assert sweep[cutoff_layer(costs)] <= 1.05 * min(sweep)


def test_memory_bounds_the_cutoff() -> None:
    assert most_layers(COSTS) == 16
    assert most_layers(replace(COSTS, slots=7)) == 3
    assert cutoff_layer(replace(COSTS, slots=1)) == 0
    assert most_layers(replace(COSTS, experts=1e-300)) == 16
    assert most_layers(replace(COSTS, experts=0)) == 16


def test_the_papers_inequality() -> None:
    """Computing binds: the last layer's experts come too late. The link binds: it is full before."""
    assert hidden_layers(COSTS) == 15  # layer 16 ends its own fetch half a second after the stage
    assert fetched_at(COSTS, 2) == [1.5, 2.5]
    assert fetched_at(replace(COSTS, draft_layers=4), 2) == [1.5, 2.0]  # one speaks for four layers
    slow = replace(COSTS, expert_s=2.0)  # 4 s per layer, from 1 s on, in a stage of 16 s
    assert hidden_layers(slow) == 3
    assert hidden_layers(replace(slow, draft_tokens=4)) == 15


def test_prefetch_that_is_right_and_hidden_costs_nothing() -> None:
    sure = replace(COSTS, accuracy=1.0, draft_tokens=2)
    assert step_seconds(sure, 16) == pytest.approx(2 * 16 + 16 * 2.0)
    assert step_seconds(sure, 0) == pytest.approx(2 * 16 + 16 * (2.0 + 0.5))
    assert cutoff_layer(sure) == 16


def test_prefetch_that_is_wrong_only_delays() -> None:
    wrong = replace(COSTS, accuracy=0.0, expert_s=4.7)  # one is under way when the target begins
    assert cutoff_layer(wrong) <= 1
    assert step_seconds(wrong, 16) > step_seconds(wrong, 0)
