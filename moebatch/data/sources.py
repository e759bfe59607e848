"""Where the rows lie: paths, globs, folders, standard input and the hub become a list of sources.

Decides formats by name and finds what is missing, before anything is read.
"""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from moebatch.errors import InputError, InputNotFound, UsageError

InputFormat = Literal["auto", "jsonl", "parquet", "csv", "txt"]
SourceKind = Literal["jsonl", "parquet", "csv", "txt", "saved", "hub"]

_HUB = "hf://datasets/"
_SUFFIXES: dict[str, SourceKind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
    ".pq": "parquet", ".csv": "csv", ".txt": "txt",
}  # fmt: skip
_COMPRESSED = (".gz", ".zst", ".zstd")
# A folder of data also holds README.txt and dataset_info.json, which are no rows.
_NOT_FROM_FOLDERS = (".txt", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One thing to read rows from: a file, standard input ("-"), a saved or a hub data set.

    `copy` is the file that holds its bytes where it could be read only once.
    """

    kind: SourceKind
    name: str
    copy: str | None = None


def find_sources(names: Sequence[str], *, input_format: InputFormat = "auto") -> list[Source]:
    """All sources that the names mean, in the order given; files of a folder or glob by name.

    Raises: InputNotFound, InputError, UsageError.
    """
    if input_format not in get_args(InputFormat):
        raise UsageError(
            f"{input_format!r} is not an input format",
            hint=f"one of: {', '.join(get_args(InputFormat))}",
        )
    if list(names).count("-") > 1:
        raise UsageError("standard input can be read only once, and - is given twice")
    return [source for name in names for source in _expand(name, input_format=input_format)]


def _expand(name: str, *, input_format: InputFormat) -> list[Source]:
    if name == "-":
        return [_standard_input(input_format)]
    if name.startswith(_HUB):
        return [Source(kind="hub", name=name.removeprefix(_HUB))]
    if not name:
        raise UsageError("a data set has an empty name", hint="name a file, or . for this folder")
    try:
        return _on_disk(name, input_format=input_format)
    except PermissionError as error:
        raise InputError(f"{error.filename or name} may not be read") from error
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, a loop of links, NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputNotFound(f"{name:.100} cannot be looked up: {reason}") from error


def _on_disk(name: str, *, input_format: InputFormat) -> list[Source]:
    path = Path(name)
    if path.is_dir():
        return _folder(path, input_format=input_format)
    if path.exists():
        return [_file(path, input_format=input_format)]
    return [_file(Path(match), input_format=input_format) for match in _matches(name)]


def _standard_input(input_format: InputFormat) -> Source:
    if input_format == "parquet":
        raise UsageError(
            "Parquet cannot be read from standard input", hint="give the path of the file"
        )
    return Source(kind="jsonl" if input_format == "auto" else input_format, name="-")


def _matches(pattern: str) -> list[str]:
    matches = sorted(glob.glob(pattern, recursive=True))
    found = [match for match in matches if Path(match).is_file() and not _is_ours(Path(match))]
    if not found:
        what = "no file matches" if glob.has_magic(pattern) else "no such file or folder:"
        raise InputNotFound(f"{what} {pattern}")
    return found


def _file(path: Path, *, input_format: InputFormat) -> Source:
    kind = _suffix_kind(path) if input_format == "auto" else input_format
    if kind is None:
        raise InputError(
            f"the format of {path} is not known by its name",
            hint="name it with --input-format jsonl, parquet, csv or txt",
        )
    return Source(kind=kind, name=str(path))


def _suffix_kind(path: Path) -> SourceKind | None:
    """The format that a name promises; without a suffix (a pipe, /dev/fd/63) lines of JSON."""
    suffix = _data_suffix(path)
    return "jsonl" if not suffix else _SUFFIXES.get(suffix)


def _data_suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def _folder(path: Path, *, input_format: InputFormat) -> list[Source]:
    if any((path / marker).exists() for marker in ("state.json", "dataset_dict.json")):
        return [Source(kind="saved", name=str(path))]
    files = [file for file in sorted(path.rglob("*")) if _is_data(file, input_format=input_format)]
    if not files:
        raise InputError(
            f"the folder {path} holds no data files",
            hint="expected .jsonl, .parquet or .csv; other files can be named one by one",
        )
    return [_file(file, input_format=input_format) for file in files]


def _is_data(file: Path, *, input_format: InputFormat) -> bool:
    """Whether a file of a folder holds rows: of the format asked for, or of any clear one."""
    if not file.is_file() or file.name.startswith(".") or _is_ours(file):
        return False
    suffix = _data_suffix(file)
    if input_format == "auto":
        return suffix in _SUFFIXES and suffix not in _NOT_FROM_FOLDERS
    return _SUFFIXES.get(suffix) == input_format


def _is_ours(file: Path) -> bool:
    """Whether a file is the journal or report of some run, which lie beside its output."""
    return any(part.endswith(".moebatch") for part in file.parts[:-1])
