"""A folder of Parquet parts holds what one file would hold, whatever the types do on the way."""

import json
import random

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from commands import moebatch, write_rows

from moebatch.data.output_rows import RowFormat
from moebatch.data.parquet_out import write_parquet
from moebatch.data.parquet_parts import ParquetParts, part_paths
from moebatch.data.requests import Choice, Completion, RawRow, Request, SamplingParams
from moebatch.data.writer import OutputWriter

FORMAT = RowFormat(model_name="m", run_id="r")
VALUES = [None, True, 3, 2**60, 1.5, "text", "é", [], [1], [2**60], [1.5, 2], {"a": [1]},
          [None], "null", 10**30]  # fmt: skip


def lines(path, rows):
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return path


def parsed(row: dict) -> dict:
    """A 2 that stood in a column of fractions before it became one of JSON texts is a 2.0 there."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    return row | {n: json.loads(v) for n, v in texts.items() if v[:1] in '[{"-0123456789'}


@pytest.mark.parametrize("seed", range(40))
def test_parts_hold_what_one_file_holds(seed, tmp_path) -> None:
    rng = random.Random(seed)
    kinds = {name: rng.choices(VALUES, k=2) for name in "abc"}
    rows = [
        {name: rng.choice(values) for name, values in kinds.items() if rng.random() < 0.8}
        for _ in range(rng.randrange(1, 30))
    ]
    one, folder = tmp_path / "one.parquet", tmp_path / "parts"
    folder.mkdir()
    write_parquet(lines(tmp_path / "lines", rows), one, metadata={"k": "v"})
    parts, first = ParquetParts(folder, metadata={"k": "v"}), 0
    while first < len(rows):
        last = first + rng.randrange(1, 9)
        parts.add(lines(tmp_path / "lines", rows[first:last]))
        first = last
    parts.close()
    assert not [path for path in folder.iterdir() if path.suffix != ".parquet"]
    whole = pq.read_table(one)
    together = ds.dataset(folder, format="parquet").to_table().select(whole.column_names)
    assert together.schema.equals(whole.schema)
    assert list(map(parsed, together.to_pylist())) == list(map(parsed, whole.to_pylist()))
    for path in part_paths(folder):
        assert pq.read_schema(path).metadata[b"k"] == b"v"


def put_all(writer: OutputWriter, count: int) -> None:
    for index in range(count):
        row = RawRow(index=index, line=index + 1, id=str(index), schema="flat",
                     columns={"id": str(index), "prompt": "p" * 50})  # fmt: skip
        request = Request(index=index, id=row.id, prompt_token_ids=(1,), params=SamplingParams())
        choice = Choice(index=0, token_ids=(2,), text=f"t{index}", finish_reason="length")
        writer.put(row, Completion(request=request, choices=(choice,)))


def test_full_parts_are_there_before_the_run_is_over(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moebatch.data.writer._PART_BYTES", 2000)
    out = tmp_path / "out"
    out.mkdir()
    writer = OutputWriter(out, format=FORMAT, output_format="parquet")
    put_all(writer, 40)
    before = part_paths(out)
    assert len(before) >= 2
    seen = [text for path in before for text in pq.read_table(path)["generated_text"].to_pylist()]
    assert seen == [f"t{i}" for i in range(len(seen))]
    writer.close()
    assert ds.dataset(out).to_table()["generated_text"].to_pylist() == [f"t{i}" for i in range(40)]
    assert not (tmp_path / "out.partial").exists()
    count = len(part_paths(out))
    with OutputWriter(out, format=FORMAT, output_format="parquet") as again:
        put_all(again, 10)  # fewer rows: parts beyond are gone
    assert len(part_paths(out)) < count
    assert ds.dataset(out).count_rows() == 10


def test_from_the_command_line(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moebatch.data.writer._PART_BYTES", 1500)
    data = write_rows(tmp_path / "in.jsonl", [{"id": str(i), "prompt": "ab"} for i in range(30)])
    out = tmp_path / "out"
    command = ("run", data, "-m", model, "-o", f"{out}/", "--max-tokens", 3, "--progress", "none")
    assert moebatch(*command, "--output-format", "parquet").code == 2  # there is no such folder
    out.mkdir()
    refused = moebatch(*command)
    assert refused.code == 2
    assert "--output-format parquet" in refused.err
    for _ in range(2):
        done = moebatch(*command, "--output-format", "parquet")
        assert done.code == 0, done.err
        assert len(part_paths(out)) > 1
        assert ds.dataset(out).to_table()["id"].to_pylist() == [str(i) for i in range(30)]
    other = tmp_path / "other"
    other.mkdir()
    (other / "part-00000.parquet").write_bytes(b"precious")
    refused = moebatch("run", data, "-m", model, "-o", other, "--output-format", "parquet")
    assert refused.code == 8
    assert (other / "part-00000.parquet").read_bytes() == b"precious"
