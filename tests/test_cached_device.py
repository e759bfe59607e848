"""The cache regime on the emulated accelerator: the same text and logits, whatever lanes do."""

import os
import random
from dataclasses import replace
from functools import cache, partial

import models
import pytest
import run_engine
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_device import random_rows, run_rows, worst_error
from run_engine import POLICY, tokens
from test_engine import rows as requests
from test_engine_resume import cut

from moebatch.errors import NoFeasiblePolicy
from moebatch.model.experts import add_expert, add_routed, write_expert
from moebatch.model.router import group_by_expert
from moebatch.plan.eviction import EVICTIONS
from moebatch.plan.hybrid import MISSES, ExpertCosts
from moebatch.plan.policy import Policy
from moebatch.plan.profiles import PROFILES, LinkProfile
from moebatch.plan.schedule import Lane
from moebatch.runtime.cached_device_backend import CachedDeviceBackend
from moebatch.runtime.device_regime import device_regime_facts
from moebatch.runtime.emulated import EmulatedDevice

FREE = PROFILES["unthrottled"]
SLOW = LinkProfile(name="slow", memory_bytes=2**30, h2d_bytes_per_s=5e6, d2h_bytes_per_s=5e6,
                   latency_s=1e-4)  # fmt: skip
CACHED = Policy(batch_size=9, micro_batch_size=3, kv_blocks=64, attention="gpu", regime="cache",
                expert_slots=5)  # fmt: skip
# All three lanes about as fast: every kind of split occurs.
EVEN = ExpertCosts(device_expert_s=1e-3, host_expert_s=5e-4, host_token_s=5e-4, transfer_s=1.5e-3)
TOLERANCE = 1e-4


def make(checkpoint, *, homes, costs=EVEN, **options):
    """A backend for `run_rows`."""
    return CachedDeviceBackend(checkpoint, costs=costs, **options)


def facts_of(backend):
    """What a report would say of its cache and lanes."""
    return device_regime_facts(backend).to_dict()


def run_cached(path, work, **changes):
    device = EmulatedDevice(FREE)
    return run_engine.run(path, work, replace(POLICY, regime="cache"), device=device, **changes)


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", sorted(models.CONFIGS))
def test_every_family(kind, attention, tiny_models) -> None:
    """Biases, limits, shared experts, dense layers, latent attention: the logits of the oracle."""
    model, path = tiny_models(kind)
    policy = replace(CACHED, attention=attention, expert_slots=3)
    rows = random_rows(random.Random(2), 6, 2, vocab=90)
    run_rows(path, rows, policy, EmulatedDevice(FREE), chunk=9, make=make)
    assert worst_error(model, rows) < TOLERANCE


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("slots", [0, 1, 3, 7, 16, 99])
def test_text_is_that_of_streaming(slots, eviction, tiny_models) -> None:
    """For every size of the cache, greedy and sampled."""
    path = tiny_models("mixtral")[1]
    for how in ({"seed": 3}, {"temperature": 0.9, "top_p": 0.95, "seed": 5}):
        found = run_cached(path, requests(8, **how), expert_slots=slots, eviction=eviction,
                           attention="gpu")  # fmt: skip
        assert tokens(found) == streamed(path, **how)


@cache
def streamed(path, **how):
    done = run_engine.run(path, requests(8, **how), POLICY, device=EmulatedDevice(FREE),
                          schedule="layerwise", attention="gpu", ffn="gpu",
                          weights_resident=0.2)  # fmt: skip
    return tokens(done)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    attention=st.sampled_from(["cpu", "gpu"]),
    batch_size=st.integers(1, 12),
    micro_batch_size=st.integers(1, 12),
    prefill_tokens=st.integers(5, 200),
    kv_blocks=st.integers(4, 60),
    expert_slots=st.integers(0, 17),
    eviction=st.sampled_from(EVICTIONS),
    misses=st.sampled_from(MISSES),
    prefetch_layers=st.integers(0, 3),
    keep_computed=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_text_is_the_same_under_any_policy(tiny_models, order, **policy) -> None:
    """The metamorphic test: rows come, are prefilled in parts, sample, stop and leave at any time."""
    path = tiny_models("mixtral")[1]
    work = requests(9, temperature=0.9, top_p=0.95, seed=5)
    expected = tokens(run_engine.plain(path, work))
    shuffled = order.sample(work, len(work))
    assert expected == tokens(run_cached(path, shuffled, **policy))


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    """Sizes that nothing divides."""
    model = models.reference_model(
        "mixtral", hidden_size=44, intermediate_size=37, num_hidden_layers=4, head_dim=6,
        num_attention_heads=6, num_key_value_heads=3, num_local_experts=5, num_experts_per_tok=3,
    )  # fmt: skip
    return model, models.save(model, tmp_path_factory.mktemp("odd"))


def random_costs(rng):
    return ExpertCosts(
        device_expert_s=rng.choice([1e-4, 1e-3]),
        device_token_s=rng.choice([0.0, 1e-5]),
        host_expert_s=rng.choice([1e-4, 2e-3]),
        host_token_s=rng.choice([0.0, 1e-3]),
        transfer_s=rng.choice([1e-4, 1e-3, 1e-2]),
    )


def random_case(seed):
    """(policy, rows, costs, chunk, generator): anything goes."""
    rng = random.Random(seed)
    count, size = rng.randint(1, 8), rng.randint(1, 4)
    policy = Policy(
        batch_size=count,
        micro_batch_size=min(size, count),
        kv_blocks=64,
        attention=rng.choice(["cpu", "gpu", "gpu"]),
        regime="cache",
        expert_slots=rng.choice([0, 1, 2, 5, 8, 13, 20]),
        eviction=rng.choice(EVICTIONS),
        misses=rng.choice(MISSES),
        prefetch_layers=rng.randint(0, 3),
        keep_computed=rng.random() < 0.7,
    )
    rows = random_rows(rng, count, policy.num_micro_batches)
    return policy, rows, random_costs(rng), rng.choice([1, 3, 16, 64]), rng


@pytest.mark.parametrize("part", range(10))
def test_random_cases_with_random_delays(part, odd_model) -> None:
    """Poisoned buffers and lanes that stop for a while: no fault, in any policy.

    MOEBATCH_FUZZ_CASES sets how many cases there are in all.
    """
    model, path = odd_model
    cases = int(os.environ.get("MOEBATCH_FUZZ_CASES", "20"))
    for seed in range(part, cases, 10):
        policy, rows, costs, chunk, rng = random_case(seed)
        link = replace(FREE, h2d_bytes_per_s=rng.choice([1e15, 4e7]))
        device = EmulatedDevice(link, delays=rng, max_delay_s=rng.choice([0.0, 0.0005, 0.002]))
        small_pieces = partial(make, costs=costs, chunk_bytes=rng.choice([1 << 10, 1 << 20]))
        run_rows(path, rows, policy, device, chunk=chunk, make=small_pieces, watch=check_counts)
        assert worst_error(model, rows) < TOLERANCE, f"case {seed}"


def check_counts(backend) -> None:
    """Every expert that was asked for was computed once, somewhere; the cache keeps its size."""
    facts = facts_of(backend)
    lanes = facts["computed"]
    assert lanes["device"] + lanes["host"] == facts["hits"] + facts["misses"]
    assert lanes["fetched"] <= lanes["device"]
    assert facts["brought"]["needed"] >= lanes["fetched"]
    cache = backend._slots.cache
    assert len(cache) <= cache.capacity


def test_every_lane_takes_part(tiny_models) -> None:
    """Of even costs each lane gets a share, and the timeline shows them."""
    path = tiny_models("mixtral")[1]
    seen = {}
    rows = random_rows(random.Random(4), 8, 1)
    passes = run_rows(path, rows, replace(CACHED, micro_batch_size=9, prefetch_layers=1),
                      EmulatedDevice(FREE), make=make,
                      watch=lambda b: seen.update(facts_of(b)))  # fmt: skip
    assert seen["computed"]["host"] > 0
    assert seen["computed"]["fetched"] > 0
    assert seen["computed"]["device"] > seen["computed"]["fetched"]
    assert seen["link_bytes"] > 0
    assert 0 < seen["hit_rate"] < 1
    busy = {lane for _, timeline in passes for lane in timeline.lanes}
    assert {Lane.GPU, Lane.CPU, Lane.H2D, Lane.D2H} <= busy


def test_everything_cached_moves_nothing(tiny_models) -> None:
    """All experts fit: no miss, and no byte of an expert crosses the link after loading."""
    path = tiny_models("mixtral")[1]
    seen = {}
    policy = replace(CACHED, expert_slots=99)
    run_rows(path, random_rows(random.Random(4), 8, 1), policy, EmulatedDevice(FREE), make=make,
             watch=lambda b: seen.update(facts_of(b)))  # fmt: skip
    assert (seen["misses"], seen["link_bytes"]) == (0, 0)


@pytest.mark.parametrize("misses", ["fetch", "host"])
def test_misses_are_handled_as_asked(misses, tiny_models) -> None:
    """ "fetch": all over the link as long as there is room; "host": none."""
    path = tiny_models("mixtral")[1]
    seen = {}
    policy = replace(CACHED, misses=misses, prefetch_layers=0, keep_computed=False, expert_slots=8)
    run_rows(path, random_rows(random.Random(4), 2, 1), policy, EmulatedDevice(SLOW), make=make,
             watch=lambda b: seen.update(facts_of(b)))  # fmt: skip
    host, fetched = seen["computed"]["host"], seen["computed"]["fetched"]
    assert (host == 0, fetched == 0) == ((True, False) if misses == "fetch" else (False, True))


class Careless(CachedDeviceBackend):
    """Evicts what is in use, and does not wait for what is under way."""

    def _make_experts(self, routers):
        made = super()._make_experts(routers)
        self._slots.wait_for = lambda which: self._slots._slot_of[which]
        return made


def test_a_careless_cache_is_caught(tiny_models) -> None:
    """NaN where an expert is used before it has come: the test above would see such a fault."""
    model, path = tiny_models("mixtral")
    policy = replace(CACHED, misses="fetch")
    for kind, wrong in ((CachedDeviceBackend, False), (Careless, True)):
        rows = random_rows(random.Random(3), 9, 3)
        build = partial(_of_kind, kind)
        run_rows(path, rows, policy, EmulatedDevice(SLOW), make=build)
        assert (worst_error(model, rows) > 1.0) == wrong


def _of_kind(kind, checkpoint, *, homes, **options):
    return kind(checkpoint, costs=EVEN, **options)


def test_costs_are_measured_at_the_start(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    found = []
    run_rows(path, random_rows(random.Random(3), 1, 1), CACHED, EmulatedDevice(SLOW),
             make=partial(make, costs=None), watch=lambda b: found.append(b.costs))  # fmt: skip
    (costs,) = found
    assert costs.transfer_s >= 30_000 / SLOW.h2d_bytes_per_s  # an expert has 32 KiB
    assert costs.device_expert_s + costs.device_token_s > 0
    assert costs.host_expert_s + costs.host_token_s > 0
    assert costs.host_start_s >= 2 * SLOW.latency_s


def test_a_profile_fills_the_cache_at_first(tiny_models) -> None:
    """The most used experts of earlier runs are there before the first pass."""
    path = tiny_models("mixtral")[1]
    counts = [[0] * 4 for _ in range(3)]
    counts[0][3] = counts[1][2] = 7
    found = []
    run_rows(path, random_rows(random.Random(3), 1, 1), replace(CACHED, expert_slots=2),
             EmulatedDevice(FREE), make=partial(_preloaded, found, counts))  # fmt: skip
    assert found == [[(0, 3), (1, 2)]]


def _preloaded(found, counts, checkpoint, *, homes, **options):
    backend = CachedDeviceBackend(checkpoint, costs=EVEN, profile=counts, **options)
    load = backend.load

    def watched(**given):
        load(**given)
        found.append(backend._slots.cache.experts)

    backend.load = watched
    return backend


def test_a_device_that_is_too_small_for_the_rest(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    with pytest.raises(NoFeasiblePolicy) as caught:
        run_rows(path, random_rows(random.Random(3), 1, 1), CACHED,
                 EmulatedDevice(FREE, memory_bytes=50_000), make=make)  # fmt: skip
    assert "--regime stream" in caught.value.hint


def test_tokens_of_an_earlier_run_are_taken_up(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = requests(10, seed=7)
    expected = run_engine.plain(path, work)
    for length, prefill_tokens in ((1, 200), (5, 4), (9, 7)):
        resumed = [
            replace(r, resumed=cut(done, length)) if r.index % 3 else r
            for r, done in zip(work, expected, strict=True)
        ]
        found = run_cached(path, resumed, attention="gpu", prefill_tokens=prefill_tokens,
                           batch_size=4, expert_slots=3)  # fmt: skip
        assert tokens(found) == tokens(expected)


def test_routed_rows_are_added_bit_for_bit_as_expert_by_expert(tiny_models) -> None:
    """Whatever the tokens' order, and with numbers whose sum depends on the order of additions."""
    torch.manual_seed(1)
    from moebatch.model.experts import Expert
    from moebatch.model.linear import TensorLinear

    hidden, output = torch.randn(9, 16), torch.randn(9, 16) * 1e3
    made = [
        Expert(index=e, size=8, gate_up=TensorLinear(torch.randn(16, 16)),
               down=TensorLinear(torch.randn(16, 8)))
        for e in range(6)
    ]  # fmt: skip
    chosen = torch.stack([torch.randperm(6)[:3] for _ in range(5)])
    rows = group_by_expert(torch.rand(5, 3), chosen, 6, torch.tensor([0, 2, 3, 7, 8]))
    expected, found = output.clone(), output.clone()
    for expert in made:
        add_expert(expected, hidden, rows, expert)
    results = torch.full((15, 16), float("nan"))
    for expert in reversed(made):
        write_expert(results, hidden, rows, expert)
    add_routed(found, results, rows)
    assert torch.equal(found, expected)
    assert torch.equal(found[[1, 4, 5, 6]], output[[1, 4, 5, 6]])
