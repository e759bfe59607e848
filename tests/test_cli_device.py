"""The command line with an accelerator: same text, a report that says what it ran on, a trace."""

import json
from pathlib import Path

import pytest
from test_cli import assert_one_line, moebatch, write_rows

from moebatch.cli.accelerator import accelerator_options, open_accelerator
from moebatch.errors import UsageError

ROWS = [{"id": str(k), "prompt": "abcdefg"[: k + 1], "max_tokens": 4 + k} for k in range(6)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "in.jsonl", ROWS)


def test_the_text_is_that_of_the_host_and_the_report_says_emulated(rows, tmp_path) -> None:
    trace, texts = tmp_path / "trace.json", []
    for device in (["--device", "cpu"],
                   ["--device", "emulated:t4", "--gpu-memory", "1GiB", "--trace", trace,
                    "--weights-resident", "0.3"]):  # fmt: skip
        out = tmp_path / f"{len(texts)}.jsonl"
        result = moebatch("run", rows, "-m", "demo", "-o", out, "--greedy", *device)
        assert result.returncode == 0, result.stderr
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    assert "emulated accelerator, no real one: emulated:t4" in result.stderr
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
