"""What is worth bringing for layers to come: by what it would save, if it comes in time."""

import pytest

from moebatch.plan.hybrid import ExpertCosts, layer_load
from moebatch.plan.prefetch import Outlook, Trust, worth_prefetching

COSTS = ExpertCosts(device_expert_s=1.0, host_expert_s=0.0, host_token_s=4.0, transfer_s=3.0)


def outlook(layer, tokens, *, cached=(), until_s=100.0, trust=1.0):
    return Outlook(layer=layer, load=layer_load(tokens, cached), until_s=until_s, trust=trust)


def chosen(*outlooks, backlog_s=0.0, most=9):
    return worth_prefetching(outlooks, COSTS, backlog_s=backlog_s, most=most)


def test_the_largest_saving_comes_first() -> None:
    """An expert with many tokens costs the host, or the link, most."""
    found = chosen(outlook(1, {0: 1, 1: 2}), outlook(2, {3: 5, 4: 5}))
    assert found[0] == (2, 3)
    assert set(found) <= {(1, 0), (1, 1), (2, 3), (2, 4)}
    assert chosen(outlook(1, {0: 1, 1: 2}), outlook(2, {3: 5, 4: 5}), most=1) == [(2, 3)]


def test_what_is_cached_is_not_brought() -> None:
    assert chosen(outlook(1, {0: 1, 1: 1}, cached={0, 1})) == []
    assert chosen(outlook(1, {0: 1, 1: 1}, cached={0})) == [(1, 1)]


def test_what_saves_nothing_is_left() -> None:
    """Beside a long queue on the accelerator the host has time for a small expert."""
    crowded = dict.fromkeys(range(9), 1)
    assert chosen(outlook(1, crowded, cached=range(8))) == []


def test_what_comes_too_late_is_left() -> None:
    """When it could be there the layer would be done."""
    late = outlook(1, {0: 1}, until_s=2.0)
    assert chosen(late) == [(1, 0)]  # one second late: two, not four by the host
    assert chosen(late, backlog_s=2.5) == []
    assert chosen(outlook(1, {0: 1}, until_s=0.0)) == []


def test_a_second_one_waits_for_the_first() -> None:
    """Both are worth it, but the link brings one at a time."""
    assert chosen(outlook(1, {0: 2}, until_s=3.5), outlook(2, {1: 2}, until_s=3.5, trust=0.9)) == [
        (1, 0),
        (2, 1),
    ]
    assert chosen(outlook(1, {0: 1}, until_s=2.5), outlook(2, {1: 1}, until_s=2.5, trust=0.9)) == [
        (1, 0)
    ]


def test_trust_weighs() -> None:
    near, far = outlook(1, {0: 2}, trust=0.9), outlook(2, {1: 3}, trust=0.2)
    assert chosen(near, far, most=1) == [(1, 0)]


def test_trust_is_learned_for_each_distance() -> None:
    trust = Trust(2)
    for _ in range(100):
        trust.predicted(5, 1, [1, 2])
        trust.predicted(5, 2, [3, 4])
        trust.came(5, [1, 2, 7])
    assert trust.of(1) == pytest.approx(1.0, abs=0.01)
    assert trust.of(2) == pytest.approx(0.0, abs=0.01)
    trust.came(5, [9])  # no prediction: nothing to learn
    assert trust.of(1) == pytest.approx(1.0, abs=0.01)
