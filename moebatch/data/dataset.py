"""A data set that is read twice: once to find what is wrong with it, once to answer its rows.

The first reading finds damaged files, missing columns and ids that stand twice, before weights are
loaded. It keeps eight bytes a row. What cannot be read twice, a pipe, is copied to a file first.
"""

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from moebatch.data.columns import ColumnNames
from moebatch.data.compressed import open_raw
from moebatch.data.reader import RowRange, read_places
from moebatch.data.requests import RawRow, RowError
from moebatch.data.sources import InputFormat, Source, find_sources
from moebatch.errors import InputError, OutputWriteError, UsageError

if TYPE_CHECKING:
    import numpy as np

OnDuplicate = Literal["refuse", "row-error"]
_SHOWN_IDS = 5  # ids that a refusal names, and lines of each
_PROGRESS_ROWS = 250_000
_MARK = b"\0"  # no id's hash starts from it, so that unreadable lines equal nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the first reading found. `num_rows` counts the rows of the shard, `in_range` of all.

    `ids` is a digest of all ids of the range, in order. `repeated` marks with 1, for each row of the
    range, that its id stands on an earlier row.
    """

    num_rows: int
    in_range: int
    num_unreadable: int
    ids: str
    repeated: bytes

    @property
    def num_repeated(self) -> int:
        """Rows whose id an earlier row has."""
        return self.repeated.count(1)


class Dataset:
    """Rows from files, folders, pipes or the hub. Use it in a `with`: it may own temporary files.

    Raises: InputNotFound, InputError, UsageError when it is made.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        input_format: InputFormat = "auto",
        columns: ColumnNames | None = None,
        chosen: RowRange | None = None,
        subset: str | None = None,
        split: str | None = None,
    ) -> None:
        self._sources = find_sources(names, input_format=input_format)
        self._columns = columns or ColumnNames()
        self._chosen = chosen or RowRange()
        self._subset, self._split = subset, split
        self._stack = ExitStack()
        if (subset or split) and all(
            source.kind not in ("hub", "saved") for source in self._sources
        ):
            raise UsageError("--hf-subset and --hf-split belong to data sets of the hub")

    @property
    def files(self) -> list[str]:
        """The files that are read, so that none of them is overwritten."""
        return [s.name for s in self._sources if s.kind != "hub" and s.name != "-"]

    def __enter__(self) -> Self:
        """Copy what cannot be read twice.

        Raises: InputError, OutputWriteError.
        """
        try:
            self._sources = [self._seekable(source) for source in self._sources]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def rows(self, survey: Survey | None = None) -> Generator[RawRow | RowError, None, None]:
        """The rows of the shard; those that a survey found to repeat an id are row errors.

        Who does not read to the end closes it: a file is open meanwhile.

        Raises: InputNotFound, InputError.
        """
        return (row for row, _ in self.places(survey))

    def places(self, survey: Survey | None = None) -> Iterator[tuple[RawRow | RowError, str]]:
        """The rows, each with its place for people: "in.jsonl:7".

        Raises: InputNotFound, InputError.
        """
        return read_places(
            self._sources,
            columns=self._columns,
            chosen=self._chosen,
            subset=self._subset,
            split=self._split,
            repeated=survey.repeated if survey else b"",
        )

    def survey(self, *, on_duplicate: OnDuplicate = "refuse",
               progress: Callable[[int], None] = lambda rows: None) -> Survey:  # fmt: skip
        """Read everything once; `progress` hears the number of rows now and then.

        Raises: InputNotFound; InputError: damaged, no rows, a named column is missing, ids that
        stand twice and are not wanted as row errors.
        """
        hashes, unreadable = array("Q"), 0
        for item, _ in self._everything():
            bad = isinstance(item, RowError)
            unreadable += bad
            if len(hashes) % _PROGRESS_ROWS == _PROGRESS_ROWS - 1:
                progress(len(hashes) + 1)
            hashes.append(_hash(_MARK + str(item.index).encode() if bad else _encoded(item.id)))
        suspects = _suspects(hashes)
        repeated = self._repeated(suspects, refuse=on_duplicate == "refuse")
        part, parts = self._chosen.shard
        return Survey(
            num_rows=len(range(part, len(hashes), parts)),
            in_range=len(hashes),
            num_unreadable=unreadable,
            ids=hashlib.blake2b(memoryview(hashes), digest_size=16).hexdigest(),
            repeated=repeated,
        )

    def _everything(self) -> Iterator[tuple[RawRow | RowError, str]]:
        """The rows of all shards, with their places."""
        return read_places(
            self._sources,
            columns=self._columns,
            chosen=replace(self._chosen, shard=(0, 1)),
            subset=self._subset,
            split=self._split,
        )

    def _repeated(self, suspects: "np.ndarray", *, refuse: bool) -> bytes:
        """One mark a row, from those rows whose hashes are equal; two ids may share a hash."""
        marks = bytearray(len(suspects))
        if not suspects.any():
            return bytes(marks)
        seen: dict[str, list[str]] = {}
        for item, place in self._everything():
            if not suspects[item.index] or isinstance(item, RowError):
                continue
            places = seen.setdefault(item.id, [])
            marks[item.index] = bool(places)
            if len(places) <= _SHOWN_IDS:
                places.append(place)
        if refuse and any(marks):
            _refuse({id_: places for id_, places in seen.items() if len(places) > 1})
        return bytes(marks)

    def _seekable(self, source: Source) -> Source:
        if source.kind in ("hub", "saved"):
            return source
        try:
            if source.name != "-" and stat.S_ISREG(os.stat(source.name).st_mode):
                return source
        except OSError:  # reading it will say what is wrong
            return source
        try:
            opened = tempfile.NamedTemporaryFile(prefix="moebatch-")  # noqa: SIM115 - the stack closes it
            copy = self._stack.enter_context(opened)
            with open_raw(source.name) as stream:
                shutil.copyfileobj(stream, copy, 1 << 20)
            copy.flush()
        except OSError as error:
            what = "standard input" if source.name == "-" else source.name
            raise OutputWriteError(
                f"cannot copy {what} to {tempfile.gettempdir()}: {error.strerror or error}",
                hint="set TMPDIR to a folder with room, or give the rows as a file",
            ) from error
        return replace(source, copy=copy.name)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), sys.byteorder)


def _encoded(id_: str) -> bytes:
    return b"i" + id_.encode("utf-8", "surrogatepass")


def _suspects(hashes: "array[int]") -> "np.ndarray":
    """For each row, whether another row has the same hash."""
    import numpy as np

    values = np.frombuffer(hashes, dtype=np.uint64)
    ordered = np.sort(values)
    return np.isin(values, ordered[1:][ordered[1:] == ordered[:-1]])


def _refuse(places_of: dict[str, list[str]]) -> None:
    """Say which ids stand twice, and where."""
    shown = [
        f"{id_!r} ({', '.join(places[:_SHOWN_IDS])}{', ...' if len(places) > _SHOWN_IDS else ''})"
        for id_, places in list(places_of.items())[:_SHOWN_IDS]
    ]
    more = len(places_of) - len(shown)
    raise InputError(
        f"ids stand more than once: {', '.join(shown)}" + (f" and {more} more ids" if more else ""),
        hint="make them unique, name another --id-column, or answer only the first of each: "
        "--on-duplicate row-error",
    )
