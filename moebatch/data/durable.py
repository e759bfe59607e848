"""Files that survive a crash: appended to, replaced in one step, forced to the disk.

Everything that a run keeps goes through here. Nothing is buffered that `flush` has not written, and
a file under its final name is whole.
"""

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from moebatch.errors import OutputWriteError

_BUFFER_BYTES = 1 << 18


class AppendFile:
    """A file that grows. `write` buffers, `flush` hands over to the system, `sync` to the disk."""

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        """Open for writing after the first `keep_bytes`; what follows them is cut off.

        Raises: OSError.
        """
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._buffer = bytearray()
        self.num_bytes = keep_bytes
        try:
            if os.fstat(self._fd).st_size > keep_bytes:
                os.ftruncate(self._fd, keep_bytes)
            os.lseek(self._fd, keep_bytes, os.SEEK_SET)
        except OSError:
            self.close()
            raise

    def write(self, content: bytes) -> None:
        """Add bytes.

        Raises: OSError.
        """
        self._buffer += content
        self.num_bytes += len(content)
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """From here on the bytes survive the end of this process.

        Raises: OSError.
        """
        while self._buffer:
            written = os.write(self._fd, self._buffer)
            del self._buffer[:written]

    def sync(self) -> None:
        """From here on the bytes survive the end of the machine.

        Raises: OSError.
        """
        self.flush()
        sync(self._fd)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes written before.

        Raises: OSError.
        """
        self.flush()
        return os.pread(self._fd, length, offset)

    def close(self) -> None:
        """Close; what was not flushed is dropped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sync(fd: int) -> None:
    """Force a file to the disk; devices and pipes have none.

    Raises: OSError.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def new_path(path: Path) -> Path:
    """Where the new content of a file stands until it is whole; a crash may leave it there."""
    return path.with_name(path.name + ".new")


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file so that a crash leaves either the old one or the new one.

    Raises: OSError; the old file is then untouched.
    """
    new = new_path(path)
    file = AppendFile(new)
    try:
        for piece in pieces:
            file.write(piece)
        file.sync()
        file.close()
        publish(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    finally:
        file.close()


def publish(path: Path, final: Path) -> None:
    """Give a file that is on the disk its final name, in one step that lasts.

    Raises: OSError.
    """
    os.replace(path, final)
    sync_folder(final.resolve().parent)


def remove(path: Path) -> None:
    """Delete a file if it is there.

    Raises: OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut; some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_error(path: Path | str, error: OSError, *, kept: str = "") -> OutputWriteError:
    """What the system says about a failed write, as one line for the user."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "free some space" if full else "check the disk"
    return OutputWriteError(
        f"cannot write {path}: {error.strerror or error}{kept}",
        hint=f"{advice}, then run the same command again",
    )
