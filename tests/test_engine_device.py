"""The engine on the emulated accelerator: the schedule never changes the text."""

import random
from dataclasses import replace

import pytest
import run_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_engine import POLICY, request, tokens
from test_engine import rows
from test_engine_resume import cut

from moebatch.data.requests import Completion, RowError
from moebatch.errors import Interrupted
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
    expected = tokens(run_engine.plain(path, work))
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
    work = rows(9, temperature=0.9, top_p=0.95, seed=5)
    expected = tokens(run_engine.plain(path, work))
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
        assert tokens(run_engine.plain(source, good)) == tokens(answered)


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


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
def test_tokens_of_an_earlier_run_are_taken_up(attention, tiny_models) -> None:
    """Beside rows that decode and prompts in parts, some of which end inside what was resumed."""
    path = tiny_models("mixtral")[1]
    work = rows(10, seed=7)
    expected = run_engine.plain(path, work)
    for length, prefill_tokens in ((1, 200), (3, 200), (5, 4), (9, 7)):
        resumed = [
            replace(r, resumed=cut(done, length)) if r.index % 3 else r
            for r, done in zip(work, expected, strict=True)
        ]
        found = run_on_device(path, resumed, schedule="cgopipe", attention=attention, ffn="gpu",
                              prefill_tokens=prefill_tokens, batch_size=4)  # fmt: skip
        assert tokens(found) == tokens(expected)


def test_an_interrupt_ends_a_pass_and_tells_what_is_in_flight(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(10, seed=7)
    expected = {done.request.index: done for done in run_engine.plain(path, work)}
    seen = 0

    def on_pass(stats) -> None:
        nonlocal seen
        seen = stats.passes

    policy = replace(POLICY, schedule="cgopipe", ffn="gpu", weights_resident=0.0)
    device = EmulatedDevice(PROFILES["unthrottled"])
    with run_engine.open_engine(path, policy, device=device,
                                interrupted=lambda: seen >= 3) as engine:  # fmt: skip
        with pytest.raises(Interrupted):
            list(engine.run(work, on_pass))
        under_way = list(engine.in_flight())
    assert engine.stats.passes == 3
    assert under_way
    for asked, part in under_way:
        whole = expected[asked.index].choices[part.choice].token_ids
        assert tuple(part.token_ids) == whole[: len(part.token_ids)]
