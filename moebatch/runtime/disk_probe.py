"""Measures the disk as the engine reads it: whole pages, beside a processor that computes."""

import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from moebatch.model.direct_io import Extent, Stage

_PAGE = 16 << 20
_PAGES = 32
_ENOUGH_S = 0.6
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
        return file_bandwidth(Path(file.name))


def file_bandwidth(path: Path) -> float:
    """The same for a file that is there already, such as a checkpoint; reads 512 MiB of it at most.

    Pages are from all over the file: one part may lie in some cache below the operating system's.
    They are read while all cores multiply, as in a pass: a reader alone would be faster.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        reading = pool.submit(_read_pages, path)
        matrix = torch.randn(_MATRIX, _MATRIX)
        while not reading.done():
            torch.mm(matrix, matrix)
        return reading.result()


def _read_pages(path: Path) -> float:
    try:
        return _read_rate(path, direct=True)
    except (AttributeError, OSError):  # not on this system, or not in this file system
        return _read_rate(path, direct=False)


def _read_rate(path: Path, *, direct: bool) -> float:
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    descriptor, stage = os.open(path, flags), Stage()
    drop = getattr(os, "posix_fadvise", None)
    try:
        if not direct and drop is not None:
            drop(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(descriptor).st_size
        page = min(size, _PAGE)
        extents = [Extent(descriptor, start, page) for start in range(0, size - page + 1, page)]
        target, done = np.empty(page, dtype=np.uint8), 0
        start = time.perf_counter()
        for extent in random.sample(extents, min(len(extents), _PAGES)):
            stage.read(extent, [target])
            done += page
            if time.perf_counter() - start > _ENOUGH_S:
                break
        return max(done, 1) / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
