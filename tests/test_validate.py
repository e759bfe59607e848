"""`moebatch validate`: the same verdict on every row as a run, without weights."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from commands import moebatch, read_rows, write_rows

from moebatch.cli.validate import bins


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def light_model(here) -> Path:
    """The demo model without its weights."""
    import moebatch

    source, path = Path(moebatch.__file__).parent / "demo" / "model", here / "light"
    path.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    return path


ROWS = [
    {"id": "a", "prompt": "hello there", "max_tokens": 9},
    b"nonsense",
    {"id": "b", "messages": [{"role": "user", "content": "hi"}]},
    {"id": "a", "prompt": "again"},
    {"id": "c", "prompt": "x" * 9999},
    {"id": "d", "prompt": "x", "sampling_params": {"n": 3, "max_tokens": 1000}},
    {"id": "e"},
]


def test_bad_rows_are_named_with_line_and_code(here, light_model) -> None:
    write_rows(here / "in.jsonl", ROWS)
    result = moebatch("validate", "in.jsonl", "-m", light_model)
    assert result.code == 6
    named = [line.split(": ")[:2] for line in result.out.splitlines()[:4]]
    assert named == [
        ["in.jsonl:2", "invalid_json"],
        ["in.jsonl:4", "duplicate_id"],
        ["in.jsonl:5", "context_length_exceeded"],
        ["in.jsonl:7", "missing_prompt"],
    ]
    assert "7 rows · 3 good, 4 bad" in result.out
    assert "\x1b" not in result.out
    assert "error:" not in result.err


def test_the_json_form_and_what_a_run_says(here, light_model) -> None:
    write_rows(here / "in.jsonl", ROWS)
    facts = json.loads(moebatch("validate", "in.jsonl", "-m", light_model, "--json").out)
    assert moebatch("run", "in.jsonl", "-m", "demo", "-o", "out.jsonl", "--on-duplicate",
                    "row-error", "-q").code == 3  # fmt: skip
    report = json.loads((here / "out.jsonl.moebatch" / "report.json").read_text())
    assert facts["rows"]["by_error_code"] == report["requests"]["by_error_code"]
    assert facts["rows"]["good"] == report["requests"]["succeeded"]
    assert facts["tokens"]["prompt"] == report["tokens"]["prompt"]
    assert facts["tokens"]["generated_at_most"] >= report["tokens"]["generated"]
    failed = [row["error"] for row in read_rows(here / "out.jsonl") if row["error"]]
    assert [(bad["line"], bad["code"]) for bad in facts["bad_rows"]] == [
        (error["line"], error["code"]) for error in failed
    ]
    assert sum(one["rows"] for one in facts["histogram"]) == facts["rows"]["good"]
    assert facts["rows"]["max_tokens_clamped"] == 1


def test_a_good_data_set_is_exit_0(here, light_model) -> None:
    write_rows(here / "in.jsonl", [{"prompt": "hi"}])
    assert moebatch("validate", "in.jsonl", "-m", light_model).code == 0
    skipping = [{"prompt": "hi"}, {"prompt": "x" * 9999}]
    write_rows(here / "in.jsonl", skipping)
    result = moebatch("validate", "in.jsonl", "-m", light_model, "--on-too-long", "skip")
    assert result.code == 0
    assert "1 skipped" in result.out


def test_what_fails_as_a_whole(here, light_model) -> None:
    write_rows(here / "in.jsonl", [{"prompt": "hi"}])
    (here / "empty.jsonl").write_bytes(b"")
    assert moebatch("validate", "empty.jsonl", "-m", light_model).code == 6
    assert moebatch("validate", "no.jsonl", "-m", light_model).code == 7
    assert moebatch("validate", "in.jsonl", "-m", here / "nomodel").code == 7
    result = moebatch("validate", "in.jsonl", "-m", light_model, "--on-too-long", "pray")
    assert result.code == 2
    assert result.error


def test_bins_cover_every_length_once() -> None:
    lengths = Counter({0: 1, 15: 2, 16: 3, 100: 4, 1024: 5})
    found = bins(lengths)
    assert [count for _, _, count in found if count] == [3, 3, 4, 5]
    assert all(high + 1 == low for (_, high, _), (low, _, _) in pairwise(found))
    assert found[0][0] == 0
    assert bins(Counter()) == []
