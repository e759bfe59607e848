"""Write output rows in input order, into OUT.partial, which becomes OUT in one step at the end.

Rows may finish in any order: what is ahead of its turn waits, in bounded memory. A table (Parquet)
is made from the lines at the end, since only then the types of its columns are known.
"""

import contextlib
import errno
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from moebatch.data import durable
from moebatch.data.json_text import to_json
from moebatch.data.output_rows import EXTRAS, RowFormat, index_of, output_row
from moebatch.data.parquet_parts import ParquetParts
from moebatch.data.places import Destination, OutputFormat, partial_path, resolve_format
from moebatch.data.requests import Outcome, RawRow, RowError, Schema
from moebatch.data.stdout import Stdout, silence_stdout
from moebatch.data.waiting import Line, Waiting
from moebatch.errors import OutputClosed, UsageError

Order = Literal["input", "completion"]

# How much a reader of the partial file may lag behind: rows, and seconds.
_FLUSH_ROWS = 64
_FLUSH_S = 1.0
_PART_BYTES = 100 << 20  # of JSON lines; a part of a table has less


class OutputWriter:
    """Takes the outcome of every row, in any order, and writes them in the order of the input.

    Indices start at `first_index` and leave no gap. Use it as a context manager: leaving it by an
    exception keeps the partial file and makes no output. Failed rows go to `error_path` alone,
    where it is given; lines of JSON, whatever the output's format. `diverted` lists the
    places of these rows, counted from 0.
    """

    def __init__(
        self,
        path: Destination,
        *,
        format: RowFormat,
        output_format: OutputFormat = "auto",
        order: Order = "input",
        first_index: int = 0,
        metadata: Mapping[str, str] | None = None,
        error_path: Path | None = None,
    ) -> None:
        """`metadata` goes into a Parquet file's key-value metadata.

        Raises: OutputWriteError, UsageError.
        """
        if unknown := [name for name in format.include if name not in EXTRAS]:
            raise UsageError(
                f"{unknown[0]} cannot be included", hint=f"one of: {', '.join(EXTRAS)}"
            )
        self.num_rows = 0
        self.diverted: list[int] = []
        self._path = path
        self._format = format
        self._output_format = resolve_format(path, output_format=output_format)
        self._order = order
        self._next_index = first_index
        self._metadata = dict(metadata or {})
        self._waiting = Waiting(None if path == "-" else path.resolve().parent)
        self._previous: Schema = "flat"
        self._flushed_at_s = time.monotonic()
        self._closed = False
        self._file = _open(path)
        self._parts: ParquetParts | None = None
        if path != "-" and path.is_dir():
            self._parts = ParquetParts(path, metadata=self._metadata)
        self._error_path = error_path
        self._error_file = None if error_path is None else _open(error_path)

    @property
    def num_waiting(self) -> int:
        """Rows held back because an earlier row has not come yet."""
        return len(self._waiting)

    def put(self, row: RawRow | None, outcome: Outcome) -> None:
        """Take what came of a row; `row` is None for a line that could not be read.

        Raises: OutputWriteError, OutputClosed.
        """
        if row is None and isinstance(outcome, RowError):
            row = outcome.raw
        # The shape of a line that was no row depends on the row before it: it waits as it is.
        unknown = row is None and self._format.schema == "auto"
        item = outcome if unknown else self._line(row, outcome)
        if self._order == "completion":
            self._write(item)
            return
        index = index_of(outcome)
        assert index >= self._next_index and index not in self._waiting, f"row {index} came twice"
        with self._explained():
            self._waiting.put(index, item)
            while self._next_index in self._waiting:
                self._write(self._waiting.pop(self._next_index))
                self._next_index += 1

    def close(self) -> None:
        """Finish the output: everything on the disk, under its own name.

        Raises: OutputWriteError, OutputClosed.
        """
        assert not self._waiting, f"row {self._next_index} never came, {self.num_waiting} wait"
        self._waiting.close()
        with self._explained():
            self._file.sync()
            self._file.close()
            if self._error_path is not None and self._error_file is not None:
                self._error_file.sync()
                self._error_file.close()
                durable.publish(partial_path(self._error_path), self._error_path)
            if self._path != "-":
                self._publish(self._path)
        self._closed = True

    def abort(self) -> None:
        """Stop writing and keep the partial file, as far as rows have come in order."""
        self._waiting.close()
        for file in self._files:
            with contextlib.suppress(OSError):
                file.flush()
            file.close()

    @property
    def _files(self) -> "list[durable.AppendFile | Stdout]":
        return [self._file] if self._error_file is None else [self._file, self._error_file]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._closed:
            self.close()

    def _line(self, row: RawRow | None, outcome: Outcome) -> Line:
        schema = self._format.schema_for(row, previous=self._previous)
        text = to_json(output_row(row, outcome, schema=schema, format=self._format))
        failed = isinstance(outcome, RowError)
        return Line(content=text.encode() + b"\n", schema=schema, failed=failed)

    def _write(self, item: Line | Outcome) -> None:
        line = item if isinstance(item, Line) else self._line(None, item)
        self._previous = line.schema
        with self._explained():
            file = self._file
            if line.failed and self._error_file is not None:
                file = self._error_file
                self.diverted.append(self.num_rows)
            file.write(line.content)
            self.num_rows += 1
            self._flush_sometimes()
            if self._parts is not None and self._file.num_bytes >= _PART_BYTES:
                self._next_part(self._parts)

    def _next_part(self, parts: ParquetParts) -> None:
        assert self._path != "-"
        self._file.flush()
        parts.add(partial_path(self._path))
        self._file.close()
        self._file = _open(self._path)

    def _flush_sometimes(self) -> None:
        now = time.monotonic()
        if self.num_rows % _FLUSH_ROWS == 0 or now - self._flushed_at_s >= _FLUSH_S:
            for file in self._files:
                file.flush()
            self._flushed_at_s = now

    def _publish(self, path: Path) -> None:
        """Make the partial file the output, in one step that a crash cannot halve."""
        partial = partial_path(path)
        if self._parts is not None:
            if partial.stat().st_size or not self.num_rows:
                self._parts.add(partial)
            self._parts.close()
            durable.remove(partial)
        elif self._output_format == "jsonl":
            durable.publish(partial, path)
        else:
            self._publish_table(partial, path)

    def _publish_table(self, partial: Path, path: Path) -> None:
        from moebatch.data.parquet_out import write_parquet

        unfinished = path.with_name(path.name + ".unfinished")
        try:
            write_parquet(partial, unfinished, metadata=self._metadata)
            durable.publish(unfinished, path)
        finally:
            durable.remove(unfinished)
        durable.remove(partial)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the system says about a failed write into one line for the user."""
        try:
            yield
        except BrokenPipeError as error:
            silence_stdout()
            raise OutputClosed("the reader of the output went away") from error
        except OSError as error:
            self.abort()
            raise durable.write_error(self._path, error, kept=self._kept()) from error

    def _kept(self) -> str:
        if self._path == "-" or not self.num_rows:
            return ""
        return f"; finished rows are kept in {partial_path(self._path)}"


def _open(path: Destination) -> durable.AppendFile | Stdout:
    if path == "-":
        return Stdout()
    try:
        return durable.AppendFile(partial_path(path))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        raise durable.write_error(path, error) from error
