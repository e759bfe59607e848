"""`moebatch run`: options in, one job, its summary and exit code out."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from moebatch.cli import options as opt
from moebatch.errors import Interrupted, UsageError
from moebatch.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from moebatch.cli.asked import ResourceOptions
    from moebatch.cli.keeping import KeepOptions


def run(
    dataset: opt.Dataset,
    model: opt.Model,
    output: opt.Output,
    input_format: opt.InputFormat = "auto",
    prompt_column: opt.PromptColumn = None,
    messages_column: opt.MessagesColumn = None,
    token_ids_column: opt.TokenIdsColumn = None,
    id_column: opt.IdColumn = None,
    limit: opt.Limit = None,
    offset: opt.Offset = 0,
    hf_subset: opt.HubSubset = None,
    hf_split: opt.HubSplit = None,
    shard: opt.Shard = None,
    on_duplicate: opt.OnDuplicate = "refuse",
    system: opt.System = None,
    strict: opt.Strict = False,
    output_format: opt.OutputFormat = "auto",
    output_schema: opt.OutputSchema = "auto",
    include: opt.Include = None,
    order: opt.Order = "input",
    overwrite: opt.Overwrite = False,
    resume: opt.Resume = "auto",
    no_resume: opt.NoResume = False,
    keep_errors: opt.KeepErrors = False,
    checkpoint_tokens: opt.CheckpointTokens = None,
    time_limit: opt.TimeLimit = None,
    allow_row_errors: opt.AllowRowErrors = False,
    error_file: opt.ErrorFile = None,
    max_errors: opt.MaxErrors = None,
    fail_fast: opt.FailFast = False,
    revision: opt.Revision = None,
    cache_dir: opt.CacheDir = None,
    offline: opt.Offline = False,
    dtype: opt.Dtype = "auto",
    max_model_len: opt.MaxModelLen = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    temperature: opt.Temperature = None,
    greedy: opt.Greedy = False,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    n: opt.Choices = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    stop_token_id: opt.StopTokenId = None,
    ignore_eos: opt.IgnoreEos = False,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    logprobs: opt.Logprobs = None,
    include_stop_str_in_output: opt.IncludeStop = False,
    skip_special_tokens: opt.SkipSpecial = None,
    generation_config: opt.GenerationConfig = "auto",
    chat_template: opt.ChatTemplate = None,
    apply_chat_template: opt.ApplyChatTemplate = "auto",
    on_too_long: opt.OnTooLong = "error",
    truncation_side: opt.TruncationSide = "left",
    memory: opt.Memory = "auto",
    cpu_threads: opt.CpuThreads = None,
    batch_size: opt.BatchSize = None,
    micro_batch_size: opt.MicroBatchSize = None,
    policy: opt.PolicyFile = "auto",
    weights_resident: opt.WeightsResident = "auto",
    kv_cache_dtype: opt.KvCacheDtype = "auto",
    regime: opt.RegimeName = "auto",
    expert_cache: opt.ExpertCache = "auto",
    eviction: opt.Eviction = "auto",
    prefetch_layers: opt.PrefetchLayers = None,
    quantization: opt.Quantization = "none",
    device: opt.Device = "auto",
    schedule: opt.Schedule = "auto",
    gpu_memory: opt.GpuMemory = None,
    on_oom: opt.OnOom = "replan",
    speculate: opt.Speculate = None,
    draft_model: opt.DraftModel = None,
    draft_tokens: opt.DraftTokens = "auto",
    report: opt.ReportFile = None,
    trace: opt.Trace = None,
    routing_trace: opt.RoutingTrace = None,
    progress: opt.Progress = "auto",
    json_report: opt.JsonReport = False,
    quiet: opt.Quiet = False,
) -> None:
    """Generate text for every row of a data set and write it in the order of the rows."""
    from moebatch.cli import asked, job, speculation
    from moebatch.cli.accelerator import accelerator_options
    from moebatch.cli.limits import parse_tolerance
    from moebatch.cli.progress import make_view
    from moebatch.cli.shards import parse_shard, shard_path
    from moebatch.data.columns import ColumnNames
    from moebatch.model.resolve import resolve_model

    opt.check_choices(
        apply_chat_template=apply_chat_template, on_duplicate=on_duplicate, on_too_long=on_too_long,
        truncation_side=truncation_side, kv_cache_dtype=kv_cache_dtype, output_format=output_format,
        output_schema=output_schema, quantization=quantization, resume=resume, dtype=dtype, order=order,
    )  # fmt: skip
    limit_s = None if time_limit is None else parse_duration(time_limit)
    view = make_view(progress, quiet=quiet)
    sampling = given(
        max_tokens=max_tokens, min_tokens=min_tokens, top_p=top_p, top_k=top_k, min_p=min_p, n=n,
        temperature=greedy_temperature(temperature, greedy=greedy), seed=seed, stop=stop or None,
        stop_token_ids=stop_token_id or None, ignore_eos=ignore_eos or None, logprobs=logprobs,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, skip_special_tokens=skip_special_tokens,
        include_stop_str_in_output=include_stop_str_in_output or None,
    )  # fmt: skip
    part = parse_shard(shard)
    task = job.Job(
        command=asked.command_line(),
        model=resolve_model(model, revision=revision, cache_dir=cache_dir, offline=offline),
        rows=asked.InputOptions(
            sources=dataset, input_format=input_format, limit=limit, offset=offset,
            subset=hf_subset, split=hf_split, shard=part, on_duplicate=on_duplicate,
            columns=ColumnNames(prompt=prompt_column, messages=messages_column,
                                prompt_token_ids=token_ids_column, id=id_column),
        ),
        output=asked.OutputOptions(
            path=output_path(output, part), output_format=output_format, schema=output_schema,
            order=order, include=tuple(include or ()), overwrite=overwrite,
            error_file=error_file and shard_path(error_file, part), allow_row_errors=allow_row_errors,
            report_file=Path(report) if report and report != "-" else None,
            tolerance=parse_tolerance(max_errors, fail_fast=fail_fast),
        ),
        prompts=asked.PromptOptions(
            generation_config=generation_config, apply_chat_template=apply_chat_template, strict=strict,
            system=asked.text_or_file(system), truncation_side=truncation_side, on_too_long=on_too_long,
            sampling=sampling, chat_template=chat_template, max_model_len=max_model_len,
        ),
        resources=resources(memory, dtype=dtype, cpu_threads=cpu_threads, batch_size=batch_size,
                            micro_batch_size=micro_batch_size, kv_cache_dtype=kv_cache_dtype,
                            weights_resident=weights_resident, policy=policy, regime=regime,
                            quantization=quantization, expert_cache=expert_cache, eviction=eviction,
                            prefetch_layers=prefetch_layers, routing_trace=routing_trace),
        speculation=speculation.asked_for(speculate, draft_model=draft_model, offline=offline,
                                          draft_tokens=draft_tokens, cache_dir=cache_dir),
        keep=keep_options(resume, no_resume=no_resume, overwrite=overwrite,
                          keep_errors=keep_errors, checkpoint_tokens=checkpoint_tokens),
        accelerator=accelerator_options(device, schedule=schedule, gpu_memory=gpu_memory,
                                        trace=trace, on_oom=on_oom),
    )  # fmt: skip
    raise typer.Exit(_execute(task, view, report=report, json_report=json_report, quiet=quiet,
                              time_limit_s=limit_s))  # fmt: skip


def _execute(task: Any, view: Any, *, time_limit_s: float | None, report: str | None,
             json_report: bool, quiet: bool) -> int:  # fmt: skip
    from moebatch.cli.report_file import write_report
    from moebatch.cli.stop import Stop

    output = task.output.path
    with Stop(time_limit_s=time_limit_s) as stop:
        try:
            with view:
                result = task.execute(view, stop)
        except (KeyboardInterrupt, Interrupted) as error:
            at_once = isinstance(error, KeyboardInterrupt)
            how = (
                "at once, without a last checkpoint" if at_once else "before anything new was done"
            )
            typer.echo(f"stopped {how}", err=True)
            return stop.exit_code
    write_report(result, path=report, output=output)
    if json_report:
        typer.echo(result.to_json())
    if not quiet:
        for line in result.summary(str(output)):
            typer.echo(line, err=True)
    if stop.requested() and result.status != "completed":
        typer.echo(f"stopped ({result.status}){_way_on(output)}", err=True)
    exit_code: int = result.exit_code
    return exit_code


def _way_on(output: Path | Literal["-"]) -> str:
    if output == "-":
        return ""
    return f"; finished rows are in {output}.partial, the same command goes on from here"


_THREADS_PER_CORE = 8  # more never helps, and thousands end the process


def output_path(output: str, part: tuple[int, int]) -> Path | Literal["-"]:
    """Where a shard's output goes.

    Raises: UsageError for a folder that does not exist: only a name says that it was meant.
    """
    from moebatch.cli.shards import shard_path

    if output == "-":
        return "-"
    path = shard_path(Path(output), part)
    if output.endswith("/") and not path.is_dir():
        raise UsageError(f"the folder {path} does not exist", hint=f"create it: mkdir -p {path}")
    return path


def keep_options(resume: str, *, no_resume: bool, overwrite: bool, keep_errors: bool,
                 checkpoint_tokens: int | None) -> "KeepOptions":  # fmt: skip
    """How the work of an earlier run is treated, checked.

    Raises: UsageError.
    """
    from moebatch.cli.keeping import KeepOptions

    if no_resume and resume != "auto":
        raise UsageError("--resume and --no-resume contradict each other")
    if checkpoint_tokens is not None and checkpoint_tokens < 1:
        raise UsageError("--checkpoint-tokens must be at least 1")
    return KeepOptions(
        overwrite=overwrite,
        resume=not no_resume,
        numeric=resume == "numeric",
        keep_errors=keep_errors,
        checkpoint_steps=checkpoint_tokens,
    )


def given(**options: Any) -> dict[str, Any]:
    """Those that the user gave: all that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def greedy_temperature(temperature: float | None, *, greedy: bool) -> float | None:
    """--greedy is --temperature 0.

    Raises: UsageError when both are given and contradict each other.
    """
    if greedy and temperature:
        raise UsageError(
            "--greedy and --temperature contradict each other", hint="give one of them"
        )
    return 0.0 if greedy else temperature


def resources(memory: str, *, dtype: str, cpu_threads: int | None, batch_size: int | None,
              micro_batch_size: int | None, weights_resident: str,
              kv_cache_dtype: str, policy: str = "auto", quantization: str = "none",
              routing_trace: Path | None = None, **about_cache: Any) -> "ResourceOptions":  # fmt: skip
    """What the run may use, checked; `about_cache` as in `regime_options`.

    Raises: UsageError for numbers out of range.
    """
    from moebatch.cli.asked import ResourceOptions
    from moebatch.cli.planning import read_policy
    from moebatch.cli.regime import regime_options
    from moebatch.plan.policy import Overrides

    cores = os.cpu_count() or 1
    if cpu_threads is not None and cpu_threads > _THREADS_PER_CORE * cores:
        raise UsageError(f"--cpu-threads {cpu_threads} is too many: the machine has {cores} cores")
    for name, value in (("--cpu-threads", cpu_threads), ("--batch-size", batch_size),
                        ("--micro-batch-size", micro_batch_size)):  # fmt: skip
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1")
    memory_bytes = None if memory == "auto" else parse_bytes(memory)
    if memory_bytes == 0:
        raise UsageError("--memory must be more than nothing", hint="write it like 6GiB, or auto")
    return ResourceOptions(
        memory_bytes=memory_bytes,
        policy=read_policy(policy),
        regime=regime_options(
            weights_resident=weights_resident, routing_trace=routing_trace, **about_cache
        ),
        cpu_threads=cpu_threads,
        dtype=dtype,
        quantization=quantization,
        overrides=Overrides(
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            weights_resident=share("--weights-resident", weights_resident),
            kv_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
        ),
    )


def share(option: str, text: str) -> float | None:
    """The number of an option that is auto or a share.

    Raises: UsageError for anything else.
    """
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"{option} {text} is neither auto nor a number from 0 to 1")
    return value
