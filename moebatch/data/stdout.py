"""Standard output as a place for rows, and what to do once its reader has gone away."""

import contextlib
import os
import sys


class Stdout:
    """Standard output with the interface of a file that grows."""

    num_bytes = 0

    def write(self, content: bytes) -> None:
        """Write every byte: an unbuffered standard output (PYTHONUNBUFFERED) may take only some."""
        left = memoryview(content)
        while left:
            left = left[sys.stdout.buffer.write(left) :]

    def flush(self) -> None:
        sys.stdout.buffer.flush()

    def sync(self) -> None:
        self.flush()

    def close(self) -> None:
        """It is not ours to close."""


def silence_stdout() -> None:
    """Let what is left in Python's buffer go nowhere, or it would fail once more at exit."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
