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
from moebatch.plan.memory import MemoryPlan
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.units import format_bytes, format_duration

SCHEMA_VERSION = 1
_PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


@dataclass(slots=True)
class RowCounts:
    """Sums over the rows that were written."""

    succeeded: int = 0
    failed: int = 0
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
        return self.succeeded + self.failed

    def add(self, outcome: Outcome) -> None:
        """Count one row's outcome."""
        if not isinstance(outcome, Completion):
            self.failed += 1
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
    policy: Policy | None
    policy_source: str
    memory_plan: MemoryPlan | None
    memory_budget_bytes: int
    peak_rss_bytes: int
    rows: RowCounts
    times: Times
    passes: int
    disk_read_bytes: int
    lane_busy_s: Mapping[str, float]
    expert_tokens: Sequence[Sequence[int]]
    warnings: Sequence[str]

    @property
    def generation_throughput(self) -> float | None:
        """Generated tokens per second of prefill and decode (the paper's measure)."""
        seconds = self.times.prefill + self.times.decode
        return self.rows.generated_tokens / seconds if seconds > 0 else None

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
            "io": {"disk_read_bytes": self.disk_read_bytes},
            "lanes_busy_s": dict(self.lane_busy_s),
            "passes": self.passes,
            "moe": expert_load(self.expert_tokens) if self.spec.has_router else None,
            "finish_reasons": dict(self.rows.finish_reasons),
            "determinism": {"sampling": "batch-independent", "kernels": "batch-dependent"},
            "warnings": list(self.warnings),
            **self._flat(),
        }

    def to_json(self) -> str:
        """Valid JSON: numbers that are not known are null."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def summary(self, output: str) -> list[str]:
        """A few lines for the end of a run."""
        rows, rate = self.rows, self.generation_throughput
        lines = [
            f"{rows.total:,} rows in {format_duration(self.times.total)} · "
            f"{rate or 0:.1f} output tok/s · {rows.succeeded:,} ok, {rows.failed:,} failed → {output}",
            f"prefill {format_duration(self.times.prefill)} for {rows.prompt_tokens:,} prompt tokens · "
            f"decode {format_duration(self.times.decode)} for {rows.generated_tokens:,} new tokens · "
            f"load {format_duration(self.times.load)}",
        ]
        if self.policy is not None:
            lines.append(
                f"memory peak {format_bytes(self.peak_rss_bytes)} of "
                f"{format_bytes(self.memory_budget_bytes)} · batch {self.policy.batch_size} · "
                f"weights resident {self.policy.weights_resident:.0%}"
            )
        if rows.by_error_code:
            codes = ", ".join(f"{code} {n}" for code, n in rows.by_error_code.most_common())
            lines.append(f"failed rows: {codes}")
        return lines + [f"warning: {text}" for text in self.warnings]

    def _policy(self) -> dict[str, Any] | None:
        if self.policy is None:
            return None
        return {**asdict(self.policy), "source": self.policy_source}

    def _memory_plan(self) -> dict[str, int] | None:
        if self.memory_plan is None:
            return None
        return {**asdict(self.memory_plan), "total": self.memory_plan.total}

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
        rows, times = self.rows, self.times
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
        tokens = self.rows.prompt_tokens + self.rows.generated_tokens
        return {
            "num_requests": self.rows.total,
            "elapsed_time": self.times.total,
            "total_num_tokens": tokens,
            "requests_per_second": _rate(self.rows.succeeded, self.times.total),
            "tokens_per_second": _rate(tokens, self.times.total),
        }


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
