"""The planner's laws: within the budget, never worse with more memory, honest when nothing fits."""

import re
import time
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_families import MIXTRAL_8X7B, QWEN3_30B_A3B, spec_of

from moebatch.errors import NoFeasiblePolicy, UsageError
from moebatch.plan.cost import expert_page_bytes
from moebatch.plan.machine import MachineSpec, loads
from moebatch.plan.memory import attention_page_bytes, vocabulary_bytes
from moebatch.plan.model_spec import ModelSpec, RopeSpec
from moebatch.plan.optimizer import choose, memory_of, num_pages, table_of
from moebatch.plan.policy import KV_BLOCK_TOKENS, Overrides, Policy
from moebatch.plan.search_host import Candidates, HostModel, candidates, search_host
from moebatch.plan.workload import WorkloadSpec
from moebatch.units import parse_bytes

BASE = 300 << 20
MIXTRAL, QWEN = spec_of(MIXTRAL_8X7B), spec_of(QWEN3_30B_A3B)
MTBENCH = WorkloadSpec(
    mean_prompt=77, max_prompt=418, mean_gen=128, max_gen=128, num_sequences=None
)
FREE = Overrides()
MACHINE: MachineSpec = loads((Path(__file__).parent / "machine.json").read_text())


@st.composite
def specs(draw):
    experts = draw(st.integers(1, 8))
    groups, head_dim = draw(st.integers(1, 4)), 16 * draw(st.integers(1, 8))
    return ModelSpec(
        family="any",
        num_layers=draw(st.integers(1, 6)),
        hidden_size=64 * draw(st.integers(1, 32)),
        num_q_heads=groups * draw(st.integers(1, 4)),
        num_kv_heads=groups,
        head_dim=head_dim,
        num_experts=experts,
        top_k=draw(st.integers(1, experts)),
        expert_size=64 * draw(st.integers(1, 64)),
        vocab_size=draw(st.integers(100, 60000)),
        max_model_len=4096,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=1e4),
        layer_windows=(None,),
        tie_embeddings=draw(st.booleans()),
        weight_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


@st.composite
def workloads(draw):
    mean_prompt, mean_gen = draw(st.floats(1, 800)), draw(st.floats(1, 200))
    return WorkloadSpec(
        mean_prompt=mean_prompt,
        max_prompt=ceil(mean_prompt) + draw(st.integers(0, 1000)),
        mean_gen=mean_gen,
        max_gen=ceil(mean_gen) + draw(st.integers(0, 300)),
        num_sequences=draw(st.none() | st.integers(0, 5000)),
    )


@st.composite
def overrides(draw):
    def maybe(strategy):
        return draw(st.none() | strategy)

    return Overrides(
        batch_size=maybe(st.integers(1, 300)),
        micro_batch_size=maybe(st.integers(1, 100)),
        weights_resident=maybe(st.floats(0, 1)),
        prefill_tokens=maybe(st.integers(1, 8192)),
        kv_dtype=maybe(st.sampled_from(["float32", "bfloat16", "float16"])),
    )


budgets = st.integers(400 << 20, 8 << 30)


def chosen(spec, workload, memory_bytes, fixed=FREE):
    plan = choose(spec, workload, machine=MACHINE, compute="float32", memory_bytes=memory_bytes,
                  base_bytes=BASE, fixed=fixed)  # fmt: skip
    return plan.policy, plan.memory


def host_model(spec, workload, fixed=FREE):
    kv_dtype = fixed.kv_dtype or spec.weight_dtype
    return HostModel(spec, workload, MACHINE, compute="float32", kv_dtype=kv_dtype, base_bytes=BASE)


def single(batch, prefill, attention, experts):
    return Candidates(*(np.array([float(x)]) for x in (batch, prefill, attention, experts)))


def estimate(spec, workload, memory_bytes, fixed=FREE):
    """The throughput of the search's best; `choose` follows the best few pass by pass."""
    model = host_model(spec, workload, fixed)
    grid = candidates(spec, workload, fixed)
    try:
        return search_host(model, grid, memory_bytes=memory_bytes)[0][2]
    except NoFeasiblePolicy:
        return 0.0


@settings(max_examples=12, deadline=None)
@given(spec=specs(), workload=workloads(), budget=budgets, fixed=overrides())
def test_the_choice_is_that_of_brute_force(spec, workload, budget, fixed) -> None:
    """Every combination of the grid on its own, in plain Python."""
    model = host_model(spec, workload, fixed)
    grid = candidates(spec, workload, fixed)
    step = max(1, len(grid.batch) // 150)  # a part of a large grid bounds the best from below
    best = 0.0
    for k in range(0, len(grid.batch), step):
        one = single(grid.batch[k], grid.prefill_tokens[k], grid.attention_pages[k],
                     grid.expert_pages[k])  # fmt: skip
        if model.memory(one).total[0] <= budget:
            best = max(best, model.throughput(one)[0])
    found = estimate(spec, workload, budget, fixed)
    assert found >= best * (1 - 1e-9)
    if step == 1:
        assert found == pytest.approx(best)


@settings(max_examples=8, deadline=None)
@given(spec=specs(), workload=workloads(), budget=budgets, fixed=overrides())
def test_within_the_budget_or_refused_with_a_budget_that_works(
    spec, workload, budget, fixed
) -> None:
    try:
        policy, memory = chosen(spec, workload, budget, fixed)
    except NoFeasiblePolicy as error:
        assert error.exit_code == 5
        named = parse_bytes(re.search(r"at least (\w+)", error.hint).group(1))
        assert named > budget
        policy, memory = chosen(spec, workload, named, fixed)
        assert memory.total <= named
        # and it is the least: one page of the budget's unit below, nothing fits
        with pytest.raises(NoFeasiblePolicy):
            chosen(spec, workload, named - 2**20, fixed)
    else:
        assert memory.total <= budget
    assert memory == memory_of(spec, policy, base_bytes=BASE, workload=workload)
    running = memory.kv_cache + memory.activations + memory.logits
    weights = memory.base + memory.vocabulary + memory.resident_weights + memory.page_buffer
    assert memory.total == weights + max(memory.loading, running)


@settings(max_examples=8, deadline=None)
@given(
    spec=specs(),
    workload=workloads(),
    budget=budgets,
    more=st.integers(0, 2 << 30),
    fixed=overrides(),
)
def test_more_memory_is_never_slower(*, spec, workload, budget, more, fixed) -> None:
    """Guards: a larger batch that just needed one more prefill pass was taken, and was slower."""
    less = estimate(spec, workload, budget, fixed)
    assert estimate(spec, workload, budget + more, fixed) >= less * (1 - 1e-8)


@settings(max_examples=8, deadline=None)
@given(spec=specs(), workload=workloads(), fixed=overrides())
def test_overrides_are_respected(spec, workload, fixed) -> None:
    policy, _ = chosen(spec, workload, 1 << 40, fixed)
    rows = policy.batch_size if workload.num_sequences is None else max(1, workload.num_sequences)
    if fixed.batch_size is not None:
        assert policy.batch_size == min(fixed.batch_size, rows)
    if fixed.micro_batch_size is not None:
        assert policy.micro_batch_size == min(fixed.micro_batch_size, policy.batch_size)
    if fixed.weights_resident is not None:
        assert (
            abs(policy.weights_resident - fixed.weights_resident) <= 0.5 / num_pages(spec) + 1e-12
        )
    if fixed.prefill_tokens is not None:
        assert policy.prefill_tokens == fixed.prefill_tokens
    assert policy.kv_dtype == (fixed.kv_dtype or spec.weight_dtype)


@settings(max_examples=8, deadline=None)
@given(spec=specs(), workload=workloads(), budget=budgets, fixed=overrides())
def test_the_policy_can_run(spec, workload, budget, fixed) -> None:
    """Room for the longest sequence alone, no more rows than there are, no idle slots."""
    try:
        policy, _ = chosen(spec, workload, budget, fixed)
    except NoFeasiblePolicy:
        assume(False)
    assert policy.kv_blocks * KV_BLOCK_TOKENS >= workload.max_prompt + workload.max_gen
    assert policy.micro_batch_size <= policy.batch_size
    assert 1 <= policy.page_slots <= max(1, len(table_of(spec, policy).streamed))
    if workload.num_sequences is not None:
        assert policy.batch_size <= max(1, workload.num_sequences)


@settings(max_examples=8, deadline=None)
@given(spec=specs(), workload=workloads(), prefill=st.sampled_from([512, 4096]))
def test_a_model_that_fits_is_resident(spec, workload, prefill) -> None:
    policy, memory = chosen(spec, workload, 1 << 40)
    assert policy.weights_resident == 1.0
    assert table_of(spec, policy).streamed == ()
    weights = spec.total_params - spec.vocabulary_params
    assert memory.resident_weights >= weights * (4 if spec.weight_dtype == "float32" else 2)


@settings(max_examples=8, deadline=None)
@given(spec=specs(), share=st.floats(0, 1), slots=st.integers(1, 9))
def test_table_and_memory_tell_the_same(spec, share, slots) -> None:
    """Whole pages, attention first; the plan's bytes are those of the table.

    Guards: staging buffers were sized for experts where the attention page is the larger one.
    """
    policy = Policy(batch_size=1, micro_batch_size=1, weights_resident=share, page_slots=slots)
    table = table_of(spec, policy)
    pages = num_pages(spec)
    assert len(table.streamed) + len(table.resident) == pages
    assert abs(len(table.resident) - share * pages) <= 0.5
    kept_attention = sum(page == 0 for _, page in table.resident)
    assert kept_attention == min(len(table.resident), spec.num_layers)

    def size(page):
        return expert_page_bytes(spec) if page else attention_page_bytes(spec)

    memory = memory_of(spec, policy, base_bytes=BASE)
    assert memory.resident_weights == sum(size(page) for _, page in table.resident)
    largest = max((size(page) for _, page in table.streamed), default=0)
    staged = max((size(page) for _, page in table.resident), default=0)
    assert memory.page_buffer >= min(slots, len(table.streamed)) * largest
    assert memory.loading >= 2 * staged
    assert memory.base == BASE
    assert memory.vocabulary == vocabulary_bytes(spec)


@settings(max_examples=8, deadline=None)
@given(
    spec=specs(),
    share=st.floats(0, 1),
    more=st.integers(1, 500),
    name=st.sampled_from(["batch_size", "prefill_tokens", "page_slots", "kv_blocks"]),
)
def test_peak_memory_grows_with_every_size(spec, name, share, more) -> None:
    policy = Policy(batch_size=3, micro_batch_size=1, weights_resident=share)
    larger = replace(policy, **{name: getattr(policy, name) + more})
    before, after = (memory_of(spec, p, base_bytes=BASE).total for p in (policy, larger))
    assert after >= before


def test_mixtral_in_16_gib_streams_and_in_128_gib_does_not() -> None:
    small, memory = chosen(MIXTRAL, MTBENCH, 16 << 30)
    assert small.weights_resident < 0.3
    assert small.batch_size > 64
    assert 0.9 * (16 << 30) < memory.total <= 16 << 30
    large, memory = chosen(MIXTRAL, MTBENCH, 128 << 30)
    assert large.weights_resident == 1.0
    assert memory.resident_weights > 92e9


def test_many_experts_are_planned_quickly() -> None:
    """Guards: a page table for each of forty thousand candidates took more than a minute."""
    start = time.process_time()
    policy, _ = chosen(QWEN, MTBENCH, 12 << 30)
    assert time.process_time() - start < 5
    assert policy.weights_resident < 0.2


def test_zero_is_no_batch() -> None:
    """Guards: an explicit zero passed as "not given"."""
    for name, value in (("batch_size", 0), ("micro_batch_size", 0), ("prefill_tokens", 0),
                        ("weights_resident", 1.5), ("kv_dtype", "int3")):  # fmt: skip
        with pytest.raises(UsageError):
            chosen(MIXTRAL, MTBENCH, 16 << 30, Overrides(**{name: value}))


def test_workload_from_lengths() -> None:
    workload = WorkloadSpec.measure([(3, 10), (5, 20)], complete=True)
    assert (workload.mean_prompt, workload.max_prompt) == (4.0, 5)
    assert (workload.mean_gen, workload.max_gen) == (15.0, 20)
    assert workload.num_sequences == 2
    assert WorkloadSpec.measure([(3, 10)], complete=False).num_sequences is None
    empty = WorkloadSpec.measure([], complete=True)
    assert (empty.max_prompt, empty.max_gen, empty.num_sequences) == (1, 1, 0)


@pytest.mark.parametrize(("bits", "share"), [(8.125, 0.508), (4.375, 0.274)])
def test_rounded_weights_leave_room_for_more(bits, share) -> None:
    """More pages stay within the same budget, and each takes its share of what it took."""
    plans = [
        choose(spec, MTBENCH, machine=MACHINE, compute="bfloat16", memory_bytes=24 << 30,
               base_bytes=BASE, fixed=Overrides(batch_size=64))
        for spec in (MIXTRAL, replace(MIXTRAL, rounded_bits=bits))
    ]  # fmt: skip
    read, rounded = plans
    assert rounded.policy.weights_resident > 1.3 * read.policy.weights_resident
    assert max(plan.memory.total for plan in plans) <= 24 << 30
    whole = replace(read.policy, weights_resident=1.0)
    all_pages = [
        memory_of(spec, whole, base_bytes=BASE).resident_weights
        for spec in (MIXTRAL, replace(MIXTRAL, rounded_bits=bits))
    ]
    assert all_pages[1] / all_pages[0] == pytest.approx(share, rel=0.01)
    slots = [plan.memory.page_buffer / plan.policy.page_slots for plan in plans]
    assert slots[1] > slots[0]  # a streamed page is rounded into memory of its own
