"""What users get wrong, and what their files hold: one clear line or one error row, no traceback."""

import contextlib
import gzip
import os
from pathlib import Path

import pytest
from commands import moebatch, read_rows, write_rows

from moebatch.errors import UsageError

ROW = b'{"prompt":"hi"}\n'


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.jsonl").write_bytes(ROW)
    return tmp_path


def run(*args: object, out: object = "out.jsonl", stdin: bytes = b""):
    return moebatch("run", "-m", "demo", "-o", out, "--max-tokens", 1, "-q", *args, stdin=stdin)


def compressed(data: bytes) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


# --- rows ---


def test_extreme_rows_are_answered_or_refused_each_in_its_place(here) -> None:
    """Found by hand: a lone surrogate in an id ended the run."""
    rows = [
        {"prompt": "hi"},
        b'{"id":"\\ud800","prompt":"x"}',
        b'{"prompt":"\\ud800"}',
        b'{"\\ud800":1,"prompt":"x"}',
        b'{"prompt":"x","prompt":"y"}',
        {"prompt": "\u202e\x00\x07😀\u2028"},
        {"prompt": "x", "stop": "\udc00"},
        {"prompt": "x" * 100_000},
        b'{"prompt":"x","temperature":1e-300}',
        b'{"prompt":"x","temperature":1e300}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","top_p":1e-300}',
        b'{"prompt":"x","repetition_penalty":1e300}',
        b'{"prompt":"x","seed":-9223372036854775808}',
        b'{"prompt":"x","seed":9223372036854775808}',
        b'{"prompt":"x","max_tokens":1e308}',
        {"prompt": "x", "sampling_params": {"logit_bias": {"5": 100, "9" * 30: 1}}},
        {"prompt_token_ids": [5, 10**30]},
        {"prompt_token_ids": []},
        {"prompt": [[5, 6]]},
        {"prompt": {"a": 1}},
        {"messages": [None]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"custom_id": [], "url": {}, "body": {"prompt": "x"}},
        {"custom_id": "c", "body": [1]},
        {"context": "1+1=", "continuation": " 2"},
        b"\xff\xfe{",
        b"[" * 200_000,
    ]  # fmt: skip
    data = write_rows(here / "in.jsonl", rows)
    assert run(data, "--on-duplicate", "row-error", "--max-model-len", 64).code == 3
    codes = [
        (row.get("error") or row.get("moebatch_error") or {}).get("code")
        for row in read_rows(here / "out.jsonl")
    ]
    invalid, none = "invalid_request", None
    assert codes == [
        none, none, invalid, none, none, none, none, "context_length_exceeded",
        none, none, invalid, none, none, none, invalid, none, invalid, invalid, invalid, none,
        invalid, invalid, "unsupported_parameter", invalid, "unsupported_parameter", invalid,
        "missing_prompt", "invalid_json", "invalid_json",
    ]  # fmt: skip


def test_columns_that_change_late_and_lines_of_ten_megabytes(here) -> None:
    rows = [{"prompt": "a", "n_words": 1}] * 30
    rows += [{"text": "b", "n_words": "two"}, {"messages": [{"role": "user", "content": "c"}]}]
    rows += [{"prompt": "x" * 10_000_000}, {"input": "d", "new": [1, 2]}]
    write_rows(here / "in.jsonl", rows)
    for out in ("out.jsonl", "out.parquet"):
        assert run("in.jsonl", out=out).code == 3
    written = read_rows(here / "out.jsonl")
    assert len(written) == len(rows)
    assert [i for i, row in enumerate(written) if row["error"]] == [32]
    assert written[32]["error"]["code"] == "context_length_exceeded"
    assert written[33]["new"] == [1, 2]
    assert "prompt" not in written[30]

    import pyarrow.parquet as pq

    table = pq.read_table(here / "out.parquet")
    assert {"prompt", "text", "messages", "new"} <= set(table.column_names)
    assert table.column("n_words").to_pylist()[29:31] == ["1", '"two"']


# --- files ---


@pytest.mark.parametrize(
    ("name", "content", "code", "word"),
    [
        ("e.jsonl", b"", 6, "no rows"),
        ("b.jsonl", b"\xef\xbb\xbf\r\n \n\t", 6, "no rows"),
        ("torn.jsonl.gz", gzip.compress(ROW * 1000)[:-9], 6, "torn.jsonl.gz"),
        ("tail.jsonl.gz", gzip.compress(ROW) + b"garbage", 6, "tail.jsonl.gz"),
        ("torn.jsonl.zst", compressed(os.urandom(9999))[:-9], 6, "torn.jsonl.zst"),
        ("a.parquet", ROW, 6, "a.parquet"),
        ("z.parquet", b"", 6, "z.parquet"),
        ("array.json", b'\xef\xbb\xbf [\n{"prompt":"a"},\n{"prompt":"b"}\n]', 6, "jq -c"),
        ("h.csv", b"prompt\n", 6, "no rows"),
        ("twice.csv", b"prompt,prompt\na,b\n", 6, "'prompt'"),
        ("quote.csv", b'"prompt\n', 6, "header"),
        ("p.xyz", ROW, 6, "--input-format"),
    ],
)
def test_files_that_are_no_data_set(here, name, content, code, word) -> None:
    (here / name).write_bytes(content)
    result = run(name)
    assert result.code == code
    assert word in result.error + result.err
    assert not list(here.glob("out.jsonl*"))


@pytest.mark.parametrize(
    ("name", "content", "num_rows"),
    [
        ("zipped.jsonl", gzip.compress(ROW * 2), 2),  # the name does not say it
        ("plain.jsonl.gz", ROW * 2, 2),  # nor must it be true
        ("x.jsonl.zst", compressed(ROW * 2), 2),
        ("two.zst.jsonl", compressed(ROW) + compressed(ROW), 2),
        ("x.csv.gz", gzip.compress(b"prompt\na\n"), 1),
        ("cr.csv", b"prompt\rabc\rdef", 2),
        ("crlf.csv", b'\xef\xbb\xbfprompt\r\n"a\r\nb"\r\n', 1),
        ("plain", ROW, 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_one_after_all(here, name, content, num_rows) -> None:
    (here / name).write_bytes(content)
    assert run(name).code == 0
    rows = read_rows(here / "out.jsonl")
    assert len(rows) == num_rows
    assert {None} == {row["error"] for row in rows}


def test_utf16_is_called_by_its_name(here) -> None:
    """What a Windows shell writes with `>`: every line fails, and the message says why."""
    (here / "w.jsonl").write_bytes((ROW.decode() * 3).encode("utf-16"))
    assert run("w.jsonl").code == 3
    rows = read_rows(here / "out.jsonl")
    assert {"invalid_json"} == {row["error"]["code"] for row in rows}
    assert "UTF-16" in rows[0]["error"]["message"]


@pytest.mark.parametrize(
    ("name", "code"),
    [("", 2), ("a" * 5000, 7), ("loop.jsonl", 7), ("nope.jsonl", 7), ("*.nope", 7), ("[", 7),
     ("empty", 6), ("/dev/null", 6)],
)  # fmt: skip
def test_names_that_lead_nowhere(here, name, code) -> None:
    (here / "loop.jsonl").symlink_to("loop.jsonl")
    (here / "empty").mkdir()
    result = run(name)
    assert result.code == code
    assert len(result.error) < 300


def test_a_folder_with_the_output_in_it_can_be_run_again(here) -> None:
    """Journals and reports of earlier runs lie there too; they are no data."""
    (here / "data").mkdir()
    (here / "data" / "in.jsonl").write_bytes(ROW)
    side = here / "data" / "old.jsonl.moebatch"
    side.mkdir()
    (side / "journal-00000.jsonl").write_bytes(b"not a row\n")
    for name in ("data", "data/**/*.jsonl"):
        (here / "out.jsonl").unlink(missing_ok=True)
        assert run(name).code == 0
        assert len(read_rows(here / "out.jsonl")) == 1


def test_a_pipe_is_read_once_and_checked_all_the_same(here) -> None:
    read, write = os.pipe()
    os.write(write, ROW * 2)
    os.close(write)
    assert run(f"/dev/fd/{read}").code == 0
    os.close(read)
    assert len(read_rows(here / "out.jsonl")) == 2
    twice = run("-", out="o.jsonl", stdin=b'{"id":"x","prompt":"a"}\n' * 2)
    assert twice.code == 6
    assert "'x' (-:1, -:2)" in twice.error
    zipped = run("-", out="piped.jsonl", stdin=gzip.compress(ROW))
    assert zipped.code == 0
    assert len(read_rows(here / "piped.jsonl")) == 1


def test_odd_columns_of_a_parquet_file(here) -> None:
    import datetime
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "prompt": ["a", None, "c"],
        "day": pa.array([datetime.datetime(2020, 1, 1)] * 3),
        "price": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("2.00")]),
        "raw": pa.array([b"\xff\x00", b"", None]),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "nan": [float("nan"), float("inf"), 0.5],
        "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
        "gap": pa.nulls(3),
        "temperature": pa.array([0.5, None, float("nan")]),
        "id": pa.array([1, 2, 3], pa.uint64()),
        "span": pa.array([datetime.timedelta(seconds=5)] * 3),
    }
    pq.write_table(pa.table(columns), here / "odd.parquet")
    assert run("odd.parquet", out="out.parquet").code == 3
    written = pq.read_table(here / "out.parquet").to_pylist()
    assert [str(row["id"]) for row in written] == ["1", "2", "3"]
    assert [
        row["error"] and row["error"].split('"code": "')[1].split('"')[0] for row in written
    ] == [None, "missing_prompt", None]


# --- the output and what lies beside it ---


@pytest.mark.parametrize(
    ("out", "word"),
    [
        ("ok.jsonl", "also the input"),
        ("./ok.jsonl", "also the input"),
        ("link.jsonl", "also the input"),
        (".", "folder"),
        ("nope/out.jsonl", "mkdir -p"),
        ("n" * 300, "too long"),
        ("loop.jsonl", "loop.jsonl"),
        ("side.jsonl", "side.jsonl.moebatch is in the way"),
        ("part.jsonl", "part.jsonl.partial is in the way"),
        ("pipe", "regular file"),
        ("/dev/null", "regular file"),
    ],
)
def test_places_that_cannot_take_the_output(here, out, word) -> None:
    """All found before the model; `-o /dev/null --overwrite` once replaced the device."""
    os.link("ok.jsonl", "link.jsonl")
    (here / "loop.jsonl").symlink_to("loop.jsonl")
    (here / "side.jsonl.moebatch").write_text("")
    (here / "part.jsonl.partial").mkdir()
    os.mkfifo("pipe")
    result = run("ok.jsonl", "--overwrite", out=out)
    assert result.code == 2
    assert word in result.error + result.err
    assert (here / "ok.jsonl").read_bytes() == ROW


@pytest.mark.parametrize("option", ["--report", "--error-file"])
@pytest.mark.parametrize("place", ["ok.jsonl", "out.jsonl", "nope/r", ".", "/dev/full"])
def test_places_that_cannot_take_what_lies_beside(here, option, place) -> None:
    """A report once overwrote the input; found before the model is loaded."""
    result = run("ok.jsonl", option, place)
    assert result.code == 2
    assert option in result.error or "folder" in result.error
    assert (here / "ok.jsonl").read_bytes() == ROW
    assert not list(here.glob("out.jsonl*"))


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--error-file", "-"], "name a file"),
        (["--error-file", "e.parquet"], "lines of JSON"),
        (["--error-file", "e.jsonl", "--report", "e.jsonl"], "overwrite"),
        (["--report", "out.jsonl.moebatch/manifest.json"], "what the run keeps"),
        (["--error-file", "out.jsonl.moebatch/journal-00000.jsonl"], "what the run keeps"),
        (["-o", "out.csv"], "JSONL or Parquet"),
        (["-o", "out.jsonl.gz"], "JSONL or Parquet"),
        (["-"], "only once"),
    ],
)
def test_files_that_would_be_something_else(here, args, word) -> None:
    (here / "out.jsonl.moebatch").mkdir()
    result = run("ok.jsonl", "-", *args) if args == ["-"] else run("ok.jsonl", *args)
    assert result.code == 2
    assert word in result.error + result.err


def test_a_name_that_promises_another_format_can_be_insisted_on(here) -> None:
    assert run("ok.jsonl", "--output-format", "jsonl", out="out.csv").code == 0
    assert len(read_rows(here / "out.csv")) == 1


def test_an_unwritable_folder(here) -> None:
    (here / "locked").mkdir()
    (here / "locked").chmod(0o555)
    if os.access(here / "locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    assert "cannot be written" in run("ok.jsonl", out="locked/out.jsonl").error


# --- options ---


@pytest.mark.parametrize(
    "flags",
    [
        ["--memory", "-1"], ["--memory", "nan"], ["--memory", ""], ["--temperature", "nan"],
        ["--temperature", "-1"], ["--seed", str(10**30)], ["--seed", "1.5"], ["--n", "0"],
        ["--stop", ""], ["--stop-token-id", "-1"], ["--stop-token-id", str(10**40)],
        ["--system", "@nope"], ["--system", "@."], ["--chat-template", ""],
        ["--generation-config", "nope"], ["--generation-config", "."],
        ["--cpu-threads", "0"], ["--cpu-threads", "100000"], ["--weights-resident", "nan"],
        ["--limit", "0"], ["--limit", "-1"], ["--offset", "-1"], ["--revision", "x"],
        ["--hf-split", "x"], ["--max-model-len", "0"], ["--repetition-penalty", "0"],
        ["--max-errors", "many"], ["--max-errors", "-1"], ["--max-errors", "101%"],
        ["--max-errors", "1", "--fail-fast"], ["--shard", "4/4"], ["--shard", "0/0"],
        ["--shard", "a/b"],
        ["--shard", "auto"], ["--on-duplicate", "pray"], ["--truncation-side", "up"],
    ],
)  # fmt: skip
def test_options_out_of_range(here, flags, monkeypatch) -> None:
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    result = run("ok.jsonl", *flags)
    assert result.code == 2, result.err
    assert result.error
    assert not list(here.glob("out.jsonl*"))


def test_a_huge_limit_is_no_limit(here) -> None:
    assert run("ok.jsonl", "--limit", 10**30).code == 0


@pytest.mark.parametrize(
    "name", ["", "/", "demo/", "a/b/c", "http://x", "/dev/null", "ok.jsonl", "org/" + "x" * 500]
)
def test_models_that_are_none(here, name) -> None:
    result = moebatch("run", "ok.jsonl", "-m", name, "-o", "out.jsonl")
    assert result.code == 7
    assert result.error


def test_a_path_with_a_zero_byte_is_no_crash(here) -> None:
    from moebatch.data.places import check_output
    from moebatch.data.sources import find_sources
    from moebatch.errors import InputError

    with pytest.raises(InputError):
        find_sources(["a\0b"])
    with pytest.raises(UsageError), contextlib.suppress(OSError):
        check_output(Path("a\0b"))
