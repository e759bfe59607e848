"""Measures one setting: all arms on the same prompts, repeats interleaved, each in its own process."""

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moebatch.cli.bench.arms import Arm
from moebatch.cli.bench.cap import memory_cap
from moebatch.cli.bench.prompts import Prompts
from moebatch.cli.bench.task import Task, write_rows
from moebatch.cli.bench.watch import Watched, watch

_WARM_TOKENS = 4
Say = Callable[[str], None]
OnPlan = Callable[[Arm, dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the grid. `memory_bytes` None: no limit was asked for."""

    model: str
    model_path: Path
    prompts: Prompts
    gen_lens: tuple[int, ...]
    memory_bytes: int | None

    @property
    def tokens(self) -> int:
        """Tokens that every arm has to generate."""
        return sum(self.gen_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to measure."""

    repeats: int
    warm_ups: int
    threads: int
    timeout_s: float
    work: Path


@dataclass(slots=True)
class Found:
    """What came of one arm. `runs` are those that counted."""

    arm: Arm
    planned: dict[str, Any] | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None
    capped: bool = False

    @property
    def rates(self) -> list[float]:
        """Generated tokens per second of prefill and decode, one for each run."""
        return [run["generated"] / run["seconds"] for run in self.runs]

    def to_dict(self) -> dict[str, Any]:
        """For the record."""
        rates, best = self.rates, max(self.runs, key=lambda run: run["peak_bytes"] or 0, default={})
        return {
            "name": self.arm.name,
            "label": self.arm.label,
            "note": self.arm.note,
            "version": next((run["version"] for run in self.runs if run.get("version")), None),
            "status": "ok" if rates else "missing" if self.arm.missing else "failed",
            "reason": self.reason,
            "tok_s": {
                "mean": statistics.fmean(rates),
                "sd": statistics.stdev(rates) if len(rates) > 1 else None,
                "runs": rates,
            } if rates else None,
            "peak_cpu_bytes": best.get("peak_bytes"),
            "peak_gpu_bytes": (best.get("device") or {}).get("peak_bytes"),
            "memory_limited": self.capped,
            "planned": self.planned,
            "runs": [_plain(run, first=k == 0) for k, run in enumerate(self.runs)],
        }  # fmt: skip


def _plain(run: dict[str, Any], *, first: bool) -> dict[str, Any]:
    """A run for the record; what is only drawn is kept of the first."""
    drawn = ("timeline", "samples", "expert_tokens")
    left_out = {"event", "version", "began", "ended", *(() if first else drawn)}
    return {name: value for name, value in run.items() if name not in left_out}


def measure(setting: Setting, arms: Sequence[Arm], effort: Effort, *, warm_up: Any, say: Say,
            on_plan: OnPlan) -> list[Found]:  # fmt: skip
    """Run every arm `repeats` times in turn; of an arm's variants the fastest of the first round goes
    on alone. What cannot be run says why."""
    found = [Found(arm=arm, reason=arm.missing) for arm in arms]
    with tempfile.TemporaryDirectory(prefix="moebatch-bench-", dir=effort.work) as folder:
        task = _task(setting, effort, Path(folder), warm_up)
        for repeat in range(effort.repeats):
            for one in found:
                if one.arm.missing or one.reason:
                    continue
                _once(one, task, effort, Path(folder), on_plan=on_plan)
                rate = f"{one.rates[-1]:.2f} tok/s" if one.reason is None else one.reason
                label = f" {one.arm.label}" if one.arm.label else ""
                say(f"{repeat + 1}/{effort.repeats} {one.arm.name}{label}: {rate}")
            if repeat == 0:
                found = _fastest_variants(found)
    return found


def _task(setting: Setting, effort: Effort, folder: Path, warm_up: Any) -> Task:
    rows = write_rows(folder / "rows.jsonl", setting.prompts.token_ids, setting.gen_lens)
    warm = None
    if effort.warm_ups:
        lens = [_WARM_TOKENS] * len(warm_up)
        warm = str(write_rows(folder / "warm.jsonl", list(warm_up), lens))
    return Task(
        model=str(setting.model_path),
        rows=str(rows),
        warm_up=warm,
        work=str(effort.work),
        threads=effort.threads,
        memory_bytes=setting.memory_bytes,
    )


def _once(one: Found, task: Task, effort: Effort, folder: Path, *, on_plan: OnPlan) -> None:
    """One run of one arm; `one` is changed."""
    path = replace(task, options=one.arm.options).write(folder / "task.json")

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "planned":
            planned = {name: value for name, value in event.items() if name != "event"}
            if one.planned is None:
                on_plan(one.arm, planned)
            one.planned = planned

    if task.memory_bytes is not None:
        _drop_cached(Path(task.model), Path(task.work))
    with memory_cap(task.memory_bytes) as cap:
        ran = watch([*one.arm.command, str(path)], cap=cap, timeout_s=effort.timeout_s,
                    environment=one.arm.environment, on_event=on_event)  # fmt: skip
    one.capped = ran.capped
    done = next((event for event in ran.events if event["event"] == "done"), None)
    if done is None:
        one.reason = ran.error or "it ended without a result"
        return
    run = _run_facts(done, ran)
    expected = _expected(one.arm, task, done)
    if run["generated"] != expected:
        one.reason = f"it generated {run['generated']} tokens, {expected} were asked for"
        return
    one.runs.append(run)


def _drop_cached(*folders: Path) -> None:
    """Have the system forget what it holds of weight files: a control group is charged only for what
    its own processes bring into the page cache, and would find all that others brought for nothing."""
    if not hasattr(os, "posix_fadvise"):
        return
    for folder in folders:
        for file in (*folder.glob("*.safetensors"), *folder.glob("*.gguf")):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _expected(arm: Arm, task: Task, done: dict[str, Any]) -> int:
    """Tokens that had to come out; fewer where an arm's rate is taken from fewer, which it says."""
    lines = Path(task.rows).read_text(encoding="utf-8").splitlines()
    few = arm.options.get("tokens")
    if few is not None:
        return int(done["rows"] * few)
    return sum(json.loads(line)["max_new_tokens"] for line in lines)


def _run_facts(done: dict[str, Any], ran: Watched) -> dict[str, Any]:
    """One run: what the arm said, and the memory that was seen from outside."""
    seconds = done["seconds"] if "seconds" in done else done["prefill_s"] + done["decode_s"]
    shift = done["began"] - ran.started_at if "began" in done else 0.0
    samples = [(round(at - shift, 2), size) for at, size in ran.samples]
    return {**done, "seconds": seconds, "peak_bytes": ran.peak_bytes, "samples": samples,
            "others_share": ran.others_share}  # fmt: skip


def _fastest_variants(found: list[Found]) -> list[Found]:
    """Of each rival's variants the fastest; schedules of moebatch are all kept."""
    kept: list[Found] = []
    for one in found:
        rivals = [k for k, other in enumerate(kept)
                  if other.arm.name == one.arm.name and not one.arm.ours]  # fmt: skip
        if not rivals:
            kept.append(one)
            continue
        before = kept[rivals[0]]
        if max(one.rates, default=0.0) > max(before.rates, default=0.0):
            kept[rivals[0]] = one
    return kept
