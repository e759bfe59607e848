"""`moebatch bench` on the demo model: what it measures, checks, writes and refuses."""

import csv
import io
import json
import sys
import time
from pathlib import Path

import pytest
from commands import moebatch

from moebatch.cli.bench import arms, record, roofs, table
from moebatch.cli.bench.cap import memory_cap
from moebatch.cli.bench.compare import compare, markdown
from moebatch.cli.bench.dummy import dummy_model
from moebatch.cli.bench.measure import Found, _fastest_variants
from moebatch.cli.bench.watch import thinned, watch
from moebatch.cli.this_machine import read_machine
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families.known import KNOWN
from moebatch.model.resolve import resolve_model
from moebatch.plan.optimizer import resident_pages
from moebatch.plan.policy import Policy
from moebatch.plan.workload import WorkloadSpec

ROWS, GEN = 3, 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    """One real benchmark: two numbers of requests, a baseline that is not there."""
    path = tmp_path_factory.mktemp("bench") / "result.json"
    done = moebatch("bench", "mtbench", "-m", "demo", "--num-prompts", f"{ROWS},{ROWS + 1}",
                    "--output-len", GEN, "-r", 1, "--cpu-threads", 1, "--baseline", "vllm",
                    "--output-json", path)  # fmt: skip
    assert done.code == 0, done.err
    return {"path": path, "record": record.read(path), "out": done.out, "err": done.err}


def test_what_was_asked_was_generated(measured) -> None:
    for setting, rows in zip(measured["record"]["settings"], (ROWS, ROWS + 1), strict=True):
        ours = setting["arms"][0]
        assert (ours["name"], ours["status"]) == ("moebatch", "ok")
        assert setting["num_prompts"] == rows and setting["generated"] == rows * GEN
        run = ours["runs"][0]
        assert run["generated"] == rows * GEN
        assert run["seconds"] == pytest.approx(run["prefill_s"] + run["decode_s"])
        assert ours["tok_s"]["mean"] == pytest.approx(rows * GEN / run["seconds"])
        assert ours["tok_s"]["sd"] is None  # one run has none


def test_the_roof_is_above_what_was_measured(measured) -> None:
    for setting in measured["record"]["settings"]:
        ours = setting["arms"][0]
        found = ours["planned"]["roofs"]
        assert found["tok_s"] == min(found["by_resource"].values())
        assert ours["planned"]["predicted"]["tok_s"] > 0
        assert ours["planned"]["policy"]["batch_size"] >= 1


def test_the_warm_up_does_not_count(measured) -> None:
    """Tokens that the experts saw: those of the measured prompts and what they generated, no more."""
    setting = measured["record"]["settings"][0]
    layer = setting["arms"][0]["runs"][0]["expert_tokens"][0]
    spec = resolve_model("demo").spec
    through = setting["prompts"]["total"] + ROWS * (GEN - 1)
    assert sum(layer) == through * spec.top_k


def test_roofs_and_prediction_are_said_before_the_runs(measured) -> None:
    lines = measured["err"].splitlines()
    plan = next(k for k, line in enumerate(lines) if "roofs, tok/s" in line and "predicted" in line)
    assert plan < next(k for k, line in enumerate(lines) if line.startswith("1/1 moebatch"))
    assert any("stored lengths" in line for line in lines)


def test_a_baseline_that_is_not_installed_is_said_so(measured) -> None:
    for setting in measured["record"]["settings"]:
        rival = setting["arms"][1]
        assert rival["name"] == "vllm" and rival["status"] == "missing"
        assert "not installed" in rival["reason"]
    assert measured["out"].count("not installed") == 2


def test_memory_is_seen_from_outside(measured) -> None:
    ours = measured["record"]["settings"][0]["arms"][0]
    if sys.platform != "linux":
        pytest.skip("only Linux shows the memory of other processes")
    assert 50 << 20 < ours["peak_cpu_bytes"] < 4 << 30
    samples = ours["runs"][0]["samples"]
    assert [at for at, _ in samples] == sorted(at for at, _ in samples)


def test_two_numbers_of_requests_are_a_sweep_with_the_planners_curve(measured) -> None:
    (curve,) = measured["record"]["curves"]
    assert curve["axis"] == "num_prompts"
    assert [point["x"] for point in curve["measured"]] == [ROWS, ROWS + 1]
    assert len(curve["predicted"]) > 5
    assert all(point["tok_s"] > 0 for point in curve["predicted"])


def test_no_folder_and_no_host_stands_in_the_record(measured) -> None:
    import platform

    text = measured["path"].read_text()
    assert str(measured["path"].parent) not in text
    assert str(Path(__file__).parents[1]) not in text
    assert platform.node() not in text


def test_the_table_as_markdown_csv_and_json_lines(measured) -> None:
    found = list(table.rows(measured["record"]))
    assert [row["arm"] for row in found] == ["moebatch", "vllm"] * 2
    assert measured["out"] == table.markdown(measured["record"])
    lines = table.markdown(measured["record"]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    parsed = list(csv.DictReader(io.StringIO(table.comma_separated(measured["record"]))))
    assert float(parsed[0]["measured"]) == found[0]["measured"]
    objects = [json.loads(line) for line in table.json_lines(measured["record"]).splitlines()]
    assert objects == found


def test_comparing_a_result_with_itself(measured) -> None:
    done = moebatch("bench", "compare", measured["path"], measured["path"], "--format", "json")
    assert done.code == 0
    found = json.loads(done.out)
    assert [row["ratio"] for row in found] == [1.0, 1.0]
    assert "1.00" in markdown(found)


def one_result(rates: list[float]) -> dict:
    from statistics import fmean, stdev

    arm = {"name": "moebatch", "label": "", "peak_cpu_bytes": 1,
           "tok_s": {"mean": fmean(rates), "sd": stdev(rates), "runs": rates}}  # fmt: skip
    setting = {"workload": "mtbench", "prompts": {"padded": False}, "model": "m", "num_prompts": 1,
               "gen_len": 1, "memory_bytes": None, "device": "cpu", "arms": [arm]}  # fmt: skip
    return {"settings": [setting]}


def test_a_difference_is_told_from_noise() -> None:
    calm = one_result([10.0, 10.1, 9.9])
    assert compare(calm, one_result([12.0, 12.1, 11.9]))[0]["differs"] is True
    assert compare(calm, one_result([8.0, 12.3, 10.0]))[0]["differs"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mtbench"], "which model"),
        (["mtbanch", "-m", "demo"], "neither a workload nor a file"),
        (["mtbench", "-m", "demo", "--num-prompts", "0"], "--num-prompts"),
        (["mtbench", "-m", "demo", "--output-len", "8,x"], "--output-len"),
        (["mtbench", "-m", "demo", "-r", "0"], "--repeats"),
        (["mtbench", "-m", "demo", "--baseline", "vlm"], "no baseline is called vlm"),
        (["mtbench", "-m", "demo", "--schedule", "fast"], "--schedule fast"),
        (["mtbench", "-m", "demo", "--format", "xml"], "--format xml"),
        (["mtbench", "-m", "demo", "--load-format", "fake"], "--load-format fake"),
        (["mtbench", "-m", "demo", "--report", "/no/such/place.html"], "--report"),
        (["mtbench", "-m", "demo", "--memory", "much"], "much"),
        (["mtbench", "-m", "demo", "--memory", "0%"], "--memory"),
        (["mtbench", "more.json", "-m", "demo"], "more.json"),
        (["compare", "one.json"], "compare takes two"),
        (["compare", "no.json", "no.json"], "cannot read no.json"),
        (["mtbench", "-m", "demo", "--baseline-python", "/no/python"], ""),
    ],
)
def test_wrong_options_get_one_line(arguments, said) -> None:
    if not said:
        arguments, said = [*arguments, "--baseline", "vllm"], "--baseline-python"
    done = moebatch("bench", *arguments)
    assert done.code in (2, 7)
    assert said in done.error


def test_another_programs_json_is_no_result(tmp_path) -> None:
    (tmp_path / "a.json").write_text('{"kind": "other"}')
    done = moebatch("bench", "compare", tmp_path / "a.json", tmp_path / "a.json")
    assert done.code == 6
    assert "not the result of a benchmark" in done.error


def test_of_a_rivals_variants_the_fastest_goes_on() -> None:
    def found(name: str, label: str, rate: float | None) -> Found:
        runs = [] if rate is None else [{"generated": rate, "seconds": 1.0}]
        return Found(arm=arms.Arm(name=name, label=label), runs=runs)

    kept = _fastest_variants([
        found("moebatch", "a", 1.0), found("moebatch", "b", 2.0), found("rival", "slow", 3.0),
        found("rival", "fast", 4.0), found("rival", "broken", None),
    ])  # fmt: skip
    assert [one.arm.label for one in kept] == ["a", "b", "fast"]


def test_what_a_process_says_and_takes() -> None:
    program = (
        "import time; held = bytearray(60 << 20); "
        'print(\'{"event": "done", "x": 1}\'); print("noise"); time.sleep(0.5)'
    )
    ran = watch([sys.executable, "-c", program], timeout_s=60)
    assert ran.code == 0 and ran.events == ({"event": "done", "x": 1},)
    if sys.platform == "linux":
        assert ran.peak_bytes is not None and ran.peak_bytes > 60 << 20


def test_a_process_that_fails_or_hangs_is_ended_with_a_reason() -> None:
    failed = watch([sys.executable, "-c", "raise ValueError('no such thing')"], timeout_s=60)
    assert failed.code == 1 and failed.error == "ValueError: no such thing"
    start = time.monotonic()
    hung = watch([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.3)
    assert time.monotonic() - start < 30
    assert "takes too long" in hung.error


def test_a_memory_limit_holds_where_one_can_be_set() -> None:
    with memory_cap(200 << 20) as cap:
        if cap is None:
            pytest.skip("no right to make a control group here")
        program = "held = bytearray(b'x') * (400 << 20)"
        ran = watch([sys.executable, "-c", program], cap=cap, timeout_s=60)
        assert ran.code != 0 and ran.capped
        fine = watch([sys.executable, "-c", "pass"], cap=cap, timeout_s=60)
        assert fine.code == 0


def test_thinned_samples_keep_the_peak() -> None:
    samples = [(float(k), k * (k != 777) + 10**6 * (k == 777)) for k in range(2000)]
    few = thinned(samples)
    assert len(few) <= 300 and max(size for _, size in few) == 10**6


def test_roofs_are_those_of_each_resource_alone() -> None:
    machine = read_machine(Path(__file__).parent / "machine.json")
    spec = KNOWN["mixtral-8x7b"].spec
    workload = WorkloadSpec.measure([(77, 32)] * 64, complete=True)
    policy = Policy(batch_size=64, micro_batch_size=64, weights_resident=0.5, kv_blocks=1000,
                    prefill_tokens=8192, kv_dtype="bfloat16")  # fmt: skip
    found = roofs.roofs_of(spec, workload, policy, machine, compute="float32")
    rates = found.to_dict()["by_resource"]
    assert set(rates) == {"compute", "memory", "disk"}
    attention, experts = resident_pages(spec, policy)
    assert attention == spec.num_layers  # they stay first
    streamed = (spec.num_expert_pages - experts) * 2 * spec.expert_params
    assert found.disk_bytes == pytest.approx(streamed * found.passes, rel=1e-6)
    assert rates["disk"] == pytest.approx(64 * 32 / (found.disk_bytes / machine.disk_bandwidth))
    # 2 FLOPs a parameter and token, attention and the last layer's prompt tokens aside
    assert found.flops == pytest.approx(2 * spec.active_params * 64 * 109, rel=0.1)
    assert found.tok_s == min(rates.values()) == rates[found.bound_by]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_dummy_weights_are_what_the_model_needs(tiny_models, tmp_path, kind) -> None:
    source = tiny_models(kind)[1]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((source / "config.json").read_text())
    model = dummy_model(str(bare), tmp_path, say=lambda line: None)
    with Checkpoint(model.path) as checkpoint:
        checkpoint.check(model.parts())
    again = dummy_model(str(bare), tmp_path, say=pytest.fail)
    assert again.spec == model.spec


def test_dummy_weights_run(tmp_path) -> None:
    """No tokenizer, no weights: a config.json alone, on an emulated accelerator, two schedules."""
    config = dict(resolve_model("demo").config)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/config.json").write_text(json.dumps(config))
    done = moebatch("bench", "random", "-m", tmp_path / "alone", "--load-format", "dummy",
                    "--input-len", 6, "--output-len", 2, "--num-prompts", 2, "-r", 1,
                    "--num-warmups", 0, "--device", "emulated:unthrottled", "--schedule",
                    "cgopipe,flexgen", "--weights-resident", 0, "--cpu-threads", 1,
                    "--format", "json")  # fmt: skip
    assert done.code == 0, done.err
    (setting,) = json.loads(done.out)["settings"]
    assert [arm["label"] for arm in setting["arms"]] == ["cgopipe", "flexgen"]
    for arm in setting["arms"]:
        assert arm["status"] == "ok" and arm["planned"]["policy"]["schedule"] == arm["label"]
        assert arm["peak_gpu_bytes"] > 0 and "link" in arm["planned"]["roofs"]["by_resource"]


def test_no_room_for_the_model_is_a_result_and_an_exit_code(tmp_path) -> None:
    done = moebatch("bench", "random", "-m", "demo", "--input-len", 6, "--output-len", 2,
                    "--num-prompts", 1, "-r", 1, "--memory", "100MiB", "--format", "json")  # fmt: skip
    assert done.code == 1
    (setting,) = json.loads(done.out)["settings"]
    assert setting["arms"][0]["status"] == "failed"
    assert "memory" in setting["arms"][0]["reason"]
