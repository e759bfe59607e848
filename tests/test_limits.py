"""Failed rows: when they end the run, where they are written, and what the exit code says."""

import json
from pathlib import Path

import pytest
from commands import moebatch, read_rows, write_rows
from hypothesis import given
from hypothesis import strategies as st

from moebatch.cli.limits import ErrorLimit, Tolerance, parse_tolerance
from moebatch.data.requests import Completion, Request, RowError, SamplingParams
from moebatch.errors import TooManyErrors

GOOD, BAD = {"prompt": "hi"}, {"prompt": ""}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(rows: list[object], *args: object, out: str = "out.jsonl"):
    write_rows(Path("in.jsonl"), rows)
    return moebatch("run", "in.jsonl", "-m", "demo", "-o", out, "--max-tokens", 1, "--progress",
                    "none", *args)  # fmt: skip


def error(index: int, code: str = "invalid_request", *, skipped: bool = False) -> RowError:
    return RowError(index=index, id=str(index), code=code, message="m", skipped=skipped)


def completion(index: int) -> Completion:
    request = Request(index=index, id=str(index), prompt_token_ids=(1,), params=SamplingParams())
    return Completion(request=request, choices=())


def count_until_stop(limit: ErrorLimit, outcomes: list) -> int | None:
    """How many outcomes are seen until the run is ended; None: never."""
    for count, outcome in enumerate(outcomes, start=1):
        try:
            limit.see(outcome)
        except TooManyErrors as stop:
            assert stop.exit_code == 4
            return count
    return None


# --- --max-errors and --fail-fast ---


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--max-errors", "3"], 3), (["--max-errors", "2"], 4), (["--max-errors", "50%"], 3),
        (["--max-errors", "49.9%"], 4), (["--fail-fast"], 4), ([], 3),
        (["--allow-row-errors"], 0), (["--allow-row-errors", "--fail-fast"], 4),
    ],
)  # fmt: skip
def test_exit_codes_with_three_failed_rows_of_six(here, flags, code) -> None:
    result = run([GOOD, BAD] * 3, *flags)
    assert result.code == code
    assert (here / "out.jsonl").exists() is (code != 4)
    if code == 4:
        assert "prompt is empty" in result.error
        assert "line" in result.error


@given(
    st.lists(st.sampled_from(["good", "bad", "skipped"]), max_size=40),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_the_run_ends_at_the_first_failure_too_many(kinds, most, random) -> None:
    rows = [
        completion(i) if kind == "good" else error(i, skipped=kind == "skipped")
        for i, kind in enumerate(kinds)
    ]
    random.shuffle(rows)
    failures = [k for k, row in enumerate(rows, 1) if isinstance(row, RowError) and not row.skipped]
    expected = failures[most] if len(failures) > most else None
    limit = ErrorLimit(Tolerance(most=most), num_rows=len(rows))
    assert count_until_stop(limit, rows) == expected


def test_a_share_is_one_of_all_rows() -> None:
    """Not of those that have ended: the bad rows of a file end first."""
    limit = ErrorLimit(parse_tolerance("10%", fail_fast=False), num_rows=25)
    assert count_until_stop(limit, [error(i) for i in range(25)]) == 3
    limit = ErrorLimit(parse_tolerance("100%", fail_fast=False), num_rows=25)
    assert count_until_stop(limit, [error(i) for i in range(25)]) is None


# --- the first twenty rows ---


def test_twenty_equal_failures_from_the_start_end_the_run(here) -> None:
    """A wrong column name is found after twenty rows, not after a night."""
    rows = [{"question": str(i)} for i in range(30)]
    result = run(rows)
    assert result.code == 4
    assert "first 20 rows" in result.error
    assert "missing_prompt" in result.error
    assert "--max-errors" in result.err
    assert run(rows, "--max-errors", "100%", "--overwrite").code == 3
    assert len(read_rows(here / "out.jsonl")) == 30
    assert run(rows[:19], "--overwrite").code == 3


@pytest.mark.parametrize(
    "other", [completion(7), error(7, "missing_prompt"), error(7, skipped=True)]
)
def test_one_row_that_ends_otherwise_is_enough_to_go_on(other) -> None:
    rows = [error(i) for i in range(40) if i != 7]
    for place in (0, 12, 19):
        limit = ErrorLimit(Tolerance(), num_rows=40)
        assert count_until_stop(limit, [*rows[:place], other, *rows[place:]]) is None


def test_good_rows_that_are_still_being_computed_count_as_good() -> None:
    """Bad rows end before good ones: twenty bad outcomes in a row say nothing about the start."""
    limit = ErrorLimit(Tolerance(), num_rows=40)
    assert count_until_stop(limit, [error(i) for i in range(0, 40, 2)]) is None


# --- the error file, skipped rows ---


def test_failed_rows_go_to_the_error_file_and_only_there(here) -> None:
    rows = [GOOD | {"id": "a"}, BAD | {"id": "b"}, b"nonsense", GOOD | {"id": "d"}]
    assert run(rows, "--error-file", "errors.jsonl").code == 3
    assert [row["id"] for row in read_rows(here / "out.jsonl")] == ["a", "d"]
    failed = read_rows(here / "errors.jsonl")
    assert [row["error"]["code"] for row in failed] == ["invalid_request", "invalid_json"]
    assert failed[1]["error"]["line"] == 3
    assert not list(here.glob("*.partial"))
    again = run(rows, "--error-file", "errors.jsonl", out="other.jsonl")
    assert again.code == 8
    assert "errors.jsonl" in again.error


def test_an_error_file_beside_a_table_and_beside_standard_output(here) -> None:
    assert run([GOOD, BAD], "--error-file", "e.jsonl", out="out.parquet").code == 3
    assert len(read_rows(here / "e.jsonl")) == 1
    result = run([GOOD, BAD], "--error-file", "f.jsonl", out="-")
    assert len(result.out.splitlines()) == 1
    assert len(read_rows(here / "f.jsonl")) == 1


def test_skipped_rows_are_no_failures(here) -> None:
    rows = [GOOD, {"prompt": "x" * 300}]
    result = run(rows, "--max-model-len", 50, "--on-too-long", "skip", "--fail-fast", "--json")
    assert result.code == 0
    assert json.loads(result.out)["requests"] == {
        "total": 2, "succeeded": 1, "failed": 0, "skipped": 1, "by_error_code": {},
    }  # fmt: skip
    assert "1 skipped" in result.err
    assert [row["finish_reason"] for row in read_rows(here / "out.jsonl")] == ["length", "skipped"]


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_what_is_cut_and_what_stays(here, side) -> None:
    ids = list(range(100, 160))
    flags = ["--max-model-len", 11, "--on-too-long", "truncate", "--truncation-side", side]
    assert run([{"prompt_token_ids": ids}], *flags, "--include", "prompt_token_ids").code == 0
    (row,) = read_rows(here / "out.jsonl")
    expected = {"left": ids[-10:], "right": ids[:10], "middle": [*ids[:5], *ids[-5:]]}[side]
    assert row["moebatch_prompt_token_ids"] == expected
    assert row["truncated_tokens"] == 50


# --- ids that stand twice ---


def test_an_id_twice_is_found_before_the_model_is_loaded(here) -> None:
    rows = [{"id": "a"}, {"id": "b"}, b"broken", {"id": "a"}, {"id": "c"}, {"id": "b"}, {"id": "b"}]
    rows = [row if isinstance(row, bytes) else GOOD | row for row in rows]
    result = run(rows)
    assert result.code == 6
    assert "'a' (in.jsonl:1, in.jsonl:4)" in result.error
    assert "'b' (in.jsonl:2, in.jsonl:6, in.jsonl:7)" in result.error
    assert not list(here.glob("out.jsonl*"))
    assert run(rows, "--on-duplicate", "row-error").code == 3
    codes = [row["error"] and row["error"]["code"] for row in read_rows(here / "out.jsonl")]
    again = "duplicate_id"
    assert codes == [None, None, "invalid_json", again, None, again, again]
    assert read_rows(here / "out.jsonl")[3]["id"] == "a"


def test_a_row_without_an_id_takes_its_place_in_the_data(here) -> None:
    """Which may be another row's id; an unreadable line takes nothing away from anybody."""
    assert run([GOOD, GOOD, {"id": "1"} | GOOD]).code == 6
    assert run([{"id": 1} | GOOD, b"broken", {"id": 3} | GOOD]).code == 3


def test_many_equal_ids_are_not_all_printed(here) -> None:
    result = run([{"id": str(i % 50), "prompt": "x"} for i in range(1000)])
    assert result.code == 6
    assert "and 45 more ids" in result.error
    assert len(result.error) < 1000


# --- shards ---


def test_shards_partition_the_rows_and_answer_them_alike(here) -> None:
    rows = [{"prompt": f"row {i}"} for i in range(7)]
    flags = ["--temperature", "0.8", "--limit", "6", "--offset", "1", "--max-tokens", "4"]
    assert run(rows, *flags).code == 0
    whole = read_rows(here / "out.jsonl")
    parts = []
    for part in range(3):
        assert run(rows, *flags, "--shard", f"{part}/3").code == 0
        parts.append(read_rows(here / f"out.shard-0000{part}-of-00003.jsonl"))
    assert [whole[part::3] for part in range(3)] == parts


def test_more_shards_than_rows(here) -> None:
    assert run([GOOD], "--shard", "1/2").code == 0
    assert (here / "out.shard-00001-of-00002.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ({"ID": "3", "COUNT": "4"}, (3, 4)),
        ({"ID": "4", "COUNT": "4", "MIN": "1"}, (3, 4)),
        ({"ID": "6", "COUNT": "4", "MIN": "0", "STEP": "2"}, (3, 4)),
    ],
)
def test_shard_auto_asks_slurm(environment, shard) -> None:
    from moebatch.cli.shards import parse_shard

    variables = {f"SLURM_ARRAY_TASK_{name}": value for name, value in environment.items()}
    assert parse_shard("auto", environment=variables) == shard
