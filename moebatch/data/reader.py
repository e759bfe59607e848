"""Read rows from files, standard input or the hub, one at a time.

Memory does not grow with the data set. A bad row is a value in its place; only a source as a
whole can fail. Knows no tokenizer.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moebatch.data.columns import ColumnNames, check_named, row_id, schema_of
from moebatch.data.formats import HubPart, iter_source
from moebatch.data.json_lines import BadRow, Row
from moebatch.data.requests import RawRow, RowError
from moebatch.data.sources import InputFormat, Source, find_sources
from moebatch.errors import InputError, UsageError

T = TypeVar("T")
Placed = tuple[str, int, Row]  # name of the source, line, row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Which rows of the data set are read: `limit` rows after `offset`, of these every n-th.

    `shard` (i, n) keeps the rows whose position within the range is i modulo n.
    """

    limit: int | None = None
    offset: int = 0
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        """Raises: UsageError when a number is out of range."""
        if self.offset < 0 or (self.limit is not None and self.limit < 1):
            raise UsageError("--limit must be at least 1 and --offset at least 0")
        part, parts = self.shard
        if not 0 <= part < parts:
            raise UsageError(f"shard {part} of {parts} does not exist")


def read_rows(
    sources: Sequence[str],
    *,
    input_format: InputFormat = "auto",
    columns: ColumnNames | None = None,
    limit: int | None = None,
    offset: int = 0,
    shard: tuple[int, int] = (0, 1),
    subset: str | None = None,
    split: str | None = None,
) -> Iterator[RawRow | RowError]:
    """Stream the rows of all sources; missing sources are reported at once, the rest while reading.

    Rows are numbered without gaps as they are yielded (`index`); a row without an id takes its
    position in the whole data set, which does not depend on limit, offset or shard.
    Raises: InputNotFound, InputError (unreadable, no rows, a named column is missing), UsageError.
    """
    placed = read_places(
        find_sources(sources, input_format=input_format),
        columns=columns or ColumnNames(),
        chosen=RowRange(limit=limit, offset=offset, shard=shard),
        subset=subset,
        split=split,
    )
    return (row for row, _ in placed)


def read_places(
    sources: Sequence[Source],
    *,
    columns: ColumnNames,
    chosen: RowRange,
    subset: str | None = None,
    split: str | None = None,
    repeated: bytes = b"",
) -> Iterator[tuple[RawRow | RowError, str]]:
    """`read_rows` for sources that were found before; each row with its place: "in.jsonl:7".

    `repeated` marks, by place in the range of rows, those whose id an earlier row has.
    """
    part = HubPart(subset=subset, split=split)
    items = (
        (source.name, line, row)
        for source in sources
        for line, row in iter_source(source, part=part)
    )
    name = " ".join(source.name for source in sources)
    return _rows(
        _select(items, chosen=chosen, name=name),
        names=columns,
        repeated=repeated,
        offset=chosen.offset,
    )


def peek(iterator: Iterator[T], k: int) -> tuple[list[T], Iterator[T]]:
    """The first k items, and an iterator over all items, those included."""
    head = list(itertools.islice(iterator, k))
    return head, itertools.chain(head, iterator)


def _select(
    items: Iterable[Placed], *, chosen: RowRange, name: str
) -> Iterator[tuple[int, Placed]]:
    """Yield (position in the data set, row with its source and line) of the rows chosen.

    Raises: InputError when the range is empty. An empty shard of a range with rows is fine.
    """
    stop = None if chosen.limit is None else min(chosen.offset + chosen.limit, sys.maxsize)
    part, parts = chosen.shard
    position = -1
    for position, item in enumerate(itertools.islice(items, stop)):
        if position >= chosen.offset and (position - chosen.offset) % parts == part:
            yield position, item
    if position < chosen.offset:
        _refuse_empty(name, num_rows=position + 1, offset=chosen.offset)


def _refuse_empty(name: str, *, num_rows: int, offset: int) -> None:
    if num_rows == 0:
        raise InputError(f"{name} holds no rows")
    raise InputError(f"{name} holds no rows after the first {offset}; it has {num_rows}")


def _rows(
    items: Iterable[tuple[int, Placed]], *, names: ColumnNames, repeated: bytes, offset: int
) -> Iterator[tuple[RawRow | RowError, str]]:
    checked = False
    for index, (position, (source, line, row)) in enumerate(items):
        place = f"{source}:{line}"
        if isinstance(row, BadRow):
            yield _bad_row(row, index=index, position=position, line=line), place
            continue
        if not checked:
            check_named(row, names=names)
            checked = True
        read = RawRow(
            index=index,
            line=line,
            id=row_id(row, names=names, position=position),
            schema=schema_of(row),
            columns=row,
        )
        again = position - offset < len(repeated) and repeated[position - offset]
        yield (_repeated(read) if again else read), place


def _bad_row(bad: BadRow, *, index: int, position: int, line: int) -> RowError:
    return RowError(
        index=index,
        id=str(position),
        code="invalid_json",
        message=f"line {line} is {bad.message}",
        line=line,
    )


def _repeated(row: RawRow) -> RowError:
    return RowError(
        index=row.index,
        id=row.id,
        code="duplicate_id",
        message=f"the id {row.id!r} stands on an earlier line already",
        param="id",
        line=row.line,
        raw=row,
    )
