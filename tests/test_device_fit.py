"""Fitting a policy to an accelerator: what is planned is not exceeded, and what is fixed is kept."""

from dataclasses import replace

import pytest
import run_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_engine import POLICY, tokens
from test_engine import rows

from moebatch.errors import NoFeasiblePolicy
from moebatch.model.resolve import resolve_model
from moebatch.plan.device_fit import (
    device_memory,
    disk_layers,
    fit,
    host_memory,
    with_disk_layers,
)
from moebatch.plan.optimizer import memory_of
from moebatch.plan.pipeline import STYLES
from moebatch.plan.profiles import PROFILES
from moebatch.runtime.device_backend import layer_homes
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


def test_what_host_memory_cannot_hold_stays_on_disk(tiny_models) -> None:
    """Whole layers; less of them in host memory, the same text."""
    path = tiny_models("mixtral")[1]
    spec = resolve_model(str(path)).spec
    policy = fit(spec, POLICY, schedule="cgopipe", device_bytes=10**7, micro_batch_size=3,
                 weights_resident=0.2)  # fmt: skip
    plan = memory_of(spec, policy, base_bytes=0)
    expected, needs = tokens(run_engine.plain(path, rows(9))), []
    for count in range(spec.num_layers + 1):
        changed = with_disk_layers(spec, policy, count)
        assert disk_layers(spec, changed) == count
        assert list(layer_homes(spec, changed)).count("disk") == count
        needs.append(host_memory(spec, changed, plan, emulated=True).total)
        device = EmulatedDevice(PROFILES["unthrottled"])
        assert expected == tokens(run_engine.run(path, rows(9), changed, device=device))
    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == len(needs)


def test_a_policy_with_grouped_experts_on_a_device(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    policy = replace(POLICY, schedule="cgopipe", ffn="gpu", experts_grouped=2, weights_resident=0.0)
    device = EmulatedDevice(PROFILES["unthrottled"])
    found = run_engine.run(path, rows(9), policy, device=device)
    assert tokens(run_engine.plain(path, rows(9))) == tokens(found)
