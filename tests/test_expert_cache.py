"""The expert cache: never above its capacity, pins hold, and Belady is the optimum."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.plan.eviction import (
    EVICTIONS,
    LFU,
    LRU,
    MRS,
    Belady,
    Visit,
    eviction,
    preload_order,
    shares_of,
)
from moebatch.plan.expert_cache import ExpertCache
from moebatch.plan.replay import compare, replay

LAYERS, EXPERTS = 2, 4


def visits_of(passes) -> list[Visit]:
    return [
        Visit(layer=layer, experts=tuple(sorted(experts)))
        for one in passes
        for layer, experts in enumerate(one)
    ]


@st.composite
def routings(draw, *, layers=LAYERS, experts=EXPERTS, most=8):
    """Visits layer by layer, pass by pass, with router scores that rank the chosen highest."""
    found = []
    for _ in range(draw(st.integers(1, most))):
        for layer in range(layers):
            chosen = draw(st.sets(st.integers(0, experts - 1), min_size=1, max_size=experts))
            scores = draw(st.lists(st.floats(0, 0.5), min_size=experts, max_size=experts))
            boosted = [s + (0.5 if e in chosen else 0.0) for e, s in enumerate(scores)]
            found.append(Visit(layer=layer, experts=tuple(sorted(chosen)), scores=boosted))
    return found


def fewest_misses(visits: list[Visit], capacity: int) -> int:
    """By trying every set that a cache could hold after every visit."""
    needed = [frozenset((v.layer, e) for e in v.experts) for v in visits]

    @cache
    def best(step: int, held: frozenset) -> int:
        if step == len(needed):
            return 0
        missed = len(needed[step] - held)
        pool = sorted(held | needed[step])
        choices = combinations(pool, min(capacity, len(pool)))
        return missed + min(best(step + 1, frozenset(kept)) for kept in choices)

    return best(0, frozenset())


@settings(deadline=None, max_examples=60)
@given(visits=routings(most=4), capacity=st.integers(0, 4))
def test_belady_is_the_optimum(visits, capacity) -> None:
    result = replay(visits, num_layers=LAYERS, num_experts=EXPERTS, capacity=capacity,
                    name="belady")  # fmt: skip
    assert result.misses == fewest_misses(visits, capacity)


@settings(deadline=None)
@given(visits=routings(layers=3, experts=8, most=12), capacity=st.integers(0, 24))
def test_no_policy_beats_belady_and_all_see_the_same(visits, capacity) -> None:
    *others, best = compare(visits, num_layers=3, num_experts=8, capacities=[capacity])
    asked = sum(len(v.experts) for v in visits)
    for result in (*others, best):
        assert result.hits + result.misses == asked
        assert result.hits <= best.hits
    if capacity == 0:
        assert best.hits == 0
    if capacity == 24:
        distinct = len({(v.layer, e) for v in visits for e in v.experts})
        assert {r.misses for r in (*others, best)} == {distinct}


@settings(deadline=None)
@given(
    visits=routings(layers=3, experts=8, most=12),
    capacity=st.integers(0, 24),
    name=st.sampled_from([*EVICTIONS, "belady"]),
    keep_always=st.booleans(),
    data=st.data(),
)
def test_capacity_pins_and_counts_hold(visits, capacity, name, keep_always, data) -> None:
    policy = (
        Belady(3, 8, visits) if name == "belady" else eviction(name, num_layers=3, num_experts=8)
    )
    held = ExpertCache(capacity, policy, keep_always=keep_always)
    inside: set = set()
    pinned: set = set()
    for visit in visits:
        hits, misses = held.look_up(visit)
        assert {(visit.layer, e) for e in hits} == inside & {
            (visit.layer, e) for e in visit.experts
        }
        assert sorted(hits + misses) == list(visit.experts)
        for expert in misses:
            done = held.admit((visit.layer, expert), prefetched=data.draw(st.booleans()))
            if done.evicted is not None:
                assert done.admitted and done.evicted in inside - pinned
                inside.remove(done.evicted)
            if done.admitted:
                inside.add((visit.layer, expert))
            elif capacity > len(pinned):
                assert not keep_always
        assert len(held) == len(inside) <= capacity
        assert held.experts == sorted(inside)
        if data.draw(st.booleans()) and inside:
            chosen = data.draw(st.sampled_from(sorted(inside)))
            if chosen in pinned:
                held.unpin(chosen)
                pinned.remove(chosen)
            else:
                held.pin(chosen)
                pinned.add(chosen)
        if data.draw(st.booleans()):
            capacity = data.draw(st.integers(len(pinned), 24))
            gone = held.resize(capacity)
            assert not set(gone) & pinned
            inside -= set(gone)
    assert held.counts.prefetch_hits <= held.counts.prefetched


def test_lru_forgets_who_was_used_longest_ago() -> None:
    held = ExpertCache(2, LRU(1, 4))
    for expert in (0, 1, 0, 2):
        held.look_up(Visit(layer=0, experts=(expert,)))
        held.admit((0, expert))
    assert held.experts == [(0, 0), (0, 2)]


def test_lfu_keeps_who_was_used_most_and_of_equals_the_latest() -> None:
    held = ExpertCache(2, LFU(1, 4))
    for expert in (0, 0, 1, 2, 3):
        held.look_up(Visit(layer=0, experts=(expert,)))
        held.admit((0, expert))
    assert held.experts == [(0, 0), (0, 3)]


def test_mrs_follows_equation_3_of_hybrimoe() -> None:
    """Two visits by hand: one expert chosen, so that TopP keeps two scores."""
    policy = MRS(1, 4)
    policy.visit(Visit(layer=0, experts=(0,), scores=(0.5, 0.3, 0.15, 0.05)), 1)
    np.testing.assert_allclose(policy.worth[0], [0.25, 0.15, 0, 0])
    policy.visit(Visit(layer=0, experts=(2,), scores=(0.1, 0.2, 0.6, 0.1)), 2)
    np.testing.assert_allclose(policy.worth[0], [0.125, 0.175, 0.3, 0])


def test_mrs_does_not_keep_what_is_worth_less_than_all_that_is_there() -> None:
    policy = MRS(1, 3)
    held = ExpertCache(1, policy)
    held.look_up(Visit(layer=0, experts=(0,), scores=(0.9, 0.1, 0.0)))
    held.admit((0, 0))
    held.look_up(Visit(layer=0, experts=(1,), scores=(0.4, 0.5, 0.1)))
    assert not held.admit((0, 1)).admitted
    assert held.experts == [(0, 0)]
    always = ExpertCache(1, policy, keep_always=True)
    always.admit((0, 0))
    assert always.admit((0, 1)).evicted == (0, 0)


def test_prefetched_experts_count_as_such_only_when_they_are_used() -> None:
    held = ExpertCache(2, LRU(1, 4))
    held.admit((0, 1), prefetched=True)
    held.admit((0, 2), prefetched=True)
    hits, misses = held.look_up(Visit(layer=0, experts=(1, 3)))
    assert (hits, misses) == ((1,), (3,))
    assert (held.counts.prefetched, held.counts.prefetch_hits) == (2, 1)
    assert held.counts.hit_rate == 0.5


@pytest.mark.parametrize("name", EVICTIONS)
def test_a_profile_is_loaded_first_and_outweighed_by_what_is_seen(name) -> None:
    shares = shares_of([[1, 0, 8, 1], [0, 0, 0, 0]])
    order = preload_order(shares)
    assert order[:2] == [(0, 2), (1, 0)] and sorted(order) == [(i, e) for i in range(2)
                                                               for e in range(4)]  # fmt: skip
    held = ExpertCache(3, eviction(name, num_layers=2, num_experts=4))
    held.seed(shares)
    assert held.preload(order) == [(0, 2), (1, 0), (1, 1)]
    assert held.victim() == (1, 0)
    held.look_up(Visit(layer=1, experts=(0,), scores=(0.9, 0.1, 0, 0)))
    assert held.victim() == (1, 1)


def test_dense_layers_are_not_preloaded() -> None:
    assert preload_order(shares_of(np.ones((3, 2))), without=[0]) == [
        (1, 0),
        (2, 0),
        (1, 1),
        (2, 1),
    ]
