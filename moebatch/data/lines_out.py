"""Write rows that need no model, in one go: lines of JSON or a Parquet file, whole or not at all."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from moebatch.data import durable
from moebatch.data.parquet_out import write_parquet
from moebatch.data.places import Destination, OutputFormat, partial_path, resolve_format
from moebatch.data.stdout import Stdout, silence_stdout
from moebatch.errors import OutputClosed, UsageError


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
    if path.is_dir():
        raise UsageError(f"the output {path} is a folder", hint="name a file in it")
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
    count, stdout = 0, Stdout()
    try:
        for count, line in enumerate(lines, start=1):  # noqa: B007 - the last one is the number
            stdout.write(line + b"\n")
        stdout.flush()
    except BrokenPipeError as error:
        silence_stdout()
        raise OutputClosed("the reader of the output went away") from error
    except OSError as error:
        raise durable.write_error("standard output", error) from error
    return count
