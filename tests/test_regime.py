"""Streaming or a cache of experts: memory and time of the second, and which is chosen when."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optimizer import BASE, MACHINE, MIXTRAL, QWEN, overrides, specs, workloads

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.cache_time import CacheTime
from moebatch.plan.cost import distinct_experts, expert_page_bytes
from moebatch.plan.eviction import shares_of
from moebatch.plan.job_time import predict
from moebatch.plan.optimizer import job_time, memory_of, resident_pages
from moebatch.plan.policy import Overrides
from moebatch.plan.regime import Question, cache_plan, choose_regime, crossover, tail_slots
from moebatch.plan.workload import WorkloadSpec

GIB = 1 << 30
SLOW_DISK = replace(MACHINE, disk_bandwidth=1e9)
# Lengths that differ much, so that a job has a tail.
UNEVEN = WorkloadSpec.measure([(50, 20 + 9 * k) for k in range(60)], complete=True)


def question(spec=QWEN, workload=UNEVEN, memory=12 * GIB, **fixed):
    return Question(spec=spec, workload=workload, machine=SLOW_DISK, compute="float32",
                    memory_bytes=memory, base_bytes=BASE, fixed=Overrides(**fixed))  # fmt: skip


def one_row(tokens=64):
    return WorkloadSpec.measure([(32, tokens)], complete=True)


def cache_time(spec, eviction="mrs", shares=None):
    return CacheTime(spec, SLOW_DISK, compute="float32", kv_dtype="bfloat16", eviction=eviction,
                     shares=shares)  # fmt: skip


@settings(deadline=None, max_examples=20)
@given(
    spec=specs(), workload=workloads(), fixed=overrides(), memory=st.integers(300 << 20, 8 << 30)
)
def test_a_plan_with_a_cache_keeps_to_its_budget(spec, workload, fixed, memory) -> None:
    """Less memory is a smaller cache, and none below the least that a refusal names."""
    asked = Question(spec=spec, workload=workload, machine=MACHINE, compute="float32",
                     memory_bytes=memory, base_bytes=BASE, fixed=fixed)  # fmt: skip
    try:
        plan = cache_plan(asked)
    except NoFeasiblePolicy as error:
        assert str(error).startswith("the smallest policy")
        return
    assert plan.policy.regime == "cache"
    assert plan.memory.total <= memory
    need = memory_of(spec, plan.policy, base_bytes=BASE, workload=workload, native=MACHINE.native)
    assert need == plan.memory
    assert 0 <= plan.policy.expert_slots <= spec.num_expert_pages
    richer = cache_plan(replace(asked, memory_bytes=memory + 4 * expert_page_bytes(spec),
                                fixed=replace(fixed, batch_size=plan.policy.batch_size)))  # fmt: skip
    assert richer.memory.total <= memory + 4 * expert_page_bytes(spec)


def test_a_smaller_budget_is_a_smaller_cache_down_to_none() -> None:
    """And then attention is streamed too, before it is refused."""
    found = []
    for memory in (12 * GIB, 6 * GIB, *range(5 * GIB, GIB, -128 << 20)):
        try:
            found.append(cache_plan(question(workload=one_row(), memory=memory)).policy)
        except NoFeasiblePolicy:
            break
    kept = [resident_pages(QWEN, policy)[0] for policy in found]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == QWEN.num_layers > kept[-1]
    room = [
        attention * 5 + policy.expert_slots for attention, policy in zip(kept, found, strict=True)
    ]
    assert found[0].expert_slots > 500 and room == sorted(room, reverse=True)
    assert found[-1].expert_slots < 5  # less than one attention page


@pytest.mark.parametrize("tokens", [1, 4, 50])
def test_expected_experts_of_even_routing(tokens) -> None:
    """E (1 - (1 - k/E)^T) in each layer, of which the share that is not kept is missing."""
    touched = 48 * 128 * (1 - (1 - 8 / 128) ** tokens)
    time = cache_time(QWEN)
    assert time.touched(tokens) == pytest.approx(touched)
    assert time.touched(tokens) == pytest.approx(48 * distinct_experts(QWEN, tokens))
    assert time.misses(tokens, 48 * 32) == pytest.approx(0.75 * touched)
    assert time.misses(tokens, 48 * 128) == 0
    even = shares_of(np.ones((48, 128)))
    assert cache_time(QWEN, shares=even).misses(tokens, 48 * 32) == pytest.approx(0.75 * touched)


def test_uneven_routing_misses_less() -> None:
    counts = np.ones((48, 128)) + 200 * (np.arange(128) < 16)
    time = cache_time(QWEN, shares=shares_of(counts))
    assert time.touched(8) < cache_time(QWEN).touched(8)
    assert time.misses(8, 48 * 16) < 0.4 * time.touched(8)


def test_lru_keeps_nothing_of_use_when_a_pass_asks_for_more_than_there_is_room_for() -> None:
    lru, mrs = cache_time(QWEN, "lru"), cache_time(QWEN, "mrs")
    touched = lru.touched(32)
    assert lru.misses(32, 1000) == touched > mrs.misses(32, 1000)
    assert lru.misses(1, 1000) == mrs.misses(1, 1000)
    assert lru.misses(32, 48 * 128) == 0


@pytest.mark.parametrize("spec", [MIXTRAL, QWEN])
def test_one_row_takes_the_cache_and_many_rows_stream_until_their_tail(spec) -> None:
    alone = choose_regime(question(spec, one_row()))
    assert alone.policy.regime == "cache"
    many = choose_regime(question(spec, UNEVEN.of_size(2000)))
    assert many.policy.regime == "stream"
    assert many.policy.tail_rows == many.crossover > 0
    assert many.policy.expert_slots >= resident_pages(spec, many.policy)[1]


def test_a_model_that_fits_never_needs_a_cache() -> None:
    plan = choose_regime(question(memory=200 * GIB))
    assert plan.policy.weights_resident == 1.0
    assert (plan.policy.regime, plan.policy.tail_rows) == ("stream", 0)


@pytest.mark.parametrize("regime", ["stream", "cache"])
def test_the_user_decides(regime) -> None:
    for workload in (one_row(), UNEVEN.of_size(2000)):
        policy = choose_regime(question(workload=workload, regime=regime)).policy
        assert (policy.regime, policy.tail_rows) == (regime, 0)


def test_what_the_user_says_of_the_cache_is_obeyed() -> None:
    asked = question(workload=one_row(), regime="cache", expert_slots=77, eviction="lfu",
                     prefetch_layers=1)  # fmt: skip
    policy = choose_regime(asked).policy
    assert (policy.expert_slots, policy.eviction, policy.prefetch_layers) == (77, "lfu", 1)
    with pytest.raises(NoFeasiblePolicy):
        choose_regime(replace(asked, fixed=replace(asked.fixed, expert_slots=6000)))


def test_the_crossover_parts_the_row_counts() -> None:
    """With so many rows a pass of the tail is faster with the cache, with one more it is not."""
    asked = question(spec=MIXTRAL, workload=UNEVEN.of_size(500), memory=24 * GIB, regime="stream")
    plan = choose_regime(asked)
    rows = crossover(asked, plan)
    assert 0 < rows < plan.policy.batch_size
    faster = []
    for count in (rows, rows + 1):
        decoding = WorkloadSpec.measure([(1, 2)] * count, complete=True)
        policy = replace(plan.policy, batch_size=count, kv_blocks=10_000)
        attention, experts = resident_pages(MIXTRAL, policy)
        slots = int(tail_slots(asked, plan, count))
        streamed = job_time(MIXTRAL, decoding, policy, machine=SLOW_DISK, compute="float32")
        cached = predict(cache_time(MIXTRAL), decoding, policy, attention_pages=attention,
                         expert_pages=slots)  # fmt: skip
        assert experts <= slots
        faster.append(streamed.total_s - cached.total_s)
    assert faster[0] > faster[1]


def test_a_tail_makes_a_job_of_uneven_lengths_faster() -> None:
    fixed = question(spec=MIXTRAL, memory=24 * GIB, regime="stream")
    free = replace(fixed, fixed=Overrides(batch_size=60))
    streamed = choose_regime(replace(fixed, fixed=replace(fixed.fixed, batch_size=60)))
    plan = choose_regime(free)
    assert plan.policy.tail_rows > 0
    assert plan.job.total_s < streamed.job.total_s
    assert plan.job.passes == streamed.job.passes
