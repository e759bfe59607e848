"""The command line with an accelerator: same text, a report that says what it ran on, a trace."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import moebatch, write_rows
from test_cli import assert_one_line

from moebatch.cli import this_machine
from moebatch.cli.accelerator import accelerator_options, open_accelerator
from moebatch.cli.app import _guarded
from moebatch.cli.this_machine import read_machine
from moebatch.errors import UsageError
from moebatch.plan import device_fit
from moebatch.plan.machine import Processor
from moebatch.plan.profiles import LinkProfile
from moebatch.runtime import device_backend, probe, probe_device
from moebatch.runtime.emulated import EmulatedDevice

ROWS = [{"id": str(k), "prompt": "abcdefg"[: k + 1], "max_tokens": 4 + k} for k in range(6)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "in.jsonl", ROWS)


def test_the_text_is_that_of_the_host_and_the_report_says_emulated(rows, tmp_path) -> None:
    trace, texts = tmp_path / "trace.json", []
    for device in (["--device", "cpu"],
                   ["--device", "emulated:t4", "--gpu-memory", "1GiB", "--trace", trace,
                    "--schedule", "cgopipe",
                    "--weights-resident", "0.3"]):  # fmt: skip
        out = tmp_path / f"{len(texts)}.jsonl"
        result = moebatch("run", rows, "-m", "demo", "-o", out, "--greedy", *device)
        assert result.code == 0, result.err
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    assert "emulated accelerator, no real one: emulated:t4" in result.err
    report = json.loads((tmp_path / "1.jsonl.moebatch" / "report.json").read_text())
    gpu = report["machine"]["gpu"]
    assert gpu["emulated"] is True
    assert 0 < gpu["peak_bytes"] <= gpu["memory_bytes"] == 2**30
    assert report["policy"]["schedule"] == "cgopipe"
    events = json.loads(trace.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["measured", "simulated"]
    assert {"load_page", "cpu_attn", "ffn"} <= {e["name"] for e in events}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, "--device tpu does not exist"),
        ({"device": "cuda:x"}, "--device cuda:x does not exist"),
        ({"device": "emulated:h9000"}, "no emulated accelerator 'h9000'"),
        ({"schedule": "fast"}, "--schedule fast does not exist"),
        ({"device": "cpu", "schedule": "cgopipe"}, "needs an accelerator"),
        ({"device": "emulated:t4", "schedule": "zigzag"}, "for the host alone"),
        ({"device": "cpu", "gpu_memory": "1GiB"}, "--gpu-memory has no meaning"),
        ({"trace": Path("/nowhere/trace.json")}, "--trace /nowhere/trace.json"),
        ({"trace": Path("/")}, "--trace /"),
    ],
)
def test_wrong_options(options, words) -> None:
    asked = {"device": "auto", "schedule": "auto", "gpu_memory": None, "trace": None, **options}
    with pytest.raises(UsageError, match=words):
        open_accelerator(accelerator_options(asked.pop("device"), **asked))


def test_too_little_accelerator_memory(rows, tmp_path) -> None:
    result = moebatch("run", rows, "-m", "demo", "-o", tmp_path / "out.jsonl",
                      "--device", "emulated:t4", "--gpu-memory", "1MiB")  # fmt: skip
    assert_one_line(result, 5, "accelerator memory", "--gpu-memory")


def planned_too_large(monkeypatch, factor: float) -> None:
    """A planner that takes the device for larger than it is."""
    known = device_fit.device_memory

    def smaller(spec, policy):
        found = known(spec, policy)
        return replace(found, resident_weights=int(found.resident_weights / factor),
                       activations=0, workspace=0)  # fmt: skip

    monkeypatch.setattr(device_fit, "device_memory", smaller)
    fast = Processor(name="fast", memory_bytes=2.0**30, bandwidth=1e12, flops={"bfloat16": 1e14})
    monkeypatch.setattr(probe_device, "measure_device", lambda device, **_: (fast, 1e14, 1e14))


def run_here(rows, out, *options) -> int:
    return _guarded(["run", str(rows), "-m", "demo", "-o", str(out), "--temperature", "0.8",
                     "--dtype", "float32", *options])  # fmt: skip


def test_a_device_without_memory_gets_a_smaller_plan(rows, tmp_path, monkeypatch, capsys) -> None:
    """The plan is wrong, the run goes on: the text is that of a device with room."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run_here(rows, whole, "--device", "emulated:t4", "--gpu-memory", "1GiB") == 0
    capsys.readouterr()
    planned_too_large(monkeypatch, 1.3)
    tight = ["--device", "emulated:t4", "--gpu-memory", "9MiB"]
    assert run_here(rows, out, *tight) == 0
    assert "going on with a smaller plan" in capsys.readouterr().err
    assert out.read_text() == whole.read_text()
    assert run_here(rows, tmp_path / "other.jsonl", *tight, "--on-oom", "fail") == 5
    said = capsys.readouterr().err
    assert "raise --gpu-memory" in said and "Traceback" not in said


def test_memory_that_runs_out_between_tokens(rows, tmp_path, monkeypatch) -> None:
    """What was generated until then is kept, and no row is answered twice."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    options = ["--device", "emulated:t4", "--gpu-memory", "1GiB"]
    assert run_here(rows, whole, *options) == 0
    passes = {"left": 4}
    compute = device_backend.DeviceBackend.compute

    def once(self, groups, **kwargs):
        passes["left"] -= 1
        if passes["left"] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return compute(self, groups, **kwargs)

    monkeypatch.setattr(device_backend.DeviceBackend, "compute", once)
    assert run_here(rows, out, *options) == 0
    assert out.read_text() == whole.read_text()
    report = json.loads(Path(f"{out}.moebatch/report.json").read_text())
    assert report["requests"]["succeeded"] == len(ROWS)


def test_a_wrong_device_leaves_nothing_behind(rows, tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    assert run_here(rows, out, "--device", "emulated:h9000") == 2
    assert run_here(rows, out, "--schedule", "cgopipe", "--device", "cpu") == 2
    assert list(tmp_path.iterdir()) == []


def test_stopped_and_resumed_on_a_device(rows, tmp_path, monkeypatch) -> None:
    """In the middle of rows, and with another schedule afterwards: the text of one go."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    device = ["--device", "emulated:t4", "--gpu-memory", "1GiB"]
    assert run_here(rows, whole, *device, "--schedule", "cgopipe") == 0
    trace, passes = tmp_path / "trace.json", iter(range(100))
    compute = device_backend.DeviceBackend.compute

    def stopped(self, groups, **kwargs):
        if next(passes) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(self, groups, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(device_backend.DeviceBackend, "compute", stopped)
        assert run_here(rows, out, *device, "--trace", str(trace), "--schedule", "cgopipe") == 143
    assert not out.exists()
    assert json.loads(trace.read_text())["traceEvents"]
    assert _guarded(["status", str(out)]) in (0, 3)
    assert run_here(rows, out, *device, "--schedule", "fastdecode") == 0
    assert out.read_text() == whole.read_text()


def test_the_planner_measures_the_device() -> None:
    """All figures are there, and the device's memory is given back."""
    profile = LinkProfile(name="test", memory_bytes=2**26, h2d_bytes_per_s=2e9,
                          d2h_bytes_per_s=1e9, latency_s=0.0)  # fmt: skip
    device = EmulatedDevice(profile)
    processor, link, back = probe_device.measure_device(device, dtype="float32", compute="float32")
    assert 0 < link < 2.1e9  # never faster than the emulated link
    assert 0 < back < 1.1e9
    assert processor.flops["float32"] > 0
    assert processor.bandwidth > 0
    assert device.memory.used == device.memory.peak == 0


def test_the_planner_uses_what_it_measured(rows, tmp_path, monkeypatch) -> None:
    """A fast device computes the experts; one that is slow behind a slow link leaves them."""
    chosen = []
    for speed in (1e14, 1e6):
        one = Processor(
            name="one", memory_bytes=2.0**30, bandwidth=speed, flops={"bfloat16": speed}
        )
        monkeypatch.setattr(probe_device, "measure_device",
                            lambda device, one=one, speed=speed, **_: (one, speed, speed))  # fmt: skip
        out = tmp_path / f"{speed}.jsonl"
        assert run_here(rows, out, "--device", "emulated:t4", "--gpu-memory", "1GiB") == 0
        report = json.loads(Path(f"{out}.moebatch/report.json").read_text())
        chosen.append((report["policy"]["ffn"], report["policy"]["attention"]))
    assert chosen[0][0] == "gpu"
    assert chosen[1] == ("cpu", "cpu")


def test_the_doctor_measures_an_accelerator(monkeypatch, capsys) -> None:
    """And keeps nothing of one that is emulated."""
    machine = read_machine(Path(__file__).parent / "machine.json")
    monkeypatch.setattr(probe, "measure", lambda **_: machine)
    monkeypatch.setattr(this_machine, "keep", lambda *_: pytest.fail("kept"))
    assert _guarded(["doctor", "--device", "emulated:t4-mini"]) == 0
    said = capsys.readouterr().out
    for part in (
        "emulated:t4-mini",
        "host to accelerator, pinned",
        "pageable",
        "accelerator to host",
    ):
        assert part in said
    assert _guarded(["doctor", "--device", "emulated:t4-mini", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["link"] < 201e6
    assert found["accelerator"]["memory_bytes"] == 64 * 2**20
