"""This machine's measured figures: from the cache, or measured once in a process of their own.

A process of its own keeps torch out of `moebatch plan` and the probe's memory out of a run's peak.
"""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from moebatch import __version__
from moebatch.errors import MoebatchError, UsageError
from moebatch.native.extension import default_variant
from moebatch.plan.machine import MachineSpec, loads

ENVIRONMENT = "MOEBATCH_MACHINE"  # a file to be used instead of measuring
_FORMAT = 4


def cache_directory() -> Path:
    """Where measurements are kept: the platform's cache folder of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moebatch"


def cache_file(threads: int) -> Path:
    """The file of this processor, this many threads, these versions and kernels."""
    processor = "".join(c if c.isalnum() else "-" for c in _processor())
    parts = (_FORMAT, __version__, f"torch{_torch()}", processor, threads, default_variant())
    name = f"machine-{'-'.join(map(str, parts))}.json"
    return cache_directory() / name


def this_machine(*, threads: int | None = None, quiet: bool = False) -> MachineSpec:
    """The machine's figures; measured now if they are not in the cache.

    Raises: UsageError when the file that MOEBATCH_MACHINE names is none; MoebatchError when the
    measurement fails.
    """
    if named := os.environ.get(ENVIRONMENT):
        return read_machine(Path(named))
    count = threads or num_cores()
    path = cache_file(count)
    cached = _cached(path)
    if cached is not None:
        return cached
    if not quiet:
        typer.echo("measuring this machine, once (about 10 seconds)", err=True)
    done = subprocess.run(
        [sys.executable, "-m", "moebatch", "doctor", "--json", "--cpu-threads", str(count)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[0].removeprefix("error: ")
        raise MoebatchError(f"this machine could not be measured: {reason}",
                            hint="run moebatch doctor, or name a file in MOEBATCH_MACHINE")  # fmt: skip
    return loads(done.stdout)


def read_machine(path: Path) -> MachineSpec:
    """A machine described in a JSON file.

    Raises: UsageError when it cannot be read or is none.
    """
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the machine description {path}: {error}") from None


def keep(machine: MachineSpec, threads: int) -> Path | None:
    """Write a measurement into the cache; None where that is not possible."""
    path = cache_file(threads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps(machine.to_dict(), indent=1), encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return None
    return path


def _cached(path: Path) -> MachineSpec | None:
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, UsageError):  # absent or damaged: measure again
        return None


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def _processor() -> str:
    """The processor's name and instruction sets, so that another machine has another file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    fields = dict(line.split(":", 1) for line in lines[:40] if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
            if flag in named.get("flags", "").split()]  # fmt: skip
    model = [named.get(key, "") for key in ("model name", "cpu family", "model", "stepping")]
    return "-".join([*model, *wide])
