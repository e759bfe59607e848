"""`moebatch run`: options in, one job, its summary and exit code out."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from moebatch.cli import options as opt
from moebatch.errors import UsageError
from moebatch.units import parse_bytes

if TYPE_CHECKING:
    from moebatch.cli.asked import ResourceOptions


class _Terminated(BaseException):
    """SIGTERM arrived."""


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
    system: opt.System = None,
    strict: opt.Strict = False,
    output_format: opt.OutputFormat = "auto",
    output_schema: opt.OutputSchema = "auto",
    include: opt.Include = None,
    order: opt.Order = "input",
    overwrite: opt.Overwrite = False,
    allow_row_errors: opt.AllowRowErrors = False,
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
    weights_resident: opt.WeightsResident = "auto",
    kv_cache_dtype: opt.KvCacheDtype = "auto",
    quantization: opt.Quantization = "none",
    report: opt.ReportFile = None,
    progress: opt.Progress = "auto",
    json_report: opt.JsonReport = False,
    quiet: opt.Quiet = False,
) -> None:
    """Generate text for every row of a data set and write it in the order of the rows."""
    from moebatch.cli import asked, job
    from moebatch.cli.progress import make_view
    from moebatch.data.columns import ColumnNames
    from moebatch.model.resolve import resolve_model

    check_choices(
        output_format=output_format, output_schema=output_schema, order=order,
        apply_chat_template=apply_chat_template, on_too_long=on_too_long,
        truncation_side=truncation_side, kv_cache_dtype=kv_cache_dtype, dtype=dtype,
        quantization=quantization,
    )  # fmt: skip
    view = make_view(progress, quiet=quiet)
    flags = {
        "max_tokens": max_tokens, "min_tokens": min_tokens, "top_p": top_p, "top_k": top_k,
        "temperature": greedy_temperature(temperature, greedy=greedy), "min_p": min_p, "n": n,
        "seed": seed, "stop": stop or None, "stop_token_ids": stop_token_id or None,
        "ignore_eos": ignore_eos or None, "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "logprobs": logprobs, "skip_special_tokens": skip_special_tokens,
        "include_stop_str_in_output": include_stop_str_in_output or None,
    }  # fmt: skip
    destination: Path | Literal["-"] = "-" if output == "-" else Path(output)
    task = job.Job(
        command=asked.command_line(),
        model=resolve_model(model, revision=revision, cache_dir=cache_dir, offline=offline),
        rows=asked.InputOptions(
            sources=dataset, input_format=input_format, limit=limit, offset=offset,
            subset=hf_subset, split=hf_split,
            columns=ColumnNames(prompt=prompt_column, messages=messages_column,
                                prompt_token_ids=token_ids_column, id=id_column),
        ),
        output=asked.OutputOptions(
            path=destination, output_format=output_format, schema=output_schema, order=order,
            include=tuple(include or ()), overwrite=overwrite, allow_row_errors=allow_row_errors,
        ),
        prompts=asked.PromptOptions(
            sampling={name: value for name, value in flags.items() if value is not None},
            generation_config=generation_config, chat_template=chat_template,
            apply_chat_template=apply_chat_template, system=asked.text_or_file(system),
            strict=strict, on_too_long=on_too_long, truncation_side=truncation_side,
            max_model_len=max_model_len,
        ),
        resources=resources(memory, dtype=dtype, cpu_threads=cpu_threads, batch_size=batch_size,
                            micro_batch_size=micro_batch_size, kv_cache_dtype=kv_cache_dtype,
                            weights_resident=weights_resident, quantization=quantization),
    )  # fmt: skip
    raise typer.Exit(_execute(task, view, report=report, json_report=json_report, quiet=quiet))


def _execute(task: Any, view: Any, *, report: str | None, json_report: bool, quiet: bool) -> int:
    from moebatch.cli.job import write_report

    try:
        with _sigterm_raises(), view:
            result = task.execute(view)
    except (KeyboardInterrupt, _Terminated) as stop:
        kept = (
            "" if task.output.path == "-" else f"; finished rows are in {task.output.path}.partial"
        )
        typer.echo(f"stopped{kept}", err=True)
        return 130 if isinstance(stop, KeyboardInterrupt) else 143
    write_report(result, path=report, output=task.output.path)
    if json_report:
        typer.echo(result.to_json())
    if not quiet:
        for line in result.summary(str(task.output.path)):
            typer.echo(line, err=True)
    exit_code: int = result.exit_code
    return exit_code


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack like Ctrl-C does, so that files are closed in order."""

    def stop(signum: int, frame: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


CHOICES = {
    "output_format": ("auto", "jsonl", "parquet"),
    "output_schema": ("auto", "openai", "flat"),
    "order": ("input", "completion"),
    "apply_chat_template": ("auto", "always", "never"),
    "on_too_long": ("error", "truncate", "skip"),
    "truncation_side": ("left", "right", "middle"),
    "dtype": ("auto", "float32", "bfloat16"),
    "quantization": ("none", "int8"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16"),
}


def check_choices(**values: str) -> None:
    """Refuse a word that an option does not know.

    Raises: UsageError naming the option and what it takes.
    """
    for name, value in values.items():
        if value not in CHOICES[name]:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} {value} does not exist", hint="one of: " + ", ".join(CHOICES[name])
            )


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
              kv_cache_dtype: str, quantization: str) -> "ResourceOptions":  # fmt: skip
    """What the run may use, checked.

    Raises: UsageError for numbers out of range.
    """
    from moebatch.cli.asked import ResourceOptions
    from moebatch.plan.optimizer import Overrides

    for name, value in (("--cpu-threads", cpu_threads), ("--batch-size", batch_size),
                        ("--micro-batch-size", micro_batch_size)):  # fmt: skip
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1")
    return ResourceOptions(
        memory_bytes=None if memory == "auto" else parse_bytes(memory),
        cpu_threads=cpu_threads,
        dtype=dtype,
        quantization=quantization,
        overrides=Overrides(
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            weights_resident=_share(weights_resident),
            kv_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
        ),
    )


def _share(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"--weights-resident {text} is neither auto nor a number from 0 to 1")
    return value
