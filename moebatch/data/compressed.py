"""Files of bytes, plain or compressed: gzip and Zstandard are known by their first bytes.

Names are not asked: neither format can be mistaken for text, and users' suffixes are often wrong.
"""

import gzip
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


@contextmanager
def open_bytes(name: str) -> Iterator[IO[bytes]]:
    """The content of a file, or of standard input for "-", decompressed while it is read.

    Raises: OSError; reading raises OSError, EOFError or zlib.error where the content is damaged.
    """
    with open_raw(name) as file:
        yield _decompressed(file)


@contextmanager
def open_raw(name: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, or of standard input for "-", as they are.

    Raises: OSError.
    """
    if name == "-":
        yield sys.stdin.buffer
    else:
        with open(name, "rb") as file:
            yield file


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    start = file.peek(4)[:4] if isinstance(file, io.BufferedReader) else b""
    if start[:2] == _GZIP:
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if start == _ZSTANDARD:
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file), "zstd"))
    return file
