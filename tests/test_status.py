"""`moebatch status` and `moebatch retry`: what became of a run, and the same once more."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import moebatch, read_rows, write_rows

RUN = ["-m", "demo", "-o", "out.jsonl", "--max-tokens", 3, "-q"]
# Logits divided by next to nothing are infinite: the row fails in the engine, and may be retried.
BROKEN = {"id": "broken", "prompt": "x", "repetition_penalty": 1e-300}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def facts(output: str = "out.jsonl") -> dict:
    result = moebatch("status", output, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_a_finished_run(here) -> None:
    rows = [{"id": "a", "prompt": "x"}, b"broken line", BROKEN, {"id": "b", "prompt": "y"}]
    write_rows(here / "in.jsonl", rows)
    assert moebatch("run", "in.jsonl", *RUN).code == 3
    said = facts()
    assert said["state"] == "finished"
    assert said["rows"] == {
        "total": 4, "answered": 2, "failed": 2, "skipped": 0, "left": 0, "in_flight": 0,
        "by_error_code": {"invalid_json": 1, "non_finite_logits": 1},
    }  # fmt: skip
    assert said["tokens"]["generated"] == sum(
        row["completion_tokens"] for row in read_rows(here / "out.jsonl")
    )
    shown = moebatch("status", "out.jsonl").out
    assert "finished" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("name", ["nope.jsonl", "empty.jsonl", "in.jsonl"])
def test_what_is_no_run(here, name) -> None:
    (here / "empty.jsonl.moebatch").mkdir()
    write_rows(here / "in.jsonl", [])
    for command in ("status", "retry"):
        result = moebatch(command, name)
        assert result.code == 7
        assert name in result.error


@pytest.mark.parametrize("name", ["", "/", "."])
@pytest.mark.parametrize("command", [["status"], ["retry"], ["merge", "-o", "x.jsonl"]])
def test_names_of_no_file(here, command, name) -> None:
    result = moebatch(*command, name)
    assert result.code == 2
    assert result.error


@pytest.mark.parametrize(
    "name", ["rows.json", "report.json", "journal-00000.jsonl", "inflight.bin"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff" * 99,
                                     b'{"schema_version":1,"shard":["a"],"diverted":["z"]}',
                                     b'{"status":"completed","requests":[]}'])  # fmt: skip
def test_damaged_files_beside_an_output_are_no_crash(here, name, content) -> None:
    write_rows(here / "in.jsonl", [b"x"])
    assert moebatch("run", "in.jsonl", *RUN).code == 3
    (here / "out.jsonl.moebatch" / name).write_bytes(content)
    assert facts()["state"] in ("finished", "stopped")
    assert moebatch("status", "out.jsonl").code == 0
    assert moebatch("merge", "out.jsonl", "-o", "x.jsonl").code in (0, 7)


def test_a_live_run_and_a_dead_one(here) -> None:
    write_rows(here / "in.jsonl", [{"prompt": f"row {i}"} for i in range(3000)])
    process = subprocess.Popen(
        [sys.executable, "-m", "moebatch", "run", "in.jsonl", "-m", "demo", "-o", "out.jsonl",
         "--batch-size", "4", "--max-tokens", "4", "--ignore-eos", "-q"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    try:
        while not (here / "out.jsonl.partial").exists() or facts()["rows"]["answered"] < 1:
            assert process.poll() is None
            time.sleep(0.05)
        live = facts()
        locked = moebatch("run", "in.jsonl", *RUN)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert live["state"] == "running"
    assert str(process.pid) in live["writer"]
    assert locked.code == 9
    dead = facts()
    assert dead["state"] == "stopped"
    assert dead["rows"]["total"] == 3000
    assert live["rows"]["answered"] <= dead["rows"]["answered"] < 3000
    assert dead["rows"]["left"] == 3000 - dead["rows"]["answered"]
    assert "moebatch retry out.jsonl" in moebatch("status", "out.jsonl").err


def test_retry_computes_what_failed_and_nothing_else(here, tmp_path_factory, monkeypatch) -> None:
    """Also from another folder, and although the first run said --overwrite."""
    rows = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": ""}, BROKEN]
    write_rows(here / "in.jsonl", rows)
    assert moebatch("run", "in.jsonl", *RUN, "--overwrite", "--keep-errors").code == 3
    before = read_rows(here / "out.jsonl")
    write_rows(here / "in.jsonl", [rows[0], {"id": "b", "prompt": "mended"}, BROKEN])
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    result = moebatch("retry", here / "out.jsonl")
    assert result.code == 3
    after = read_rows(here / "out.jsonl")
    assert after[0] == before[0]
    assert [row["error"] and row["error"]["code"] for row in after] == [
        None,
        None,
        "non_finite_logits",
    ]
    report = json.loads((here / "out.jsonl.moebatch" / "report.json").read_text())
    assert report["resumed"]["rows"] == 1
    assert report["resumed"]["rows_retried"] == 1


def test_retry_takes_more_options(here) -> None:
    write_rows(here / "in.jsonl", [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": ""}])
    assert moebatch("run", "in.jsonl", *RUN).code == 3
    assert moebatch("retry", "out.jsonl", "--allow-row-errors").code == 0
    assert moebatch("retry", "out.jsonl", "--", "--no-such-option").code == 2
    result = moebatch("retry", "out.jsonl", "--", "--seed", 7)
    assert result.code == 8
    assert "seed" in result.error


def test_retry_without_the_rows(here) -> None:
    assert moebatch("run", "-", *RUN, stdin=b'{"prompt":"x"}\n').code == 0
    result = moebatch("retry", "out.jsonl")
    assert result.code == 2
    assert "standard input" in result.error
