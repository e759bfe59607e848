"""The search for accelerators: exact on its grid, within the limits, a superset of the paper's."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import MIXTRAL_8X7B, spec_of
from test_optimizer import specs

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.accelerator_time import AcceleratorModel, Setting
from moebatch.plan.catalogue import MACHINES, catalogued
from moebatch.plan.machine import changed
from moebatch.plan.outlook import Limits, look
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.search_accelerator import (
    Grid,
    batch_sizes,
    disk_pages,
    kinds,
    page_levels,
    search,
    settings_of,
)
from moebatch.plan.workload import named_workload

MIXTRAL = replace(spec_of(MIXTRAL_8X7B), weight_dtype="float16")
GIB = 1 << 30


def model_of(spec, machine, prompt=77.0, gen=32.0):
    return AcceleratorModel(spec, machine, mean_prompt=prompt, mean_gen=gen,
                            pairs_per_prompt=prompt * (prompt + 1) / 2, kv_dtype="float16")  # fmt: skip


def brute_force(spec, model, grid, *, gpu_bytes, host_bytes, paper=False):
    """Every policy of the grid, one at a time, with the scalar cost functions."""
    best = 0.0
    for (attention, ffn, kept), batch, pages in product(kinds(grid), grid.batches, grid.pages):
        attention_pages, expert_pages = (float(x) for x in settings_of(spec, float(pages)))
        base = Setting(
            batch=float(batch), micro_batch=1.0, prefill_batch=1.0, prefill_micro_batch=1.0,
            gpu_attention=float(attention), gpu_ffn=float(ffn), kv_resident=kept,
            attention_pages=attention_pages, expert_pages=expert_pages,
        )  # fmt: skip
        base = replace(base, disk_pages=float(disk_pages(spec, model, base, host_bytes)))
        if not ffn and (base.disk_pages or expert_pages):
            continue
        if model.host_memory(base).total > host_bytes:
            continue
        for at in settings_for(grid, base, paper=paper):
            fits_host = model.host_memory(at).total <= host_bytes
            if fits_host and model.accelerator_memory(at).total <= gpu_bytes:
                rate = model.throughput(at, prefill_s=model.prefill(at).total,
                                        decode_s=model.decode(at).total)  # fmt: skip
                best = max(best, float(rate))
    return best


def settings_of_paper(grid, base):
    for micro in grid.micro_batches:
        size = min(float(micro), base.batch)
        yield replace(base, micro_batch=size, prefill_batch=base.batch, prefill_micro_batch=size)


def all_settings(grid, base):
    for micro, group, parts, prefill_micro in product(
        grid.micro_batches, grid.groups, grid.prefill_parts, grid.micro_batches
    ):
        size = min(float(micro), base.batch)
        calls = base.batch / size
        prefill = max(1.0, base.batch / parts)
        yield replace(
            base, micro_batch=size, group=max(1.0, calls) if group == 0 else min(group, calls),
            prefill_batch=prefill, prefill_micro_batch=min(float(prefill_micro), prefill),
        )  # fmt: skip


def settings_for(grid, base, *, paper):
    return settings_of_paper(grid, base) if paper else all_settings(grid, base)


@st.composite
def cases(draw):
    spec = draw(specs())
    machine = draw(st.sampled_from(sorted(MACHINES)))
    total = spec.num_layers + spec.num_expert_pages
    grid = Grid(
        batches=tuple(sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=3)))),
        micro_batches=tuple(draw(st.sets(st.integers(1, 64), min_size=1, max_size=3))),
        prefill_parts=(1, *draw(st.sets(st.integers(2, 9), max_size=2))),
        pages=tuple(sorted(draw(st.sets(st.integers(0, total), min_size=1, max_size=3)))),
        kv_resident=(0.0, draw(st.floats(0.1, 1.0))),
    )
    # limits at the edge: what some policy of the grid needs exactly, and around it
    model = model_of(spec, catalogued(machine), draw(st.floats(1, 500)), draw(st.floats(1, 200)))
    attention, experts = settings_of(spec, float(max(grid.pages)))
    batch = float(max(grid.batches))
    some = Setting(
        batch=batch, micro_batch=1.0, prefill_batch=batch, prefill_micro_batch=1.0,
        gpu_attention=float(draw(st.integers(0, 1))), gpu_ffn=1.0, kv_resident=0.0,
        attention_pages=float(attention), expert_pages=float(experts),
    )  # fmt: skip
    factor = draw(st.sampled_from([0.8, 1.0, 1.2, 5.0]))
    return (spec, model, grid, factor * float(model.accelerator_memory(some).total),
            draw(st.sampled_from([0.7, 1.0, 3.0])) * float(model.host_memory(some).total))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(case=cases(), space=st.sampled_from(["full", "paper"]))
def test_the_best_is_that_of_brute_force(case, space) -> None:
    spec, model, grid, gpu, host = case
    found = search(spec, model, grid, gpu_bytes=gpu, host_bytes=host, space=space)
    best = brute_force(spec, model, grid, gpu_bytes=gpu, host_bytes=host, paper=space == "paper")
    assert (found[0].throughput if found else 0.0) == pytest.approx(best)
    for one in found:
        assert model.accelerator_memory(one.setting).total <= gpu * (1 + 1e-12)
        assert model.host_memory(one.setting).total <= host * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_ours_is_never_below_the_papers(case) -> None:
    spec, model, grid, gpu, host = case
    ours = search(spec, model, grid, gpu_bytes=gpu, host_bytes=host)
    paper = search(spec, model, grid, gpu_bytes=gpu, host_bytes=host, space="paper")
    assert bool(paper) <= bool(ours)
    if paper:
        assert ours[0].throughput >= paper[0].throughput * (1 - 1e-9)


@pytest.mark.parametrize("hardware", ["t4", "l4", "2xt4"])
@pytest.mark.parametrize("workload", ["mtbench", "helm-synthetic", "helm-summarization"])
def test_small_gpus_attend_on_the_host_and_compute_experts_on_the_gpu(hardware, workload) -> None:
    """MoE-Lightning, section 5: A_g = 0 and F_g = 1 on the T4 and L4 machines, r_w small."""
    machine = catalogued(hardware)
    for space in ("paper", "full"):
        outlook = look(MIXTRAL, named_workload(workload), machine, limits=Limits(),
                       compute="float16", space=space)  # fmt: skip
        assert (outlook.policy.attention, outlook.policy.ffn) == ("cpu", "gpu")
        assert outlook.policy.weights_resident < 0.4


def test_figure_10_as_the_link_grows_weights_move_to_the_host() -> None:
    """Two A100-80G: a strong host attends and takes more weights as b_cg rises; a weak one does not."""
    kept, attention = {}, {}
    for scale in (1, 4):
        for link in (100, 300, 500):
            machine = changed(changed(catalogued("figure10"), "pcie", link), "host-scale", scale)
            policy = look(MIXTRAL, named_workload("mtbench"), machine, limits=Limits(),
                          compute="float16").policy  # fmt: skip
            kept[scale, link], attention[scale, link] = policy.weights_resident, policy.attention
    assert kept[4, 100] > kept[4, 300] > kept[4, 500]
    assert {attention[1, link] for link in (100, 300, 500)} == {"gpu"}
    assert {attention[4, link] for link in (100, 300, 500)} == {"cpu"}


@pytest.mark.parametrize("hardware", ["t4", "l4", "a10", "rtx3090"])
def test_the_memory_is_used(hardware) -> None:
    """Where a larger batch helps, the tighter memory is planned to within 5 % of its limit."""
    outlook = look(MIXTRAL, named_workload("mtbench"), catalogued(hardware), limits=Limits(),
                   compute="float16")  # fmt: skip
    assert max(memory.peak / memory.limit for memory in outlook.memories) > 0.95
    assert all(memory.peak <= memory.limit for memory in outlook.memories)


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    machine = catalogued("t4")
    for limits, word, option in (
        (Limits(accelerator=GIB), "accelerator memory", "--gpu-memory"),
        (Limits(host=GIB // 4), "host memory", "--memory"),
    ):
        with pytest.raises(NoFeasiblePolicy) as refused:
            look(MIXTRAL, named_workload("mtbench"), machine, limits=limits, compute="float16")
        assert word in str(refused.value)
        assert option in (refused.value.hint or "")


def test_what_the_user_fixed_stays() -> None:
    fixed = Overrides(batch_size=100, micro_batch_size=25, attention="gpu", ffn="gpu",
                      kv_resident=0.0)  # fmt: skip
    policy = look(MIXTRAL, named_workload("mtbench"), catalogued("l4"), limits=Limits(),
                  compute="float16", fixed=fixed).policy  # fmt: skip
    assert (policy.batch_size, policy.micro_batch_size, policy.attention) == (100, 25, "gpu")
    assert (policy.ffn, policy.kv_resident, policy.schedule) == ("gpu", 0.0, "flexgen")
    assert Policy.from_json(policy.to_json()) == policy


def test_batch_sizes_and_levels() -> None:
    sizes = np.array(batch_sizes(5000))
    assert sizes[0] == 1 and sizes[-1] == 5000 and (np.diff(sizes) > 0).all()
    assert (sizes[1:] <= np.maximum(sizes[:-1] + 1, sizes[:-1] * 1.04)).all()
    levels = page_levels(MIXTRAL)
    assert levels[0] == 0 and levels[-1] == 288 and 32 in levels
