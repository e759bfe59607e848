"""One run from files to files: read rows, plan, let the engine compute, write what comes out."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from moebatch.cli import prompts
from moebatch.cli.accelerator import (
    TRACED_PASSES,
    AcceleratorOptions,
    check_accelerator,
    device_line,
    given_plan,
    open_accelerator,
    plan_for,
    write_trace,
)
from moebatch.cli.asked import InputOptions, OutputOptions, PromptOptions, ResourceOptions
from moebatch.cli.flow import Rows
from moebatch.cli.keeping import KeepOptions, Work, fingerprint, open_work
from moebatch.cli.limits import ErrorLimit
from moebatch.cli.planning import (
    overridden,
    plan_line,
    plan_run,
    with_actual_dtype,
    workload_of,
)
from moebatch.cli.progress import View
from moebatch.cli.regime import known_shares, refuse_on_device, routing_of
from moebatch.cli.speculation import Drafting, Speculation
from moebatch.cli.stop import Stop
from moebatch.cli.this_machine import this_machine
from moebatch.data.manifest import Manifest
from moebatch.data.output_rows import RowFormat
from moebatch.data.parse import RequestBuilder
from moebatch.data.places import check_beside, check_output
from moebatch.data.reader import peek
from moebatch.data.requests import RawRow, Request, RowError
from moebatch.data.rows_file import RowsFile
from moebatch.data.tokenizer import Tokenizer, load_tokenizer
from moebatch.data.writer import OutputWriter
from moebatch.errors import DeviceMemoryFull, Interrupted
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import LocalModel
from moebatch.plan.device_fit import DevicePlan
from moebatch.plan.memory import LOADERS
from moebatch.plan.optimizer import Plan
from moebatch.plan.policy import Overrides
from moebatch.plan.schedule import Processor
from moebatch.plan.workload import WorkloadSpec
from moebatch.report import Report, Times

if TYPE_CHECKING:
    from moebatch.model.linear import ComputeType
    from moebatch.runtime.arithmetic import Arithmetic
    from moebatch.runtime.backend import PassResult
    from moebatch.runtime.device import Device
    from moebatch.runtime.engine import Engine, EngineStats

_LESS_MEMORY, _LEAST_MEMORY = 0.85, 0.25  # of the accelerator's, planned with after it ran out
_PEEKED_ROWS = 1000  # rows that are looked at before the batch is planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a run was asked for."""

    command: str
    model: LocalModel
    rows: InputOptions
    output: OutputOptions
    prompts: PromptOptions
    resources: ResourceOptions
    accelerator: AcceleratorOptions = field(default_factory=AcceleratorOptions)
    keep: KeepOptions = field(default_factory=KeepOptions)
    speculation: Speculation = field(default_factory=Speculation)

    def execute(self, view: View, stop: Stop) -> Report:
        """Run it; the report also when rows failed, or when it was stopped with its work kept.

        Raises: MoebatchError for anything that ends the whole run; Interrupted before there was any
        work to keep.
        """
        out = self.output
        if self.accelerator.device != "auto" or self.accelerator.schedule is not None:
            check_accelerator(self.accelerator)  # before there is a side directory
        self.speculation.check(self.model)
        with self.rows.open() as dataset, Checkpoint(self.model.path) as checkpoint:
            check_output(out.path, inputs=dataset.files, overwrite=out.overwrite,
                         output_format=out.output_format, error_path=out.error_file,
                         error_is_ours=out.wrote_error_file())  # fmt: skip
            if out.report_file is not None:
                others = [] if out.error_file is None else [str(out.error_file)]
                check_beside(out.report_file, option="--report", output=out.path,
                             inputs=[*dataset.files, *others])  # fmt: skip
            if (trace := self.resources.regime.routing_trace) is not None:
                check_beside(trace, option="--routing-trace", output=out.path,
                             inputs=dataset.files)  # fmt: skip
            checkpoint.check(self.model.parts())
            survey = dataset.survey(
                on_duplicate=self.rows.on_duplicate,
                progress=lambda rows: view.note(f"checking · {rows:,} rows"),
            )
            job = replace(self, model=with_actual_dtype(self.model, checkpoint))
            with stop.deferred(), closing(dataset.rows(survey)) as rows:
                return job._execute(checkpoint, view, stop, rows,
                                    out.rows_file(survey, self.rows.shard))  # fmt: skip

    def _execute(self, checkpoint: Checkpoint, view: View, stop: Stop,
                 rows: Iterable[RawRow | RowError], made: RowsFile) -> Report:  # fmt: skip
        start, started_at = time.perf_counter(), datetime.now(UTC)
        out, done = self.output, _Done()
        tokenizer = load_tokenizer(self.model.path)
        builder, identity = self._builder(tokenizer)
        limit = ErrorLimit(out.tolerance, num_rows=made.num_rows)
        with open_work(out.path, identity, self.keep) as work:
            view.note_all(work.greeting())
            work.note_rows(made)
            flow = Rows(OutputWriter(out.path, format=self._format(tokenizer, work.manifest),
                                     output_format=out.output_format, order=out.order,
                                     error_path=out.error_file, metadata=work.metadata()),
                        builder, limit, stop, work.record)  # fmt: skip
            with suppress(Interrupted), flow.writer:
                head, requests = peek(flow.requests(rows), _PEEKED_ROWS)
                if head:
                    self._run(flow, head, requests, done, num_rows=made.num_rows, work=work,
                              tokenizer=tokenizer, checkpoint=checkpoint, view=view)  # fmt: skip
                with stop.immediate():
                    flow.writer.close()
                work.note_rows(made.finished(flow.writer.diverted))
                work.finish()
            report = self._report(flow, done.computed, work, started_at=started_at,
                                  total_s=time.perf_counter() - start)  # fmt: skip
            work.log(report.status)
        if self.accelerator.trace is not None and done.traced:
            write_trace(self.accelerator.trace, done.traced)
        return report

    def _builder(self, tokenizer: Tokenizer) -> tuple[RequestBuilder, dict[str, Any]]:
        """What makes requests of rows, and the fingerprint of all that goes into them."""
        asked, model = self.prompts, self.model
        template = prompts.chat_template(model, asked)
        defaults = prompts.row_defaults(model, asked)
        shaping = {"system": asked.system, "apply_chat_template": asked.apply_chat_template}
        identity = fingerprint(model, tokenizer=tokenizer, template=template, defaults=defaults,
                               schema=self.output.schema, prompts=shaping)  # fmt: skip
        builder = prompts.request_builder(model, asked, tokenizer=tokenizer, template=template,
                                          defaults=defaults, columns=self.rows.columns)  # fmt: skip
        return builder, identity

    @property
    def max_model_len(self) -> int:
        """The longest sequence: the model's, or less where the user says so.

        Raises: UsageError for more than the model has.
        """
        return prompts.max_model_len(self.model, self.prompts)

    def _format(self, tokenizer: Tokenizer, manifest: Manifest) -> RowFormat:
        return RowFormat(
            schema=self.output.schema,
            model_name=self.model.name,
            run_id=manifest.run_id,
            created=manifest.created,
            include=self.output.include,
            token_bytes=tokenizer.token_bytes,
        )

    def _run(
        self, flow: Rows, head: Sequence[Request], requests: Iterator[Request], done: "_Done", *,
        num_rows: int, work: Work, tokenizer: Tokenizer, checkpoint: Checkpoint, view: View,
    ) -> None:  # fmt: skip
        """Plan from the first rows, load, and run. `done` is filled in also when that is stopped.

        Where the accelerator's memory runs out, again with a smaller plan, from where it was.
        Raises: Interrupted, MoebatchError.
        """
        share, left, stats = 1.0, requests, None
        while True:
            try:
                self._attempt(flow, head, left, done, num_rows=num_rows, work=work, view=view,
                              tokenizer=tokenizer, checkpoint=checkpoint, share=share,
                              stats=stats)  # fmt: skip
                return
            except DeviceMemoryFull as error:
                share *= _LESS_MEMORY
                if not self.accelerator.replans or self.resources.policy or share < _LEAST_MEMORY:
                    raise
                left, done.unanswered = itertools.chain(done.unanswered, left), ()
                stats = done.stats
                view.note(f"{error}; going on with a smaller plan")
                work.log(f"{error}; going on with a smaller plan")

    def _attempt(
        self, flow: Rows, head: Sequence[Request], requests: Iterator[Request], done: "_Done", *,
        num_rows: int, work: Work, tokenizer: Tokenizer, checkpoint: Checkpoint, view: View,
        share: float, stats: "EngineStats | None",
    ) -> None:  # fmt: skip
        """One engine, from its plan to its end; it may use `share` of the accelerator's memory."""
        from moebatch.runtime import host
        from moebatch.runtime.engine import Engine

        device = open_accelerator(self.accelerator)
        how = self._arithmetic(accelerator=device is not None)
        budget = self.resources.memory_bytes or host.default_budget_bytes()
        workload = workload_of(head, num_rows, complete=len(head) < _PEEKED_ROWS)
        drafting = self.speculation.prepared(workload)
        plan, line = self._plan(device, workload, compute=how.compute, threads=how.threads,
                                budget=budget, share=share, attention=work.attention_before(),
                                drafting=drafting)  # fmt: skip
        view.note(line)
        work.log(line)
        work.use_numeric({"dtype": how.compute, "kv_cache_dtype": plan.policy.kv_dtype,
                          "attention": plan.policy.attention, "kernels": how.variant,
                          "quantization": how.quantization})  # fmt: skip
        with (
            ExitStack() as stack,
            routing_of(self.model, self.resources.regime) as routing,
            Engine(
                checkpoint,
                spec=self.model.spec,
                family=self.model.family,
                policy=plan.policy,
                **self._text(tokenizer),
                compute=how.compute,
                kernels=how.kernels,
                quantization=how.quantization,
                device=device,
                stats=stats,
                speculator=drafting.open(stack, self.model.spec, workload, plan, how),
                profile=routing.profile,
                log=routing.log,
                traced_passes=TRACED_PASSES if self.accelerator.trace else 0,
                interrupted=flow.stop.requested,
            ) as engine,
        ):
            try:
                with flow.stop.immediate():
                    engine.load(threads=min(how.threads, LOADERS), progress=view.loading)
                flow.compute(engine, requests, lambda stats: view.running(
                    flow.state(stats, num_rows, workload.mean_gen)))  # fmt: skip
            except DeviceMemoryFull:
                done.unanswered, done.stats = engine.unanswered(), engine.stats
                raise
            finally:
                done.computed = Computed.of(engine, plan=plan, budget=budget, how=how)
                done.traced = engine.traced
                routing.learn(engine.expert_tokens)

    def _arithmetic(self, *, accelerator: bool) -> "Arithmetic":
        """What the host computes with; starts its threads."""
        from moebatch.runtime import arithmetic, host

        return arithmetic.prepare(
            dtype=self.resources.dtype, quantization=self.resources.quantization,
            weight_dtype=self.model.spec.weight_dtype, accelerator=accelerator,
            threads=self.resources.cpu_threads or host.num_cores(),
        )  # fmt: skip

    def _text(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What an engine needs to know of text."""
        return {
            "open_stream": lambda skip: tokenizer.stream(skip_special_tokens=skip),
            "decode": lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip),
            "eos_token_ids": self.model.eos_token_ids,
            "max_model_len": self.max_model_len,
        }

    def _plan(self, device: "Device | None", workload: WorkloadSpec, *, compute: "ComputeType",
              threads: int, budget: int, share: float, attention: Processor | None,
              drafting: Drafting) -> tuple[Plan | DevicePlan, str]:  # fmt: skip
        """The plan, and the line that says what it is."""
        from moebatch.runtime import host

        spec, resources = self.model.spec, self.speculation.reserved(self.resources)
        base = host.base_bytes() + drafting.memory_bytes
        if device is None:
            planned = plan_run(self.model, workload, resources, compute=compute, threads=threads,
                               budget=budget, base_bytes=base)  # fmt: skip
            return planned, plan_line(self.model.name, spec, planned, budget)
        refuse_on_device(resources.regime)
        if resources.policy is not None:
            asked = resources.regime.overrides(spec, resources.overrides)
            fitted = given_plan(device, spec, overridden(resources.policy, asked), budget=budget,
                                base_bytes=base)  # fmt: skip
        else:
            fitted = plan_for(
                device, spec, workload, machine=this_machine(threads=threads), compute=compute,
                schedule=self.accelerator.schedule, budget=budget, base_bytes=base, share=share,
                fixed=replace(resources.overrides, attention=attention), regime=resources.regime,
                shares=known_shares(self.model))  # fmt: skip
        return fitted, device_line(self.model.name, device, fitted, budget)

    def _policy_source(self) -> str:
        start = "planned" if self.resources.policy is None else "file"
        return start if self.resources.overrides == Overrides() else f"{start}, overridden"

    def _report(self, flow: Rows, done: "Computed", work: Work, *, started_at: datetime,
                total_s: float) -> Report:  # fmt: skip
        from moebatch.runtime import host

        failed = flow.counts.failed and not self.output.allow_row_errors
        stop = flow.stop if not work.finished else None
        return Report(
            command=self.command,
            started_at=started_at.isoformat(timespec="seconds"),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
            status=stop.reason if stop else "completed",
            exit_code=stop.exit_code if stop else 3 if failed else 0,
            model_name=self.model.name,
            model_revision=self.model.revision,
            spec=self.model.spec,
            compute_dtype=done.compute,
            quantization=self.resources.quantization,
            machine={**host.describe(), "gpu": done.device, "kernels": done.kernels},
            plan=done.plan,
            policy_source=self._policy_source(),
            memory_budget_bytes=done.budget,
            peak_rss_bytes=host.peak_rss_bytes(),
            rows=flow.counts,
            kept=flow.kept,
            work=work.describe(),
            times=Times(
                total=total_s, load=done.load_s, prefill=done.prefill_s, decode=done.decode_s
            ),
            passes=done.passes,
            disk_read_bytes=done.disk_read_bytes,
            loaded_bytes=done.loaded_bytes,
            lane_busy_s=done.lane_busy_s,
            expert_tokens=done.expert_tokens,
            speculation=done.speculation,
            expert_cache=done.expert_cache,
            warnings=[*flow.warnings, *done.warnings],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What the engine has to say about a run once it is over."""

    plan: Plan | DevicePlan | None
    budget: int
    compute: str | None = None
    kernels: str | None = None
    warnings: Sequence[str] = ()
    device: dict[str, Any] | None = None
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    passes: int = 0
    disk_read_bytes: int = 0
    loaded_bytes: int = 0
    lane_busy_s: Mapping[str, float] = field(default_factory=dict)
    expert_tokens: Sequence[Sequence[int]] = ()
    speculation: dict[str, Any] | None = None
    expert_cache: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, engine: "Engine", *, plan: Plan | DevicePlan, budget: int,
           how: "Arithmetic") -> "Computed":  # fmt: skip
        """Read it off the engine."""
        stats = engine.stats
        return cls(
            plan=plan,
            budget=budget,
            compute=how.compute,
            kernels=how.variant,
            warnings=how.warnings,
            device=engine.device_facts,
            load_s=stats.load_s,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            passes=stats.passes,
            disk_read_bytes=engine.disk_read_bytes,
            loaded_bytes=stats.loaded_bytes,
            lane_busy_s={lane.value: busy for lane, busy in stats.lane_busy_s.items()},
            expert_tokens=engine.expert_tokens,
            speculation=engine.speculation,
            expert_cache=None if engine.regime is None else engine.regime.to_dict(),
        )

    @classmethod
    def nothing(cls) -> "Computed":
        """No row could become a request, so no model was loaded."""
        return cls(plan=None, budget=0)


@dataclass(slots=True)
class _Done:
    """What was computed, for who asks after the engine is gone."""

    computed: Computed = field(default_factory=Computed.nothing)
    traced: "Sequence[PassResult]" = ()
    unanswered: Sequence[Request] = ()
    stats: "EngineStats | None" = None
