"""`moebatch plan` and `doctor` as a user calls them, in processes of their own where that matters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moebatch.cli import this_machine
from moebatch.cli.app import _guarded
from moebatch.plan.policy import Policy

ROWS = "".join(
    json.dumps({"id": k, "prompt": "word " * (3 + 5 * (k % 7)), "max_tokens": 8}) + "\n"
    for k in range(40)
)


def ask(capsys, *args) -> tuple[int, str, str]:
    code = _guarded(["plan", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(ROWS)
    return path


def test_plan_does_not_load_torch(rows) -> None:
    """Design, idea 1: numbers first. Also for a data set, which needs a tokenizer."""
    code = (
        "import sys; from moebatch.cli.app import _guarded; "
        f"a = _guarded(['plan', '--model', 'mixtral-8x7b', '--hardware', 't4', '--json']); "
        f"b = _guarded(['plan', {str(rows)!r}, '--model', 'demo', '--json']); "
        "print('torch' in sys.modules, a, b, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "False 0 0"


def test_what_a_person_reads(capsys) -> None:
    code, out, _ = ask(capsys, "--model", "mixtral-8x7b", "--hardware", "l4", "--explain")
    assert code == 0
    for part in ("46.7 B parameters", "batch size N", "accelerator memory", "host memory",
                 "binds", "tokens/s", "what would help", "other policies", "P1 of attention",
                 "balance point"):  # fmt: skip
        assert part in out, part
    assert "\x1b[" not in out


def test_json_has_the_same_answer(capsys) -> None:
    _, out, _ = ask(capsys, "--model", "mixtral-8x7b", "--hardware", "l4", "--json")
    answer = json.loads(out)
    policy = Policy(**answer["policy"])
    assert (policy.attention, policy.ffn) == ("cpu", "gpu")
    assert answer["predicted_tok_s"] > 0
    for memory in answer["memory"]:
        assert 0 < memory["peak"] <= memory["limit"]
    assert set(answer["layer_busy_s"]) == {
        "accelerator",
        "host",
        "to_accelerator",
        "to_host",
        "disk",
    }


def test_the_saved_policy_runs_as_planned(capsys, rows, tmp_path) -> None:
    saved, out = tmp_path / "policy.json", tmp_path / "out.jsonl"
    code, _, _ = ask(capsys, rows, "--model", "demo", "--save", saved, "--memory", "2GiB")
    assert code == 0
    policy = Policy.from_json(saved.read_text())
    # A process of its own: what this one holds after other tests would count against --memory.
    command = ["run", str(rows), "--model", "demo", "-o", str(out), "--policy", str(saved),
               "--memory", "2GiB", "--micro-batch-size", "7", "--quiet"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "moebatch", *command], check=True)
    report = json.loads(Path(f"{out}.moebatch/report.json").read_text())
    used = report["policy"]
    assert used["source"] == "file, overridden"
    assert used["micro_batch_size"] == 7
    for name in ("batch_size", "weights_resident", "prefill_tokens", "kv_blocks", "kv_dtype"):
        assert used[name] == getattr(policy, name)
    compared = report["predicted_vs_measured"]
    assert compared["passes"]["predicted"] >= compared["passes"]["measured"] > 0
    assert compared["generation_throughput"]["predicted"] > 0
    assert compared["memory_bytes"]["measured"] > 0


def test_a_policy_that_cannot_run_here_is_refused(capsys, rows, tmp_path) -> None:
    saved, out = tmp_path / "policy.json", tmp_path / "out.jsonl"
    run = ["run", str(rows), "--model", "demo", "-o", str(out), "--policy", str(saved)]
    saved.write_text('{"batch_size": 3}')
    assert _guarded(run) == 2
    assert "'micro_batch_size' is missing" in capsys.readouterr().err
    saved.write_text(Policy(batch_size=8, micro_batch_size=8, kv_blocks=1 << 20).to_json())
    assert _guarded([*run, "--memory", "2GiB"]) == 5
    assert "raise --memory" in capsys.readouterr().err
    assert _guarded([*run[:-1], str(tmp_path / "none.json")]) == 2
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ([], 2, "--model"),
        (["--model", "nonsense"], 7, "short name"),
        (["--model", "demo", "--hardware", "t5"], 2, "t4"),
        (["--model", "demo", "--hardware", "./none.json"], 2, "none.json"),
        (["--model", "demo", "--workload", "imagenet"], 2, "mtbench"),
        (["--model", "demo", "--what-if", "pcie=1"], 2, "no accelerator"),
        (["--model", "demo", "--hardware", "t4", "--what-if", "pcie"], 2, "key=value"),
        (["--model", "demo", "--hardware", "t4", "--what-if", "pcie=fast"], 2, "no number"),
        (["--model", "demo", "--policy-space", "paper"], 2, "accelerator"),
        (["--model", "demo", "--policy-space", "all"], 2, "one of"),
        (["--model", "demo", "--plot", "x.gif"], 2, ".png"),
        (["--model", "demo", "--save", "/nowhere/p.json"], 2, "/nowhere/p.json"),
        (["--model", "demo", "--memory", "10MiB"], 5, "raise --memory"),
        (
            ["--model", "mixtral-8x7b", "--hardware", "t4", "--gpu-memory", "1GiB"],
            5,
            "--gpu-memory",
        ),
        (["/none.jsonl", "--model", "demo"], 7, "none.jsonl"),
        (["--model", "demo", "--max-tokens", "0"], 2, "--max-tokens"),
        (["--model", "demo", "--batch-size", "0"], 2, "--batch-size"),
        (["--model", "demo", "--kv-resident", "2"], 2, "--kv-resident"),
    ],
)
def test_wrong_questions_get_one_line(capsys, args, code, text) -> None:
    got, out, err = ask(capsys, *args)
    assert got == code, err
    assert text in err
    assert err.startswith("error: ") and len(err.splitlines()) <= 2
    assert out == ""


def test_a_sweep_is_a_table(capsys) -> None:
    args = ("--model", "mixtral-8x7b", "--hardware", "figure10")
    code, out, _ = ask(capsys, *args, "--what-if", "pcie=100:500,host-scale=1:4", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["pcie"], row["host-scale"]) for row in rows] == [
        ("100", "1"), ("100", "4"), ("500", "1"), ("500", "4"),
    ]  # fmt: skip
    assert [row["A_g"] for row in rows] == [1, 0, 1, 0]
    code, out, _ = ask(capsys, *args, "--what-if", "gpu=t4:l4")
    assert code == 0 and "tok/s" in out
    code, _, err = ask(capsys, *args, "--what-if", "gpu=t4:l4", "--save", "x.json")
    assert code == 2 and "one plan" in err


def test_the_roofline_is_drawn(capsys, tmp_path) -> None:
    path = tmp_path / "roofs.png"
    code, _, _ = ask(capsys, "--model", "mixtral-8x7b", "--hardware", "t4", "--plot", path)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    svg = tmp_path / "roofs.svg"
    code, _, _ = ask(capsys, "--model", "demo", "--plot", svg)
    assert code == 0 and "<svg" in svg.read_text()


def test_a_measurement_is_kept_and_used(tmp_path, monkeypatch) -> None:
    """Doctor in a process of its own, its figures from then on; a damaged cache is measured anew."""
    machine = (Path(__file__).parent / "machine.json").read_text()
    monkeypatch.delenv("MOEBATCH_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def pretend(command, **kwargs):
        calls.append(command)
        this_machine.keep(this_machine.loads(machine), 3)
        return subprocess.CompletedProcess(command, 0, stdout=machine, stderr="")

    monkeypatch.setattr(this_machine.subprocess, "run", pretend)
    first = this_machine.this_machine(threads=3, quiet=True)
    assert this_machine.this_machine(threads=3, quiet=True).to_dict() == first.to_dict()
    assert len(calls) == 1
    this_machine.cache_file(3).write_text("torn {")
    this_machine.this_machine(threads=3, quiet=True)
    assert len(calls) == 2


def test_doctor_measures_this_machine(tmp_path) -> None:
    """The real probe, once: every figure is there and positive, and the file is a machine.

    With smaller experts than it has by itself, and fewer repetitions.
    """
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("MOEBATCH_MACHINE")
    code = (
        "from moebatch.__main__ import main; from moebatch.runtime import probe; "
        "probe._EXPERT = probe._SMALL_EXPERT = 128; "
        "probe.timed.__kwdefaults__['seconds'] = 0.02; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json", "--cpu-threads", "1"],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    machine = this_machine.loads(done.stdout)
    assert machine.host.bandwidth > 1e8 and machine.disk_bandwidth > 1e6
    for rates in machine.rates.values():
        assert set(rates.gemm) == {"packed", "streamed"}
        assert rates.gemm["packed"](384) > rates.gemm["packed"](1) > 1e6
    assert len(list((tmp_path / "moebatch").glob("machine-*.json"))) == 1


def test_doctor_refuses_what_it_cannot_measure(tmp_path) -> None:
    assert _guarded(["doctor", "--disk", str(tmp_path / "none")]) == 2
    assert _guarded(["doctor", "--cpu-threads", "0"]) == 2
