"""A folder of Parquet files, each closed and renamed as soon as it is full.

A reader may take up finished parts while the run goes on. All parts end up with the same columns and
types: where a later row changes a column's type, the parts before it are written again at the end.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebatch.data import durable
from moebatch.data.json_text import to_json
from moebatch.data.parquet_out import ColumnType, column_types, join_types, write_parquet

_TEXTS: tuple[ColumnType, ...] = ("null", "string", "json")


def part_paths(folder: Path) -> list[Path]:
    """The finished parts of a folder, in order."""
    return sorted(folder.glob("part-[0-9][0-9][0-9][0-9][0-9].parquet"))


class ParquetParts:
    """Writes the parts of one folder, from the first one on; parts of an earlier run give way."""

    def __init__(self, folder: Path, *, metadata: Mapping[str, str]) -> None:
        self._folder, self._metadata = folder, metadata
        self._types: dict[str, ColumnType] = {}
        self._written: list[dict[str, ColumnType]] = []

    def add(self, lines: Path) -> None:
        """Make the next part of a file of JSON lines.

        Raises: OSError.
        """
        self._types = join_types(self._types, column_types(lines))
        self._write(lines, len(self._written))
        self._written.append(dict(self._types))

    def close(self) -> None:
        """Bring all parts to the same types, and remove what an earlier run had beyond them.

        Raises: OSError.
        """
        for number, types in enumerate(self._written):
            if any(_differs(types.get(name), kind) for name, kind in self._types.items()):
                self._rewrite(number, types)
        for path in part_paths(self._folder)[len(self._written) :]:
            durable.remove(path)

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}.parquet"

    def _write(self, lines: Path, number: int) -> None:
        path = self._path(number)
        unfinished = path.with_name(path.name + ".unfinished")
        try:
            write_parquet(lines, unfinished, metadata=self._metadata, types=self._types)
            durable.publish(unfinished, path)
        finally:
            durable.remove(unfinished)

    def _rewrite(self, number: int, types: Mapping[str, ColumnType]) -> None:
        """By way of lines, as the rows came."""
        path = self._path(number)
        lines = path.with_name(path.name + ".lines")
        try:
            durable.write_whole(lines, (_line(row, types) for row in _rows(path)))
            self._write(lines, number)
        finally:
            durable.remove(lines)


def _differs(before: ColumnType | None, now: ColumnType) -> bool:
    """Whether a column written as `before` (None: not at all) has to be written again as `now`."""
    if before == "null" and now in _TEXTS:
        return False  # texts that are all missing look the same
    return before != now


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _line(row: Mapping[str, Any], types: Mapping[str, ColumnType]) -> bytes:
    plain = {
        name: json.loads(value) if types[name] == "json" and value is not None else value
        for name, value in row.items()
    }
    return to_json(plain).encode() + b"\n"
