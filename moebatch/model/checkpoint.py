"""Safetensors files on disk -> named byte ranges, read in place.

Nothing is mapped: `read_into` fills a buffer of the caller's by pread, so the peak memory is the
caller's to decide, and several threads may read at once.
Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header,
data without gaps).
"""

import errno
import json
import os
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from threading import Lock, local
from typing import Any

import numpy as np

from moebatch.errors import ModelError
from moebatch.model.direct_io import LARGEST_REQUEST, Extent, Stage, Take
from moebatch.model.families.parts import Part
from moebatch.model.stored import Quantization, TensorEntry, check_part, quantization_of

# The last four only in quantised matrices.
_DTYPES: dict[str, tuple[str, int]] = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3", 1),
    "U8": ("uint8", 1),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
}
_MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit
# Less than this is better left to the system's cache, whatever else streams by.
_LEAST_DIRECT = 256 << 10
# Tensors that lie side by side in one file, in order.
Run = Sequence[TensorEntry]


def runs_of(entries: Iterable[TensorEntry]) -> list[list[TensorEntry]]:
    """Entries in the order of the files, neighbours together that one request can bring."""
    runs: list[list[TensorEntry]] = []
    for entry in sorted(entries, key=lambda entry: (entry.path, entry.offset)):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last.path, last.offset + last.num_bytes) == (entry.path, entry.offset)
            and _bytes_of(runs[-1]) + entry.num_bytes <= LARGEST_REQUEST
        ):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def goes_direct(run: Run) -> bool:
    """Whether a run that is not to be cached is read past the cache, if the file system can."""
    return _bytes_of(run) >= _LEAST_DIRECT


def _bytes_of(run: Run) -> int:
    return sum(entry.num_bytes for entry in run)


class Checkpoint:
    """The tensors of a model directory, single-file or sharded. Close it, or use it in a `with`."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files and check that each file holds what its header says.

        Raises: ModelError when a file is missing, truncated or damaged.
        """
        config = directory / "config.json"
        known = os.path.exists(config)
        self.quantization = quantization_of(read_json(config)) if known else Quantization()
        self._entries: dict[str, TensorEntry] = {}
        self._files: dict[Path, int] = {}
        self._direct: dict[Path, int | None] = {}  # opened so, when first read; None: not possible
        self._opened: list[int] = []  # for that; also those that then could not be read so
        self._opening, self._stages = Lock(), local()
        paths = _weight_files(directory)
        for path in paths:
            self._entries |= {entry.name: entry for entry in _read_header(path)}
        try:
            for path in paths:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise ModelError(f"cannot read {path}: {error.strerror}") from error

    def entry(self, name: str) -> TensorEntry:
        """Where the named tensor lies.

        Raises: ModelError when the checkpoint has no such tensor.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise ModelError(
                f"the checkpoint has no tensor {name}",
                hint="the download is incomplete, or config.json belongs to another model",
            ) from None

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        return name in self._entries

    def check(self, parts: Iterable[Part]) -> None:
        """Compare names and shapes with what the model needs, before any weight is read.

        Raises: ModelError naming the first tensor that is missing or has another shape or type.
        """
        for part in parts:
            check_part(self, part)

    def read_into(self, entry: TensorEntry, buffer: memoryview, *, cached: bool = True,
                  following: Run = ()) -> None:  # fmt: skip
        """`read_run` of a single tensor."""
        self.read_run((entry,), (buffer,), cached=cached, following=following)

    def read_run(self, run: Run, buffers: Sequence[memoryview], *, cached: bool = True,
                 following: Run = (), take: Take | None = None) -> None:  # fmt: skip
        """Fill each buffer (exactly as many bytes as its entry has) from the file.

        `take` is given the bytes as they come and puts them there itself: all of them, in order.

        Bytes that are not to be `cached` do not stay in the system's page cache: weights that are
        streamed come again and again and would only push other memory out. `following` is what the
        same thread reads next; its first bytes may be fetched already.
        Raises: ModelError when the file ends early or cannot be read.
        """
        sizes = [len(buffer) for buffer in buffers]
        assert sizes == [entry.num_bytes for entry in run], (sizes, run)
        if not cached and goes_direct(run) and self._read_direct(run, buffers, following, take):
            return
        for which, (entry, buffer) in enumerate(zip(run, buffers, strict=True)):
            self._read_cached(entry, buffer)
            if take is not None:
                take(which, np.frombuffer(buffer, dtype=np.uint8), 0)
            if not cached and goes_direct(run):
                self._forget(entry)

    def _read_direct(self, run: Run, buffers: Sequence[memoryview], following: Run,
                     take: Take | None) -> bool:  # fmt: skip
        """Whether the file system could read past its cache."""
        extent = self._extent(run)
        if extent is None:
            return False
        if not hasattr(self._stages, "stage"):
            self._stages.stage = Stage()
        targets = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
        then = self._extent(following) if goes_direct(following) else None
        try:
            self._stages.stage.read(extent, targets, then, take=take)
        except EOFError:
            raise _cut_off(run[-1]) from None
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._direct[run[0].path] = None
                return False
            raise ModelError(f"cannot read {run[0].path}: {error.strerror}") from error
        return True

    def _extent(self, run: Run) -> Extent | None:
        path = run[0].path
        with self._opening:
            if path not in self._direct:
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                    self._opened.append(fd)
                except (AttributeError, OSError):  # the system has no such flag, or the file system
                    fd = None
                self._direct[path] = fd
            fd = self._direct[path]
        return None if fd is None else Extent(fd, run[0].offset, _bytes_of(run))

    def _read_cached(self, entry: TensorEntry, buffer: memoryview) -> None:
        fd, done = self._files[entry.path], 0
        try:
            while done < entry.num_bytes:
                count = os.preadv(fd, [buffer[done:]], entry.offset + done)
                if count == 0:
                    raise _cut_off(entry)
                done += count
        except OSError as error:
            raise ModelError(f"cannot read {entry.path}: {error.strerror}") from error

    def _forget(self, entry: TensorEntry) -> None:
        fd = self._files[entry.path]
        os.posix_fadvise(fd, entry.offset, entry.num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close all files."""
        for fd in (*self._files.values(), *self._opened):
            os.close(fd)
        self._files.clear()
        self._direct.clear()
        self._opened.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _cut_off(entry: TensorEntry) -> ModelError:
    return ModelError(f"{entry.path} ends inside tensor {entry.name}",
                      hint="the file was cut off; fetch it again")  # fmt: skip


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not os.path.exists(index):  # Path.exists raises where a directory may not be searched
        single = directory / "model.safetensors"
        if os.path.exists(single):
            return [single]
        raise ModelError(
            f"{directory} holds no model.safetensors and no model.safetensors.index.json",
            hint="give a directory in the Hugging Face layout, with weights as safetensors",
        )
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(map(_is_file_name, names)):
        raise ModelError(f"{index} names no weight files", hint="fetch the file again")
    files = [directory / name for name in sorted(set(names))]
    missing = [path.name for path in files if not os.path.exists(path)]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(files)} weight files are missing in {directory}: {missing[0]}"
            + (" …" if len(missing) > 1 else ""),
            hint="the download is incomplete; fetch the missing files",
        )
    return files


def _is_file_name(name: object) -> bool:
    """Whether this is the name of a file in the directory itself."""
    return isinstance(name, str) and name.isprintable() and Path(name).name == name != ""


def _read_header(path: Path) -> list[TensorEntry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 0 < length <= min(size, _MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    try:
        header = json.loads(text)
        tensors = {name: info for name, info in header.items() if name != "__metadata__"}
        entries = [_entry(path, 8 + length, name, info) for name, info in tensors.items()]
        end = _end(entries, 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(
            f"{path} is no safetensors file: its header cannot be read",
            hint="the file is damaged or cut off; fetch it again",
        ) from None
    if end != size:
        raise ModelError(
            f"{path} is {'cut off' if end > size else 'too long'}: it has {size} bytes,"
            f" its header speaks of {end}",
            hint="the download is incomplete or damaged; fetch the file again",
        )
    return entries


def _end(entries: list[TensorEntry], start: int) -> int:
    """Where the last tensor ends.

    Raises: ValueError unless the tensors follow each other without gap or overlap.
    """
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != start:
            raise ValueError(entry.name)
        start += entry.num_bytes
    return start


def _entry(path: Path, data_start: int, name: str, info: dict[str, Any]) -> TensorEntry:
    begin, end = info["data_offsets"]
    shape = tuple(info["shape"])
    whole = all(type(n) is int and 0 <= n < 1 << 63 for n in (begin, end, *shape))
    if not whole or not f"{name}{info['dtype']}".isprintable():
        raise ValueError(name)
    if info["dtype"] not in _DTYPES:
        raise ModelError(
            f"tensor {name} has data type {info['dtype']}, which is not supported",
            hint="supported are BF16, F16 and F32, and what quantised ones are made of: "
            + ", ".join(list(_DTYPES)[3:]),
        )
    dtype, item_bytes = _DTYPES[info["dtype"]]
    if end - begin != prod(shape) * item_bytes:
        raise ValueError(name)
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=shape,
        path=path,
        offset=data_start + begin,
        num_bytes=end - begin,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model directory.

    Raises: ModelError when the file cannot be read or is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no valid JSON: {error}", hint="fetch it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object", hint="fetch the file again")
    return value
