"""Runs one arm in a process of its own and watches its memory: all of its descendants, many times a
second."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebatch.cli.bench.cap import MemoryCap

_EVERY_S = 0.1
_MOST_SAMPLES = 300
_LAST_LINES = 12
_PROC = Path("/proc")
Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A process that has ended. `events` are the JSON lines of its standard output.

    `peak_bytes` and `samples` (seconds, bytes) are resident memory of the process and all below it;
    None and empty where the system does not tell. `capped`: whether its memory was limited.
    `others_share` of all processors' time went to other programs meanwhile; None where not known.
    """

    code: int
    events: tuple[Event, ...]
    error: str
    peak_bytes: int | None
    samples: tuple[tuple[float, int], ...]
    started_at: float
    capped: bool
    others_share: float | None


def watch(command: Sequence[str], *, cap: MemoryCap | None = None, timeout_s: float,
          environment: Mapping[str, str] | None = None,
          on_event: Callable[[Event], None] = lambda event: None) -> Watched:  # fmt: skip
    """Run a command to its end; when this is interrupted, so is the command."""
    started_at, before = time.time(), _processor_s()
    process = subprocess.Popen(
        command if cap is None else cap.wrap(command), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    events: list[Event] = []
    errors: list[str] = []
    readers = [
        threading.Thread(target=_read_events, args=(process, events, on_event), daemon=True),
        threading.Thread(target=_read_errors, args=(process, errors), daemon=True),
    ]
    for reader in readers:
        reader.start()
    samples: list[tuple[float, int]] = []
    own: dict[int, int] = {}  # clock ticks of every process below us, as last seen
    peak = 0
    try:
        while process.poll() is None:
            now = time.time() - started_at
            if now > timeout_s:
                errors.append(f"ended after {timeout_s:.0f} s: it takes too long")
                _end(process)
                break
            size, ticks = tree(process.pid)
            own.update(ticks)
            if size:
                samples.append((now, size))
                peak = max(peak, size, _high_water(process.pid))
            time.sleep(_EVERY_S)
    except BaseException:
        _end(process)
        raise
    _end_group(process.pid)  # an engine may leave processes of its own behind
    for reader in readers:
        reader.join(timeout=5)
    return Watched(
        code=process.wait(), events=tuple(events), error=_reason(errors, process.returncode),
        peak_bytes=peak or None, samples=thinned(samples), started_at=started_at,
        capped=cap is not None,
        others_share=_others_share(before, own, time.time() - started_at),
    )  # fmt: skip


def _processor_s() -> float | None:
    """Processor seconds of everything on the machine."""
    try:
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, softirq = map(float, fields[:7])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _others_share(before: float | None, own: Mapping[int, int], wall_s: float) -> float | None:
    """Of the processors' time since then, what neither the watched processes nor idling took."""
    after = _processor_s()
    if before is None or after is None or wall_s <= 0:
        return None
    others = after - before - sum(own.values()) / os.sysconf("SC_CLK_TCK")
    return min(1.0, max(0.0, others / wall_s / (os.cpu_count() or 1)))


def tree(root: int) -> tuple[int, dict[int, int]]:
    """Resident bytes of a process and all below it, and clock ticks that each of them has had;
    nothing where the system does not tell."""
    children: dict[int, list[int]] = {}
    had: dict[int, int] = {}
    try:
        entries = [name for name in os.listdir(_PROC) if name.isdecimal()]
    except OSError:
        return 0, {}
    for name in entries:
        try:
            fields = (_PROC / name / "stat").read_text().rsplit(")", 1)[1].split()
            parent, had[int(name)] = int(fields[1]), int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(name))
    page, total, waiting = os.sysconf("SC_PAGE_SIZE"), 0, [root]
    ticks: dict[int, int] = {}
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        ticks[one] = had.get(one, 0)
        try:
            total += int((_PROC / str(one) / "statm").read_text().split()[1]) * page
        except (OSError, ValueError, IndexError):
            continue
    return total, ticks


def thinned(samples: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Few enough to draw; of neighbours that become one the largest stays."""
    step = -(-len(samples) // _MOST_SAMPLES) or 1
    groups = [samples[k : k + step] for k in range(0, len(samples), step)]
    return tuple(max(group, key=lambda one: one[1]) for group in groups)


def _high_water(pid: int) -> int:
    try:
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _read_events(process: "subprocess.Popen[str]", events: list[Event],
                 on_event: Callable[[Event], None]) -> None:  # fmt: skip
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if not line.startswith('{"event"'):
                continue  # a library's own words
            try:
                event = json.loads(line)
            except ValueError:
                continue
            events.append(event)
            on_event(event)


def _read_errors(process: "subprocess.Popen[str]", errors: list[str]) -> None:
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            if line.strip():
                errors.append(line.rstrip())
                del errors[:-_LAST_LINES]


def _reason(errors: Sequence[str], code: int) -> str:
    """The line of standard error that says most, for a process that failed."""
    if code == 0:
        return ""
    if code == -signal.SIGKILL:
        return "it was killed: out of memory" if not errors else f"killed; last words: {errors[-1]}"
    said = [line for line in errors if "rror" in line] or list(errors)
    return said[-1].strip() if said else f"exit code {code}, without a word"


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and all that it started: they are a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            continue
    _end_group(process.pid)


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
