"""The cache regime of an accelerator from the command line, and how it is fitted to its memory."""

import json
from dataclasses import replace

import pytest
from commands import moebatch, write_rows
from test_cli import assert_one_line

from moebatch.errors import NoFeasiblePolicy
from moebatch.model.resolve import resolve_model
from moebatch.plan.cached_fit import MAX_PASS_TOKENS, cached_device_bytes, fit_cache
from moebatch.plan.policy import Policy
from moebatch.plan.profiles import PROFILES
from moebatch.runtime.cached_device_backend import CachedDeviceBackend
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
        ([*CACHED[:4], "--eviction", "lru"], "--eviction needs --regime cache"),
        ([*CACHED, "--routing-trace", "t.bin"], "--routing-trace is for machines without"),
    ],
)
def test_what_has_no_effect_is_refused(options, words, rows, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = moebatch("run", rows, "-m", "demo", "-o", tmp_path / "o.jsonl", *options)
    assert_one_line(result, 2, words)


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
