"""Measures the disk as the engine reads it: whole pages, in any order."""

import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from moebatch.model.direct_io import Extent, Stage

_PAGE = 16 << 20
_PAGES, _WRITTEN = 64, 16
_ENOUGH_S = 0.6


def disk_bandwidth(directory: Path) -> float:
    """Bytes per second of reading pages of a fresh file that is not in the page cache."""
    directory.mkdir(parents=True, exist_ok=True)
    block = os.urandom(_PAGE)
    with tempfile.NamedTemporaryFile(dir=directory, prefix="moebatch-probe-") as file:
        for _ in range(_WRITTEN):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return file_bandwidth(Path(file.name))


def file_bandwidth(path: Path) -> float:
    """The same for a file that is there already, such as a checkpoint; reads 1 GiB of it at most.

    Pages are from all over the file: one part may lie in some cache below the operating system's.
    """
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
        target, taken = np.zeros(page, dtype=np.uint8), []
        target.fill(0)
        end = time.perf_counter() + _ENOUGH_S
        for extent in random.sample(extents, min(len(extents), _PAGES)):
            start = time.perf_counter()
            stage.read(extent, [target])
            taken.append(time.perf_counter() - start)
            if time.perf_counter() > end:
                break
        # The first ones also fault in our memory, and a virtual disk takes a breath now and then.
        return page / statistics.median(taken) if taken else 1.0
    finally:
        os.close(descriptor)
