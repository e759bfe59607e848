"""`moebatch bench`: options in, measured settings out."""

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moebatch.cli.bench import options as opt
from moebatch.errors import UsageError

if TYPE_CHECKING:
    from moebatch.cli.bench.grid import Asked


def bench(
    workload: opt.Workload,
    files: opt.Files = None,
    model: opt.Models = None,
    num_prompts: opt.NumPrompts = "64",
    output_len: opt.OutputLen = None,
    input_len: opt.InputLen = None,
    dataset_path: opt.DatasetPath = None,
    padded: opt.Padded = False,
    seed: opt.Seed = 0,
    load_format: opt.LoadFormat = "auto",
    memory: opt.Memory = "auto",
    dtype: opt.Dtype = "auto",
    quantization: opt.Quantization = "none",
    cpu_threads: opt.CpuThreads = None,
    batch_size: opt.BatchSize = None,
    micro_batch_size: opt.MicroBatchSize = None,
    weights_resident: opt.WeightsResident = "auto",
    policy: opt.PolicyFile = "auto",
    device: opt.Device = "auto",
    gpu_memory: opt.GpuMemory = None,
    schedule: opt.Schedules = "auto",
    repeats: opt.Repeats = 3,
    num_warmups: opt.WarmUps = 1,
    timeout: opt.Timeout = "1h",
    baseline: opt.Baselines = None,
    baseline_python: opt.BaselinePython = None,
    baseline_dtype: opt.BaselineDtype = "bfloat16",
    baseline_batch: opt.BaselineBatch = "16,32,64",
    llama_server: opt.LlamaServer = None,
    work_folder: opt.WorkFolder = None,
    output_json: opt.OutputJson = None,
    format_: opt.Format = "md",
    report: opt.Report = None,
) -> None:
    """Measure throughput: the roofs first, then the runs, then how far apart they are.

    Lengths are forced and checked, repeats of all arms are interleaved, each in a process of its own.
    """
    from moebatch.cli.bench import grid

    _check_results(format_, report, output_json)
    opt.check_choices(dtype=dtype, quantization=quantization)
    if workload == "compare":
        _compare(files or [], format_)
        return
    if files:
        raise UsageError(f"what is {files[0]}?", hint="only compare takes files: compare A B")
    asked = grid.Asked.read(
        workload=workload, models=model or [], num_prompts=num_prompts, output_len=output_len,
        input_len=input_len, dataset=dataset_path, padded=padded, seed=seed,
        load_format=load_format, memory=memory, dtype=dtype, quantization=quantization,
        cpu_threads=cpu_threads,
        batch_size=batch_size, micro_batch_size=micro_batch_size,
        weights_resident=weights_resident, policy=policy, device=device, gpu_memory=gpu_memory,
        schedule=schedule, repeats=repeats, warm_ups=num_warmups, timeout=timeout,
        baseline=baseline, pythons=baseline_python or [], baseline_dtype=baseline_dtype,
        batches=baseline_batch,
        server=llama_server, work=work_folder,
    )  # fmt: skip
    raise typer.Exit(_measure(asked, format_, output_json=output_json, report=report))


def _check_results(format_: str, report: Path | None, output_json: Path | None) -> None:
    if format_ not in ("md", "json", "jsonl", "csv"):
        raise UsageError(f"--format {format_} does not exist", hint="one of: md, json, jsonl, csv")
    for option, path in (("--report", report), ("--output-json", output_json)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{option} {path} cannot be written: no such folder, or it is one")


def _compare(files: list[Path], format_: str) -> None:
    from moebatch.cli.bench import compare, record

    if len(files) != 2:
        raise UsageError("compare takes two results", hint="moebatch bench compare A.json B.json")
    if format_ == "csv":
        raise UsageError("--format csv is not for compare", hint="use md, json or jsonl")
    found = compare.compare(record.read(files[0]), record.read(files[1]))
    if format_ == "md":
        typer.echo(compare.markdown(found), nl=False)
    elif format_ == "json":
        typer.echo(json.dumps(found, indent=1))
    else:
        for row in found:
            typer.echo(json.dumps(row))


def _measure(asked: "Asked", format_: str, *, output_json: Path | None,
             report: Path | None) -> int:  # fmt: skip
    from moebatch.cli.bench import grid, record, table

    # Unwinding ends the processes of the arms; by default SIGTERM would leave them behind.
    def save(document: dict[str, Any]) -> None:
        """What is measured is kept, also when a later setting is interrupted."""
        if output_json is not None:
            _write(output_json, record.dumps(document))

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        document = grid.run(asked, say=lambda line: typer.echo(line, err=True), save=save)
    finally:
        signal.signal(signal.SIGTERM, before)
    save(document)
    if report is not None:
        from moebatch.cli.bench.page import page

        _write(report, page(document))
    if format_ != "md":
        typer.echo(table.markdown(document), err=True, nl=False)
    typer.echo(_shown(document, format_), nl=False)
    return _exit_code(document)


def _shown(document: dict[str, Any], format_: str) -> str:
    from moebatch.cli.bench import record, table

    if format_ == "json":
        return record.dumps(document)
    show = {"md": table.markdown, "jsonl": table.json_lines, "csv": table.comma_separated}
    return show[format_](document)


def _exit_code(document: dict[str, Any]) -> int:
    """1 when moebatch itself failed in a setting; a rival that fails is a result."""
    ours = [arm for setting in document["settings"] for arm in setting["arms"]
            if arm["name"] == "moebatch"]  # fmt: skip
    return int(any(arm["status"] != "ok" for arm in ours))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
