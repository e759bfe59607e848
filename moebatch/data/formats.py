"""One reader per format; each yields (line or row number from 1, row) and holds a small part."""

import csv
import io
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from moebatch.data.compressed import open_bytes
from moebatch.data.json_lines import BadRow, Row, iter_json_lines
from moebatch.data.parquet_out import JSON_COLUMNS
from moebatch.data.sources import Source, SourceKind
from moebatch.errors import InputError, InputNotFound

_BOM = b"\xef\xbb\xbf"
_PARQUET_BATCH_ROWS = 256
# The csv module refuses fields over 128 KiB unless told otherwise; a prompt may be longer.
_MAX_CSV_FIELD_CHARS = 2**30

Rows = Iterator[tuple[int, Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPart:
    """Which part of a `datasets` data set is meant: --hf-subset and --hf-split."""

    subset: str | None = None
    split: str | None = None


def iter_source(source: Source, *, part: HubPart) -> Rows:
    """Yield the rows of one source.

    Raises: InputNotFound, InputError when the source as a whole cannot be read.
    """
    if source.kind in _DATASETS:
        with _readable(source.name):
            yield from enumerate(_DATASETS[source.kind](source.name, part), start=1)
    else:
        with _readable(source.name):
            yield from _FILES[source.kind](source.copy or source.name)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn what the libraries raise about a source into one line for the user."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputNotFound(f"{name} is not there: {_one_line(error)}") from error
    except ConnectionError as error:
        raise InputNotFound(f"{name} cannot be reached: {_one_line(error)}") from error
    except (OSError, EOFError, zlib.error, ValueError, RuntimeError) as error:
        raise InputError(f"{name} cannot be read: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split()) or type(error).__name__


def _jsonl(name: str) -> Rows:
    with open_bytes(name) as stream:
        yield from iter_json_lines(_refuse_array(stream, name=name))


def _refuse_array(stream: IO[bytes], *, name: str) -> Iterator[bytes]:
    """The lines of a file, unless it is one long JSON array, which .json files often are.

    Raises: InputError.
    """
    first = stream.readline()
    if name.endswith(".json") and first.removeprefix(_BOM).lstrip().startswith(b"["):
        raise InputError(
            f"{name} holds one JSON array, not an object on each line",
            hint=f"convert it: jq -c '.[]' {name} > {name}l",
        )
    yield from itertools.chain([first] if first else [], stream)


def _text_lines(stream: Iterable[bytes]) -> Iterator[str]:
    """Lines as text. Bad bytes stay as surrogates, so that only their own row fails, later."""
    for number, line in enumerate(stream):
        text = line.decode("utf-8", "surrogateescape")
        yield text.removeprefix("\ufeff") if number == 0 else text


def _txt(name: str) -> Rows:
    with open_bytes(name) as stream:
        for number, line in enumerate(_text_lines(stream), start=1):
            if line.strip():
                yield number, {"prompt": line.rstrip("\r\n")}


def _csv(name: str) -> Rows:
    csv.field_size_limit(_MAX_CSV_FIELD_CHARS)
    with open_bytes(name) as stream:
        # newline="" also ends lines at a lone CR, as old spreadsheets write them.
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, strict=True)
        header = _csv_header(reader, name=name)
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield reader.line_num, BadRow(message=f"not CSV: {error}")
                continue
            if fields:
                yield reader.line_num, _csv_row(header, fields)


def _csv_header(reader: Iterator[list[str]], *, name: str) -> list[str]:
    """The names of the columns.

    Raises: InputError when they cannot tell the columns apart.
    """
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise InputError(f"the header of {name} is not CSV: {error}") from error
    twice = [column for column, count in Counter(header).items() if count > 1]
    if twice:
        raise InputError(f"{name} has two columns that are called {twice[0]!r}")
    return header


def _csv_row(header: list[str], fields: list[str]) -> Row:
    if len(fields) != len(header):
        return BadRow(message=f"not CSV: {len(fields)} fields, the header has {len(header)}")
    return dict(zip(header, fields, strict=True))


def _parquet(name: str) -> Rows:
    import pyarrow.parquet as pq

    number = 0
    with pq.ParquetFile(name) as file:
        as_json = _json_columns(file.schema_arrow.metadata)
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                for column in as_json:
                    row[column] = _from_json(row.get(column))
                yield number, row


def _json_columns(metadata: Mapping[bytes, bytes] | None) -> list[str]:
    """The columns that hold JSON texts, if the file is one of ours."""
    names = _from_json((metadata or {}).get(JSON_COLUMNS.encode(), b"[]").decode())
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _from_json(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _saved(name: str, part: HubPart) -> Iterable[dict[str, Any]]:
    """A data set that `datasets` saved to disk; it is memory-mapped, not loaded."""
    import datasets

    loaded = datasets.load_from_disk(name)
    if not isinstance(loaded, dict):
        return loaded  # type: ignore[no-any-return]
    split = part.split or (next(iter(loaded)) if len(loaded) == 1 else "train")
    if split not in loaded:
        raise InputError(
            f"{name} has no split {split!r}", hint=f"name one with --hf-split: {', '.join(loaded)}"
        )
    return loaded[split]  # type: ignore[no-any-return]


def _hub(name: str, part: HubPart) -> Iterable[dict[str, Any]]:
    import datasets

    split = part.split or "train"
    return datasets.load_dataset(name, part.subset, split=split, streaming=True)  # type: ignore[no-any-return]


_FILES: dict[SourceKind, Callable[[str], Rows]] = {
    "jsonl": _jsonl, "parquet": _parquet, "csv": _csv, "txt": _txt,
}  # fmt: skip
_DATASETS: dict[SourceKind, Callable[[str, HubPart], Iterable[dict[str, Any]]]] = {
    "saved": _saved, "hub": _hub,
}  # fmt: skip
