"""Accelerator schedules: each op once, deps before, no deadlock, no buffer used too early or late."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_lanes import RandomLanes

from moebatch.plan.pages import ATTENTION_PAGE, page_table
from moebatch.plan.pipeline import (
    STAGING_SLOTS,
    STYLES,
    WEIGHT_BUFFERS,
    Phase,
    Step,
    kv_slots,
    pass_tasks,
    stream_prologue,
)
from moebatch.plan.schedule import PAGE_OPS, Lane, Op, Task, check
from moebatch.plan.stream import cut_layer, stream_plan


class Buffers(RandomLanes):
    """Watches everything that is shared: layer buffers, staging slots, contexts, a row's buffers.

    `holds[x]` is what lies in buffer x: the (op, layer, micro-batch) that wrote it last.
    """

    def __init__(self, passes, rng, step, kv):
        super().__init__(passes, rng)
        self.step, self.kv = step, kv
        # A layer alone in the stream is loaded for the next pass while this one uses it: counted.
        self.loading, self.loaded, self.staged = Counter(), Counter(), set()
        self.contexts, self.holds = set(), {}
        self.slots, self.peak_layers = set(), 0

    def start(self, task):
        cut, layer, j = self.step.stream.layers[task.layer], task.layer, task.micro_batch
        if task.op is Op.LOAD_PAGE:
            self.loading[(layer, task.page)] += 1
            copies = {i: max(self.loading[(i, p)] for i_, p in self.loading if i_ == i)
                      for i, _ in self.loading}  # fmt: skip
            self.peak_layers = max(self.peak_layers, sum(copies.values()))
            assert sum(copies.values()) <= WEIGHT_BUFFERS, "no layer buffer is free"
            if self.step.stream.homes[layer] != "pinned":
                assert (layer, task.page) in self.staged, "not staged yet"
        elif task.op is Op.STAGE_PAGE:
            assert (layer, task.page) not in self.slots, "staged a second time"
            self.slots.add((layer, task.page))
            assert len(self.slots) <= STAGING_SLOTS, "no staging slot is free"
        elif task.op is Op.STAGE_KV:
            self.contexts.add((layer, j))
            assert len(self.contexts) <= 2 * self.kv, "no staging slot for a context is free"
        elif task.op is Op.LOAD_KV:
            self.contexts.add(("device", layer, j))
            on_device = [c for c in self.contexts if c[0] == "device"]
            assert len(on_device) <= self.kv, "no context buffer is free"
        elif task.op is Op.PRE_ATTN:
            self._need(layer, cut.attention_pages)
        elif task.op in (Op.POST_ATTN, Op.FFN) and task.lane is Lane.GPU:
            needs = cut.attention_pages if task.op is Op.POST_ATTN else range(cut.num_pages)
            self._need(layer, needs)
        self._read(task)

    def _need(self, layer, pages):
        assert all(self.loaded[(layer, page)] for page in pages), "without its page"

    def _read(self, task):
        """What a task reads is what the right task wrote."""
        layer, j = task.layer, task.micro_batch
        reads = {
            Op.OFFLOAD_QKV: ("qkv", Op.PRE_ATTN),
            Op.OFFLOAD_KV: ("qkv", Op.PRE_ATTN),
            Op.GPU_ATTN: ("qkv", Op.PRE_ATTN),
            Op.CPU_ATTN: ("host_qkv", Op.OFFLOAD_QKV),
            Op.STORE_KV: ("host_qkv", Op.OFFLOAD_KV),
            Op.LOAD_HIDDEN: ("host_attended", Op.CPU_ATTN),
        }
        if task.op in reads:
            place, writer = reads[task.op]
            assert self.holds[(place, j)] == (writer, layer), f"{task.key}: {place} overwritten"
        if task.op is Op.POST_ATTN:
            assert self.holds[("attended", j)][1] == layer
        if task.op is Op.GPU_ATTN and ("device", layer, j) in self.contexts:
            assert self.holds[("context", layer, j)] == (Op.LOAD_KV, layer), "context not there"

    def end(self, task):
        layer, j = task.layer, task.micro_batch
        if task.op is Op.LOAD_PAGE:
            self.loaded[(layer, task.page)] += 1
            self.slots.discard((layer, task.page))
            self.staged.discard((layer, task.page))
        elif task.op is Op.STAGE_PAGE:
            self.staged.add((layer, task.page))
        elif task.op is Op.FREE_LAYER:
            for page in range(self.step.stream.layers[layer].num_pages):
                assert self.loaded[(layer, page)], "freed before it came"
                self.loaded[(layer, page)] -= 1
                self.loading[(layer, page)] -= 1
        elif task.op is Op.LOAD_KV:
            self.contexts.discard((layer, j))
            self.holds[("context", layer, j)] = (task.op, layer)
        elif task.op is Op.GPU_ATTN:
            self.contexts.discard(("device", layer, j))
        writes = {
            Op.PRE_ATTN: "qkv",
            Op.OFFLOAD_QKV: "host_qkv",
            Op.OFFLOAD_KV: "host_qkv",
            Op.CPU_ATTN: "host_attended",
            Op.LOAD_HIDDEN: "attended",
            Op.GPU_ATTN: "attended",
        }
        if task.op in writes:
            self.holds[(writes[task.op], j)] = (task.op, layer)


@st.composite
def steps(draw, name):
    """(step of a schedule, page count of its cut)."""
    layers, experts = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    table = page_table(
        layers,
        experts,
        resident_experts=draw(st.integers(0, layers * experts)),
        resident_attention=draw(st.integers(0, layers)),
    )
    phases = draw(st.lists(st.sampled_from(Phase), min_size=1, max_size=5))
    attention = draw(st.sampled_from(["cpu", "gpu"]))
    ffn = draw(st.sampled_from(["cpu", "gpu"]))
    if ffn == "cpu":
        kept = tuple(where for where in table.streamed if where[1] == ATTENTION_PAGE)
        table = replace(table, streamed=kept)
    sizes = {where: draw(st.integers(1, 40)) for where in table.streamed}
    plan = stream_plan(
        table,
        sizes,
        num_pages=draw(st.integers(1, 7)),
        homes=draw(
            st.lists(st.sampled_from(["pinned", "cpu", "disk"]), min_size=layers, max_size=layers)
        ),
        align=1,
    )
    on_gpu = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    return Step(
        stream=plan,
        micro_batches=tuple(phases),
        attention=attention,
        ffn=ffn,
        kv_on_gpu=tuple(x and attention == "gpu" for x in on_gpu),
        group=draw(st.integers(1, 3)) if STYLES[name].grouped else 1,
    )


named = st.sampled_from(sorted(STYLES)).flatmap(lambda name: st.tuples(st.just(name), steps(name)))


def fewer(step, count):
    """The same step with other micro-batches: rows came and went."""
    return replace(step, micro_batches=(step.micro_batches * count)[:count])


@settings(max_examples=200, deadline=None)
@given(named, st.integers(1, 4))
def test_check_passes_also_when_the_micro_batches_change(case, other) -> None:
    name, step = case
    passes = [stream_prologue(step.stream), pass_tasks(name, step),
              pass_tasks(name, fewer(step, other)), pass_tasks(name, step)]  # fmt: skip
    check(passes[0], [])
    for before, tasks in pairwise(passes):
        check(tasks, before)


@settings(max_examples=200, deadline=None)
@given(named)
def test_each_op_once(case) -> None:
    name, step = case
    tasks = pass_tasks(name, step)
    found = Counter(task.key for task in tasks)
    assert set(found.values()) == {1}
    layers, phases = range(len(step.stream.layers)), step.micro_batches
    expected = {(Op.LOAD_PAGE, i, 0, p) for i, p in step.stream.pages}
    expected |= {(Op.STAGE_PAGE, i, 0, p) for i, p in step.stream.pages
                 if step.stream.homes[i] != "pinned"}  # fmt: skip
    expected |= {(Op.FREE_LAYER, i, 0, 0) for i in step.stream.streamed}
    for i in layers:
        for j, phase in enumerate(phases):
            ops = [Op.PRE_ATTN, Op.POST_ATTN]
            if phase is Phase.DECODE and step.attention == "cpu":
                ops += [Op.OFFLOAD_QKV, Op.CPU_ATTN, Op.LOAD_HIDDEN]
            elif step.kv_on_gpu[i]:
                ops += [Op.GPU_ATTN]
            else:
                ops += [Op.GPU_ATTN, Op.OFFLOAD_KV, Op.STORE_KV]
                ops += [Op.STAGE_KV, Op.LOAD_KV] if phase is not Phase.PREFILL else []
            expected |= {(op, i, j, 0) for op in ops}
        ffn = [Op.FFN] + [Op.OFFLOAD_NORMED, Op.LOAD_FFN, Op.ADD_FFN] * (step.ffn == "cpu")
        expected |= {(op, i, j, 0) for op in ffn for j in range(0, len(phases), step.group)}
    assert expected == set(found)


@settings(max_examples=200, deadline=None)
@given(named, st.integers(1, 4), st.integers(0, 10**6))
def test_no_deadlock_and_no_buffer_is_used_too_early_or_too_long(case, other, seed) -> None:
    name, step = case
    passes = [stream_prologue(step.stream), pass_tasks(name, step),
              pass_tasks(name, fewer(step, other)), pass_tasks(name, step)]  # fmt: skip
    kv = kv_slots(name, step.attention, step.group)
    lanes = Buffers(passes, random.Random(seed), step, kv)
    lanes.run()
    assert lanes.peak_layers <= min(WEIGHT_BUFFERS, len(step.stream.streamed) + 1)


@settings(max_examples=100, deadline=None)
@given(named)
def test_what_a_task_needs_does_not_rest_on_the_order_of_a_lane(case) -> None:
    """Mathematics: a layer's ops in order for each micro-batch, by deps alone."""
    name, step = case
    needs = {}
    for task in pass_tasks(name, step):
        needs[task.key] = set(task.deps).union(*(needs[dep] for dep in task.deps))
    first = {j: j - j % step.group for j in range(len(step.micro_batches))}
    for i in range(len(step.stream.layers)):
        for j, leader in first.items():
            assert (Op.PRE_ATTN, i, j, 0) in needs[(Op.POST_ATTN, i, j, 0)]
            assert (Op.POST_ATTN, i, j, 0) in needs[(Op.FFN, i, leader, 0)]
            if i:
                assert (Op.FFN, i - 1, leader, 0) in needs[(Op.PRE_ATTN, i, j, 0)]


def step_of(*, num_micro_batches, num_layers=3, num_pages=None, attention="cpu", experts=4):
    table = page_table(num_layers, experts, resident_experts=0, resident_attention=0)
    sizes = {where: 10 if where[1] == 0 else 30 for where in table.streamed}
    plan = stream_plan(table, sizes, num_pages=num_pages or num_micro_batches,
                       homes=["pinned"] * num_layers, align=1)  # fmt: skip
    return Step(stream=plan, micro_batches=(Phase.DECODE,) * num_micro_batches,
                attention=attention, kv_on_gpu=(False,) * num_layers)  # fmt: skip


@pytest.mark.parametrize("name", sorted(STYLES))
def test_trap_one_micro_batch_does_not_deadlock(name) -> None:
    """A lookahead of two with one micro-batch would wait for the request's own future."""
    step = step_of(num_micro_batches=1)
    passes = [stream_prologue(step.stream), pass_tasks(name, step), pass_tasks(name, step)]
    for seed in range(20):
        Buffers(passes, random.Random(seed), step, 3).run()


def test_trap_attention_stands_in_the_first_page() -> None:
    """The next layer's attention is launched before its last page has come, and must not wait."""
    step = step_of(num_micro_batches=4)
    for cut in step.stream.layers:
        assert cut.units[0].index == ATTENTION_PAGE
        assert cut.units[0].end <= cut.bounds[1]
    for task in pass_tasks("cgopipe", step):
        if task.op is Op.PRE_ATTN:
            waits = [key for key in (*task.deps, *task.carried) if key[0] is Op.LOAD_PAGE]
            assert [(Op.LOAD_PAGE, task.layer, 0, 0)] == waits


def test_cgopipe_is_algorithm_one() -> None:
    """The launch order of a layer in the middle, as the paper writes it."""
    step = step_of(num_micro_batches=3)
    tasks = pass_tasks("cgopipe", step)
    at = next(k for k, t in enumerate(tasks) if t.key == (Op.LOAD_HIDDEN, 1, 0, 0))
    body = [(t.op, t.layer, t.page if t.op in PAGE_OPS else t.micro_batch) for t in tasks[at:]]
    ahead = [Op.PRE_ATTN, Op.OFFLOAD_QKV, Op.CPU_ATTN]
    expected = []
    for j in range(3):
        i, u = (1, j + 2) if j + 2 < 3 else (2, j + 2 - 3)
        expected += [(Op.LOAD_HIDDEN, 1, j), (Op.LOAD_PAGE, 2, j), (Op.POST_ATTN, 1, j)]
        expected += [(Op.FFN, 1, j)] + [(Op.FREE_LAYER, 1, 0)] * (j == 2)
        expected += [(op, i, u) for op in ahead]
    assert expected == body[: len(expected)]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), max_size=9),
    attention=st.booleans(),
    num_pages=st.integers(1, 12),
    align=st.sampled_from([1, 64, 256]),
)
def test_a_cut_covers_every_byte_once(sizes, attention, num_pages, align) -> None:
    units = [(k + (not attention), size) for k, size in enumerate(sizes)]
    cut = cut_layer(units, num_pages, align)
    assert cut.num_pages <= num_pages
    assert [size for _, size in units] == [
        min(size, u.end - u.start) for u, (_, size) in zip(cut.units, units, strict=True)
    ]
    assert list(cut.bounds) == sorted(set(cut.bounds))
    assert all(bound % align == 0 for bound in cut.bounds)
    assert sum(cut.page_bytes(p) for p in range(cut.num_pages)) == cut.num_bytes
    if sizes:
        assert cut.bounds[0] == 0
        assert cut.bounds[-1] == cut.units[-1].end
    if sizes and attention:
        assert cut.units[0].end <= cut.bounds[1]


def test_pages_are_equal_unless_attention_is_larger() -> None:
    cut = cut_layer([(0, 1000)] + [(e, 3000) for e in range(1, 9)], 5, align=1)
    assert {5000} == {cut.page_bytes(p) for p in range(5)}
    cut = cut_layer([(0, 4000), (1, 1000), (2, 1000)], 5, align=1)
    assert [cut.page_bytes(p) for p in range(5)] == [4000, 500, 500, 500, 500]


BROKEN = {
    "a load does not wait for its buffer": (
        lambda t: replace(t, deps=(), carried=()) if t.op is Op.LOAD_PAGE else t,
        "no layer buffer|second time",
    ),
    "attention does not wait for its page": (
        lambda t: replace(t, carried=(), deps=tuple(d for d in t.deps if d[0] is not Op.LOAD_PAGE)),
        "without its page",
    ),
    "keys are stored after they were overwritten": (
        lambda t: replace(t, deps=tuple(d for d in t.deps if d[0] is not Op.STORE_KV)),
        "overwritten",
    ),
}


@pytest.mark.parametrize("broken", sorted(BROKEN))
def test_a_broken_schedule_is_caught(broken) -> None:
    """The watcher sees what it is there for."""
    change, message = BROKEN[broken]
    step = step_of(num_micro_batches=2, attention="gpu")
    good = [stream_prologue(step.stream), *[pass_tasks("cgopipe", step)] * 2]

    def watch(passes):
        for seed in range(60):
            Buffers(passes, random.Random(seed), step, 2).run()

    watch(good)
    with pytest.raises((AssertionError, KeyError), match=message):
        watch([good[0], *[[change(t) for t in tasks] for tasks in good[1:]]])


def test_a_circle_is_a_deadlock() -> None:
    a, b = Task(Op.FFN, Lane.GPU, 0), Task(Op.LOAD_PAGE, Lane.H2D, 0)
    with pytest.raises(AssertionError, match="deadlock"):
        RandomLanes(
            [[replace(a, deps=(b.key,)), replace(b, deps=(a.key,))]], random.Random(1)
        ).run()
