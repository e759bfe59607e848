"""Fitting a policy to an accelerator: what is planned is not exceeded, and what is fixed is kept."""

from dataclasses import replace

import pytest
import run_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_engine import POLICY
from test_engine import rows

from moebatch.errors import NoFeasiblePolicy
from moebatch.model.resolve import resolve_model
from moebatch.plan.device_fit import device_memory, fit
from moebatch.plan.pipeline import STYLES
from moebatch.plan.profiles import PROFILES
from moebatch.runtime.emulated import EmulatedDevice


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schedule=st.sampled_from(sorted(STYLES)),
    device_bytes=st.integers(1_500_000, 3_000_000),
    batch_size=st.integers(1, 9),
    prefill_tokens=st.integers(100, 300),
)
def test_the_device_never_holds_more_than_planned(
    tiny_models, *, schedule, device_bytes, batch_size, prefill_tokens
) -> None:
    path = tiny_models("mixtral")[1]
    spec = resolve_model(str(path)).spec
    host = replace(POLICY, batch_size=batch_size, prefill_tokens=prefill_tokens, kv_blocks=40)
    policy = fit(spec, host, schedule=schedule, device_bytes=device_bytes,
                 micro_batch_size=None, weights_resident=None)  # fmt: skip
    device = EmulatedDevice(PROFILES["unthrottled"], memory_bytes=device_bytes)
    with run_engine.open_engine(path, policy, device=device) as engine:
        assert len(list(engine.run(rows(9)))) == 9
    planned = device_memory(spec, policy)
    assert device.memory.peak <= planned.total - planned.workspace <= device_bytes


def test_a_cache_that_stays_on_the_device_needs_no_room_for_contexts(tiny_models) -> None:
    """Guards: contexts were given room although nothing of the cache crosses the link."""
    path = tiny_models("mixtral")[1]
    spec = resolve_model(str(path)).spec
    policy = fit(spec, replace(POLICY, kv_blocks=200), schedule="flexgen", device_bytes=10**7,
                 micro_batch_size=3, weights_resident=0.0)  # fmt: skip
    assert (policy.kv_resident, device_memory(spec, policy).contexts) == (1.0, 0)
    device = EmulatedDevice(PROFILES["unthrottled"], memory_bytes=10**7)
    with run_engine.open_engine(path, policy, device=device) as engine:
        assert len(list(engine.run(rows(9)))) == 9
    planned = device_memory(spec, policy)
    assert device.memory.peak <= planned.total - planned.workspace


def test_more_memory_keeps_more_and_too_little_is_said(tiny_models) -> None:
    spec = resolve_model(str(tiny_models("mixtral")[1])).spec
    kept = [
        fit(spec, POLICY, schedule="cgopipe", device_bytes=size, micro_batch_size=None,
            weights_resident=None).weights_resident
        for size in (1_200_000, 1_400_000, 5_000_000)
    ]  # fmt: skip
    assert kept == sorted(kept)
    assert kept[-1] == 1.0
    with pytest.raises(NoFeasiblePolicy, match="smallest policy"):
        fit(spec, POLICY, schedule="cgopipe", device_bytes=1000, micro_batch_size=None,
            weights_resident=None)  # fmt: skip


def test_what_the_user_fixed_is_kept(tiny_models) -> None:
    spec = resolve_model(str(tiny_models("mixtral")[1])).spec
    policy = fit(spec, POLICY, schedule="cgopipe", device_bytes=10**8, micro_batch_size=2,
                 weights_resident=0.0)  # fmt: skip
    assert (policy.micro_batch_size, policy.weights_resident) == (2, 0.0)
    assert (policy.attention, policy.ffn) == ("cpu", "gpu")
    policy = fit(spec, POLICY, schedule="layerwise", device_bytes=10**8, micro_batch_size=None,
                 weights_resident=None)  # fmt: skip
    assert (policy.attention, policy.num_micro_batches) == ("gpu", 1)
