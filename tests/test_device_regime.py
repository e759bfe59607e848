"""Streaming to an accelerator or a cache on it: predicted seconds, crossover, and who decides."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optimizer import BASE, MACHINE, MIXTRAL, MTBENCH, QWEN

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.cached_fit import slot_bytes, tail_bytes, tail_host_bytes
from moebatch.plan.catalogue import catalogued
from moebatch.plan.device_fit import DevicePlan, host_memory
from moebatch.plan.device_regime import (
    DeviceQuestion,
    cached_plan,
    choose_on_device,
    few_rows,
    rate,
    setting_of,
    tail_of,
)
from moebatch.plan.hybrid import ExpertCosts, balanced, equal_splits, layer_load
from moebatch.plan.memory import kv_block_bytes
from moebatch.plan.optimizer import memory_of, resident_pages
from moebatch.plan.outlook import Limits, look
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.workload import WorkloadSpec

GIB = 1 << 30
T4 = catalogued("t4")
FAST = replace(T4, link=8 * T4.link, link_back=8 * T4.link_back)
MANY = replace(MTBENCH, num_sequences=2000)
STREAM = Policy(batch_size=64, micro_batch_size=16, ffn="gpu", schedule="cgopipe", kv_blocks=1600,
                kv_dtype="float16", weights_resident=0.2, prefill_tokens=2048,
                experts_grouped=16)  # fmt: skip


def question(spec=MIXTRAL, machine=T4, workload=MANY, host=190 * GIB, device=14 * GIB,
             emulated=False, **fixed):  # fmt: skip
    return DeviceQuestion(spec=spec, workload=workload, machine=machine, compute="float16",
                          memory_bytes=host, device_bytes=device, base_bytes=BASE,
                          fixed=Overrides(**fixed), emulated=emulated)  # fmt: skip


def rows(count, tokens=64):
    return WorkloadSpec.measure([(32, tokens)] * count, complete=True)


def streamed(asked, policy=STREAM):
    """The plan that a policy stands for."""
    on_host = memory_of(asked.spec, policy, base_bytes=BASE)
    memory = host_memory(asked.spec, policy, on_host, emulated=asked.emulated)
    return DevicePlan(policy=policy, memory=memory)


def host_bytes(asked, policy=STREAM):
    return int(streamed(asked, policy).memory.total)


@settings(deadline=None)
@given(
    count=st.integers(1, 9),
    missing=st.integers(0, 9),
    device=st.integers(1, 9),
    host=st.integers(1, 9),
    start=st.integers(0, 5),
    transfer=st.integers(1, 20),
    can_fetch=st.integers(0, 9),
)
def test_equal_experts_are_split_as_the_search_splits_them(
    *, count, missing, device, host, start, transfer, can_fetch
) -> None:
    """The closed form against the search that the engine uses for each layer."""
    missing = min(missing, count)
    costs = ExpertCosts(device_expert_s=float(device), host_expert_s=float(host),
                        host_token_s=0.0, host_start_s=float(start),
                        transfer_s=float(transfer))  # fmt: skip
    load = layer_load(dict.fromkeys(range(count), 1), range(missing, count), can_fetch=can_fetch)
    expected = balanced(load, costs)
    found = equal_splits(count, costs, tokens=1, can_fetch=can_fetch)
    assert found.makespan_s[missing] == pytest.approx(expected.makespan_s)
    assert found.fetched[missing] <= min(missing, can_fetch)
    alone = equal_splits(count, costs, tokens=1, can_fetch=can_fetch, one_processor=True)
    assert alone.makespan_s[missing] >= found.makespan_s[missing]


def test_seconds_of_round_numbers() -> None:
    """Half of the experts on the accelerator, a link so slow that the host computes all others."""
    asked = question(machine=replace(T4, link=1.0, link_back=1e30), host=1 << 60)
    time, at = asked.time("float16"), setting_of(MIXTRAL, MANY, replace(STREAM, batch_size=1))
    one = time.costs(1.0, rows=1)
    assert one.transfer_s == slot_bytes(MIXTRAL) - 256  # bytes at one byte a second
    done = time.cached_decode(at, MIXTRAL.num_expert_pages // 2)
    around = asked.model("float16").decode_around(at)
    on_host = (done.busy.host - around.host) / 32 / one.host_expert_s
    # of two experts that are chosen one is missing on average
    assert on_host == pytest.approx(1.0)
    assert done.busy.to_accelerator == around.to_accelerator
    everything = time.cached_decode(at, MIXTRAL.num_expert_pages)
    assert everything.busy.host == around.host
    assert everything.total < done.total < time.streamed_decode(at)


@pytest.mark.parametrize("spec", [MIXTRAL, QWEN])
def test_the_crossover_falls_as_the_link_gets_faster(spec) -> None:
    """A slow link is what a cache avoids; behind a fast one there is nothing to gain."""
    found = []
    for factor in (0.25, 0.5, 1, 2, 4, 8, 32, 1000):
        machine = replace(T4, link=factor * T4.link, link_back=factor * T4.link_back)
        asked = question(spec, machine)
        found.append(tail_of(asked, STREAM, host_bytes=host_bytes(asked)).crossover)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_the_crossover_parts_the_row_counts() -> None:
    """With so many rows a pass is clearly faster with the cache, with a twelfth more it is not."""
    policy, asked = replace(STREAM, batch_size=256), question(machine=FAST)
    tail = tail_of(asked, policy, host_bytes=0)
    assert 0 < tail.policy.tail_rows == few_rows(MIXTRAL) < tail.crossover < policy.batch_size
    time, gains = asked.time("float16"), []
    for count in (tail.crossover, tail.crossover + tail.crossover // 12):
        at = replace(setting_of(MIXTRAL, MANY, policy), batch=count)
        cached = time.cached_decode(at, tail.policy.expert_slots).total
        gains.append(cached / time.streamed_decode(at))
    assert gains[0] < 0.95 <= gains[1]


@pytest.mark.parametrize(("spec", "most"), [(MIXTRAL, 10), (QWEN, 46)])
def test_few_rows_leave_some_experts_alone(spec, most) -> None:
    """1 - (1 - k/E)^rows of them have tokens: with a row more, over 95 %."""
    share = 1 - spec.top_k / spec.num_experts
    assert few_rows(spec) == most
    assert 1 - share**most <= 0.95 < 1 - share ** (most + 1)


@pytest.mark.parametrize("spec", [MIXTRAL, QWEN])
def test_one_row_takes_the_cache_and_many_stream_until_their_tail(spec) -> None:
    alone = look(spec, rows(1), T4, limits=Limits(), compute="float16")
    assert alone.policy.regime == "cache"
    assert alone.policy.expert_slots > 0
    assert alone.throughput > alone.alternatives[0][1]
    many = look(spec, MANY, T4, limits=Limits(), compute="float16")
    assert (many.policy.regime, many.policy.ffn) == ("stream", "gpu")
    assert 0 < many.policy.tail_rows <= many.crossover
    for outlook in (alone, many):
        assert all(memory.peak <= memory.limit for memory in outlook.memories)


@pytest.mark.parametrize("regime", ["stream", "cache"])
def test_the_user_decides(regime) -> None:
    for workload in (rows(1), MANY):
        policy = look(MIXTRAL, workload, T4, limits=Limits(), compute="float16",
                      fixed=Overrides(regime=regime)).policy  # fmt: skip
        assert (policy.regime, policy.tail_rows) == (regime, 0)
    fixed = Overrides(weights_resident=0.1)
    assert look(MIXTRAL, rows(1), T4, limits=Limits(), compute="float16",
                fixed=fixed).policy.regime == "stream"  # fmt: skip


def test_what_the_user_says_of_the_cache_is_obeyed() -> None:
    said = {"expert_slots": 7, "eviction": "lfu", "prefetch_layers": 1}
    for asked in (question(**said), question(workload=rows(1), regime="cache", **said)):
        plan = (
            cached_plan(asked) if asked.fixed.regime else choose_on_device(asked, streamed(asked))
        )
        policy = plan.policy
        assert (policy.expert_slots, policy.eviction, policy.prefetch_layers) == (7, "lfu", 1)


def test_no_change_over_where_host_memory_does_not_do() -> None:
    """The experts on the accelerator must be on the host too; one byte less and there is no tail."""
    asked, policy = question(), replace(STREAM, kv_blocks=35)  # no row that ends frees any
    before = streamed(asked, policy)
    tail = tail_of(asked, policy, host_bytes=int(before.memory.total))
    resident = resident_pages(MIXTRAL, policy)[1]
    assert tail.host_bytes == resident * slot_bytes(MIXTRAL) > 0
    enough = before.memory.total + tail.host_bytes
    plan = choose_on_device(replace(asked, memory_bytes=enough), before)
    assert plan.memory.total == enough and plan.policy.tail_rows == tail.policy.tail_rows
    less = choose_on_device(replace(asked, memory_bytes=enough - 1), before)
    assert (less.policy.tail_rows, less.crossover) == (0, None)
    assert less.memory == before.memory


def test_the_cache_of_rows_that_have_ended_is_room_for_experts() -> None:
    """What a full batch held on the host need not be planned twice."""
    asked = question(machine=FAST, workload=rows(2000))  # 6 blocks a row
    policy = replace(STREAM, batch_size=512, kv_blocks=512 * 6)
    most = tail_of(asked, policy, host_bytes=0).policy.tail_rows
    freed = (512 - most) * 6 * kv_block_bytes(MIXTRAL, "float16")
    need = resident_pages(MIXTRAL, policy)[1] * slot_bytes(MIXTRAL)
    assert tail_of(asked, policy, host_bytes=0).host_bytes == max(0, need - freed) < need


def test_the_change_must_pay_for_itself() -> None:
    """Twice the bytes that move, or a disk to read from, and more passes have to follow."""
    passes = []
    for resident, on_disk in ((0.1, 0.0), (0.4, 0.0), (0.1, 0.3)):
        policy = replace(STREAM, weights_resident=resident, weights_on_disk=on_disk)
        asked = question(device=45 * GIB)
        passes.append(tail_of(asked, policy, host_bytes=0).policy.tail_passes)
    assert 1 <= passes[0] < passes[1]
    assert passes[0] < passes[2]


def test_an_emulated_accelerator_takes_the_hosts_memory_for_its_slots() -> None:
    """Less of it means fewer slots, and then none."""
    asked, slots = question(emulated=True, host=1 << 60), []
    policy = replace(STREAM, kv_blocks=35, weights_resident=0.1)  # the slots grow into free memory
    streaming = host_bytes(asked, policy)
    most = tail_of(asked, policy, host_bytes=streaming).policy
    need = streaming + tail_host_bytes(MIXTRAL, most, slots=most.expert_slots, emulated=True)
    for spare in (0, 3, 9):
        budget = need - spare * slot_bytes(MIXTRAL)
        tail = tail_of(replace(asked, memory_bytes=budget), policy, host_bytes=streaming)
        assert streaming + tail.host_bytes <= budget
        slots.append(most.expert_slots - tail.policy.expert_slots)
    assert slots == [0, 3, 9]


def test_a_tail_fits_the_accelerator_or_is_none() -> None:
    seen = []
    for device in (2 * GIB, 6 * GIB, 14 * GIB):
        asked = question(device=device)
        policy = replace(STREAM, weights_resident=0.0)
        tail = tail_of(asked, policy, host_bytes=host_bytes(asked, policy))
        seen.append(tail.policy.expert_slots)
        if tail.crossover is None:
            assert tail_bytes(MIXTRAL, replace(policy, tail_rows=1)) > device
            continue
        slots = tail.policy.expert_slots * slot_bytes(MIXTRAL)
        assert tail_bytes(MIXTRAL, tail.policy) + slots <= device
    assert 0 == seen[0] < seen[1] < seen[2]


def test_where_rates_are_of_native_kernels_the_host_takes_longer() -> None:
    """Beside an accelerator PyTorch computes the host's experts."""
    machine = replace(MACHINE, accelerator=T4.accelerator, link=T4.link, link_back=T4.link_back,
                      kernels="avx512")  # fmt: skip
    native = question(machine=machine).time("float16").costs(4.0, rows=8)
    plain = question(machine=replace(machine, kernels="pytorch")).time("float16").costs(4.0, rows=8)
    assert native.host_expert_s == pytest.approx(2.3 * plain.host_expert_s)


def test_an_emulated_accelerator_computes_no_faster_than_the_host() -> None:
    """Its experts take what the host's take, as they were measured, and both take turns."""
    machine = replace(MACHINE, accelerator=T4.accelerator, link=T4.link, link_back=T4.link_back)
    asked = question(machine=machine, emulated=True, host=1 << 60)
    costs = asked.time("float16").costs(4.0, rows=8)
    assert costs.device_expert_s == costs.host_expert_s
    real = replace(asked, emulated=False)
    assert real.time("float16").costs(4.0, rows=8).device_expert_s < costs.device_expert_s
    policy = cached_plan(replace(asked, workload=rows(4))).policy
    assert rate(asked, policy) < rate(real, policy)


def test_a_cache_that_does_not_fit_is_not_chosen() -> None:
    """All experts must be in host memory: else a single row streams."""
    asked = question(workload=rows(1), host=60 * GIB)
    with pytest.raises(NoFeasiblePolicy):
        cached_plan(asked)
    one = replace(STREAM, batch_size=1, micro_batch_size=1, weights_on_disk=0.5)
    assert choose_on_device(asked, streamed(asked, one)).policy.regime == "stream"
