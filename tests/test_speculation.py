"""How many drafts pay: against brute force, and at the edges that arithmetic knows."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.plan.speculation import (
    AcceptanceRate,
    PassCost,
    best_drafts,
    break_even,
    expected_tokens,
    gain,
    share_drafts,
)


def streamed(tokens, disk: float = 40.0):
    """A pass that reads for so long and computes for a second per token meanwhile."""
    return np.maximum(disk, tokens)


def test_expected_tokens_are_those_of_the_geometric_series() -> None:
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.5, 3) == 1 + 0.5 + 0.25 + 0.125


@given(alpha=st.floats(0, 1), drafts=st.integers(0, 6))
def test_expected_tokens_equal_the_mean_over_all_outcomes(alpha, drafts) -> None:
    mean = 0.0
    for outcome in itertools.product([True, False], repeat=drafts):
        chance = np.prod([alpha if ok else 1 - alpha for ok in outcome])
        run = next((k for k, ok in enumerate(outcome) if not ok), drafts)
        mean += chance * (1 + run)
    assert expected_tokens(alpha, drafts) == pytest.approx(mean)


def test_drafts_are_free_while_the_disk_binds_and_cost_where_the_processor_does() -> None:
    assert best_drafts(0.8, rows=1, seconds=streamed, most=8) == 8
    # 10 rows: 40 tokens fit under the disk's 40 seconds, so 3 drafts each
    assert best_drafts(0.3, rows=10, seconds=streamed, most=8) == 3
    assert best_drafts(0.8, rows=64, seconds=streamed, most=8) == 0
    assert gain(0.8, 4, rows=1, seconds=streamed) == pytest.approx(expected_tokens(0.8, 4))


def test_what_drafting_takes_counts() -> None:
    assert best_drafts(0.8, rows=1, seconds=streamed, draft_seconds=50.0) == 0
    assert best_drafts(0.99, rows=1, seconds=streamed, draft_seconds=1.0, most=8) == 8


def test_break_even_is_where_the_gain_falls_to_one() -> None:
    rows = break_even(0.5, 4, seconds=streamed)
    assert rows is not None
    assert gain(0.5, 4, rows=rows, seconds=streamed) <= 1
    assert gain(0.5, 4, rows=rows - 1, seconds=streamed) > 1
    assert break_even(0.5, 4, seconds=lambda tokens: 0 * tokens + 1.0) is None
    assert break_even(0.0, 1, seconds=streamed) == 1


@given(
    chances=st.lists(
        st.lists(st.floats(0.05, 1), max_size=3).map(lambda x: list(np.cumprod(x))),
        min_size=1, max_size=3,
    ),
    disk=st.floats(1, 20),
)  # fmt: skip
def test_shared_drafts_are_as_good_as_any_other_choice(chances, disk) -> None:
    def seconds(tokens):
        return streamed(tokens, disk)

    def rate(counts):
        tokens = len(chances) + sum(sum(row[:n]) for row, n in zip(chances, counts, strict=True))
        return tokens / float(seconds(np.array([len(chances) + sum(counts)]))[0])

    every = itertools.product(*(range(len(row) + 1) for row in chances))
    chosen = share_drafts(chances, tokens=len(chances), seconds=seconds)
    assert rate(chosen) == pytest.approx(max(map(rate, every)))


def test_acceptance_follows_what_is_seen() -> None:
    rate = AcceptanceRate()
    assert 0.5 < rate.value < 1
    for _ in range(2000):
        rate.add(False)
    assert rate.value < 0.02
    for _ in range(2000):
        rate.add(True)
    assert rate.value > 0.95


def test_the_cost_of_a_pass_follows_what_is_measured() -> None:
    cost = PassCost(lambda tokens: 0 * tokens + 2.0)  # predicted: tokens cost nothing
    np.testing.assert_allclose(cost(np.array([1.0, 50.0])), 2.0)
    for k in range(300):
        tokens = (1, 4, 16)[k % 3]
        cost.add(tokens, 0.5 * tokens)  # measured: they cost in proportion
    np.testing.assert_allclose(cost(np.array([1.0, 4.0, 16.0])), [0.5, 2.0, 8.0], rtol=0.2)
    same = PassCost(streamed)
    for _ in range(50):
        same.add(10, 80.0)  # all twice as slow: the shape stays
    np.testing.assert_allclose(same(np.array([10.0, 80.0])), [80.0, 160.0], rtol=1e-6)
