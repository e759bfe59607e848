"""Lines that are ahead of their turn: in memory up to a bound, beyond it in a temporary file.

One slow row in front of a million fast ones must not bring the million into memory.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moebatch.data.requests import Outcome, Schema

_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An output row as it will be written; `failed` rows may have a file of their own."""

    content: bytes
    schema: Schema
    failed: bool


@dataclass(frozen=True, slots=True)
class _Spilled:
    """Where a line's content stands in the temporary file."""

    offset: int
    length: int
    schema: Schema
    failed: bool


class Waiting:
    """Items by index, each taken out once. An outcome that is no line yet waits as it is."""

    def __init__(self, folder: Path | None) -> None:
        """The temporary file, if one is needed, goes into `folder` (None: where the system likes).

        It has no name and ends with the process.
        """
        self._folder = folder
        self._items: dict[int, Line | _Spilled | Outcome] = {}
        self._num_bytes = 0
        self._file: IO[bytes] | None = None
        self._num_spilled = self._end = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, index: int) -> bool:
        return index in self._items

    def put(self, index: int, item: Line | Outcome) -> None:
        """Take an item.

        Raises: OSError when the temporary file cannot be written.
        """
        if isinstance(item, Line):
            if self._num_bytes + len(item.content) > _MOST_BYTES:
                self._items[index] = self._spill(item)
                return
            self._num_bytes += len(item.content)
        self._items[index] = item

    def pop(self, index: int) -> Line | Outcome:
        """Give an item back.

        Raises: OSError when the temporary file cannot be read.
        """
        item = self._items.pop(index)
        if isinstance(item, _Spilled):
            return self._fetch(item)
        if isinstance(item, Line):
            self._num_bytes -= len(item.content)
        return item

    def close(self) -> None:
        """Drop everything."""
        self._items.clear()
        if self._file is not None:
            self._file.close()

    def _spill(self, line: Line) -> _Spilled:
        if self._file is None:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 - `close` closes it
                dir=self._folder, buffering=0
            )
        left, at = memoryview(line.content), self._end
        while left:
            written = os.pwrite(self._file.fileno(), left, at)
            left, at = left[written:], at + written
        spilled = _Spilled(self._end, len(line.content), line.schema, line.failed)
        self._end, self._num_spilled = at, self._num_spilled + 1
        return spilled

    def _fetch(self, spilled: _Spilled) -> Line:
        assert self._file is not None
        content = os.pread(self._file.fileno(), spilled.length, spilled.offset)
        self._num_spilled -= 1
        if not self._num_spilled:
            self._end = 0
            os.ftruncate(self._file.fileno(), 0)
        return Line(content=content, schema=spilled.schema, failed=spilled.failed)
