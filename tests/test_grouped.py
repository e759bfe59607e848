"""Experts in one grouped product against its plain twin, expert by expert."""

import random
from dataclasses import replace

import pytest
import torch
from run_device import random_rows, run_rows, worst_error
from test_device import FREE, HOMES, POLICY, TOLERANCE

from moebatch.model.experts import Expert, add_expert
from moebatch.model.grouped import (
    ExpertStack,
    add_results,
    can_group,
    grouped_swiglu,
    stacked,
)
from moebatch.model.linear import TensorLinear
from moebatch.model.router import group_by_expert
from moebatch.runtime import device_forward
from moebatch.runtime.emulated import EmulatedDevice

D, F = 48, 32


def stack_in_bytes(experts, generator, dtype):
    """A stack whose experts lie in byte memory as pages do, with gaps."""
    item = dtype.itemsize
    down_at = 2 * F * D * item + 64
    stride = down_at + D * F * item + 192
    memory = torch.full((64 + len(experts) * stride,), 0xFF, dtype=torch.uint8)
    stack = stacked(memory[64:], tuple(experts), stride=stride, gate_up=(0, (2 * F, D)),
                    down=(down_at, (D, F)), dtype=dtype)  # fmt: skip
    for part in (stack.gate_up, stack.down):
        part.copy_(torch.randn(part.shape, generator=generator) / 6)
    return stack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_against_expert_by_expert(seed, dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, tokens, top_k = 5, (1, 2, 7, 40)[seed % 4], 2
    chosen = [0, 2, 3] if seed % 2 else list(range(count))
    stack: ExpertStack = stack_in_bytes(chosen, generator, dtype)
    hidden = torch.randn(tokens, D, generator=generator)
    experts = torch.stack(
        [torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)]
    )
    rows = group_by_expert(torch.rand(tokens, top_k, generator=generator), experts, count)
    found, expected = torch.zeros(tokens, D), torch.zeros(tokens, D)
    results = grouped_swiglu(hidden, rows, stack)
    for k, e in enumerate(chosen):
        if e in results:
            add_results(found, rows, e, results[e])
        matrices = [TensorLinear(m[k].float()) for m in (stack.gate_up, stack.down)]
        add_expert(
            expected, hidden, rows, Expert(index=e, size=F, gate_up=matrices[0], down=matrices[1])
        )
    present = {e for e in chosen if rows.starts[e] < rows.starts[e + 1]}
    assert set(results) == present
    assert (found - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)


def test_no_rows_or_too_many_are_left_to_the_plain_path() -> None:
    stack = stack_in_bytes([0, 1], torch.Generator().manual_seed(0), torch.float32)
    many = 1 << 19
    experts = torch.full((many, 1), 1)
    rows = group_by_expert(torch.ones(many, 1), experts, 3)
    assert grouped_swiglu(torch.empty(many, D), rows, stack) == {}
    others = group_by_expert(torch.ones(4, 1), torch.full((4, 1), 2), 3)
    assert grouped_swiglu(torch.empty(4, D), others, stack) == {}


def test_whether_a_device_has_it() -> None:
    assert can_group(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("resident", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_model_on_a_device_that_has_it(kind, resident, tiny_models, monkeypatch) -> None:
    """Streamed experts in one product, resident ones beside them, dense layers untouched."""
    made = []
    monkeypatch.setattr(device_forward, "grouped_swiglu",
                        lambda *args: made.append(grouped_swiglu(*args)) or made[-1])  # fmt: skip
    model, path = tiny_models(kind)
    policy = replace(POLICY, schedule="cgopipe", weights_resident=resident)
    rows = random_rows(random.Random(4), 9, 3)
    run_rows(path, rows, policy, EmulatedDevice(FREE, grouped=True), chunk=7, homes=HOMES)
    assert worst_error(model, rows) < TOLERANCE
    assert sum(map(len, made)) > 20
