"""The report of a run: what was asked, what happened, how fast. One JSON object, schema version 1.

Counts come from token ids, memory from the operating system; nothing planned is reported as measured.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moebatch import __version__
from moebatch.data.requests import Completion, Outcome
from moebatch.plan.device_fit import DevicePlan
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import Plan
from moebatch.units import format_bytes, format_duration

SCHEMA_VERSION = 1
_PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


@dataclass(slots=True)
class RowCounts:
    """Sums over the rows that were written."""

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    truncated_tokens: int = 0
    by_error_code: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    output_lengths: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Rows, answered or not."""
        return self.succeeded + self.failed + self.skipped

    def add(self, outcome: Outcome) -> None:
        """Count one row's outcome."""
        if not isinstance(outcome, Completion):
            self.skipped += outcome.skipped
            self.failed += not outcome.skipped
            if not outcome.skipped:
                self.by_error_code[outcome.code] += 1
            return
        self.succeeded += 1
        self.prompt_tokens += len(outcome.request.prompt_token_ids)
        self.prompt_lengths[len(outcome.request.prompt_token_ids)] += 1
        self.truncated_tokens += outcome.request.truncated_tokens
        for choice in outcome.choices:
            self.generated_tokens += len(choice.token_ids)
            self.output_lengths[len(choice.token_ids)] += 1
            self.finish_reasons[choice.finish_reason] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a run's phases, by the wall clock; prefill and decode exclude loading."""

    total: float
    load: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is known about a finished run."""

    command: str
    started_at: str
    finished_at: str
    status: str
    exit_code: int
    model_name: str
    model_revision: str | None
    spec: ModelSpec
    compute_dtype: str | None
    quantization: str
    machine: dict[str, Any]
    plan: Plan | DevicePlan | None
    policy_source: str
    memory_budget_bytes: int
    peak_rss_bytes: int
    rows: RowCounts
    kept: RowCounts = field(default_factory=RowCounts)
    work: Mapping[str, Any] = field(default_factory=dict)
    times: Times
    passes: int
    disk_read_bytes: int
    loaded_bytes: int = 0
    lane_busy_s: Mapping[str, float]
    expert_tokens: Sequence[Sequence[int]]
    speculation: Mapping[str, Any] | None = None
    expert_cache: Mapping[str, Any] | None = None
    warnings: Sequence[str]

    @property
    def generation_throughput(self) -> float | None:
        """Generated tokens per second of prefill and decode (the paper's measure)."""
        seconds = self.times.prefill + self.times.decode
        return self.computed.generated_tokens / seconds if seconds > 0 else None

    @property
    def computed(self) -> RowCounts:
        """What this session has computed: all rows, less those that an earlier one had answered."""
        in_flight = self.work.get("resumed", {}).get("tokens_in_flight", 0)
        return RowCounts(
            succeeded=self.rows.succeeded - self.kept.succeeded,
            prompt_tokens=self.rows.prompt_tokens - self.kept.prompt_tokens,
            generated_tokens=max(
                0, self.rows.generated_tokens - self.kept.generated_tokens - in_flight
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields of the report file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "moebatch_version": __version__,
            "command": self.command,
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "status": self.status,
            "exit_code": self.exit_code,
            "model": self._model(),
            "machine": self.machine,
            "policy": self._policy(),
            "requests": {
                "total": self.rows.total,
                "succeeded": self.rows.succeeded,
                "failed": self.rows.failed,
                "skipped": self.rows.skipped,
                "by_error_code": dict(self.rows.by_error_code),
            },
            "tokens": {
                "prompt": self.rows.prompt_tokens,
                "generated": self.rows.generated_tokens,
                "truncated": self.rows.truncated_tokens,
            },
            "time_s": asdict(self.times),
            "throughput": self._throughput(),
            "lengths": {
                "prompt": percentiles(self.rows.prompt_lengths),
                "output": percentiles(self.rows.output_lengths),
            },
            "memory_peak": {
                "cpu_rss": self.peak_rss_bytes,
                "budget": self.memory_budget_bytes,
                "planned": self._memory_plan(),
            },
            "io": {
                "disk_read_bytes": self.disk_read_bytes,
                "loaded_bytes": self.loaded_bytes,
                "read_bytes_per_token": _rate(
                    self.disk_read_bytes - self.loaded_bytes, self.computed.generated_tokens
                ),
            },
            "lanes_busy_s": dict(self.lane_busy_s),
            "passes": self.passes,
            "predicted_vs_measured": self._compared(),
            "expert_cache": None if self.expert_cache is None else dict(self.expert_cache),
            "moe": expert_load(self.expert_tokens) if self.spec.has_router else None,
            "speculation": None if self.speculation is None else dict(self.speculation),
            "finish_reasons": dict(self.rows.finish_reasons),
            "determinism": {"sampling": "batch-independent", "kernels": "batch-dependent"},
            "warnings": list(self.warnings),
            **self.work,
            **self._flat(),
        }

    def to_json(self) -> str:
        """Valid JSON: numbers that are not known are null."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def summary(self, output: str) -> list[str]:
        """A few lines for the end of a run."""
        rows, new, rate = self.rows, self.computed, self.generation_throughput
        lines = [
            f"{rows.total:,} rows in {format_duration(self.times.total)} · "
            f"{rate or 0:.1f} output tok/s · {rows.succeeded:,} ok, {rows.failed:,} failed"
            + (f", {rows.skipped:,} skipped" if rows.skipped else "")
            + f" → {output}",
            f"prefill {format_duration(self.times.prefill)} for {new.prompt_tokens:,} prompt tokens · "
            f"decode {format_duration(self.times.decode)} for {new.generated_tokens:,} new tokens · "
            f"load {format_duration(self.times.load)}",
        ]
        if self.plan is not None:
            policy = self.plan.policy
            lines.append(
                f"memory peak {format_bytes(self.peak_rss_bytes)} of "
                f"{format_bytes(self.memory_budget_bytes)}, planned "
                f"{format_bytes(self.plan.memory.total)} · batch {policy.batch_size} · "
                f"weights resident {policy.weights_resident:.0%}"
            )
        if isinstance(self.plan, Plan):
            lines.append(
                f"predicted {self.plan.job.throughput:.1f} tok/s, measured {rate or 0:.1f}"
                f" · bound by {'the disk' if self.disk_bound else 'computing on the host'}"
            )
        if guessed := self.speculation:
            lines.append(
                f"drafts ({guessed['source']}): {guessed['accepted']:,} of {guessed['drafted']:,} "
                f"accepted · {guessed['tokens_per_pass'] or 1:.2f} tokens per row and pass"
                + _named(guessed)
            )
        if self.expert_cache and "hit_rate" in self.expert_cache:
            lines.append(_cache_line(self.expert_cache))
        if self.kept.total:
            lines.append(f"{self.kept.total:,} of the rows had been answered by an earlier run")
        if gpu := self.machine.get("gpu"):
            kind = "emulated accelerator, no real one" if gpu["emulated"] else "accelerator"
            lines.append(
                f"{kind}: {gpu['name']} · {format_bytes(gpu['peak_bytes'])} of "
                f"{format_bytes(gpu['memory_bytes'])} · schedule "
                f"{self.plan.policy.schedule if self.plan else None}"
            )
        if rows.by_error_code:
            codes = ", ".join(f"{code} {n}" for code, n in rows.by_error_code.most_common())
            lines.append(f"failed rows: {codes}")
        return lines + [f"warning: {text}" for text in self.warnings]

    def _policy(self) -> dict[str, Any] | None:
        if self.plan is None:
            return None
        said = self.plan.job.throughput if isinstance(self.plan, Plan) else None
        predicted = {"predicted_tok_s": said}
        return {**asdict(self.plan.policy), "source": self.policy_source, **predicted}

    def _memory_plan(self) -> dict[str, int] | None:
        if self.plan is None:
            return None
        memory = self.plan.memory
        return {**asdict(memory), "total": int(memory.total)}

    def _compared(self) -> dict[str, dict[str, float | None]] | None:
        """What the planner said and what happened, in total and per resource.

        Rows that end before their max_tokens make a job shorter than planned: then the rates compare.
        """
        if not isinstance(self.plan, Plan):
            return None
        job, times = self.plan.job, self.times
        pairs = {
            "generation_throughput": (job.throughput, self.generation_throughput),
            "prefill_s": (job.prefill_s, times.prefill),
            "decode_s": (job.decode_s, times.decode),
            "passes": (job.passes, self.passes),
            "generated_tokens": (job.generated_tokens, self.rows.generated_tokens),
            "cpu_busy_s": (job.parts.get("compute"), self._cpu_busy_s()),
            "disk_busy_s": (job.parts.get("disk"), self.lane_busy_s.get("disk", 0.0)),
            "memory_bytes": (int(self.plan.memory.total), self.peak_rss_bytes),
        }
        return {
            name: {"predicted": said, "measured": was, "ratio": _ratio(said, was)}
            for name, (said, was) in pairs.items()
        }

    def _cpu_busy_s(self) -> float:
        """Everything that the caller's thread did: its lane's tasks, and sampling between passes."""
        stalled = self.times.prefill + self.times.decode
        return stalled if not self.disk_bound else self.lane_busy_s.get("cpu", 0.0)

    @property
    def disk_bound(self) -> bool:
        """Whether the disk was busy for most of the run."""
        seconds = self.times.prefill + self.times.decode
        return self.lane_busy_s.get("disk", 0.0) > 0.8 * seconds

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "revision": self.model_revision,
            "family": self.spec.family,
            "dtype": self.spec.weight_dtype,
            "compute_dtype": self.compute_dtype,
            "quantization": self.quantization,
            "params": self.spec.total_params,
            "active_params": self.spec.active_params,
        }

    def _throughput(self) -> dict[str, float | None]:
        rows, times = self.computed, self.times
        return {
            "requests_per_second": _rate(rows.succeeded, times.total),
            "input_tokens_per_second": _rate(rows.prompt_tokens, times.total),
            "output_tokens_per_second": _rate(rows.generated_tokens, times.total),
            "total_tokens_per_second": _rate(
                rows.prompt_tokens + rows.generated_tokens, times.total
            ),
            "generation_throughput": self.generation_throughput,
            "prefill_tok_s": _rate(rows.prompt_tokens, times.prefill),
            "decode_tok_s": _rate(rows.generated_tokens, times.decode),
        }

    def _flat(self) -> dict[str, Any]:
        """The names that vLLM's benchmark dashboards look for."""
        tokens, new = self.rows.prompt_tokens + self.rows.generated_tokens, self.computed
        return {
            "num_requests": self.rows.total,
            "elapsed_time": self.times.total,
            "total_num_tokens": tokens,
            "requests_per_second": _rate(new.succeeded, self.times.total),
            "tokens_per_second": _rate(new.prompt_tokens + new.generated_tokens, self.times.total),
        }


def _named(guessed: Mapping[str, Any]) -> str:
    """What a draft model told of experts, where any were brought for it."""
    needed = guessed.get("named_needed")
    if needed is None or guessed["cutoff_layer"] < 0.05:
        return ""
    return (
        f" · experts named for {guessed['cutoff_layer']:.1f} layers on average, "
        f"{needed:.0%} of those that were missing were needed"
    )


def _cache_line(cache: Mapping[str, Any]) -> str:
    """What the expert cache found."""
    since = cache["changed_before_pass"]
    when = "" if since is None else f" from pass {since + 1} on"
    return (
        f"expert cache of {cache['expert_slots']}{when}: {cache['hit_rate']:.0%} of "
        f"{cache['hits'] + cache['misses']:,} experts were there, "
        f"{cache['prefetch_hits']:,} of {cache['prefetched']:,} prefetched ones were used"
    )


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured if predicted is not None and measured else None


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def percentiles(lengths: Counter[int]) -> dict[str, int | None]:
    """p50, p90, p99 and maximum of counted lengths (nearest rank)."""
    total, result = sum(lengths.values()), {}
    for name, share in _PERCENTILES:
        seen, value = 0, None
        for length in sorted(lengths):
            seen += lengths[length]
            value = length
            if seen >= share * total:
                break
        result[name] = value
    return result


def expert_load(tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How evenly a model's layers used their experts: tokens per expert, entropy, max over mean."""
    from math import log

    entropies, peaks = [], []
    for layer in tokens:
        total = sum(layer)
        if total == 0:
            continue
        shares = [count / total for count in layer if count]
        entropies.append(-sum(share * log(share) for share in shares) / log(len(layer)))
        peaks.append(max(layer) * len(layer) / total)
    return {
        "tokens_per_expert": [list(layer) for layer in tokens],
        "entropy": sum(entropies) / len(entropies) if entropies else None,
        "max_over_mean": max(peaks) if peaks else None,
    }
