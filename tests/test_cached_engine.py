"""The cache regime gives the text of the streaming regime bit for bit, whatever is cached when."""

import os
import random
import time
from itertools import product

import models
import pytest
from run_engine import POLICY, open_engine, request, run

from moebatch.errors import Interrupted, ModelError
from moebatch.model.checkpoint import Checkpoint
from moebatch.plan.eviction import EVICTIONS
from moebatch.runtime import expert_store
from moebatch.runtime.expert_store import ExpertStore
from moebatch.runtime.page_reader import PageReader

POISON = 0xFF  # as bytes of floats: not a number


def answers(outcomes):
    """Everything that was generated, to the last bit of its probability."""
    return [
        [(c.token_ids, c.finish_reason, tuple(c.logprobs or ())) for c in outcome.choices]
        for outcome in outcomes
    ]


def random_requests(rng, count, *, longest=20, vocab=97):
    """Greedy and sampled rows of uneven lengths."""
    return [
        request(i, [rng.randrange(3, vocab) for _ in range(rng.randint(1, longest))],
                temperature=rng.choice([0.0, 0.9]), max_tokens=rng.randint(1, 10), seed=7,
                logprobs=1)
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def poisoned(monkeypatch):
    """Buffers hold what is not a number before they are filled, and as soon as they are given up."""
    make, drop = expert_store._buffer, ExpertStore._drop

    def poisoned_drop(store, which):
        buffer = store._held[which].buffer
        drop(store, which)
        if buffer is not None:
            buffer.fill_(POISON)

    monkeypatch.setattr(expert_store, "_buffer", lambda size: make(size).fill_(POISON))
    monkeypatch.setattr(ExpertStore, "_drop", poisoned_drop)


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    """Sizes that nothing divides."""
    model = models.reference_model(
        "mixtral", hidden_size=44, intermediate_size=37, num_hidden_layers=4, head_dim=6,
        num_attention_heads=6, num_key_value_heads=3, num_local_experts=5, num_experts_per_tok=2,
    )  # fmt: skip
    return models.save(model, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_same_text_for_every_size_of_the_cache(eviction, odd_model, poisoned) -> None:
    """From none to all of the 20 experts, with and without prefetch, one spare buffer or more."""
    requests = random_requests(random.Random(1), 5)
    expected = answers(run(odd_model, requests))
    ways = [*product([1, 2, 7, 19], [0, 3], [1, 3]), *product([0, 20], [3], [1, 3])]
    for slots, layers, spare in ways:  # with room for none or for all nothing is prefetched
        found = run(odd_model, requests, regime="cache", expert_slots=slots, eviction=eviction,
                    prefetch_layers=layers, page_slots=spare)  # fmt: skip
        assert answers(found) == expected, (slots, layers, spare)


@pytest.mark.parametrize("kind", sorted(models.CONFIGS))
def test_every_family_has_a_cache(kind, tiny_models, poisoned) -> None:
    """Dense models and layers, shared experts, expert biases, streamed attention."""
    path = tiny_models(kind)[1]
    requests = random_requests(random.Random(2), 4, vocab=90)
    expected = answers(run(path, requests, weights_resident=0.0))
    found = run(path, requests, regime="cache", expert_slots=5, weights_resident=0.0,
                eviction="mrs")  # fmt: skip
    assert answers(found) == expected


def random_case(seed):
    """(requests, changes of the policy, the generator for delays): anything goes."""
    rng = random.Random(seed)
    changes = {
        "regime": "cache",
        "expert_slots": rng.choice([0, 1, 3, rng.randint(0, 20), 20]),
        "eviction": rng.choice(EVICTIONS),
        "prefetch_layers": rng.choice([0, 1, 3]),
        "page_slots": rng.choice([1, 2, 4]),
        "weights_resident": rng.choice([0.0, 1.0, rng.random()]),
        "batch_size": rng.randint(1, 6),
        "micro_batch_size": rng.randint(1, 3),
        "prefill_tokens": rng.choice([1, 5, 64]),
    }
    return random_requests(rng, rng.randint(1, 6), longest=rng.choice([2, 20])), changes, rng


@pytest.mark.parametrize("part", range(10))
def test_random_cases_with_random_delays(part, odd_model, poisoned, monkeypatch) -> None:
    """Poisoned buffers, and a disk that stops for a while: no fault, under any policy.

    MOEBATCH_FUZZ_CASES sets how many cases there are in all.
    """
    steps = PageReader.steps

    def slow_steps(reader, plan, buffer, **how):
        for step in steps(reader, plan, buffer, **how):
            if rng.random() < 0.1:
                time.sleep(rng.random() * longest)
            yield step

    cases = int(os.environ.get("MOEBATCH_FUZZ_CASES", "20"))
    monkeypatch.setattr(PageReader, "steps", slow_steps)
    for seed in range(part, cases, 10):
        requests, changes, rng = random_case(seed)
        longest = 0.0
        expected = answers(run(odd_model, requests, **{**changes, "regime": "stream"}))
        longest = rng.choice([0.0, 0.0005, 0.002])
        assert answers(run(odd_model, requests, **changes)) == expected, f"case {seed}"


def test_only_experts_with_tokens_are_read(odd_model) -> None:
    """Without a cache a row reads its two experts of each layer in every pass, and nothing else."""
    prompts = [request(0, [5], max_tokens=6)]
    with open_engine(
        odd_model, POLICY, regime="cache", expert_slots=0, prefetch_layers=0
    ) as engine:
        loaded = engine.disk_read_bytes
        list(engine.run(prompts))
        passes, read = engine.stats.passes, engine.disk_read_bytes - loaded
        counts = engine.regime.counts
    expert_bytes = 3 * 44 * 37 * 4
    assert (counts.hits, counts.misses) == (0, passes * 4 * 2)
    assert read == counts.misses * expert_bytes


def test_a_whole_model_in_the_cache_is_read_once(odd_model) -> None:
    with open_engine(odd_model, POLICY, regime="cache", expert_slots=20) as engine:
        loaded = engine.disk_read_bytes
        list(engine.run(random_requests(random.Random(3), 6)))
        assert engine.disk_read_bytes == loaded
        assert engine.regime.counts.misses == 0


def test_prefetch_brings_experts_before_they_are_asked_for(odd_model) -> None:
    """With room for most experts, a part of the misses of a run without prefetch become hits."""
    requests = random_requests(random.Random(5), 1)
    misses = {}
    for layers in (0, 3):
        with open_engine(odd_model, POLICY, regime="cache", expert_slots=12, eviction="lru",
                         prefetch_layers=layers) as engine:  # fmt: skip
            list(engine.run(requests))
            misses[layers] = engine.regime.counts
    assert misses[0].prefetched == 0
    assert misses[3].prefetched >= misses[3].prefetch_hits > 0


def test_a_profile_decides_what_is_loaded_first(odd_model) -> None:
    profile = [[1, 9, 2, 0, 0], [0, 0, 0, 0, 7], [3, 0, 0, 0, 0], [0, 0, 1, 0, 0]]
    with open_engine(odd_model, POLICY, regime="cache", expert_slots=4, profile=profile) as engine:
        assert engine._backend._experts.cache.experts == [(0, 1), (1, 4), (2, 0), (3, 2)]


def test_a_disk_that_fails_ends_the_run(odd_model, monkeypatch) -> None:
    """What the reader's thread raises comes out of the caller's."""
    read, left = Checkpoint.read_run, 40

    def failing(checkpoint, run, buffers, **how):
        nonlocal left
        left -= sum("experts" in entry.name for entry in run)
        if left < 0:
            raise ModelError("the disk is gone")
        read(checkpoint, run, buffers, **how)

    with open_engine(odd_model, POLICY, regime="cache", expert_slots=3) as engine:
        monkeypatch.setattr(Checkpoint, "read_run", failing)
        with pytest.raises(ModelError, match="the disk is gone"):
            list(engine.run(random_requests(random.Random(1), 4)))


def test_an_interrupt_ends_the_wait_for_an_expert(odd_model, monkeypatch) -> None:
    stopped = False

    def never(reader, plan, buffer, **how):
        nonlocal stopped
        stopped = True
        time.sleep(0.5)
        yield from ()

    with open_engine(odd_model, POLICY, regime="cache", expert_slots=0,
                     interrupted=lambda: stopped) as engine:  # fmt: skip
        monkeypatch.setattr(PageReader, "steps", never)
        with pytest.raises(Interrupted):
            list(engine.run(random_requests(random.Random(1), 1)))


@pytest.mark.parametrize("tail_rows", [1, 2, 4, 99])
@pytest.mark.parametrize("resident", [0.0, 0.4, 1.0])
def test_the_tail_goes_on_with_a_cache(resident, tail_rows, odd_model, poisoned) -> None:
    """Same text with and without the change, and it comes as soon as so few rows are left."""
    requests = random_requests(random.Random(4), 9)
    sizes = {"weights_resident": resident, "batch_size": 4}
    expected = answers(run(odd_model, requests, **sizes))
    with open_engine(odd_model, POLICY, **sizes, tail_rows=tail_rows, expert_slots=9) as engine:
        left = []
        found = list(engine.run(requests, lambda stats: left.append(stats.in_flight)))
        facts, passes = engine.regime, engine.stats.passes
        counted = sum(map(sum, engine.expert_tokens))
    assert answers(sorted(found, key=lambda o: o.request.index)) == expected
    assert facts.regime == "stream" and 0 < facts.changed_before_pass < passes
    assert left[facts.changed_before_pass - 1] <= tail_rows
    assert facts.counts.hits + facts.counts.misses > 0
    generated = sum(len(o.choices[0].token_ids) for o in found)
    prompts = sum(len(r.prompt_token_ids) for r in requests)
    # every token but each row's last goes through the experts; in the last layer only sampled ones
    assert counted == 2 * (3 * (prompts + generated - 9) + generated)


def test_what_others_follow_has_no_tail(odd_model) -> None:
    """A benchmark's warm-up ends with few rows too, and the change cannot be undone."""
    requests = random_requests(random.Random(4), 9)
    sizes = {"weights_resident": 0.4, "batch_size": 4}
    expected = answers(run(odd_model, requests, **sizes))
    with open_engine(odd_model, POLICY, **sizes, tail_rows=2, expert_slots=9) as engine:
        list(engine.run(random_requests(random.Random(5), 2), more_follow=True))
        assert engine.regime.changed_before_pass is None
        found = list(engine.run(requests))
        assert engine.regime.changed_before_pass is not None
    assert answers(sorted(found, key=lambda o: o.request.index)) == expected


def test_a_job_that_stops_with_many_rows_never_changes(odd_model) -> None:
    requests = [request(i, [5, 6], max_tokens=4) for i in range(6)]
    with open_engine(odd_model, POLICY, tail_rows=3, expert_slots=9) as engine:
        list(engine.run(requests))
        assert engine.regime.changed_before_pass is None
        assert engine.regime.counts is None
