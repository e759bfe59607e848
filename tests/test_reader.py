"""Reading rows: formats as users have them, bad lines as values, sources that fail as a whole."""

import gzip
import io
import json
import tempfile
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.data import dataset
from moebatch.data.columns import ColumnNames
from moebatch.data.dataset import Dataset
from moebatch.data.json_lines import BadRow, iter_json_lines
from moebatch.data.reader import RowRange, peek, read_rows
from moebatch.data.requests import RawRow, RowError
from moebatch.errors import InputError, InputNotFound, UsageError


def write(path, data):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def read(*sources, **options):
    return list(read_rows([str(source) for source in sources], **options))


def prompts(items):
    return [item.columns["prompt"] for item in items]


def test_jsonl_as_users_have_it(tmp_path):
    """BOM, CRLF, blank lines, no newline at the end."""
    data = b'\xef\xbb\xbf{"prompt":"a"}\r\n\r\n  \n{"prompt":"\xc3\xa9"}\n{"prompt":"c"}'
    items = read(write(tmp_path / "x.jsonl", data))
    assert prompts(items) == ["a", "é", "c"]
    assert [item.line for item in items] == [1, 4, 5]
    assert [item.index for item in items] == [0, 1, 2]
    assert [item.id for item in items] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt":"\xff"}', "not UTF-8"),
        (b'{"prompt":', "not JSON"),
        (b"[1]", "array"),
        (b"null", "null"),
        (b"3", "number"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a":' + b"[" * 150 + b"]" * 150 + b"}", "nested"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested"),
        (b'\x00{"a":1}', "not JSON"),
    ],
)
def test_a_bad_line_is_a_row_error_and_not_the_end(tmp_path, line, reason):
    first, bad, last = read(
        write(tmp_path / "x.jsonl", b'{"prompt":"a"}\n' + line + b'\n{"prompt":"c"}\n')
    )
    assert isinstance(bad, RowError)
    assert (bad.index, bad.id, bad.code, bad.line) == (1, "1", "invalid_json", 2)
    assert bad.message.startswith("line 2 is ")
    assert reason in bad.message
    assert "\n" not in bad.message
    assert (first.index, last.index) == (0, 2)


def test_brackets_in_a_text_are_no_nesting(tmp_path):
    row = {"prompt": "[" * 5000, "list": [[1]] * 200}
    assert read(write(tmp_path / "x.jsonl", json.dumps(row)))[0].columns == row


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_give_one_item_per_line_that_is_not_blank(data):
    items = list(iter_json_lines(io.BytesIO(data)))
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [number for number, line in enumerate(lines, start=1) if line.strip()]
    assert [number for number, _ in items] == expected
    assert all(isinstance(row, dict | BadRow) for _, row in items)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=6))
def test_rows_written_as_json_are_read_as_they_were(rows):
    rows = json.loads(json.dumps(rows).replace("Infinity", "1"))
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    assert [row for _, row in iter_json_lines(io.BytesIO(data))] == rows


def test_a_line_of_ten_megabytes(tmp_path):
    text = "x" * 10_000_000
    assert prompts(read(write(tmp_path / "x.jsonl", json.dumps({"prompt": text})))) == [text]


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    def peak_bytes(num_rows):
        path = write(tmp_path / f"{num_rows}.jsonl", '{"prompt":"hello"}\n' * num_rows)
        tracemalloc.start()
        assert sum(1 for _ in read_rows([path])) == num_rows
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(10)
    assert peak_bytes(20_000) < peak_bytes(200) + 100_000


def test_gzip_csv_txt_and_standard_input(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"prompt":"a"}\n'))
    assert prompts(read(tmp_path / "a.jsonl.gz")) == ["a"]
    write(tmp_path / "a.txt", "\ufeffone\r\n\r\ntwo")
    assert prompts(read(tmp_path / "a.txt")) == ["one", "two"]
    write(tmp_path / "a.csv", 'id,prompt\nx,"two\nlines"\ny,é\nz\n')
    first, second, bad = read(tmp_path / "a.csv")
    assert (first.id, first.columns["prompt"], second.columns["prompt"]) == ("x", "two\nlines", "é")
    assert (bad.code, bad.line) == ("invalid_json", 5)

    class Stdin:
        buffer = io.BytesIO(b'{"prompt":"piped"}\n')

    monkeypatch.setattr("sys.stdin", Stdin)
    assert prompts(read("-")) == ["piped"]


def test_a_long_csv_field(tmp_path):
    write(tmp_path / "a.csv", "prompt\n" + "x" * 300_000 + "\n")
    assert prompts(read(tmp_path / "a.csv")) == ["x" * 300_000]


def test_parquet_streams_all_rows_with_nested_values(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"id": i, "messages": [{"role": "user", "content": str(i)}]} for i in range(700)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=300)
    items = read(tmp_path / "x.parquet")
    assert [item.columns for item in items] == rows
    assert [item.id for item in items] == [str(i) for i in range(700)]
    assert [item.line for item in items] == list(range(1, 701))


def test_a_data_set_saved_to_disk(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    part = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    part.save_to_disk(tmp_path / "one")
    assert prompts(read(tmp_path / "one")) == ["a", "b"]
    datasets.DatasetDict({"test": part, "dev": part}).save_to_disk(tmp_path / "many")
    assert prompts(read(tmp_path / "many", split="dev")) == ["a", "b"]
    with pytest.raises(InputError, match="no split 'train'") as caught:
        read(tmp_path / "many")
    assert "test, dev" in caught.value.hint


def test_a_hub_data_set_is_streamed(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, subset, **options):
        calls.append((name, subset, options))
        return iter([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert prompts(read("hf://datasets/org/name", subset="s")) == ["a"]
    assert calls == [("org/name", "s", {"split": "train", "streaming": True})]

    def offline(*_, **__):
        raise ConnectionError("offline mode is on")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputNotFound, match="offline mode is on"):
        read("hf://datasets/org/name")


def test_folders_and_globs_read_files_by_name(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "README.txt", "info.json", ".x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, json.dumps({"prompt": name}))
    assert prompts(read(tmp_path)) == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert prompts(read(tmp_path / "?.jsonl")) == ["a.jsonl", "b.jsonl"]
    assert prompts(read(tmp_path / "b.jsonl", tmp_path / "a.jsonl")) == ["b.jsonl", "a.jsonl"]


def test_a_name_that_looks_like_a_glob_but_exists(tmp_path):
    path = write(tmp_path / "x[1].jsonl", '{"prompt":"a"}')
    assert prompts(read(path)) == ["a"]


@pytest.mark.parametrize("name", ["none.jsonl", "*.jsonl"])
def test_what_is_not_there_is_exit_7_before_reading(tmp_path, name):
    with pytest.raises(InputNotFound) as caught:
        read_rows([str(tmp_path / name)])
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.parquet", b"no parquet"),
        ("x.jsonl.gz", b"\x1f\x8bno gzip"),
        ("x.jsonl", b""),
        ("x.csv", b""),
    ],
)
def test_broken_and_empty_files_are_exit_6_with_one_line(tmp_path, name, data):
    with pytest.raises(InputError) as caught:
        read(write(tmp_path / name, data))
    assert caught.value.exit_code == 6
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cut_gzip_file_is_an_error_after_its_rows(tmp_path):
    whole = gzip.compress(b'{"prompt":"a"}\n' * 9000)
    rows = read_rows([write(tmp_path / "x.jsonl.gz", whole[: len(whole) // 2])])
    with pytest.raises(InputError, match="cannot be read"):
        list(rows)


def test_formats_that_cannot_be_known(tmp_path):
    path = write(tmp_path / "x.dat", '{"prompt":"a"}')
    with pytest.raises(InputError) as caught:
        read(path)
    assert "--input-format" in caught.value.hint
    assert prompts(read(path, input_format="jsonl")) == ["a"]
    assert prompts(read(write(tmp_path / "bare", '{"prompt":"b"}'))) == ["b"]
    with pytest.raises(UsageError):
        read("-", input_format="parquet")
    with pytest.raises(UsageError):
        read(path, input_format="xml")


def test_limit_offset_and_shard_number_rows_without_gaps(tmp_path):
    path = write(tmp_path / "x.jsonl", "".join(f'{{"prompt":"{i}"}}\n' for i in range(10)))
    items = read(path, offset=2, limit=5)
    assert prompts(items) == ["2", "3", "4", "5", "6"]
    assert [item.index for item in items] == [0, 1, 2, 3, 4]
    assert [item.id for item in items] == ["2", "3", "4", "5", "6"]
    shards = [read(path, offset=2, limit=5, shard=(i, 3)) for i in range(3)]
    assert [prompts(shard) for shard in shards] == [["2", "5"], ["3", "6"], ["4"]]
    assert [item.index for item in shards[1]] == [0, 1]
    assert read(path, limit=1, shard=(2, 3)) == []
    with pytest.raises(InputError, match="it has 10"):
        read(path, offset=10)
    for options in ({"limit": 0}, {"offset": -1}, {"shard": (3, 3)}):
        with pytest.raises(UsageError):
            read(path, **options)


def test_only_the_rows_asked_for_are_read(tmp_path):
    path = write(tmp_path / "x.jsonl.gz", gzip.compress(b'{"prompt":"a"}\n' * 9000)[:60])
    assert len(read(path, limit=2)) == 2


def test_ids_and_schemas(tmp_path):
    rows = [
        {"custom_id": "c", "id": "i", "body": {}},
        {"id": 7, "prompt": "x"},
        {"id": "", "prompt": "x"},
        {"id": None, "body": {}, "url": "/v1/completions"},
        {"id": [1], "body": "a text column"},
    ]
    items = read(write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows))))
    assert [item.id for item in items] == ["c", "7", "2", "3", "4"]
    assert [item.schema for item in items] == ["openai", "flat", "flat", "openai", "flat"]


def test_a_named_column_must_be_in_the_first_good_row(tmp_path):
    path = write(tmp_path / "x.jsonl", 'bad\n{"question":"a","key":"k"}\n{"other":"b"}\n')
    with pytest.raises(InputError, match="'quest'") as caught:
        read(path, columns=ColumnNames(prompt="quest"))
    assert caught.value.exit_code == 6
    assert caught.value.hint == "its columns are: question, key"
    _, first, later = read(path, columns=ColumnNames(prompt="question", id="key"))
    assert isinstance(later, RawRow)
    assert (first.id, later.id) == ("k", "2")


def test_peek_gives_the_head_and_loses_nothing():
    head, everything = peek(iter(range(5)), 3)
    assert head == [0, 1, 2]
    assert list(everything) == [0, 1, 2, 3, 4]
    assert peek(iter([1]), 3)[0] == [1]


# --- the first reading ---


def test_a_survey_keeps_few_bytes_a_row(tmp_path, monkeypatch):
    """Eight for the hash of its id; a set of a million ids takes twelve times as much."""

    def peak_bytes(num_rows):
        lines = "".join(f'{{"id":"row-{i}","prompt":"x"}}\n' for i in range(num_rows))
        path = write(tmp_path / f"{num_rows}.jsonl", lines)
        del lines
        tracemalloc.start()
        with Dataset([path]) as data:
            assert data.survey().num_rows == num_rows
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(10)
    heard = []
    monkeypatch.setattr(dataset, "_PROGRESS_ROWS", 10)
    with Dataset([str(tmp_path / "10.jsonl")]) as data:
        data.survey(progress=heard.append)
    assert heard == [10]
    assert peak_bytes(40_000) - peak_bytes(2_000) < 38_000 * 40


@settings(deadline=None)
@given(st.lists(st.integers(0, 5) | st.none(), max_size=12), st.integers(1, 3))
def test_a_survey_marks_what_a_set_of_ids_would(ids, parts):
    """Row ids are unique once those without one have taken their place in the data."""
    rows = [b"broken" if id_ is None else json.dumps({"id": id_}).encode() for id_ in ids]
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(b"\n".join(rows))
        file.flush()
        seen, expected = set(), []
        for id_ in ids:
            expected.append(id_ is not None and id_ in seen)
            seen.add(id_)
        for part in range(parts):
            chosen = RowRange(shard=(part, parts))
            with Dataset([file.name], chosen=chosen) as data:
                if not ids:
                    with pytest.raises(InputError, match="no rows"):
                        data.survey()
                    continue
                survey = data.survey(on_duplicate="row-error")
                codes = [getattr(row, "code", None) for row in data.rows(survey)]
            assert [bool(mark) for mark in survey.repeated] == expected
            assert survey.num_rows == len(codes)
            assert [code == "duplicate_id" for code in codes] == expected[part::parts]
            assert survey.num_repeated == sum(expected)


def test_two_ids_with_one_hash_are_two_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "_hash", lambda content: 7)
    path = write(tmp_path / "x.jsonl", '{"id":"a"}\n{"id":"b"}\nbroken\n')
    with Dataset([path]) as data:
        assert data.survey().num_repeated == 0
