"""The options of `moebatch bench`, one alias each; some are those of `run`."""

from pathlib import Path
from typing import Annotated

import typer

from moebatch.cli.options import (
    BatchSize,
    CpuThreads,
    Device,
    Dtype,
    GpuMemory,
    MicroBatchSize,
    PolicyFile,
    Quantization,
    WeightsResident,
    check_choices,
)

__all__ = [
    "BaselineBatch",
    "BaselineDtype",
    "BaselinePython",
    "Baselines",
    "BatchSize",
    "CpuThreads",
    "DatasetPath",
    "Device",
    "Dtype",
    "Files",
    "Format",
    "GpuMemory",
    "InputLen",
    "LlamaServer",
    "LoadFormat",
    "Memory",
    "MicroBatchSize",
    "Models",
    "NumPrompts",
    "OutputJson",
    "OutputLen",
    "Padded",
    "PolicyFile",
    "Quantization",
    "Repeats",
    "Report",
    "Schedules",
    "Seed",
    "Timeout",
    "WarmUps",
    "WeightsResident",
    "WorkFolder",
    "Workload",
    "check_choices",
]

_WHAT, _HOW, _RIVALS, _OUT = "What is measured", "How", "Baselines", "Results"

Workload = Annotated[
    str,
    typer.Argument(metavar="WORKLOAD", help="mtbench, helm-synthetic, helm-summarization, random, a "
                   "FILE; or compare A.json B.json."),
]  # fmt: skip
Files = Annotated[list[Path] | None, typer.Argument(metavar="[FILES]", help="For compare.")]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="As for run; several make a sweep.", rich_help_panel=_WHAT),
]
NumPrompts = Annotated[
    str, typer.Option(help="Requests, like 64 or 16,64,256.", rich_help_panel=_WHAT)
]
OutputLen = Annotated[
    str | None,
    typer.Option("--output-len", help="Tokens a request generates, forced, like 32,64,128; default: "
                 "the workload's.", rich_help_panel=_WHAT),
]  # fmt: skip
InputLen = Annotated[
    int | None, typer.Option(help="Prompt tokens, for random.", rich_help_panel=_WHAT)
]
DatasetPath = Annotated[
    Path | None,
    typer.Option(help="MT-Bench's question file, for mtbench.", rich_help_panel=_WHAT),
]
Padded = Annotated[
    bool,
    typer.Option("--padded", help="Pad all prompts to the longest, as peers do.",
                 rich_help_panel=_WHAT),
]  # fmt: skip
Seed = Annotated[int, typer.Option(help="Seed of the prompts.", rich_help_panel=_WHAT)]
LoadFormat = Annotated[
    str,
    typer.Option(help="auto, or dummy: random weights made from config.json alone.",
                 rich_help_panel=_WHAT),
]  # fmt: skip
Memory = Annotated[
    str,
    typer.Option("--memory", "--cpu-memory", help="auto, 6GiB, or 50% (of the weights); or a list.",
                 rich_help_panel=_HOW),
]  # fmt: skip
Schedules = Annotated[
    str, typer.Option("--schedule", help="One or more, like cgopipe,flexgen.", rich_help_panel=_HOW)
]
Repeats = Annotated[int, typer.Option("--repeats", "-r", help="Runs.", rich_help_panel=_HOW)]
WarmUps = Annotated[
    int, typer.Option("--num-warmups", help="Requests that do not count.", rich_help_panel=_HOW)
]
Timeout = Annotated[str, typer.Option(help="Longest run of an arm.", rich_help_panel=_HOW)]
Baselines = Annotated[
    str | None,
    typer.Option("--baseline", help="transformers, accelerate, llama.cpp, vllm.",
                 rich_help_panel=_RIVALS),
]  # fmt: skip
BaselinePython = Annotated[
    list[str] | None,
    typer.Option(help="bin/python of an environment with rivals (repeat); or "
                 "MOEBATCH_BASELINE_PYTHON.", rich_help_panel=_RIVALS),
]  # fmt: skip
BaselineDtype = Annotated[
    str, typer.Option(help="Data type of transformers and vLLM.", rich_help_panel=_RIVALS)
]
BaselineBatch = Annotated[
    str,
    typer.Option(help="Batch sizes of transformers and accelerate; the fastest counts.",
                 rich_help_panel=_RIVALS),
]  # fmt: skip
LlamaServer = Annotated[
    str | None, typer.Option(help="llama.cpp's llama-server.", rich_help_panel=_RIVALS)
]
WorkFolder = Annotated[
    Path | None,
    typer.Option(help="Where rivals' copies of the model and dummy weights are kept; default: a "
                 "temporary folder.", rich_help_panel=_HOW),
]  # fmt: skip
OutputJson = Annotated[
    Path | None, typer.Option(help="Write the whole record.", rich_help_panel=_OUT)
]
Format = Annotated[
    str, typer.Option("--format", help="On stdout: md, json, jsonl or csv.", rich_help_panel=_OUT)
]
Report = Annotated[
    Path | None,
    typer.Option("--report", help="Write a page with all figures, one HTML file.",
                 rich_help_panel=_OUT),
]  # fmt: skip
