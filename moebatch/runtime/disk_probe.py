"""Measures the disk as the engine reads it: whole pages, beside a processor that computes."""

import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_PAGE = 16 << 20
_PAGES = 16
_MATRIX = 1024


def disk_bandwidth(directory: Path) -> float:
    """Bytes per second of reading pages of a fresh file that is not in the page cache."""
    directory.mkdir(parents=True, exist_ok=True)
    block = os.urandom(_PAGE)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="moebatch-probe-") as file:
        for _ in range(_PAGES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _read_rate(file.fileno())


def file_bandwidth(path: Path) -> float:
    """The same for a file that is there already, such as a checkpoint; reads 256 MiB of it at most."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _read_rate(descriptor)
    finally:
        os.close(descriptor)


def _read_rate(descriptor: int) -> float:
    """Pages from all over the file: one part may lie in some cache below the operating system's.

    They are read while all cores multiply, as in a pass: a reader alone would be faster.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        reading = pool.submit(_read_pages, descriptor)
        matrix = torch.randn(_MATRIX, _MATRIX)
        while not reading.done():
            torch.mm(matrix, matrix)
        return reading.result()


def _read_pages(descriptor: int) -> float:
    buffer = memoryview(bytearray(_PAGE))
    drop = getattr(os, "posix_fadvise", None)
    if drop is not None:
        drop(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    pages = max(1, os.fstat(descriptor).st_size // _PAGE)
    start, done = time.perf_counter(), 0
    for page in sorted(random.sample(range(pages), min(pages, _PAGES))):
        done += os.preadv(descriptor, [buffer], page * _PAGE)
    return max(done, 1) / (time.perf_counter() - start)
