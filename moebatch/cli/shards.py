"""Shards: which part of the rows this process answers, and what its output is called."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from moebatch.errors import UsageError

ALL = (0, 1)


def parse_shard(
    text: str | None, *, environment: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """(part, parts) of --shard I/N with I from 0 to N-1; "auto" asks SLURM's array variables.

    Raises: UsageError.
    """
    if text is None:
        return ALL
    if text == "auto":
        return _from_slurm(environment)
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if match is None:
        raise UsageError(
            f"--shard {text} is not understood", hint="write it like 0/4, 1/4, 2/4, 3/4, or auto"
        )
    part, parts = int(match[1]), int(match[2])
    if part >= parts:
        last = f"; of {parts} shards the last is {parts - 1}" if parts else ""
        raise UsageError(f"--shard {text} does not exist", hint=f"shards count from 0{last}")
    return part, parts


def _from_slurm(environment: Mapping[str, str]) -> tuple[int, int]:
    """The place of this task in its array, whatever number the array starts from."""
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
    try:
        task, parts = (int(environment[name]) for name in names)
        first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
        part, rest = divmod(task - first, step)
    except KeyError as error:
        raise UsageError(
            f"--shard auto needs {error.args[0]}", hint="start it as a SLURM array, or use I/N"
        ) from None
    except (ValueError, ZeroDivisionError):
        raise UsageError("--shard auto cannot read SLURM's array variables") from None
    if rest or not 0 <= part < parts:
        raise UsageError(
            f"--shard auto cannot place task {task} among {parts}",
            hint="arrays with gaps have no order of shards; use --shard I/N",
        )
    return part, parts


def shard_path(path: Path, shard: tuple[int, int]) -> Path:
    """out.jsonl -> out.shard-00003-of-00016.jsonl; the whole data set keeps its name."""
    if shard == ALL:
        return path
    part, parts = shard
    return path.with_name(f"{path.stem}.shard-{part:05d}-of-{parts:05d}{path.suffix}")
