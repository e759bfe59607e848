"""`moebatch merge`: the outputs of all shards become one, in the order of the input."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from moebatch.cli import options as opt
from moebatch.errors import InputError, InputNotFound, OutputError

if TYPE_CHECKING:
    from moebatch.data.manifest import Manifest
    from moebatch.data.rows_file import RowsFile

_SHOWN = 10  # missing shards that a message lists


def merge(
    shards: opt.Shards,
    output: opt.Output,
    output_format: opt.OutputFormat = "auto",
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> None:
    """Join the outputs of run --shard in the order of the input.

    Checks first that every shard is there once and finished, and that all were made from the same
    rows by the same model and settings. The folder OUT_SHARD.moebatch must lie beside each.
    """
    from moebatch.data.lines_out import write_lines
    from moebatch.data.places import check_output

    opt.check_choices(output_format=output_format)
    wanted_format: Any = output_format
    paths = _paths(shards)
    destination = opt.destination(output)
    check_output(destination, inputs=[str(path) for path in paths], overwrite=overwrite,
                 output_format=wanted_format)  # fmt: skip
    _check_not_a_run(destination)
    found = _in_order([_open_shard(path) for path in paths])
    _check_alike(found)
    with ExitStack() as stack:
        readers = [_Reader(shard, stack) for shard in found]
        lines = _interleaved(readers, total=found[0].rows.in_range)
        count = write_lines(destination, lines, output_format=wanted_format)
    diverted = sum(len(shard.rows.diverted or ()) for shard in found)
    if not quiet:
        typer.echo(f"{count:,} rows of {len(found)} shards → {output}", err=True)
        if diverted:
            files = ", ".join(shard.rows.error_file or "" for shard in found if shard.rows.diverted)
            typer.echo(f"{diverted:,} failed rows are in {files}", err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One output and what stands beside it."""

    path: Path
    manifest: "Manifest"
    rows: "RowsFile"


def _paths(names: Sequence[str]) -> list[Path]:
    """The files that the names mean; the same file twice is found later, by its shard."""
    import glob

    paths: list[Path] = []
    for name in names:
        matches = [name] if Path(name).exists() or not glob.has_magic(name) else glob.glob(name)
        paths += [opt.existing_output(match) for match in matches if not _is_beside(match)]
        if not matches:
            raise InputNotFound(f"no file matches {name}")
    return sorted(paths)


def _is_beside(name: str) -> bool:
    """Whether a glob caught what lies beside an output instead of the output."""
    return name.endswith((".moebatch", ".partial"))


def _check_not_a_run(destination: Path | Literal["-"]) -> None:
    from moebatch.data.side import side_path

    if destination != "-" and side_path(destination).is_dir() and destination.exists():
        raise OutputError(
            f"{destination} is the output of a run", hint="choose another -o for the joined rows"
        )


def _open_shard(path: Path) -> Shard:
    from moebatch.data.manifest import read_manifest
    from moebatch.data.rows_file import read_rows_file
    from moebatch.data.side import has_output, is_locked, side_path

    folder = side_path(path)
    manifest, rows = read_manifest(folder / "manifest.json"), read_rows_file(folder)
    if manifest is None or rows is None:
        missing = "is not there" if not path.exists() else f"has no {folder.name} beside it"
        raise InputNotFound(
            f"{path} {missing}, so its rows cannot be checked",
            hint="copy each shard together with the folder that run made for it",
        )
    if (writer := is_locked(path)) is not None:
        raise InputError(f"{path} is being written by {writer}", hint="wait for it to end")
    if rows.diverted is None or not has_output(path):
        raise InputError(
            f"{path} is not finished", hint=f"go on with it: moebatch retry {path}"
        )  # fmt: skip
    if rows.order != "input":
        raise InputError(f"{path} was written with --order {rows.order}: its order is lost")
    return Shard(path=path, manifest=manifest, rows=rows)


def _in_order(shards: Sequence[Shard]) -> list[Shard]:
    """The shards by number; each must be there once."""
    parts = shards[0].rows.shard[1]
    by_part: dict[int, Shard] = {}
    for shard in shards:
        part, its_parts = shard.rows.shard
        if its_parts != parts:
            raise InputError(
                f"{shard.path} is one of {its_parts} shards, {shards[0].path} of {parts}"
            )
        if part in by_part:
            raise InputError(f"{by_part[part].path} and {shard.path} are both shard {part}")
        by_part[part] = shard
    missing = [part for part in range(parts) if part not in by_part]
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if missing[_SHOWN:] else "")
        raise InputError(
            f"of {parts} shards {len(missing)} are missing: {shown}",
            hint="shards are counted from 0; run those that are missing",
        )
    return [by_part[part] for part in range(parts)]


def _check_alike(shards: Sequence[Shard]) -> None:
    """All shards are of the same rows, by the same model and settings."""
    first = shards[0]
    for shard in shards[1:]:
        if (shard.rows.in_range, shard.rows.ids) != (first.rows.in_range, first.rows.ids):
            raise InputError(
                f"{first.path} and {shard.path} were made from different rows "
                f"({first.rows.in_range:,} and {shard.rows.in_range:,}, or other ids)",
                hint="the input has changed between them: run both again",
            )
        if different := first.manifest.differences(shard.manifest.fingerprint):
            raise OutputError(
                f"{first.path} and {shard.path} come of runs that differ: {'; '.join(different)}",
                hint="run the shards with the same model and options",
            )


class _Reader:
    """The rows of one shard, with a hole where a row went to its error file."""

    def __init__(self, shard: Shard, stack: ExitStack) -> None:
        self._shard = shard
        self._diverted = frozenset(shard.rows.diverted or ())
        self._lines = _lines(shard.path, stack)

    def row(self, index: int) -> bytes | None:
        """Row `index` of the shard, to be asked in order; None where there is a hole.

        Raises: InputError when the file is shorter than it should be.
        """
        if index in self._diverted:
            return None
        line = next(self._lines, None)
        if line is None:
            raise InputError(
                f"{self._shard.path} has fewer rows than were written to it",
                hint="the file was changed; run the shard again",
            )
        return line

    def end(self) -> None:
        """Check that nothing is left over.

        Raises: InputError.
        """
        if next(self._lines, None) is not None:
            raise InputError(f"{self._shard.path} has more rows than were written to it")


def _interleaved(readers: Sequence[_Reader], *, total: int) -> Iterator[bytes]:
    """Row k of all rows is row k // N of shard k % N."""
    for position in range(total):
        index, part = divmod(position, len(readers))
        line = readers[part].row(index)
        if line is not None:
            yield line
    for reader in readers:
        reader.end()


def _lines(path: Path, stack: ExitStack) -> Iterator[bytes]:
    """The rows of an output as lines of JSON without their ends."""
    from moebatch.data.formats import HubPart, iter_source
    from moebatch.data.json_text import to_json
    from moebatch.data.parquet_parts import part_paths
    from moebatch.data.sources import Source

    tables = part_paths(path) if path.is_dir() else [path] if _is_table(path) else []
    if tables:
        return (
            to_json(row).encode()
            for table in tables
            for _, row in iter_source(Source(kind="parquet", name=str(table)), part=HubPart())
        )
    file = stack.enter_context(path.open("rb"))
    return (line.removesuffix(b"\n") for line in file)


def _is_table(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"
