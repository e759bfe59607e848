"""Write rows that need no model, in one go: lines of JSON or a Parquet file, whole or not at all."""

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from moebatch.data import durable
from moebatch.data.parquet_out import write_parquet
from moebatch.data.writer import Destination, OutputFormat, partial_path, resolve_format
from moebatch.errors import OutputClosed

_STDOUT_BUFFER = 1 << 16


def write_lines(
    path: Destination,
    lines: Iterable[bytes],
    *,
    output_format: OutputFormat = "auto",
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write lines of JSON, each without its newline; returns how many.

    Whatever fails, `path` is untouched and nothing is left beside it.
    Raises: UsageError for a format that does not exist, OutputWriteError, OutputClosed; what the
    iterable raises.
    """
    resolved = resolve_format(path, output_format=output_format)
    if path == "-":
        return _to_stdout(lines)
    partial = partial_path(path)
    try:
        count = _to_file(partial, lines)
        if resolved == "parquet":
            _to_table(partial, metadata=metadata or {})
        durable.publish(partial, path)
    except OSError as error:
        raise durable.write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            durable.remove(partial)
    return count


def _to_file(path: Path, lines: Iterable[bytes]) -> int:
    file, count = durable.AppendFile(path), 0
    try:
        for count, line in enumerate(lines, start=1):  # noqa: B007 - the last one is the number
            file.write(line + b"\n")
        file.sync()
    finally:
        file.close()
    return count


def _to_table(partial: Path, *, metadata: Mapping[str, str]) -> None:
    table = partial.with_name(partial.name + ".table")
    try:
        write_parquet(partial, table, metadata=metadata)
        os.replace(table, partial)
    finally:
        durable.remove(table)


def _to_stdout(lines: Iterable[bytes]) -> int:
    count = 0
    try:
        for count, line in enumerate(lines, start=1):  # noqa: B007 - the last one is the number
            sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError as error:
        silence_stdout()
        raise OutputClosed("the reader of the output went away") from error
    return count


def silence_stdout() -> None:
    """Let what is left in Python's buffer go nowhere, or it would fail once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
