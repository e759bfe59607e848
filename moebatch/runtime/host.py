"""This machine as the operating system describes it: free memory, cgroup limits, our own use.

Reads /proc and /sys where there are any; elsewhere it falls back on what POSIX tells.
"""

import ctypes
import os
import platform
import resource
from pathlib import Path
from typing import Any

# Left to the rest of the machine when the budget is "auto": page cache, other programs, estimates.
_MARGIN_SHARE = 0.1
# Work space of oneDNN, MKL and OpenMP, and holes of the heap: measured peak less planned peak without
# it, on a 1.15 B-parameter model under 1.5 GiB (2026-11).
_LIBRARY_BYTES = 120 << 20
# malloc.h of glibc: parameters of mallopt, and the largest value that it takes for the first.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_DONTNEED = 4  # asm-generic/mman-common.h of Linux
_SMALL_BLOCK = 128 << 10
_LARGEST_HEAP_BLOCK = 32 << 20
_CGROUP = Path("/sys/fs/cgroup")


def rss_bytes() -> int:
    """Resident memory of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_rss_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def base_bytes() -> int:
    """Resident memory now, and what the libraries will add as soon as they compute."""
    return rss_bytes() + _LIBRARY_BYTES


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far.

    Not getrusage where /proc exists: a child inherits its parent's peak there.
    """
    status = _field(Path("/proc/self/status"), "VmHWM:")
    if status is not None:
        return status * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def available_bytes() -> int:
    """What this process may hold in all, its present use included: free on the machine, or what
    its cgroup leaves, whichever is less; file cache counts as free."""
    own = rss_bytes()
    free = _field(Path("/proc/meminfo"), "MemAvailable:")
    if free is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    cgroup = _cgroup_free_bytes()
    machine = free * 1024
    return own + (machine if cgroup is None else min(machine, cgroup))


def default_budget_bytes() -> int:
    """The budget of `--memory auto`: what is available, less a margin."""
    return int(available_bytes() * (1 - _MARGIN_SHARE))


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def describe() -> dict[str, Any]:
    """The machine for a report."""
    return {
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": None,
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _field(path: Path, name: str) -> int | None:
    """The number that follows a name in one of the kernel's text files."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def cgroup_limit_bytes() -> int | None:
    """What the control group allows in all; None where there is no limit."""
    usage = _cgroup_usage()
    return None if usage is None else usage[0]


def _cgroup_free_bytes() -> int | None:
    """What the cgroup still allows; None where there is no limit."""
    usage = _cgroup_usage()
    return None if usage is None else max(0, usage[0] - usage[1])


def _cgroup_usage() -> tuple[int, int] | None:
    """Limit and use without file cache, v2 or v1; None where there is no limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            text = (_CGROUP / limit).read_text().strip()
            if text == "max" or int(text) > machine:
                return None
            used = int((_CGROUP / usage).read_text())
        except (OSError, ValueError):
            continue
        stat = (_CGROUP / limit).with_name("memory.stat")
        return int(text), used - (_field(stat, cache) or 0)
    return None


def return_freed_memory(at_once: bool) -> None:
    """Tell glibc what to do with large blocks that are freed; elsewhere nothing happens.

    True: give each back to the system at once. While weights are packed, large short-lived copies
    alternate with large blocks that stay, and a heap would keep the holes: twice the memory was seen.
    False: keep them for the next use, which spares a page fault for every 4 KiB of activations.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _SMALL_BLOCK if at_once else _LARGEST_HEAP_BLOCK)
    mallopt(_M_TRIM_THRESHOLD, _SMALL_BLOCK if at_once else 4 * _LARGEST_HEAP_BLOCK)


def give_back(address: int, num_bytes: int) -> int:
    """Return the whole pages of a range of our memory to the system; they read as zeros then.

    Only for memory that a large allocation got from the system. The bytes that were given back; 0
    where the system has no such call.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-address // page) * page
    length = (address + num_bytes) // page * page - start
    if length <= 0 or platform.system() != "Linux":
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return length if madvise(start, length, _MADV_DONTNEED) == 0 else 0
