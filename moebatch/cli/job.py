"""One run from files to files: read rows, plan, let the engine compute, write what comes out."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from moebatch.cli.asked import InputOptions, OutputOptions, PromptOptions, ResourceOptions
from moebatch.cli.progress import State, View
from moebatch.data.chat import load_chat_template
from moebatch.data.counting import count_rows
from moebatch.data.output_rows import RowFormat
from moebatch.data.params import sampling_defaults
from moebatch.data.parse import RequestBuilder
from moebatch.data.reader import peek, read_rows
from moebatch.data.requests import Completion, Outcome, RawRow, Request, RowError
from moebatch.data.tokenizer import Tokenizer, load_tokenizer
from moebatch.data.writer import OutputWriter, check_output
from moebatch.errors import UsageError
from moebatch.model.checkpoint import Checkpoint, read_json
from moebatch.model.resolve import LocalModel
from moebatch.plan.memory import LOADERS, MemoryPlan
from moebatch.plan.optimizer import Overrides, choose
from moebatch.plan.policy import Policy
from moebatch.plan.workload import WorkloadSpec
from moebatch.report import Report, RowCounts, Times
from moebatch.units import format_bytes, format_count

if TYPE_CHECKING:
    from moebatch.runtime.engine import Engine, EngineStats

_PEEKED_ROWS = 1000  # rows that are looked at before the batch is planned


@dataclass(slots=True)
class Rows:
    """The stream from rows to requests, and the outcomes back to rows.

    Memory holds the rows that are under way, never the data set.
    """

    writer: OutputWriter
    builder: RequestBuilder
    counts: RowCounts = field(default_factory=RowCounts)
    _under_way: dict[int, RawRow] = field(default_factory=dict)

    def requests(self, rows: Iterable[RawRow | RowError]) -> Iterator[Request]:
        """The requests of all rows that are in order; the others are written at once."""
        for row in rows:
            if isinstance(row, RowError):
                self._finish(row.raw, row)
                continue
            outcome = self.builder.build(row)
            if isinstance(outcome, RowError):
                self._finish(row, outcome)
            else:
                self._under_way[row.index] = row
                yield outcome

    def take(self, outcome: Outcome) -> None:
        """Write what the engine made of a request."""
        index = outcome.request.index if isinstance(outcome, Completion) else outcome.index
        self._finish(self._under_way.pop(index), outcome)

    def _finish(self, row: RawRow | None, outcome: Outcome) -> None:
        self.counts.add(outcome)
        self.writer.put(row, outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a run was asked for."""

    command: str
    model: LocalModel
    rows: InputOptions
    output: OutputOptions
    prompts: PromptOptions
    resources: ResourceOptions

    def execute(self, view: View) -> Report:
        """Run it; the report also when rows failed.

        Raises: MoebatchError for anything that stops the whole run.
        """
        out = self.output
        check_output(out.path, inputs=self.rows.sources, overwrite=out.overwrite,
                     output_format=out.output_format)  # fmt: skip
        with Checkpoint(self.model.path) as checkpoint:
            checkpoint.check(self.model.parts())
            job = replace(self, model=_with_actual_dtype(self.model, checkpoint))
            return job._execute(checkpoint, view)

    def _execute(self, checkpoint: Checkpoint, view: View) -> Report:
        start, started_at = time.perf_counter(), datetime.now(UTC)
        out = self.output
        tokenizer = load_tokenizer(self.model.path)
        builder = self._builder(tokenizer)
        _, stream = peek(self._read(), 1)  # a data set that cannot be read is found before writing
        with OutputWriter(out.path, format=self._format(tokenizer, started_at),
                          output_format=out.output_format, order=out.order) as writer:  # fmt: skip
            flow = Rows(writer, builder)
            head, requests = peek(flow.requests(stream), _PEEKED_ROWS)
            done = Computed.nothing()
            if head:
                done = self._run(
                    flow, head, requests, tokenizer=tokenizer, checkpoint=checkpoint, view=view
                )
        return self._report(flow, done, started_at=started_at, total_s=time.perf_counter() - start)

    def _read(self) -> Iterator[RawRow | RowError]:
        rows = self.rows
        return read_rows(
            rows.sources,
            input_format=rows.input_format,
            columns=rows.columns,
            limit=rows.limit,
            offset=rows.offset,
            subset=rows.subset,
            split=rows.split,
        )

    def _builder(self, tokenizer: Tokenizer) -> RequestBuilder:
        prompts, model = self.prompts, self.model
        return RequestBuilder(
            tokenizer,
            chat_template=load_chat_template(model.path, override=prompts.chat_template),
            defaults=sampling_defaults(self._generation_config(), prompts.sampling),
            vocab_size=model.spec.vocab_size,
            max_model_len=self.max_model_len,
            on_too_long=prompts.on_too_long,
            truncation_side=prompts.truncation_side,
            apply_chat_template=prompts.apply_chat_template,
            system=prompts.system,
            strict=prompts.strict,
            columns=self.rows.columns,
            model_name=model.name,
        )

    def _generation_config(self) -> Mapping[str, Any] | None:
        choice = self.prompts.generation_config
        if choice == "auto":
            return self.model.generation_config
        return None if choice == "none" else read_json(Path(choice))

    @property
    def max_model_len(self) -> int:
        """The longest sequence: the model's, or less where the user says so.

        Raises: UsageError for more than the model has.
        """
        wanted, most = self.prompts.max_model_len, self.model.spec.max_model_len
        if wanted is not None and not 1 <= wanted <= most:
            raise UsageError(f"--max-model-len {wanted} is not between 1 and the model's {most}")
        return wanted or most

    def _format(self, tokenizer: Tokenizer, started_at: datetime) -> RowFormat:
        return RowFormat(
            schema=self.output.schema,
            model_name=self.model.name,
            run_id=uuid4().hex[:12],
            created=int(started_at.timestamp()),
            include=self.output.include,
            token_bytes=tokenizer.token_bytes,
        )

    def _run(
        self, flow: Rows, head: Sequence[Request], requests: Iterator[Request], *,
        tokenizer: Tokenizer, checkpoint: Checkpoint, view: View,
    ) -> "Computed":  # fmt: skip
        """Plan from the first rows, load, and run."""
        from moebatch.native.kernels import load_kernels
        from moebatch.runtime import host
        from moebatch.runtime.engine import (
            Engine,
            compute_type,
            quantization_type,
            use_threads,
        )

        compute = compute_type(self.resources.dtype, self.model.spec.weight_dtype)
        threads = self.resources.cpu_threads or host.num_cores()
        kernels = load_kernels(threads)
        use_threads(threads, native=kernels is not None)
        quantization = quantization_type(self.resources.quantization, kernels)
        budget = self.resources.memory_bytes or host.default_budget_bytes()
        workload = _workload(head)
        policy, memory = choose(
            self.model.spec,
            workload,
            memory_bytes=budget,
            base_bytes=host.base_bytes(),
            fixed=self.resources.overrides,
        )
        view.note(_plan_line(self.model, policy, memory, budget))
        total = len(head) if workload.num_sequences is not None else self._count_rows()
        with Engine(
            checkpoint,
            spec=self.model.spec,
            family=self.model.family,
            policy=policy,
            open_stream=lambda skip: tokenizer.stream(skip_special_tokens=skip),
            decode=lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip),
            eos_token_ids=self.model.eos_token_ids,
            max_model_len=self.max_model_len,
            compute=compute,
            kernels=kernels,
            quantization=quantization,
        ) as engine:
            engine.load(threads=min(threads, LOADERS), progress=view.loading)
            for outcome in engine.run(
                requests, lambda stats: view.running(_state(stats, flow, total, workload))
            ):
                flow.take(outcome)
            return Computed.of(
                engine,
                policy=policy,
                memory=memory,
                budget=budget,
                compute=compute,
                kernels="pytorch" if kernels is None else kernels.variant,
            )

    def _count_rows(self) -> int | None:
        return count_rows(self.rows.sources, limit=self.rows.limit, offset=self.rows.offset)

    def _report(self, flow: Rows, done: "Computed", *, started_at: datetime,
                total_s: float) -> Report:  # fmt: skip
        from moebatch.runtime import host

        failed = flow.counts.failed and not self.output.allow_row_errors
        return Report(
            command=self.command,
            started_at=started_at.isoformat(timespec="seconds"),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
            status="completed",
            exit_code=3 if failed else 0,
            model_name=self.model.name,
            model_revision=self.model.revision,
            spec=self.model.spec,
            compute_dtype=done.compute,
            quantization=self.resources.quantization,
            machine={**host.describe(), "kernels": done.kernels},
            policy=done.policy,
            policy_source="planned" if self.resources.overrides == Overrides() else "overridden",
            memory_plan=done.memory,
            memory_budget_bytes=done.budget,
            peak_rss_bytes=host.peak_rss_bytes(),
            rows=flow.counts,
            times=Times(
                total=total_s, load=done.load_s, prefill=done.prefill_s, decode=done.decode_s
            ),
            passes=done.passes,
            disk_read_bytes=done.disk_read_bytes,
            lane_busy_s=done.lane_busy_s,
            expert_tokens=done.expert_tokens,
            warnings=[*flow.builder.warnings, *done.warnings],
        )


_NO_KERNELS = (
    "installed without native kernels, PyTorch computes at a fraction of the speed: "
    "install a C++ compiler and moebatch once more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What the engine has to say about a run once it is over."""

    policy: Policy | None
    memory: MemoryPlan | None
    budget: int
    compute: str | None = None
    kernels: str | None = None
    warnings: Sequence[str] = ()
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    passes: int = 0
    disk_read_bytes: int = 0
    lane_busy_s: Mapping[str, float] = field(default_factory=dict)
    expert_tokens: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, engine: "Engine", *, policy: Policy, memory: MemoryPlan, budget: int,
           compute: str, kernels: str) -> "Computed":  # fmt: skip
        """Read it off the engine."""
        from moebatch.native.kernels import extension

        stats = engine.stats
        return cls(
            policy=policy,
            memory=memory,
            budget=budget,
            compute=compute,
            kernels=kernels,
            warnings=() if extension() else (_NO_KERNELS,),
            load_s=stats.load_s,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            passes=stats.passes,
            disk_read_bytes=engine.disk_read_bytes,
            lane_busy_s={lane.value: busy for lane, busy in stats.lane_busy_s.items()},
            expert_tokens=engine.expert_tokens,
        )

    @classmethod
    def nothing(cls) -> "Computed":
        """No row could become a request, so no model was loaded."""
        return cls(policy=None, memory=None, budget=0)


def _with_actual_dtype(model: LocalModel, checkpoint: Checkpoint) -> LocalModel:
    """The data type that the experts really have: config.json is often wrong about it."""
    part = model.family.expert_parts(model.spec, 0, 0)[0]
    dtype = checkpoint.entry(part.sources[0]).dtype
    return replace(model, spec=replace(model.spec, weight_dtype=dtype))


def _workload(head: Sequence[Request]) -> WorkloadSpec:
    """Lengths of the first rows, each of a row's choices a sequence of its own."""
    lengths = [
        (len(request.prompt_token_ids), request.params.max_tokens or 1)
        for request in head
        for _ in range(request.params.n)
    ]
    return WorkloadSpec.measure(lengths, complete=len(head) < _PEEKED_ROWS)


def _plan_line(model: LocalModel, policy: Policy, memory: MemoryPlan, budget: int) -> str:
    spec = model.spec
    return (
        f"{model.name}: {format_count(spec.total_params)} parameters, "
        f"{format_count(spec.active_params)} active · batch {policy.batch_size}, "
        f"micro-batch {policy.micro_batch_size} · weights resident {policy.weights_resident:.0%} · "
        f"planned memory {format_bytes(memory.total)} of {format_bytes(budget)}"
    )


def _state(stats: "EngineStats", flow: Rows, total: int | None, workload: WorkloadSpec) -> State:
    expected = None if total is None else int(total * workload.mean_gen)
    return State(
        phase=stats.phase,
        rows_done=flow.counts.total,
        rows_total=total,
        tokens=stats.generated_tokens,
        expected_tokens=expected,
        in_flight=stats.in_flight,
    )


def write_report(report: Report, *, path: str | None, output: Path | Literal["-"]) -> None:
    """Write the report where the user wants it, or beside the output.

    Raises: UsageError when the file cannot be written.
    """
    if path == "-":
        sys.stdout.write(report.to_json() + "\n")
        return
    if path is None and output == "-":
        return
    target = Path(path) if path else Path(f"{output}.moebatch") / "report.json"
    try:
        if path is None:
            target.parent.mkdir(exist_ok=True)
        target.write_text(report.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {target}: {error.strerror}") from None
