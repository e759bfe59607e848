"""The cache regime of an accelerator from the command line, and how it is fitted to its memory."""

import json
from dataclasses import replace

import pytest
from commands import moebatch, write_rows
from test_cli import assert_one_line
from test_optimizer import MIXTRAL

from moebatch.cli.accelerator import plan_for
from moebatch.cli.cached_accelerator import with_fitting_tail
from moebatch.cli.regime import RegimeOptions
from moebatch.errors import NoFeasiblePolicy
from moebatch.model.resolve import resolve_model
from moebatch.plan.cached_fit import (
    MAX_PASS_TOKENS,
    cached_device_bytes,
    fit_cache,
    tail_bytes,
    tail_host_bytes,
)
from moebatch.plan.catalogue import catalogued
from moebatch.plan.device_fit import DevicePlan, host_memory
from moebatch.plan.optimizer import memory_of
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.profiles import PROFILES
from moebatch.plan.workload import WorkloadSpec
from moebatch.runtime import probe_device
from moebatch.runtime.cached_device_backend import CachedDeviceBackend
from moebatch.runtime.device import Budget
from moebatch.runtime.emulated import EmulatedDevice

ROWS = [{"id": str(k), "prompt": "abcdefg"[: k + 1], "max_tokens": 4 + k} for k in range(6)]
POLICY = Policy(batch_size=4, micro_batch_size=2, kv_blocks=32, prefill_tokens=4096)
CACHED = ["--device", "emulated:t4", "--gpu-memory", "1GiB", "--regime", "cache"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "in.jsonl", ROWS)


def test_the_text_is_that_of_the_host_and_the_report_tells_of_the_cache(rows, tmp_path) -> None:
    texts = []
    for device in (["--device", "cpu"],
                   [*CACHED, "--expert-cache", "7", "--eviction", "lfu"]):  # fmt: skip
        out = tmp_path / f"{len(texts)}.jsonl"
        result = moebatch("run", rows, "-m", "demo", "-o", out, "--greedy", *device)
        assert result.code == 0, result.err
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    assert "cache of 7 experts, lfu" in result.err
    report = json.loads((tmp_path / "1.jsonl.moebatch" / "report.json").read_text())
    cache = report["expert_cache"]
    assert (cache["regime"], cache["expert_slots"]) == ("cache", 7)
    assert cache["hits"] + cache["misses"] == sum(
        cache["computed"][lane] for lane in ("device", "host")
    )
    assert cache["link_bytes"] > 0
    assert report["policy"]["regime"] == "cache"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*CACHED, "--schedule", "cgopipe"], "--schedule has no meaning with --regime cache"),
        ([*CACHED, "--weights-resident", "0.5"], "--weights-resident has no meaning"),
        ([*CACHED[:4], "--regime", "stream", "--eviction", "lru"], "has no meaning with --regime"),
        (
            [*CACHED[:4], "--schedule", "cgopipe", "--eviction", "lru"],
            "--schedule has no meaning with --eviction",
        ),
        ([*CACHED, "--routing-trace", "t.bin"], "--routing-trace is for machines without"),
    ],
)
def test_what_has_no_effect_is_refused(options, words, rows, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = moebatch("run", rows, "-m", "demo", "-o", tmp_path / "o.jsonl", *options)
    assert_one_line(result, 2, words)


def test_the_report_tells_of_the_change_at_the_tail(rows, tmp_path) -> None:
    """By a policy file; where streaming is asked for there is none. The text is the same."""
    policy = {"batch_size": 6, "micro_batch_size": 3, "schedule": "cgopipe", "ffn": "gpu",
              "weights_resident": 0.3, "kv_blocks": 64, "prefill_tokens": 64, "tail_rows": 2,
              "expert_slots": 9}  # fmt: skip
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    texts, found = [], []
    for options in ([], ["--regime", "stream"]):
        out = tmp_path / f"{len(texts)}.jsonl"
        result = moebatch("run", rows, "-m", "demo", "-o", out, "--greedy", "--ignore-eos",
                          "--device", "emulated:t4", "--gpu-memory", "1GiB",
                          "--policy", tmp_path / "policy.json", *options)  # fmt: skip
        assert result.code == 0, result.err
        texts.append(out.read_text())
        found.append(json.loads((tmp_path / f"{out.name}.moebatch" / "report.json").read_text()))
        assert ("expert cache from 2 rows on" in result.err) == (not options)
    assert texts[0] == texts[1]
    cache, passes = found[0]["expert_cache"], found[0]["passes"]
    assert (cache["regime"], cache["expert_slots"]) == ("stream", 9)
    assert 0 < cache["changed_before_pass"] < passes
    assert cache["hits"] + cache["misses"] == sum(
        cache["computed"][lane] for lane in ("device", "host")
    )
    assert found[1]["expert_cache"] == {"regime": "stream", "changed_before_pass": None}


@pytest.mark.parametrize("emulated", [True, False])
def test_the_tail_of_a_policy_file_fits_or_is_none(emulated, tiny_models) -> None:
    """In both memories, to the byte; never a refusal."""
    spec = resolve_model(str(tiny_models("mixtral")[1])).spec
    policy = replace(POLICY, schedule="cgopipe", ffn="gpu", weights_resident=0.4, tail_rows=2,
                     expert_slots=3)  # fmt: skip
    memory = host_memory(spec, policy, memory_of(spec, policy, base_bytes=0), emulated=emulated)
    plan = DevicePlan(policy=policy, memory=memory)
    device = tail_bytes(spec, policy)
    more = tail_host_bytes(spec, policy, slots=3, emulated=emulated)
    assert more > 0
    for spare_device, spare_host, fits in ((0, 0, True), (-1, 0, False), (0, -1, False)):
        found = with_fitting_tail(spec, plan, device_bytes=device + spare_device,
                                  budget=memory.total + more + spare_host,
                                  emulated=emulated)  # fmt: skip
        assert found.policy.tail_rows == (2 if fits else 0)
        assert found.memory.total == memory.total + more * fits


class _Accelerator:
    """What the planner looks at."""

    emulated = False

    def __init__(self, memory_bytes):
        self.memory = Budget(memory_bytes, "card")


@pytest.mark.parametrize(
    ("rows", "regime"), [(1, "cache"), (4, "cache"), (2000, "stream")], ids=str
)
def test_the_planner_chooses_the_regime_of_a_real_accelerator(rows, regime, monkeypatch) -> None:
    """A cache for few rows; many stream and have a tail. Whoever says how to stream does."""
    machine = catalogued("t4")
    measured = (machine.accelerator, machine.link, machine.link_back)
    monkeypatch.setattr(probe_device, "measure_device", lambda device, **_: measured)
    work = WorkloadSpec.measure([(77, 64)] * min(rows, 9), complete=True).of_size(rows)

    def plan(asked=None, schedule=None, **fixed):
        return plan_for(
            _Accelerator(14 << 30), MIXTRAL, work, machine=replace(machine, accelerator=None),
            compute="float16", schedule=schedule, fixed=Overrides(**fixed), budget=180 << 30,
            base_bytes=400 << 20, regime=asked or RegimeOptions(),
        )  # fmt: skip

    policy = plan().policy
    assert policy.regime == regime
    assert (policy.tail_rows > 0) == (regime == "stream")
    for streams in (plan(RegimeOptions(regime="stream")), plan(schedule="cgopipe"),
                    plan(weights_resident=0.1)):  # fmt: skip
        assert (streams.policy.regime, streams.policy.tail_rows) == ("stream", 0)
    assert plan(RegimeOptions(regime="cache")).policy.regime == "cache"


def test_too_many_experts_for_the_device(rows, tmp_path) -> None:
    options = ["--device", "emulated:t4", "--gpu-memory", "24MiB", "--regime", "cache",
               "--expert-cache", "9999", "--batch-size", "2"]  # fmt: skip
    result = moebatch("run", rows, "-m", "demo", "-o", tmp_path / "o.jsonl", *options)
    assert_one_line(result, 5, "the cache regime needs")


def test_less_memory_means_a_smaller_cache(tiny_models) -> None:
    """Down to none, with the KV cache on the host at last; what is planned is what is taken."""
    spec = resolve_model(str(tiny_models("mixtral")[1])).spec
    all_of_it = fit_cache(spec, POLICY, device_bytes=1 << 40)
    assert all_of_it.expert_slots == spec.num_expert_pages
    assert all_of_it.prefill_tokens == MAX_PASS_TOKENS
    slots, attention = [], []
    enough = cached_device_bytes(spec, all_of_it)
    for share in (1.0, 0.98, 0.95, 0.9, 0.85, 0.8):
        found = fit_cache(spec, POLICY, device_bytes=int(share * enough))
        assert cached_device_bytes(spec, found) <= share * enough
        slots.append(found.expert_slots)
        attention.append(found.attention)
    assert slots == sorted(slots, reverse=True)
    assert slots[0] == spec.num_expert_pages > slots[1]
    assert attention == sorted(attention, reverse=True)
    smallest = fit_cache(spec, POLICY, device_bytes=1 << 40, attention="cpu", capacity=0)
    least = cached_device_bytes(spec, smallest)
    assert fit_cache(spec, POLICY, device_bytes=least).expert_slots == 0
    with pytest.raises(NoFeasiblePolicy):
        fit_cache(spec, POLICY, device_bytes=least - 1)


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
def test_no_more_memory_is_taken_than_is_planned(attention, tiny_models) -> None:
    from moebatch.model.checkpoint import Checkpoint

    path = tiny_models("mixtral")[1]
    model = resolve_model(str(path))
    policy = fit_cache(model.spec, replace(POLICY, kv_dtype="bfloat16"), device_bytes=1 << 40,
                       capacity=5, attention=attention)  # fmt: skip
    device = EmulatedDevice(PROFILES["unthrottled"])
    with Checkpoint(path) as checkpoint:
        backend = CachedDeviceBackend(checkpoint, spec=model.spec, family=model.family,
                                      policy=policy, device=device, compute="float32")  # fmt: skip
        try:
            backend.load(threads=1, progress=lambda done, total: None)
            assert device.memory.peak <= cached_device_bytes(model.spec, policy)
        finally:
            backend.close()
