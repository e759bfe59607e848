"""Writing rows: the shapes of cli.md section 4, order, atomic appearance, Parquet, full disks."""

import errno
import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.data.json_text import to_json
from moebatch.data.output_rows import RowFormat
from moebatch.data.places import check_output
from moebatch.data.reader import read_rows
from moebatch.data.requests import (
    Choice,
    Completion,
    RawRow,
    Request,
    RowError,
    SamplingParams,
    TokenLogprob,
)
from moebatch.data.writer import OutputWriter
from moebatch.errors import OutputClosed, OutputError, OutputWriteError, UsageError

FORMAT = RowFormat(model_name="org/model", run_id="r1", created=1700000000)


def flat_row(index, **columns):
    return RawRow(index=index, line=index + 1, id=str(index), schema="flat", columns=columns)


def chat_row(index, url="/v1/chat/completions"):
    columns = {"custom_id": f"c{index}", "url": url, "body": {"messages": []}}
    return RawRow(index=index, line=index + 1, id=f"c{index}", schema="openai", columns=columns)


def done(row, *texts, params=None, logprobs=None, **request):
    params = params or SamplingParams(max_tokens=9, n=max(1, len(texts)))
    choices = tuple(
        Choice(
            index=i,
            token_ids=(5, 6, 2),
            text=text,
            finish_reason="stop",
            stop_reason="\n",
            logprobs=logprobs,
        )
        for i, text in enumerate(texts)
    )
    request = Request(
        index=row.index, id=row.id, prompt_token_ids=(1, 2, 3, 4), params=params, **request
    )
    return Completion(request=request, choices=choices)


def failed(row, **fields):
    said = {"code": "invalid_request", "message": "bad", "param": "n", "line": row.line} | fields
    return RowError(index=row.index, id=row.id, raw=row, **said)


def written(tmp_path, pairs, format=FORMAT, **options):
    path = tmp_path / "out.jsonl"
    with OutputWriter(path, format=format, **options) as writer:
        for row, outcome in pairs:
            writer.put(row, outcome)
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    return [json.loads(line) for line in lines]


def test_openai_shape_of_a_chat_row(tmp_path):
    row = chat_row(7)
    assert written(tmp_path, [(row, done(row, "hi"))], first_index=7) == [
        {
            "id": "moebatch-r1-00000007",
            "custom_id": "c7",
            "response": {
                "status_code": 200,
                "request_id": "r1-7",
                "body": {
                    "id": "chatcmpl-r1-7",
                    "object": "chat.completion",
                    "created": 1700000000,
                    "model": "org/model",
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": "hi"},
                            "finish_reason": "stop",
                            "stop_reason": "\n",
                            "logprobs": None,
                        }
                    ],
                    "usage": {
                        "prompt_tokens": 4,
                        "completion_tokens": 3,
                        "total_tokens": 7,
                        "prompt_tokens_details": {"cached_tokens": 0},
                    },
                },
            },
            "error": None,
        }
    ]


def test_openai_shape_of_a_completion_and_of_failures(tmp_path):
    text, bad, broken = chat_row(0, url="/v1/completions"), chat_row(1), chat_row(2)
    first, second, third = written(
        tmp_path,
        [
            (text, done(text, "hi")),
            (bad, failed(bad)),
            (broken, failed(broken, code="non_finite_logits", param=None)),
        ],
    )
    assert first["response"]["body"]["object"] == "text_completion"
    assert first["response"]["body"]["choices"][0]["text"] == "hi"
    assert second == {
        "id": "moebatch-r1-00000001",
        "custom_id": "c1",
        "response": {
            "status_code": 400,
            "request_id": "r1-1",
            "body": {
                "error": {
                    "message": "bad",
                    "type": "invalid_request_error",
                    "param": "n",
                    "code": "invalid_request",
                }
            },
        },
        "error": {"code": "invalid_request", "message": "bad", "param": "n", "line": 2},
    }
    assert third["response"]["status_code"] == 500
    assert third["response"]["body"]["error"]["type"] == "server_error"


def test_flat_shape(tmp_path):
    one, two, bad = flat_row(0, prompt="p", tag=[1]), flat_row(1, prompt="q"), flat_row(2, prompt=3)
    first, second, third = written(
        tmp_path, [(one, done(one, "hi")), (two, done(two, "a", "b")), (bad, failed(bad))]
    )
    assert first == {
        "prompt": "p",
        "tag": [1],
        "generated_text": "hi",
        "finish_reason": "stop",
        "stop_reason": "\n",
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "truncated_tokens": 0,
        "error": None,
    }
    assert second["generated_text"] == ["a", "b"]
    assert second["finish_reason"] == ["stop", "stop"]
    assert second["completion_tokens"] == 6
    assert third["generated_text"] is None
    assert third["finish_reason"] == "error"
    assert third["error"] == {
        "code": "invalid_request",
        "message": "bad",
        "type": "invalid_request_error",
        "param": "n",
        "line": 3,
        "retryable": False,
    }
    assert set(first) - {"tag"} == set(third)


def test_flat_extras_collisions_clamping_and_skipping(tmp_path):
    row = flat_row(0, prompt="p", error="mine", moebatch_error="mine too")
    skipped = flat_row(1, prompt="p")
    outcome = done(row, "x", clamped_from=50, truncated_tokens=3)
    format = RowFormat(model_name="m", run_id="r", include=("token_ids", "prompt_token_ids"))
    first, second = written(
        tmp_path,
        [(row, outcome), (skipped, failed(skipped, code="context_length_exceeded", skipped=True))],
        format=format,
    )
    assert first["token_ids"] == [5, 6, 2]
    assert first["prompt_token_ids"] == [1, 2, 3, 4]
    assert first["max_tokens_clamped"] == 9
    assert first["truncated_tokens"] == 3
    assert (first["error"], first["moebatch_error"]) == ("mine", "mine too")
    assert first["moebatch_moebatch_error"] is None
    assert second["finish_reason"] == "skipped"


LOGPROBS = (
    TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5), (6, float("-inf")))),
    TokenLogprob(token_id=6, logprob=-1.0),
)


def test_logprobs_in_all_three_shapes(tmp_path):
    content = {5: b"ab", 6: b"\xe2"}
    format = RowFormat(model_name="m", run_id="r", token_bytes=content.__getitem__)
    params = SamplingParams(max_tokens=9, logprobs=2)
    rows = [chat_row(0), chat_row(1, url="/v1/completions"), flat_row(2, prompt="p")]
    pairs = [(row, done(row, "x", params=params, logprobs=LOGPROBS)) for row in rows]
    chat, text, flat = written(tmp_path, pairs, format=format)
    positions = chat["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert positions[0] == {
        "token": "ab",
        "logprob": -0.5,
        "bytes": [97, 98],
        "top_logprobs": [
            {"token": "ab", "logprob": -0.5, "bytes": [97, 98]},
            {"token": "\ufffd", "logprob": None, "bytes": [0xE2]},
        ],
    }
    assert text["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["ab", "\ufffd"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"ab": -0.5, "\ufffd": None}, {}],
        "text_offset": [0, 2],
    }
    assert flat["logprobs"][0] == {"token_id": 5} | positions[0]


def test_auto_schema_follows_each_row_and_unread_lines_the_row_before(tmp_path):
    lost = RowError(index=1, id="1", code="invalid_json", message="line 2 is bad", line=2)
    first = RowError(index=3, id="3", code="invalid_json", message="line 4 is bad", line=4)
    chat, flat = chat_row(0), flat_row(2, prompt="p")
    pairs = [(flat, done(flat, "x")), (None, lost), (chat, done(chat, "x")), (None, first)]
    out = written(tmp_path, pairs)
    assert [sorted(row)[0] for row in out] == ["custom_id"] * 2 + ["completion_tokens"] * 2
    assert (out[1]["custom_id"], out[1]["error"]["line"]) == ("1", 2)
    assert out[3]["error"]["line"] == 4


def test_a_schema_can_be_forced(tmp_path):
    row = flat_row(0, messages=[])
    (out,) = written(
        tmp_path,
        [(row, done(row, "x"))],
        format=RowFormat(model_name="m", run_id="r", schema="openai"),
    )
    assert out["custom_id"] == "0"
    assert out["response"]["body"]["object"] == "chat.completion"


@settings(deadline=None)
@given(st.permutations(range(12)))
def test_any_order_in_is_input_order_out(tmp_path_factory, order):
    rows = [flat_row(i, prompt=str(i)) for i in range(12)]
    out = written(
        tmp_path_factory.mktemp("out"), [(rows[i], done(rows[i], f"text {i}")) for i in order]
    )
    assert [row["prompt"] for row in out] == [str(i) for i in range(12)]
    assert [row["generated_text"] for row in out] == [f"text {i}" for i in range(12)]


def test_only_rows_ahead_of_their_turn_wait(tmp_path):
    rows = [flat_row(i, prompt="p") for i in range(1000)]
    window = random.Random(0)
    with OutputWriter(tmp_path / "o.jsonl", format=FORMAT) as writer:
        for start in range(0, 1000, 10):
            for i in window.sample(range(start, start + 10), 10):
                writer.put(rows[i], done(rows[i], "x"))
                assert writer.num_waiting < 10
            assert writer.num_waiting == 0
    assert writer.num_rows == 1000


def test_completion_order(tmp_path):
    rows = [flat_row(i, prompt=str(i)) for i in range(3)]
    out = written(tmp_path, [(rows[i], done(rows[i], "x")) for i in (2, 0, 1)], order="completion")
    assert [row["prompt"] for row in out] == ["2", "0", "1"]


def test_the_output_appears_only_at_the_end(tmp_path, monkeypatch):
    path, row = tmp_path / "out.jsonl", flat_row(0, prompt="p")
    monkeypatch.setattr("moebatch.data.writer._FLUSH_ROWS", 1)
    writer = OutputWriter(path, format=FORMAT)
    writer.put(row, done(row, "x"))
    assert not path.exists()
    assert json.loads((tmp_path / "out.jsonl.partial").read_text())["generated_text"] == "x"
    writer.close()
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_an_exception_keeps_the_partial_file(tmp_path):
    row = flat_row(0, prompt="p")
    with (
        pytest.raises(KeyboardInterrupt),
        OutputWriter(tmp_path / "o.jsonl", format=FORMAT) as writer,
    ):
        writer.put(row, done(row, "x"))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["o.jsonl.partial"]
    assert len((tmp_path / "o.jsonl.partial").read_text().splitlines()) == 1


def test_a_row_that_never_came_is_our_bug(tmp_path):
    row = flat_row(1, prompt="p")
    writer = OutputWriter(tmp_path / "o.jsonl", format=FORMAT)
    writer.put(row, done(row, "x"))
    with pytest.raises(AssertionError, match="row 0 never came"):
        writer.close()
    with pytest.raises(AssertionError, match="twice"):
        writer.put(row, done(row, "x"))
    writer.abort()


def test_output_is_valid_json_whatever_the_values(tmp_path):
    strange = {"nan": float("nan"), "deep": [{"inf": float("-inf")}], "s": "\ud800é", "b": b"\xff"}
    row = flat_row(0, **strange)
    (out,) = written(tmp_path, [(row, done(row, "é\udcff"))])
    assert out["nan"] is None
    assert out["deep"] == [{"inf": None}]
    assert (out["s"], out["generated_text"], out["b"]) == ("\ud800é", "é\udcff", "/w==")


def test_text_is_written_as_it_is():
    assert to_json({"a": "é 日本"}) == '{"a": "é 日本"}'


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abcde"), values), min_size=1, max_size=5))
def test_what_is_written_is_read_again(tmp_path_factory, columns):
    folder = tmp_path_factory.mktemp("out")
    rows = [flat_row(i, **said) for i, said in enumerate(columns)]
    written(folder, [(row, done(row, "x")) for row in rows])
    again = list(read_rows([str(folder / "out.jsonl")]))
    assert [
        {k: row.columns[k] for k in said} for row, said in zip(again, columns, strict=True)
    ] == (columns)


def table_of(path):
    import pyarrow.parquet as pq

    return pq.read_table(path)


def test_parquet_infers_types_over_all_rows(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("moebatch.data.parquet_out._GROUP_ROWS", 2)
    columns = [
        {"i": 1, "f": 1, "s": "a", "mixed": 1, "nested": {"a": 1}, "ids": [], "fs": [1, 2.5]},
        {"i": 2**62, "f": 2.5, "s": None, "mixed": "x", "nested": None, "ids": [1, 2], "fs": []},
        {"i": None, "f": None, "s": "\ud800", "mixed": None, "nested": [1], "ids": [3], "b": True},
        {"i": 3, "f": 3, "big": 2**70, "wide": 2**60, "nothing": None, "empty": []},
        {"wide": 0.5, "texts": ["a"]},
    ]
    path = tmp_path / "out.parquet"
    metadata = {"moebatch.manifest": "{}"}
    with OutputWriter(path, format=FORMAT, metadata=metadata) as writer:
        for i, said in enumerate(columns):
            writer.put(flat_row(i, **said), done(flat_row(i), "x"))
    table = table_of(path)
    assert os.listdir(tmp_path) == ["out.parquet"]
    assert table.schema.metadata[b"moebatch.manifest"] == b"{}"
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds | {"error": "string", "prompt_tokens": "int64"} == kinds
    assert (kinds["i"], kinds["f"], kinds["s"], kinds["b"]) == ("int64", "double", "string", "bool")
    assert kinds["ids"].startswith("list<") and "int64" in kinds["ids"]
    assert kinds["fs"].startswith("list<") and "double" in kinds["fs"]
    got = table.to_pydict()
    assert got["i"] == [1, 2**62, None, 3, None]
    assert got["f"] == [1.0, 2.5, None, 3.0, None]
    assert got["s"] == ["a", None, "\ufffd\ufffd\ufffd", None, None]
    assert got["mixed"] == ["1", '"x"', None, None, None]
    assert got["nested"] == ['{"a": 1}', None, "[1]", None, None]
    assert got["ids"] == [[], [1, 2], [3], None, None]
    assert got["fs"] == [[1.0, 2.5], [], None, None, None]
    assert got["big"][3] == str(2**70)
    assert got["wide"][3:] == [str(2**60), "0.5"]
    assert got["texts"][4] == '["a"]'
    assert got["nothing"] == [None] * 5


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), values), max_size=6))
def test_parquet_holds_any_rows(tmp_path_factory, columns):
    pytest.importorskip("pyarrow")
    path = tmp_path_factory.mktemp("out") / "o.parquet"
    with OutputWriter(path, format=FORMAT) as writer:
        for i, said in enumerate(columns):
            writer.put(flat_row(i, **said), done(flat_row(i), "x"))
    assert table_of(path).num_rows == len(columns)


def test_parquet_rows_are_read_again_as_input(tmp_path):
    pytest.importorskip("pyarrow")
    row = flat_row(0, prompt="p", messages=[{"role": "user", "content": "c"}])
    with OutputWriter(tmp_path / "o.parquet", format=FORMAT) as writer:
        writer.put(row, done(row, "x"))
    (again,) = read_rows([str(tmp_path / "o.parquet")])
    assert again.columns["messages"] == row.columns["messages"]


@pytest.mark.parametrize("where", ["write", "sync", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_one_line_that_says_what_is_kept(tmp_path, monkeypatch, where, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    path, row = tmp_path / "o.jsonl", flat_row(0, prompt="p")
    writer = OutputWriter(path, format=FORMAT)
    writer.put(row, done(row, "x"))
    if where in ("fsync", "replace"):
        monkeypatch.setattr(os, where, fail)
    else:
        real = writer._file

        class Full:
            def __getattr__(self, name):
                return fail if name == where else getattr(real, name)

        writer._file = Full()
    with pytest.raises(OutputWriteError) as caught:
        second = flat_row(1, prompt="p")
        writer.put(second, done(second, "x"))
        writer.close()
    assert caught.value.exit_code == 1
    assert os.strerror(code) in str(caught.value)
    assert str(path) + ".partial" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not path.exists()
    assert (tmp_path / "o.jsonl.partial").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_really_full(tmp_path):
    (tmp_path / "o.jsonl.partial").symlink_to("/dev/full")
    writer = OutputWriter(tmp_path / "o.jsonl", format=FORMAT)
    with pytest.raises(OutputWriteError, match="No space left"):
        for i in range(2000):
            writer.put(flat_row(i, prompt="p" * 100), done(flat_row(i), "x"))


STDOUT_SCRIPT = """
import sys
from moebatch.data.output_rows import RowFormat
from moebatch.data.requests import RowError
from moebatch.data.writer import OutputWriter
from moebatch.errors import OutputClosed
try:
    with OutputWriter("-", format=RowFormat(model_name="m", run_id="r")) as writer:
        for i in range(int(sys.argv[1])):
            writer.put(None, RowError(index=i, id=str(i), code="cancelled", message="x" * 200))
except OutputClosed as closed:
    sys.exit(closed.exit_code)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("num_rows", "expected"), [(50_000, 141), (3, 0)])
def test_a_reader_of_stdout_that_goes_away_is_quiet(num_rows, expected, unbuffered):
    command = [sys.executable, "-c", STDOUT_SCRIPT, str(num_rows)]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        first = json.loads(process.stdout.readline())
        if num_rows == 3:
            assert len(process.stdout.readlines()) == 2
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", expected)
    assert first["error"]["code"] == "cancelled"
    assert issubclass(OutputClosed, OutputError)


def test_a_stdout_that_takes_a_few_bytes_at_a_time_gets_them_all(monkeypatch):
    taken = bytearray()

    class Slow:
        def write(self, content):
            taken.extend(content[:7])
            return min(7, len(content))

        def flush(self):
            pass

    class Stdout:
        buffer = Slow()

    monkeypatch.setattr(sys, "stdout", Stdout)
    row = flat_row(0, prompt="p")
    with OutputWriter("-", format=FORMAT) as writer:
        writer.put(row, done(row, "a text of some length"))
    assert json.loads(taken)["generated_text"] == "a text of some length"
    assert taken.endswith(b"\n")


def test_check_output(tmp_path, monkeypatch):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}")
    check_output(out, inputs=[str(source), "-", "hf://datasets/a/b"])
    check_output("-", inputs=[])
    (tmp_path / "link.jsonl").hardlink_to(source)
    refused = [
        (tmp_path, "folder"),
        (source, "also the input"),
        (tmp_path / "x" / ".." / "in.jsonl", "also the input"),
        (tmp_path / "link.jsonl", "also the input"),
        (tmp_path / "none" / "out.jsonl", "does not exist"),
    ]
    (tmp_path / "x").mkdir()
    for path, reason in refused:
        with pytest.raises(UsageError, match=reason):
            check_output(path, inputs=[str(source)], overwrite=True)
    with pytest.raises(UsageError, match="standard output"):
        check_output("-", output_format="parquet")
    with pytest.raises(UsageError, match="output format"):
        check_output(out, output_format="xml")
    out.write_text("old")
    with pytest.raises(OutputError) as caught:
        check_output(out)
    assert caught.value.exit_code == 8
    assert "--overwrite" in caught.value.hint
    check_output(out, overwrite=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="cannot be written to"):
        check_output(out, overwrite=True)


def test_unknown_extras_are_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="timing"):
        OutputWriter(
            tmp_path / "o", format=RowFormat(model_name="m", run_id="r", include=("timing",))
        )
    assert os.listdir(tmp_path) == []


def test_rows_ahead_of_their_turn_wait_on_the_disk(tmp_path, monkeypatch):
    """The same bytes as in memory; the temporary file has no name and shrinks when it is drained."""
    monkeypatch.setattr("moebatch.data.waiting._MOST_BYTES", 300)
    rows = [flat_row(i, prompt="é" * (i * 7 % 90)) for i in range(60)]
    outcomes = [done(row, "x" * row.index) for row in rows]
    outcomes[30] = RowError(index=30, id="30", code="invalid_json", message="m")
    plain = tmp_path / "plain.jsonl"
    with OutputWriter(plain, format=FORMAT) as writer:
        for row, outcome in zip(rows, outcomes, strict=True):
            writer.put(None if row.index == 30 else row, outcome)
    path = tmp_path / "o.jsonl"
    with OutputWriter(path, format=FORMAT) as writer:
        for k in [*range(20, 0, -1), 0, *range(59, 20, -1)]:
            writer.put(None if k == 30 else rows[k], outcomes[k])
            assert writer._waiting._num_bytes <= 300
        assert writer._waiting._end == 0
    assert path.read_bytes() == plain.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.jsonl", "plain.jsonl"]
