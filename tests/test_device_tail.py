"""The tail of a job on the emulated accelerator: from streaming to a cache of experts, same text."""

import random
from dataclasses import replace

import pytest
import run_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_engine import POLICY, open_engine, request, tokens
from test_cached_engine import random_requests

from moebatch.errors import Interrupted
from moebatch.model.resolve import resolve_model
from moebatch.plan.cached_fit import slot_bytes, tail_bytes
from moebatch.plan.pipeline import STYLES
from moebatch.plan.profiles import PROFILES, LinkProfile
from moebatch.plan.schedule import Lane
from moebatch.runtime import device_backend
from moebatch.runtime.emulated import EmulatedDevice
from moebatch.runtime.pinned_experts import PinnedExperts

FREE = PROFILES["unthrottled"]
SLOW = LinkProfile(name="slow", memory_bytes=2**30, h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8,
                   latency_s=1e-4)  # fmt: skip
STREAM = replace(POLICY, schedule="cgopipe", ffn="gpu", weights_resident=0.4, batch_size=4,
                 tail_rows=2, expert_slots=5)  # fmt: skip


@pytest.fixture(scope="module")
def path(tiny_models):
    return tiny_models("mixtral")[1]


@pytest.fixture(scope="module")
def work():
    """Nine rows of uneven lengths, greedy and sampled."""
    return random_requests(random.Random(4), 9)


@pytest.fixture(scope="module")
def expected(path, work):
    return tokens(run_engine.run(path, work))


def by_index(outcomes):
    return tokens(sorted(outcomes, key=lambda outcome: outcome.request.index))


def run_tail(path, work, policy=STREAM, *, device=None, **changes):
    """(tokens, facts, rows in flight after each pass, engine) of a run that may change over."""
    device, left = device or EmulatedDevice(FREE), []
    with open_engine(path, policy, device=device, **changes) as engine:
        found = list(engine.run(work, lambda stats: left.append(stats.in_flight)))
        return by_index(found), engine.regime, left, engine


@pytest.mark.parametrize("tail_rows", [1, 2, 99])
@pytest.mark.parametrize("resident", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("attention", ["cpu", "gpu"])
def test_the_tail_goes_on_with_a_cache(
    attention, resident, tail_rows, path, work, expected
) -> None:
    """Same text, and the change comes as soon as so few rows are left; no token is counted twice."""
    name = "cgopipe" if attention == "cpu" else "flexgen"
    sizes = {"attention": attention, "schedule": name, "weights_resident": resident}
    _, _, _, streamed = run_tail(path, work, **sizes, tail_rows=0)
    found, facts, left, engine = run_tail(path, work, **sizes, tail_rows=tail_rows, kv_resident=0.4)
    assert found == expected
    assert facts.regime == "stream" and 0 < facts.changed_before_pass < engine.stats.passes
    assert left[facts.changed_before_pass - 1] <= tail_rows
    assert facts.counts.hits + facts.counts.misses > 0
    assert facts.to_dict()["computed"]["device"] > 0 and facts.expert_slots == 5
    assert engine.expert_tokens == streamed.expert_tokens
    assert streamed.regime.changed_before_pass is None


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schedule=st.sampled_from(sorted(STYLES)),
    attention=st.sampled_from(["cpu", "gpu"]),
    ffn=st.sampled_from(["cpu", "gpu"]),
    batch_size=st.integers(1, 9),
    micro_batch_size=st.integers(1, 9),
    weights_resident=st.floats(0, 1),
    weights_on_disk=st.floats(0, 0.5),
    kv_resident=st.floats(0, 1),
    prefill_tokens=st.integers(5, 200),
    kv_blocks=st.integers(8, 60),
    tail_rows=st.integers(0, 9),
    expert_slots=st.integers(0, 14),
    seed=st.integers(0, 1000),
)
def test_text_is_the_same_under_any_policy_with_a_tail(
    path, work, expected, seed, **policy
) -> None:
    """The metamorphic test, with lanes that stop for a while now and then."""
    delays = random.Random(seed)
    device = EmulatedDevice(FREE, delays=delays, max_delay_s=delays.choice([0.0, 0.0005]))
    order = delays.sample(work, len(work))
    assert run_tail(path, order, device=device, **policy)[0] == expected


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("attention", ["cpu", "gpu"])
def test_other_families_have_a_tail(attention, kind, tiny_models) -> None:
    """Latent attention, dense layers, shared experts, sinks and biases of experts."""
    path = tiny_models(kind)[1]
    work = random_requests(random.Random(2), 5, vocab=90)
    sizes = {"attention": attention, "schedule": "cgopipe" if attention == "cpu" else "flexgen"}
    found, facts, _, _ = run_tail(path, work, **sizes)
    assert found == tokens(run_engine.run(path, work))
    assert facts.changed_before_pass is not None


@pytest.mark.parametrize("on_disk", [0.0, 0.3])
def test_only_what_is_not_in_memory_is_read_again(on_disk, path, work, expected) -> None:
    """Images of streamed layers are used as they lie, resident experts come back from the device."""
    device, read = EmulatedDevice(SLOW), []
    policy = replace(STREAM, weights_on_disk=on_disk, weights_resident=0.2)
    with open_engine(path, policy, device=device) as engine:
        facts = lambda: engine.regime.changed_before_pass  # noqa: E731
        found = by_index(
            engine.run(work, lambda _: read.append((facts() is None, engine.disk_read_bytes)))
        )
    assert found == expected
    before = max(size for streaming, size in read if streaming)
    after = [size for streaming, size in read if not streaming]
    assert after and len(set(after)) == 1  # nothing is read from disk any more
    assert (after[0] > before) == (on_disk > 0)


# Streams attention alone, so the tail needs more of the device than what comes before it.
LEAN = {"ffn": "cpu", "weights_resident": 0.0, "prefill_tokens": 8, "expert_slots": 12}


def streaming_peak(path, work):
    device = EmulatedDevice(FREE)
    run_tail(path, work, device=device, tail_rows=0, **LEAN)
    return device.memory.peak


def test_a_tail_keeps_to_the_memory_of_the_device(path, work, expected) -> None:
    """From all experts in slots down to none; the limit is hard."""
    spec = resolve_model(str(path)).spec
    tail, slots = tail_bytes(spec, replace(STREAM, **LEAN)), []
    assert streaming_peak(path, work) <= tail
    for room in (12, 3, 1, 0):
        limit = tail + room * slot_bytes(spec)
        device = EmulatedDevice(FREE, memory_bytes=limit)
        found, facts, _, _ = run_tail(path, work, device=device, **LEAN)
        assert found == expected
        assert facts.changed_before_pass is not None
        assert device.memory.peak <= limit
        slots.append(facts.expert_slots)
    assert slots == sorted(slots, reverse=True)
    assert slots[0] == 12 > slots[-1]
    assert all(found >= room for found, room in zip(slots, (12, 3, 1, 0), strict=True))


def test_a_device_without_room_for_the_rest_streams_to_the_end(
    path, work, expected, monkeypatch
) -> None:
    """All but the experts would have to be resident: where it cannot be, nothing is tried."""
    spec = resolve_model(str(path)).spec
    limit = tail_bytes(spec, replace(STREAM, **LEAN)) - 1
    assert streaming_peak(path, work) <= limit
    monkeypatch.setattr(device_backend.DeviceBackend, "give_up", lambda *_: pytest.fail("tried"))
    device = EmulatedDevice(FREE, memory_bytes=limit)
    found, facts, _, _ = run_tail(path, work, device=device, **LEAN)
    assert found == expected
    assert facts.to_dict() == {"regime": "stream", "changed_before_pass": None}


def test_a_tail_that_is_too_short_streams_to_the_end(path) -> None:
    """The change itself takes time: with fewer passes to come it would not pay."""
    work = [request(k, [5, 6, 7], max_tokens=2 + 3 * k) for k in range(4)]
    for passes, before in ((0, 2), (9, 2), (10, None)):  # after two passes 9 tokens are left
        _, facts, left, _ = run_tail(path, work, tail_rows=3, tail_passes=passes)
        assert (left[0], left[1]) == (4, 3)
        assert facts.changed_before_pass == before


def test_what_is_used_after_it_was_given_back_is_seen(path, work, expected, monkeypatch) -> None:
    """The twin of the tests above: experts that are copied from freed memory hold NaN."""
    taken = PinnedExperts._copy_out

    def late(self, on_device):
        for memory in on_device.values():
            self._device.spoil(memory)
        taken(self, on_device)

    monkeypatch.setattr(PinnedExperts, "_copy_out", late)
    device = EmulatedDevice(FREE)
    with open_engine(path, STREAM, device=device) as engine:
        outcomes = list(engine.run(work))
    assert any(not hasattr(outcome, "choices") for outcome in outcomes)  # not finite


def test_a_stop_during_the_change_tells_what_is_in_flight(path, work, monkeypatch) -> None:
    """While missing experts are read; the rows are those that were under way."""
    stopped = False

    def read(self, which):
        nonlocal stopped
        stopped = True

    policy = replace(STREAM, weights_on_disk=0.3, weights_resident=0.2)
    with open_engine(path, policy, device=EmulatedDevice(FREE),
                     interrupted=lambda: stopped) as engine:  # fmt: skip
        monkeypatch.setattr(PinnedExperts, "_load_one", read)
        with pytest.raises(Interrupted):
            list(engine.run(work))
        assert 1 <= len(list(engine.in_flight())) <= STREAM.tail_rows
        assert engine.regime.changed_before_pass is None


def test_a_tail_spares_the_link(path) -> None:
    """Of a single row most of what would be streamed has no tokens."""
    work, busy = [request(0, [5, 6, 7], max_tokens=40)], []
    slow = replace(SLOW, h2d_bytes_per_s=2e7)
    for rows in (0, 1):
        _, facts, _, engine = run_tail(path, work, tail_rows=rows, weights_resident=0.0,
                                       expert_slots=6, device=EmulatedDevice(slow))  # fmt: skip
        assert facts.changed_before_pass == (1 if rows else None)
        busy.append(engine.stats.lane_busy_s[Lane.H2D])
    assert busy[1] < 0.5 * busy[0]


def test_what_a_change_takes_is_counted(path) -> None:
    """As time of decoding: a throughput must not leave it out."""
    work = [request(k, [5, 6, 7], max_tokens=2 + 3 * k) for k in range(3)]
    slow = replace(SLOW, d2h_bytes_per_s=2e6)  # 32 KiB an expert: 16 ms each to copy out
    _, facts, _, engine = run_tail(path, work, weights_resident=1.0, device=EmulatedDevice(slow),
                                   expert_slots=0, tail_rows=1)  # fmt: skip
    assert facts.changed_before_pass is not None
    assert engine.stats.decode_s > 12 * 0.016
