"""OUT.moebatch: the folder beside an output in which a run keeps its work, and its lock.

manifest.json: which run this is; journal-*.jsonl: finished rows; inflight.bin: tokens of unfinished
ones; progress: counters; report.json; log.txt; lock: who writes.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moebatch.data import durable
from moebatch.data.journal import parts
from moebatch.data.manifest import Manifest, read_manifest
from moebatch.data.parquet_parts import part_paths
from moebatch.errors import OutputError, OutputLocked, UsageError

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_WAYS_OUT = "--overwrite drops what is there and starts afresh; or choose a new -o"


def side_path(output: Path) -> Path:
    """The folder that belongs to an output."""
    return output.with_name(output.name + ".moebatch")


def has_output(output: Path) -> bool:
    """Whether there is an output: a file, or a folder with parts of a table."""
    return bool(part_paths(output)) if output.is_dir() else output.exists()


class SideDirectory:
    """The folder, locked for this process until `close`. Use it in a `with`."""

    def __init__(self, output: Path) -> None:
        """Create the folder where there is none, and lock it.

        Raises: UsageError when it cannot be written to, OutputLocked when another process that is
        alive has it, OutputWriteError.
        """
        self.output, self.path = output, side_path(output)
        self._lock = -1
        try:
            self.path.mkdir(exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock = os.open(self.path / "lock", flags, 0o666)
            self._take_lock()
        except OSError as error:
            self.close()
            if error.errno in _UNWRITABLE:
                raise UsageError(
                    f"{self.path} cannot be written to: {error.strerror}",
                    hint="choose another -o",
                ) from error
            raise durable.write_error(self.path, error) from error
        except OutputLocked:
            self.close()
            raise

    @property
    def manifest_path(self) -> Path:
        """Where the run's identity stands."""
        return self.path / "manifest.json"

    @property
    def inflight_path(self) -> Path:
        """Where the tokens of unfinished rows stand."""
        return self.path / "inflight.bin"

    def begin(self, fresh: Manifest, *, overwrite: bool, resume: bool) -> Manifest:
        """The manifest to go on with: the one that is there if this run matches it, else `fresh`.

        Raises: OutputError when there is work of another run, or an output that is not ours.
        """
        there = read_manifest(self.manifest_path)
        if overwrite:
            there = None
        elif there is None and self.manifest_path.exists() and self._has_work():
            raise OutputError(
                f"{self.manifest_path} cannot be read, so what is kept beside it cannot be used",
                hint=_WAYS_OUT,
            )
        elif there is None and has_output(self.output):
            raise OutputError(
                f"{self.output} exists already", hint="add --overwrite, or choose another -o"
            )
        elif there is not None and self._has_work():
            self._check(there, fresh, resume=resume)
            return there
        elif there is not None and not there.differences(fresh.fingerprint):
            return there
        self._clear()
        return fresh

    def log(self, text: str) -> None:
        """Add a line to log.txt; a log that cannot be written stops nothing."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
        with contextlib.suppress(OSError), open(self.path / "log.txt", "a") as file:
            file.write(f"{stamp} {text}\n")

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, there: Manifest, fresh: Manifest, *, resume: bool) -> None:
        if not resume:
            raise OutputError(f"{self.output} has been begun already", hint=_WAYS_OUT)
        if different := there.differences(fresh.fingerprint):
            raise OutputError(
                f"{self.output} belongs to a run that differs: {'; '.join(different)}",
                hint=_WAYS_OUT,
            )

    def _has_work(self) -> bool:
        """Whether anything would be lost: else another run may take the place."""
        files = [*parts(self.path), self.inflight_path]
        return has_output(self.output) or any(f.exists() and f.stat().st_size for f in files)

    def _clear(self) -> None:
        """Drop what an earlier run kept; the manifest first, so that a crash leaves no half."""
        try:
            for path in (self.manifest_path, self.inflight_path, *parts(self.path)):
                durable.remove(path)
            durable.remove(self.path / "progress")
        except OSError as error:
            raise durable.write_error(self.path, error) from error

    def _take_lock(self) -> None:
        """A lock of the system, not the file's existence: it ends with the process that holds it."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise OutputLocked(
                    f"{self.output} is being written by {_holder(self._lock)}",
                    hint="wait for it to end, or choose another -o",
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise  # a file system without locks: the run goes on without one
        said = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, said.encode() + b"\n", 0)


def _holder(lock: int) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said: Mapping[str, Any] = json.loads(os.pread(lock, 4096, 0))
        return f"process {said['pid']} on {said['host']}"
    return "another process"


def is_locked(output: Path) -> str | None:
    """Who writes an output now, in words; None where nobody does. Not for the writer itself."""
    try:
        lock = os.open(side_path(output) / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return _holder(lock)
    finally:
        os.close(lock)
    return None
