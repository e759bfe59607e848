"""What a draft model tells of the experts to come: it decides when they are read, not what is said."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from drafts import model_source
from run_engine import POLICY, open_engine, plain, tokens
from test_speculative import answers, rows

from moebatch.plan.cutoff import StepCosts, cutoff_layer
from moebatch.plan.eviction import EVICTIONS
from moebatch.plan.expert_cache import CacheCounts
from moebatch.plan.profiles import PROFILES
from moebatch.runtime.emulated import EmulatedDevice
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.speculative import Speculator


def spec(layers, *, dense=(), hidden=8, router=True):
    """As much of a model's shape as foresight looks at."""
    return SimpleNamespace(num_layers=layers, hidden_size=hidden, has_router=router,
                           dense_layers=frozenset(dense),
                           experts_in=lambda i: 0 if i in dense else 4)  # fmt: skip


class Cache:
    """A cache whose routers answer by the sum of the states, and which notes what it is told."""

    def __init__(self, *, expert_s=0.0, room=99.0, in_place_s=None):
        self.counts, self.brought, self.asked = CacheCounts(), [], []
        self.expert_s, self.room, self.in_place_s, self.waited_s = expert_s, room, in_place_s, 0.0

    def routed(self, layer, states):
        self.asked.append(layer)
        return Counter({int(x) % 4: 1 for x in states.sum(dim=1)})

    def holds(self, which):
        return False

    def bring(self, ranked):
        self.brought.append(list(ranked))


def step(foresight, layers, *states):
    for layer in range(layers):
        for state in states:
            foresight.attended(layer, torch.full((1, 8), state / 8))


def test_experts_below_the_cutoff_are_brought_in_the_order_of_layers() -> None:
    cache = Cache()
    foresight = Foresight(cache, spec=spec(4, dense={1}))
    foresight.fixed = 3
    assert foresight.begin(spec(4), drafts=2)
    step(foresight, 4, 1.0)
    step(foresight, 4, 2.0, 1.0)
    assert cache.brought[0] == [(0, 1)]
    assert cache.brought[1] == [(0, 1), (2, 1)]
    assert cache.brought[-1] == [(0, 1), (0, 2), (2, 1), (2, 2)]  # never layers 1 and 3
    foresight.drafted(1.0, 2)
    told = len(cache.brought)
    step(foresight, 4, 3.0)  # a pass that drafts nothing, as for a prompt
    assert len(cache.brought) == told


@pytest.mark.parametrize("draft_layers", [1, 2, 3, 4, 9])
def test_a_draft_of_other_depth_speaks_for_every_layer_once(draft_layers) -> None:
    cache = Cache()
    foresight = Foresight(cache, spec=spec(4))
    foresight.begin(spec(draft_layers), drafts=1)
    step(foresight, draft_layers, 1.0)
    assert sorted(cache.asked) == [0, 1, 2, 3]


def test_a_draft_of_another_width_tells_nothing() -> None:
    foresight = Foresight(Cache(), spec=spec(4))
    assert not foresight.begin(spec(4, hidden=6), drafts=1)
    assert not Foresight(Cache(), spec=spec(4, router=False)).begin(spec(4), drafts=1)
    assert foresight.describe() is None


def measured(foresight, cache, *, stages=3, right=True):
    """Stages of 2 drafts at 0.1 s a layer; passes of 0.4 s a layer that miss an expert a layer."""
    for _ in range(stages):
        foresight.begin(spec(4), drafts=2)
        step(foresight, 4, 1.0)
        foresight.drafted(0.8, 2)
        for layer in range(4):
            foresight.came(layer, [1 if right else 2])
        cache.counts.misses += 4
        cache.waited_s += 1.0
        foresight.passed(2.6)
    foresight.begin(spec(4), drafts=2)


@pytest.mark.parametrize(("right", "expert_s"), [(True, 0.05), (True, 0.5), (False, 0.5)])
def test_the_cutoff_follows_from_what_was_measured(right, expert_s) -> None:
    cache = Cache(expert_s=expert_s)
    foresight = Foresight(cache, spec=spec(4))
    measured(foresight, cache, right=right)
    costs = StepCosts(draft_layer_s=0.1, target_layer_s=0.4, expert_s=expert_s, layers=4,
                      draft_layers=4, draft_tokens=2, experts=1.0, accuracy=float(right),
                      slots=99.0)  # fmt: skip
    assert foresight.cutoff == cutoff_layer(costs)
    assert (foresight.cutoff > 0) == right
    assert foresight.describe()["named_needed"] == float(right)


def test_without_room_nothing_is_brought() -> None:
    cache = Cache(expert_s=0.05, room=0.5)
    foresight = Foresight(cache, spec=spec(4))
    measured(foresight, cache)
    assert foresight.cutoff == 0 and not cache.brought


def test_where_the_host_is_fast_there_is_nothing_to_gain() -> None:
    cache = Cache(expert_s=0.5, in_place_s=0.0)
    foresight = Foresight(cache, spec=spec(4))
    measured(foresight, cache)
    assert foresight.cutoff == 0


def drafted(path, work, source, *, fixed=None, **changes):
    """Answers, and the engine's backend with what it has counted."""
    with open_engine(path, POLICY, draft_tokens=3, speculator=Speculator(source, most=3),
                     regime="cache", **changes) as engine:  # fmt: skip
        foresight = engine._backend.foresight
        if foresight is not None:
            foresight.fixed = fixed
        done = sorted(engine.run(work), key=lambda o: o.request.index)
        return done, engine.regime.counts, engine.speculation


def devices(kind):
    return EmulatedDevice(PROFILES["unthrottled"]) if kind == "emulated" else None


@pytest.mark.parametrize("fixed", [None, 0, 1, 99])
@pytest.mark.parametrize("slots", [0, 3, 8, 14])
@pytest.mark.parametrize("where", ["host", "emulated"])
def test_answers_are_those_without_it(where, slots, fixed, tiny_models) -> None:
    """For any cutoff and size of the cache, by a draft model that is often right."""
    path = tiny_models("mixtral")[1]
    work = rows(5, rng=5, temperature=0.7)
    expected = answers(plain(path, work))
    for eviction in EVICTIONS:
        with model_source(path) as source:
            done, _, told = drafted(path, work, source, fixed=fixed, expert_slots=slots,
                                    eviction=eviction, device=devices(where))  # fmt: skip
        assert answers(done) == expected
        if where == "host" or slots:
            assert told["cutoff_layer"] == fixed or fixed is None


@pytest.mark.parametrize("where", ["host", "emulated"])
def test_a_draft_model_that_is_the_target_names_what_is_needed(where, tiny_models) -> None:
    """Its drafts are the target's tokens, so that both choose the same experts; those come early."""
    path = tiny_models("mixtral")[1]
    work = rows(1, rng=5, temperature=0.7, max_tokens=40)
    common = {"expert_slots": 5, "eviction": "lru", "device": devices(where)}
    with model_source(path) as source:
        done, counts, told = drafted(path, work, source, fixed=2, **common)
    assert tokens(done) == tokens(plain(path, work))
    assert told["named_needed"] > 0.9
    assert told["accepted"] == told["drafted"] > 0
    assert counts.prefetch_hits > 0


def test_prefetch_turned_off_is_off(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    with model_source(path) as source:
        _, counts, told = drafted(path, rows(2), source, expert_slots=6, prefetch_layers=0)
    assert counts.prefetched == 0
    assert "cutoff_layer" not in told
