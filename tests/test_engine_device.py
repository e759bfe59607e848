"""The engine on the emulated accelerator: the schedule never changes the text."""

import random
from dataclasses import replace

import pytest
import run_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_engine import POLICY, request, tokens
from test_engine import rows

from moebatch.data.requests import Completion, RowError
from moebatch.plan.pipeline import STYLES
from moebatch.plan.profiles import PROFILES
from moebatch.plan.schedule import Lane
from moebatch.runtime.emulated import EmulatedDevice


def run_on_device(path, work, *, delays=None, **changes):
    device = EmulatedDevice(PROFILES["unthrottled"], delays=delays, max_delay_s=0.0005)
    return run_engine.run(path, work, POLICY, device=device, **changes)


@pytest.mark.parametrize("name", sorted(STYLES))
def test_text_is_that_of_the_host(name, tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(25, seed=3)
    expected = tokens(run_engine.run(path, work))
    found = run_on_device(path, work, schedule=name, ffn="gpu", weights_resident=0.2)
    assert expected == tokens(found)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schedule=st.sampled_from(sorted(STYLES)),
    attention=st.sampled_from(["cpu", "gpu"]),
    ffn=st.sampled_from(["cpu", "gpu"]),
    batch_size=st.integers(1, 12),
    micro_batch_size=st.integers(1, 12),
    weights_resident=st.floats(0, 1),
    kv_resident=st.floats(0, 1),
    prefill_tokens=st.integers(5, 200),
    kv_blocks=st.integers(4, 60),
    order=st.randoms(use_true_random=False),
)
def test_text_is_the_same_under_any_policy_on_a_device(tiny_models, order, **policy) -> None:
    """The metamorphic test: rows come, are prefilled in parts, sample, stop and leave at any time."""
    path = tiny_models("mixtral")[1]
    work = rows(12, temperature=0.9, top_p=0.95, seed=5)
    expected = tokens(run_engine.run(path, work))
    shuffled = order.sample(work, len(work))
    assert expected == tokens(run_on_device(path, shuffled, **policy))


def test_non_finite_logits_are_row_errors_and_harm_nobody(tiny_models, tmp_path) -> None:
    """Also not through the part of the cache that lies on the device."""
    from safetensors.torch import load_file, save_file

    source = tiny_models("mixtral")[1]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][13] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    good = [request(i, [20 + i, 30, 40], max_tokens=9) for i in range(8)]
    bad = [request(100 + i, [13, 5]) for i in range(3)]
    for attention in ("cpu", "gpu"):
        outcomes = run_on_device(tmp_path, [*bad[:2], *good, *bad[2:]], batch_size=4, kv_blocks=12,
                                 schedule="cgopipe", attention=attention, ffn="gpu",
                                 kv_resident=0.5)  # fmt: skip
        errors = [outcome for outcome in outcomes if isinstance(outcome, RowError)]
        assert [error.index for error in errors] == [100, 101, 102]
        answered = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
        assert tokens(run_engine.run(source, good)) == tokens(answered)


def test_lanes_of_the_device_are_counted(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    device = EmulatedDevice(PROFILES["unthrottled"], delays=random.Random(1), max_delay_s=0.0)
    policy = replace(POLICY, schedule="cgopipe", ffn="gpu", weights_resident=0.0)
    with run_engine.open_engine(path, policy, device=device) as engine:
        list(engine.run(rows(9)))
        busy = engine.stats.lane_busy_s
    assert {Lane.GPU, Lane.CPU, Lane.H2D, Lane.D2H} <= set(busy)
    assert all(seconds > 0 for seconds in busy.values())
    assert device.memory.peak > 0
