"""Read rows from files, standard input or the hub, one at a time.

Memory does not grow with the data set. A bad row is a value in its place; only a source as a
whole can fail. Knows no tokenizer.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moebatch.data.columns import ColumnNames, check_named, row_id, schema_of
from moebatch.data.formats import HubPart, iter_source
from moebatch.data.json_lines import BadRow, Row
from moebatch.data.requests import RawRow, RowError
from moebatch.data.sources import InputFormat, find_sources
from moebatch.errors import InputError, UsageError

T = TypeVar("T")


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
    found = find_sources(sources, input_format=input_format)
    part = HubPart(subset=subset, split=split)
    items = itertools.chain.from_iterable(iter_source(source, part=part) for source in found)
    chosen = RowRange(limit=limit, offset=offset, shard=shard)
    return _rows(
        _select(items, chosen=chosen, name=" ".join(sources)), names=columns or ColumnNames()
    )


def peek(iterator: Iterator[T], k: int) -> tuple[list[T], Iterator[T]]:
    """The first k items, and an iterator over all items, those included."""
    head = list(itertools.islice(iterator, k))
    return head, itertools.chain(head, iterator)


def _select(
    items: Iterable[tuple[int, Row]], *, chosen: RowRange, name: str
) -> Iterator[tuple[int, int, Row]]:
    """Yield (position in the data set, line, row) of the rows chosen.

    Raises: InputError when the range is empty. An empty shard of a range with rows is fine.
    """
    stop = None if chosen.limit is None else chosen.offset + chosen.limit
    part, parts = chosen.shard
    position = -1
    for position, (line, row) in enumerate(itertools.islice(items, stop)):
        if position >= chosen.offset and (position - chosen.offset) % parts == part:
            yield position, line, row
    if position < chosen.offset:
        _refuse_empty(name, num_rows=position + 1, offset=chosen.offset)


def _refuse_empty(name: str, *, num_rows: int, offset: int) -> None:
    if num_rows == 0:
        raise InputError(f"{name} holds no rows")
    raise InputError(f"{name} holds no rows after the first {offset}; it has {num_rows}")


def _rows(
    items: Iterable[tuple[int, int, Row]], *, names: ColumnNames
) -> Iterator[RawRow | RowError]:
    checked = False
    for index, (position, line, row) in enumerate(items):
        if isinstance(row, BadRow):
            yield _bad_row(row, index=index, position=position, line=line)
            continue
        if not checked:
            check_named(row, names=names)
            checked = True
        yield RawRow(
            index=index,
            line=line,
            id=row_id(row, names=names, position=position),
            schema=schema_of(row),
            columns=row,
        )


def _bad_row(bad: BadRow, *, index: int, position: int, line: int) -> RowError:
    return RowError(
        index=index,
        id=str(position),
        code="invalid_json",
        message=f"line {line} is {bad.message}",
        line=line,
    )
