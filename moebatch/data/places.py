"""Where an output may lie: what its name promises, and whether the place can take it.

All of it is asked before a run begins; nothing is touched.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from moebatch.data.side import has_output, side_path
from moebatch.errors import OutputError, UsageError

OutputFormat = Literal["auto", "jsonl", "parquet"]
Destination = Path | Literal["-"]

_TABLES = (".parquet", ".pq")
_OTHER_FORMATS = (
    ".csv", ".tsv", ".xlsx", ".arrow", ".feather", ".gz", ".zst", ".zip", ".bz2", ".xz",
)  # fmt: skip


def check_output(
    path: Destination,
    *,
    inputs: Sequence[str] = (),
    overwrite: bool = False,
    output_format: OutputFormat = "auto",
    error_path: Path | None = None,
    error_is_ours: bool = False,
) -> None:
    """Find out early whether the output can be written; touches nothing.

    An output that has a folder beside it may be a run to go on with: that is for the folder to say.
    `error_is_ours`: the error file is one that this run wrote before.
    Raises: UsageError for a place that cannot be used, OutputError when the output exists.
    """
    resolved = resolve_format(path, output_format=output_format)
    if path == "-":
        if resolved == "parquet":
            raise UsageError("Parquet cannot be written to standard output", hint="name a file")
    else:
        _check_place(path, parts=output_format == "parquet")
        _check_not_input(path, inputs=inputs)
        # What a run has begun may be gone on with: the folder beside the output knows.
        _check_free(path, overwrite=overwrite or side_path(path).is_dir(), option="-o")
    if error_path is not None:
        if error_path.suffix.lower() in _TABLES:
            raise UsageError("--error-file holds lines of JSON", hint="name it like errors.jsonl")
        check_beside(error_path, option="--error-file", output=path, inputs=inputs)
        _check_free(error_path, overwrite=overwrite or error_is_ours, option="--error-file")


def _check_free(path: Path, *, overwrite: bool, option: str) -> None:
    if has_output(path) and not overwrite:
        raise OutputError(
            f"{path} exists already", hint=f"add --overwrite, or choose another {option}"
        )


def _check_place(path: Path, *, parts: bool) -> None:
    try:
        if path.is_dir() and parts:
            _check_folder(path)
        else:
            _check_file_place(path, name="output")
        side = path.with_name(path.name + ".moebatch")
        if side.exists() and not side.is_dir():
            raise UsageError(f"{side} is in the way: it is no folder", hint="choose another -o")
        if partial_path(path).is_dir():
            raise UsageError(f"{partial_path(path)} is in the way: it is a folder")
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, a loop of links, NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the output {path!s:.100} cannot be used: {reason}") from error


def _check_folder(path: Path) -> None:
    """A folder for parts; what is kept meanwhile goes beside it."""
    for folder in (path, path.resolve().parent):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(
                f"the folder {folder} cannot be written to", hint="choose another place"
            )


def _check_file_place(path: Path, *, name: str) -> None:
    if path.is_dir():
        raise UsageError(
            f"the {name} {path} is a folder",
            hint="name a file in it; with --output-format parquet a folder takes parts",
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"the {name} {path} is no regular file", hint="-o - writes to a pipe")
    parent = path.resolve().parent
    if not parent.is_dir():
        raise UsageError(
            f"the folder {parent} does not exist", hint=f"create it: mkdir -p {parent}"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"the folder {parent} cannot be written to", hint="choose another place")


def _check_not_input(path: Path, *, inputs: Sequence[str]) -> None:
    partial = partial_path(path).resolve()
    for name in inputs:
        if Path(name).resolve() in (path.resolve(), partial) or _same_file(path, name):
            raise UsageError(f"the output {path} is also the input", hint="choose another -o")


def check_beside(path: Path, *, option: str, output: Destination, inputs: Sequence[str]) -> None:
    """Check early that a file beside the output, such as a report, can be written at the end.

    Raises: UsageError also where it would overwrite the output or an input.
    """
    if path == Path("-"):
        raise UsageError(f"{option} - is not possible: name a file")
    try:
        _check_file_place(path, name=f"file of {option}")
        others = [Path(name) for name in inputs]
        others += [] if output == "-" else [output, partial_path(output)]
        if path.resolve() in [other.resolve() for other in others]:
            raise UsageError(f"{option} {path} would overwrite the output or an input")
        if output != "-" and _is_kept_work(path.resolve(), side=side_path(output).resolve()):
            raise UsageError(f"{option} {path} would overwrite what the run keeps")
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{option} {path!s:.100} cannot be used: {reason}") from error


def _is_kept_work(path: Path, *, side: Path) -> bool:
    """Whether a file is one of a run's own, the report apart, which has its place there."""
    return path.parent == side and path.name != "report.json"


def _same_file(path: Path, name: str) -> bool:
    """Whether two names mean one file by a hard link."""
    with contextlib.suppress(OSError):
        return path.samefile(name)
    return False


def resolve_format(
    path: Destination, *, output_format: OutputFormat
) -> Literal["jsonl", "parquet"]:
    """The format that "auto" means: Parquet for names that say so, lines of JSON for the rest.

    Raises: UsageError for a format that does not exist, or a name that promises another one.
    """
    if output_format not in get_args(OutputFormat):
        raise UsageError(
            f"{output_format!r} is not an output format",
            hint=f"one of: {', '.join(get_args(OutputFormat))}",
        )
    if output_format != "auto":
        return output_format
    suffix = "" if path == "-" else path.suffix.lower()
    if suffix in _OTHER_FORMATS:
        raise UsageError(
            f"the output {path} would be no {suffix} file: outputs are JSONL or Parquet",
            hint="name it .jsonl or .parquet, or insist with --output-format jsonl",
        )
    return "parquet" if suffix in _TABLES else "jsonl"


def partial_path(path: Path) -> Path:
    """Where the rows lie until the run is over, in order, without a gap.

    After a crash the last line may be torn.
    """
    return path.with_name(path.name + ".partial")
