"""`moebatch merge`: the outputs of shards become what one run would have written, or a refusal."""

import json
import shutil
from pathlib import Path

import pytest
from commands import moebatch, read_rows, write_rows

ROWS = [{"id": f"r{i}", "prompt": f"row {i}"} for i in range(7)]
RUN = ["-m", "demo", "-o", "out.jsonl", "--max-tokens", 3, "--temperature", "0.8", "-q"]


def shard(part: int, parts: int = 3, *args: object) -> None:
    assert moebatch("run", "in.jsonl", *RUN, "--shard", f"{part}/{parts}", *args).code in (0, 3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A whole run and three shards of it, made once."""
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_rows(folder / "in.jsonl", [*ROWS, {"id": "bad", "prompt": ""}])
        assert moebatch("run", "in.jsonl", *RUN).code == 3
        for part in range(3):
            shard(part)
    (folder / "out.jsonl").rename(folder / "whole.jsonl")
    shutil.rmtree(folder / "out.jsonl.moebatch")
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


def test_the_join_is_what_one_run_writes(here) -> None:
    names = [f"out.shard-0000{part}-of-00003.jsonl" for part in (2, 0, 1)]
    result = moebatch("merge", *names, "-o", "joined.jsonl")
    assert result.code == 0
    assert "8 rows of 3 shards" in result.err
    assert (here / "joined.jsonl").read_bytes() == (here / "whole.jsonl").read_bytes()
    # A pattern also catches the folders beside the outputs.
    assert (
        moebatch("merge", "out.shard-*", "-o", "-").out.encode()
        == (here / "whole.jsonl").read_bytes()
    )


def test_the_join_as_a_table(here) -> None:
    import pyarrow.parquet as pq

    assert moebatch("merge", "out.shard-*.jsonl", "-o", "joined.parquet", "-q").code == 0
    table = pq.read_table(here / "joined.parquet").to_pylist()
    assert [row["id"] for row in table] == [row["id"] for row in read_rows(here / "whole.jsonl")]


def test_tables_as_shards(here) -> None:
    for part in range(2):
        flags = ["--shard", f"{part}/2", "-o", "t.parquet", "-m", "demo", "--max-tokens", 2]
        assert moebatch("run", "in.jsonl", *flags, "-q").code in (0, 3)
    assert moebatch("merge", "t.shard-*.parquet", "-o", "joined.jsonl").code == 0
    ids = [row["id"] for row in read_rows(here / "joined.jsonl")]
    assert ids == [row["id"] for row in read_rows(here / "whole.jsonl")]


def test_folders_of_tables_as_shards(here) -> None:
    for part in range(2):
        (here / f"t.shard-0000{part}-of-00002").mkdir()
        flags = ["--shard", f"{part}/2", "-o", "t", "-m", "demo", "--max-tokens", 2, "-q"]
        assert moebatch("run", "in.jsonl", *flags, "--output-format", "parquet").code in (0, 3)
    assert moebatch("merge", "t.shard-*", "-o", "joined.jsonl").code == 0
    ids = [row["id"] for row in read_rows(here / "joined.jsonl")]
    assert ids == [row["id"] for row in read_rows(here / "whole.jsonl")]
    folder = moebatch("merge", "t.shard-*", "-o", ".", "--output-format", "parquet", "--overwrite")
    assert folder.code == 2


def test_rows_that_went_to_error_files_leave_no_hole(here) -> None:
    for part in range(2):
        shard(part, 2, "--error-file", "errors.jsonl")
    result = moebatch("merge", "out.shard-*-of-00002.jsonl", "-o", "joined.jsonl")
    assert result.code == 0
    assert "1 failed rows are in" in result.err
    good = [row for row in read_rows(here / "whole.jsonl") if row["error"] is None]
    assert read_rows(here / "joined.jsonl") == good


def test_shards_that_are_missing_or_there_twice(here) -> None:
    result = moebatch("merge", "out.shard-00001-of-00003.jsonl", "-o", "j.jsonl")
    assert result.code == 6
    assert "2 are missing: 0, 2" in result.error
    shutil.copytree("out.shard-00001-of-00003.jsonl.moebatch", "copy.jsonl.moebatch")
    shutil.copy("out.shard-00001-of-00003.jsonl", "copy.jsonl")
    result = moebatch("merge", "out.shard-*.jsonl", "copy.jsonl", "-o", "j.jsonl")
    assert result.code == 6
    assert "both shard 1" in result.error
    shard(0, 2)
    assert moebatch("merge", "out.shard-*.jsonl", "-o", "j.jsonl").code == 6
    assert moebatch("merge", "nope-*.jsonl", "-o", "j.jsonl").code == 7
    assert moebatch("merge", "whole.jsonl", "-o", "j.jsonl").code == 7
    assert not list(here.glob("j.jsonl*"))


def test_a_shard_that_is_not_finished(here) -> None:
    (here / "out.shard-00001-of-00003.jsonl").unlink()
    names = [f"out.shard-0000{part}-of-00003.jsonl" for part in range(3)]
    result = moebatch("merge", *names, "-o", "j.jsonl")
    assert result.code == 6
    assert "moebatch retry out.shard-00001-of-00003.jsonl" in result.err


def test_shards_of_other_rows(here) -> None:
    """The input grew after the first shard, or an id changed."""
    for rows in ([*ROWS, {"id": "bad", "prompt": ""}, ROWS[0] | {"id": "new"}], ROWS[::-1]):
        write_rows(here / "in.jsonl", rows)
        shard(1)
        result = moebatch("merge", "out.shard-*.jsonl", "-o", "j.jsonl")
        assert result.code == 6
        assert "different rows" in result.error


def test_shards_of_other_runs(here) -> None:
    shard(2, 3, "--overwrite", "--seed", 5)
    result = moebatch("merge", "out.shard-*.jsonl", "-o", "j.jsonl")
    assert result.code == 8
    assert "seed was 0, is 5" in result.error


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_shard_that_was_changed_by_hand(here, change) -> None:
    path = here / "out.shard-00001-of-00003.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1] if change == "shorter" else [*lines, lines[0]]))
    assert moebatch("merge", "out.shard-*.jsonl", "-o", "j.jsonl").code == 6
    assert not list(here.glob("j.jsonl*"))


def test_rows_in_the_order_of_their_end_cannot_be_joined(here) -> None:
    shard(1, 3, "--order", "completion", "--overwrite")
    result = moebatch("merge", "out.shard-*.jsonl", "-o", "j.jsonl")
    assert result.code == 6
    assert "--order completion" in result.error


def test_a_join_overwrites_nothing_unasked(here) -> None:
    assert moebatch("merge", "out.shard-*.jsonl", "-o", "whole.jsonl").code == 8
    name = "out.shard-00000-of-00003.jsonl"
    assert moebatch("merge", "out.shard-*.jsonl", "-o", name, "--overwrite").code == 2
    assert moebatch("merge", "out.shard-*.jsonl", "-o", "whole.jsonl", "--overwrite").code == 0


def test_what_stands_beside_an_output(here) -> None:
    said = json.loads((here / "out.shard-00001-of-00003.jsonl.moebatch" / "rows.json").read_text())
    assert (said["shard"], said["num_rows"], said["in_range"]) == ([1, 3], 3, 8)
    assert said["diverted"] == []
