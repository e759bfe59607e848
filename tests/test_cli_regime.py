"""The options of the small-batch regime, its report, profile and routing trace, from the outside."""

import json
from pathlib import Path

import pytest
from commands import moebatch, read_rows, write_rows

from moebatch.plan.routing_trace import read_trace

ROWS = [{"id": f"r{k}", "prompt": "abc" * (k + 1), "max_tokens": 4 + 6 * k} for k in range(5)]


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moebatch"


def run(rows, model, out, *more):
    done = moebatch("run", rows, "--model", model, "-o", out, "--greedy", "--ignore-eos",
                    "--progress", "none", *more)  # fmt: skip
    report = out.with_name(out.name + ".moebatch") / "report.json"
    return done, json.loads(report.read_text()) if done.code == 0 else None


def texts(path):
    return [(row["id"], row["generated_text"]) for row in read_rows(path)]


def test_every_regime_writes_the_same_text_and_says_what_it_did(rows, model, tmp_path) -> None:
    expected, report = run(rows, model, tmp_path / "stream.jsonl", "--regime", "stream")
    assert expected.code == 0, expected.err
    assert report["expert_cache"] == {"regime": "stream", "changed_before_pass": None}
    for name, options in {
        "slots": ["--expert-cache", "3", "--eviction", "lru", "--prefetch-layers", "0"],
        "bytes": ["--expert-cache", "64KiB", "--eviction", "lfu"],
        "none": ["--expert-cache", "0"],
        "auto": [],
    }.items():
        out = tmp_path / f"{name}.jsonl"
        done, report = run(rows, model, out, "--regime", "cache", *options)
        assert done.code == 0, done.err
        assert texts(out) == texts(tmp_path / "stream.jsonl")
        cache = report["expert_cache"]
        assert cache["regime"] == "cache" and cache["hits"] + cache["misses"] > 0
        assert report["policy"]["regime"] == "cache"
        assert f"expert cache of {cache['expert_slots']}" in done.err
        if name == "slots":
            assert cache["expert_slots"] == 3 and cache["prefetched"] == 0
        if name == "none":
            assert cache["hits"] == 0
            read = report["io"]["disk_read_bytes"] - report["io"]["loaded_bytes"]
            assert read > 0 and read % cache["misses"] == 0  # whole experts and nothing else


def test_a_saved_policy_with_a_tail_runs(rows, model, tmp_path) -> None:
    run(rows, model, tmp_path / "stream.jsonl", "--regime", "stream")
    policy = {"batch_size": 5, "micro_batch_size": 2, "weights_resident": 0.3, "kv_blocks": 64,
              "tail_rows": 2, "expert_slots": 6}  # fmt: skip
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    options = ["--policy", tmp_path / "policy.json"]
    done, report = run(rows, model, tmp_path / "tail.jsonl", *options)
    assert done.code == 0, done.err
    assert report["expert_cache"]["regime"] == "stream"
    assert 0 < report["expert_cache"]["changed_before_pass"] < report["passes"]
    assert texts(tmp_path / "tail.jsonl") == texts(tmp_path / "stream.jsonl")
    _, report = run(rows, model, tmp_path / "never.jsonl", *options, "--regime", "stream")
    assert report["expert_cache"]["changed_before_pass"] is None


def test_experts_that_were_used_are_remembered(rows, model, tmp_path, own_cache) -> None:
    _, report = run(rows, model, tmp_path / "one.jsonl", "--regime", "cache")
    (profile,) = own_cache.glob("experts-*.json")
    counted = report["moe"]["tokens_per_expert"]
    assert json.loads(profile.read_text()) == {"expert_tokens": counted}
    profile.write_text("not a profile")
    done, _ = run(rows, model, tmp_path / "two.jsonl", "--regime", "cache")
    assert done.code == 0
    assert json.loads(profile.read_text()) == {"expert_tokens": counted}


@pytest.mark.parametrize("regime", ["stream", "cache"])
def test_a_trace_is_recorded_and_replayed(regime, rows, model, tmp_path) -> None:
    trace = tmp_path / "routing.trace"
    options = ["--batch-size", "2", "--regime", regime, "--routing-trace", trace]
    _, report = run(rows, model, tmp_path / "out.jsonl", *options)
    header, records = read_trace(trace)
    experts = report["moe"]["tokens_per_expert"]
    assert (header.num_layers, header.num_experts) == (len(experts), len(experts[0]))
    assert [r.number for r in records] == sorted(r.number for r in records)
    assert records[-1].number == report["passes"] - 1
    for layer, counts in enumerate(experts):
        mine = [r for r in records if r.layer == layer]
        assert [
            sum(int((r.experts == e).sum()) for r in mine) for e in range(len(counts))
        ] == counts
        assert all(abs(r.scores.sum() - 1) < 0.01 for r in mine)
    done = moebatch("replay", trace, "--expert-cache", "0,50%,100%", "--json")
    results = {(r["capacity"], r["eviction"]): r for r in json.loads(done.out)["results"]}
    total = len(experts) * len(experts[0])
    assert {capacity for capacity, _ in results} == {0, total // 2, total}
    for name in ("lru", "lfu", "mrs", "belady"):
        assert results[0, name]["hits"] == 0
        assert results[total // 2, name]["hits"] <= results[total // 2, "belady"]["hits"]
    assert "belady" in moebatch("replay", trace).out


def test_plan_explains_the_crossover(model, rows) -> None:
    options = ["--model", "mixtral-8x7b", "--memory", "24GiB"]
    done = moebatch("plan", *options, "--explain")
    assert "crossover at" in done.out, done.out
    answer = json.loads(moebatch("plan", *options, "--json").out)
    assert answer["crossover_rows"] == answer["policy"]["tail_rows"] > 0
    forced = json.loads(moebatch("plan", *options, "--regime", "cache", "--json").out)
    assert forced["policy"]["regime"] == "cache" and forced["policy"]["expert_slots"] > 0
    assert "expert cache" in moebatch("plan", *options, "--regime", "cache").out


def test_plan_explains_the_crossover_of_an_accelerator() -> None:
    options = ["--model", "mixtral-8x7b", "--hardware", "t4"]
    done = moebatch("plan", *options, "--explain")
    assert "crossover at" in done.out, done.out
    assert "rows on a cache of" in done.out
    answer = json.loads(moebatch("plan", *options, "--json").out)
    assert answer["crossover_rows"] >= answer["policy"]["tail_rows"] > 0
    forced = moebatch("plan", *options, "--regime", "cache", "--explain")
    assert "expert cache" in forced.out and "roofline" in forced.out, forced.err
    streamed = json.loads(moebatch("plan", *options, "--regime", "stream", "--json").out)
    assert (streamed["crossover_rows"], streamed["policy"]["tail_rows"]) == (None, 0)
    refused = moebatch("plan", *options, "--regime", "cache", "--weights-resident", "0.5")
    assert refused.code == 2 and "--weights-resident has no meaning" in refused.error


@pytest.mark.parametrize(
    "options, text",
    [
        (["--regime", "sometimes"], "--regime sometimes does not exist"),
        (["--eviction", "random"], "--eviction random does not exist"),
        (["--expert-cache", "many"], "--expert-cache many is neither"),
        (["--expert-cache", "-3"], "--expert-cache -3 is neither"),
        (["--prefetch-layers", "-1"], "--prefetch-layers must be from 0"),
        (["--regime", "stream", "--expert-cache", "3"], "--expert-cache has no meaning"),
        (["--regime", "stream", "--eviction", "lru"], "--eviction has no meaning"),
        (["--expert-cache", "3", "--weights-resident", "0.5"], "contradict each other"),
        (["--routing-trace", "/no/such/folder/t"], "the folder /no/such/folder does not"),
        (["--device", "emulated:t4-mini", "--regime", "stream", "--eviction", "lru"],
         "--eviction has no meaning"),
    ],
)  # fmt: skip
def test_wrong_options_get_one_line(options, text, rows, model, tmp_path) -> None:
    done = moebatch("run", rows, "--model", model, "-o", tmp_path / "out.jsonl", *options)
    assert done.code == 2
    assert text in done.error
    assert not (tmp_path / "out.jsonl").exists()


def test_a_cache_beyond_the_memory_is_refused(rows, model, tmp_path) -> None:
    done = moebatch("run", rows, "--model", model, "-o", tmp_path / "out.jsonl", "--regime", "cache",
                    "--memory", "100MiB")  # fmt: skip
    assert done.code == 5 and "raise --memory" in done.err


@pytest.mark.parametrize(
    "content, code, text",
    [
        (None, 2, "cannot read the trace"),
        (b"", 6, "is no routing trace"),
        (b"{}\n", 6, "is no routing trace"),
        (b'{"format": "moebatch-routing", "version": 1, "model": "m", "num_layers": 1, '
         b'"num_experts": 4, "top_k": 0}\n', 6, "is no routing trace"),
        (b'{"format": "moebatch-routing", "version": 1, "model": "m", "num_layers": 1, '
         b'"num_experts": 4, "top_k": 1}\n' + b"\xff" * 40, 6, "is damaged"),
        (b'{"format": "moebatch-routing", "version": 1, "model": "m", "num_layers": 1, '
         b'"num_experts": 4, "top_k": 1}\n', 2, "holds no routing"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_said_in_one_line(content, code, text, tmp_path) -> None:
    trace = tmp_path / "t"
    if content is not None:
        trace.write_bytes(content)
    done = moebatch("replay", trace)
    assert done.code == code
    assert text in done.error
    assert moebatch("replay", trace, "--expert-cache", "x").code != 0
