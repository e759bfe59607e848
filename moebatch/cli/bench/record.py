"""The document that a benchmark leaves: one JSON object, schema version 1, without names of hosts and
folders."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moebatch import __version__
from moebatch.cli.bench.measure import Found, Setting
from moebatch.errors import InputError, InputNotFound
from moebatch.plan.definitions import NAMES, definition
from moebatch.plan.machine import MachineSpec

KIND, SCHEMA_VERSION = "moebatch-bench", 1
_PACKAGES = ("torch", "numpy")


def head(machine: MachineSpec, about: dict[str, Any], *, threads: int) -> dict[str, Any]:
    """What is known before anything runs. `about` is the host's description."""
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "moebatch_version": __version__,
        "commit": _commit(),
        "command": command(sys.argv[1:]),
        "started_at": now(),
        "machine": {
            **about,
            "threads": threads,
            "load_before": _load(),
            "memory_bandwidth": machine.host.bandwidth,
            "disk_bandwidth": machine.disk_bandwidth,
            "flops": dict(machine.host.flops),
            "measured_by": machine.source,
        },
        "versions": {name: _version(name) for name in _PACKAGES},
        "settings": [],
    }


def now() -> str:
    """The time, for a record."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def setting_facts(setting: Setting, found: Sequence[Found], *, device: str) -> dict[str, Any]:
    """One setting with all its arms, and the paper's figure where it has this very setting."""
    arms = [one.to_dict() for one in found]
    ours = next((arm["tok_s"]["mean"] for arm in arms
                 if arm["name"] == "moebatch" and arm["tok_s"]), None)  # fmt: skip
    for arm in arms:
        rate = arm["tok_s"]["mean"] if arm["tok_s"] else None
        arm["ours_to_it"] = ours / rate if ours and rate else None
    return {
        "workload": setting.prompts.workload,
        "model": setting.model,
        "num_prompts": len(setting.gen_lens),
        "gen_len": setting.gen_lens[0] if len(set(setting.gen_lens)) == 1 else None,
        "generated": setting.tokens,
        "memory_bytes": setting.memory_bytes,
        "device": device,
        "prompts": setting.prompts.describe(),
        "paper": _paper(setting, device),
        "arms": arms,
    }


def _paper(setting: Setting, device: str) -> dict[str, Any] | None:
    workload = setting.prompts.workload
    if workload not in NAMES or len(set(setting.gen_lens)) != 1:
        return None
    short = device.partition(":")[2] if device.startswith("emulated:") else device
    found = definition(workload).published(
        model=setting.model, device=short, padded=setting.prompts.padded,
        gen_len=setting.gen_lens[0])  # fmt: skip
    return None if found is None else asdict(found)


def command(arguments: Sequence[str]) -> str:
    """The command without folders: of a path its last part."""
    return " ".join(["moebatch", *(_short(argument) for argument in arguments)])


def _short(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={_short(value)}"
    parts = [part.rstrip("/").rpartition("/")[2] or part for part in argument.split(",")]
    return ",".join(parts)


def dumps(document: dict[str, Any]) -> str:
    """The document as JSON; a row of numbers or words takes one line."""
    text = json.dumps(document, indent=1, allow_nan=False)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found.group().split()), text) + "\n"


def read(path: Path) -> dict[str, Any]:
    """A document that `--output-json` wrote.

    Raises: InputNotFound, InputError.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputNotFound(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{path} is no JSON") from None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise InputError(f"{path} is not the result of a benchmark",
                         hint="moebatch bench … --output-json FILE writes one")  # fmt: skip
    if value.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"{path} has schema version {value.get('schema_version')!r},"
                         f" this moebatch reads {SCHEMA_VERSION}")  # fmt: skip
    return value


def _load() -> float | None:
    with suppress(OSError):
        return os.getloadavg()[0]
    return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a checkout, with + where files were changed; None once installed."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "-C", str(here), "describe", "--always", "--dirty=+"],
                              capture_output=True, text=True, check=False, timeout=10)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() or None
