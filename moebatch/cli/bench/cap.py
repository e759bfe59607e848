"""A memory limit for the processes of an arm: a control group of its own, where one can be made.

The limit counts anonymous memory and file cache, so a rival that offloads to disk really reads the
disk. Without the right to make a control group there is no limit, and reports say so.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class MemoryCap:
    """One control group."""

    def __init__(self, group: Path) -> None:
        self._procs = str(group / "cgroup.procs")

    def wrap(self, command: Sequence[str]) -> list[str]:
        """A command that joins the group, then becomes the given one."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', self._procs, *command]


@contextmanager
def memory_cap(num_bytes: int | None) -> Iterator[MemoryCap | None]:
    """A group that may hold so many bytes; None where there is nothing to limit or no right to."""
    group = None if num_bytes is None else _make(num_bytes)
    try:
        yield None if group is None else MemoryCap(group)
    finally:
        if group is not None:
            with suppress(OSError):  # a process that is still ending keeps it a moment longer
                group.rmdir()


def _make(num_bytes: int) -> Path | None:
    for parent, limit in _own_groups():
        group = parent / f"moebatch-bench-{os.getpid()}"
        try:
            group.mkdir(exist_ok=True)
            (group / limit).write_text(str(num_bytes))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        return group
    return None


def _own_groups() -> list[tuple[Path, str]]:
    """This process's control groups that could have one below them, and the name of their limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((_ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
        elif not controllers:
            found.append((_ROOT / path.lstrip("/"), "memory.max"))
    return [(group, limit) for group, limit in found if group.is_dir()]
