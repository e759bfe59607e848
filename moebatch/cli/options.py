"""The options, one alias each, grouped in panels. Names follow vLLM, OpenAI and Hugging Face."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from moebatch.errors import UsageError

_INPUT, _OUTPUT = "Input", "Output"
_GENERATION, _RESOURCES, _REPORTING = "Generation (a row wins)", "Resources", "Reporting"

Dataset = Annotated[
    list[str],
    typer.Argument(metavar="DATASET", help="Files, globs, folders, hf://datasets/ORG/NAME or -."),
]
Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A directory, a hub id, a short name, or demo."),
]
Output = Annotated[
    str,
    typer.Option("--output", "--output-file", "-o", help="Where the answers go; - is stdout.",
                 rich_help_panel=_OUTPUT),
]  # fmt: skip
OutputFormat = Annotated[str, typer.Option(help="auto, jsonl or parquet.", rich_help_panel=_OUTPUT)]
OutputSchema = Annotated[
    str, typer.Option(help="auto (like the row), openai or flat.", rich_help_panel=_OUTPUT)
]
Include = Annotated[
    list[str] | None,
    typer.Option(help="Add a column: token_ids, prompt_token_ids.", rich_help_panel=_OUTPUT),
]
Order = Annotated[str, typer.Option(help="input or completion.", rich_help_panel=_OUTPUT)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output.", rich_help_panel=_OUTPUT)
]
Resume = Annotated[
    str,
    typer.Option(
        "--resume",
        help="Go on with an earlier run of the same command (default); numeric: also where it "
        "computed in another data type.",
        rich_help_panel=_OUTPUT,
    ),
]
NoResume = Annotated[
    bool,
    typer.Option("--no-resume", help="Refuse an output that is begun.", rich_help_panel=_OUTPUT),
]
KeepErrors = Annotated[
    bool,
    typer.Option("--keep-errors/--retry-errors", show_default=False,
                 help="Rows that failed in an earlier run: kept, or computed again (default).",
                 rich_help_panel=_OUTPUT),
]  # fmt: skip
CheckpointTokens = Annotated[
    int | None,
    typer.Option(help="Save unfinished rows every K steps; default: by time.",
                 rich_help_panel=_OUTPUT),
]  # fmt: skip
TimeLimit = Annotated[
    str | None,
    typer.Option(help="Save and exit 75 after this long, like 3h50m.", rich_help_panel=_OUTPUT),
]
AllowRowErrors = Annotated[
    bool,
    typer.Option("--allow-row-errors", help="Exit 0 though rows failed.", rich_help_panel=_OUTPUT),
]
ErrorFile = Annotated[
    Path | None,
    typer.Option("--error-file", help="Failed rows go there, and only there.",
                 rich_help_panel=_OUTPUT),
]  # fmt: skip
MaxErrors = Annotated[
    str | None,
    typer.Option(help="Stop when more rows fail: N or P%.", rich_help_panel=_OUTPUT),
]
FailFast = Annotated[
    bool,
    typer.Option("--fail-fast", help="Stop at the first failed row.", rich_help_panel=_OUTPUT),
]
InputFormat = Annotated[
    str, typer.Option(help="auto, jsonl, parquet, csv or txt.", rich_help_panel=_INPUT)
]
PromptColumn = Annotated[
    str | None, typer.Option(help="Column with the prompt text.", rich_help_panel=_INPUT)
]
MessagesColumn = Annotated[
    str | None, typer.Option(help="Column with chat messages.", rich_help_panel=_INPUT)
]
TokenIdsColumn = Annotated[
    str | None, typer.Option(help="Column with prompt token ids.", rich_help_panel=_INPUT)
]
IdColumn = Annotated[
    str | None, typer.Option(help="Column with the row's id.", rich_help_panel=_INPUT)
]
Limit = Annotated[
    int | None, typer.Option("--limit", "-L", help="Read at most N rows.", rich_help_panel=_INPUT)
]
Offset = Annotated[int, typer.Option(help="Skip the first N rows.", rich_help_panel=_INPUT)]
Shard = Annotated[
    str | None,
    typer.Option(help="Answer every N-th row: I/N (I from 0), or auto in a SLURM array.",
                 rich_help_panel=_INPUT),
]  # fmt: skip
OnDuplicate = Annotated[
    str,
    typer.Option(help="An id twice: refuse the data, or row-error from its second row on.",
                 rich_help_panel=_INPUT),
]  # fmt: skip
System = Annotated[
    str | None,
    typer.Option("--system", "-s", help="System message: text, or @file.", rich_help_panel=_INPUT),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Unknown parameters are row errors.", rich_help_panel=_INPUT),
]
HubSubset = Annotated[
    str | None,
    typer.Option("--hf-subset", help="Subset of a hub data set.", rich_help_panel=_INPUT),
]
HubSplit = Annotated[
    str | None, typer.Option("--hf-split", help="Split of a hub data set.", rich_help_panel=_INPUT)
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", "--download-dir", help="Where downloaded models lie."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never ask the hub.")]
Dtype = Annotated[
    str,
    typer.Option(help="Arithmetic: auto (bf16 where weights and CPU are), float32, bfloat16."),
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt + answer, in tokens; default: the model's.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "--max-new-tokens", help="Tokens to generate at most.",
                 rich_help_panel=_GENERATION),
]  # fmt: skip
MinTokens = Annotated[
    int | None, typer.Option(help="No end before this many.", rich_help_panel=_GENERATION)
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy.", rich_help_panel=_GENERATION)
]
Greedy = Annotated[
    bool, typer.Option("--greedy", help="Same as --temperature 0.", rich_help_panel=_GENERATION)
]
TopP = Annotated[
    float | None, typer.Option(help="Nucleus: likeliest mass kept.", rich_help_panel=_GENERATION)
]
TopK = Annotated[
    int | None, typer.Option(help="Likeliest tokens kept; 0 = all.", rich_help_panel=_GENERATION)
]
MinP = Annotated[
    float | None,
    typer.Option(help="Least share of the likeliest token's.", rich_help_panel=_GENERATION),
]
Choices = Annotated[
    int | None, typer.Option("--n", help="Answers a row.", rich_help_panel=_GENERATION)
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the sampling.", rich_help_panel=_GENERATION)
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop at this text (repeat).", rich_help_panel=_GENERATION)
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(help="Stop at this token (repeat).", rich_help_panel=_GENERATION)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after EOS.", rich_help_panel=_GENERATION)
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: repeat less.", rich_help_panel=_GENERATION)
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="OpenAI's; -2 to 2.", rich_help_panel=_GENERATION)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="OpenAI's; -2 to 2.", rich_help_panel=_GENERATION)
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="Log-probabilities of the K likeliest.", rich_help_panel=_GENERATION),
]
IncludeStop = Annotated[
    bool,
    typer.Option("--include-stop-str-in-output", help="Keep the stop text.",
                 rich_help_panel=_GENERATION),
]  # fmt: skip
SkipSpecial = Annotated[
    bool | None,
    typer.Option("--skip-special-tokens/--no-skip-special-tokens", show_default=False,
                 help="Leave special tokens out of the text (default).",
                 rich_help_panel=_GENERATION),
]  # fmt: skip
GenerationConfig = Annotated[
    str,
    typer.Option(help="auto (the model's), none, or a JSON file.", rich_help_panel=_GENERATION),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="A template file, or a name among the model's.", rich_help_panel=_GENERATION),
]
ApplyChatTemplate = Annotated[
    str,
    typer.Option(help="auto (messages only), always or never.", rich_help_panel=_GENERATION),
]
OnTooLong = Annotated[
    str,
    typer.Option(help="Prompt beyond the model: error, truncate or skip.",
                 rich_help_panel=_GENERATION),
]  # fmt: skip
TruncationSide = Annotated[
    str, typer.Option(help="What is cut: left, right or middle.", rich_help_panel=_GENERATION)
]
Memory = Annotated[
    str,
    typer.Option("--memory", "--cpu-memory", help="Host memory of the whole process: auto or 6GiB.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
CpuThreads = Annotated[
    int | None, typer.Option(help="Threads; default: all cores.", rich_help_panel=_RESOURCES)
]
BatchSize = Annotated[
    int | None, typer.Option(help="Rows in flight; default: planned.", rich_help_panel=_RESOURCES)
]
MicroBatchSize = Annotated[
    int | None,
    typer.Option(help="Rows per attention call; default: planned.", rich_help_panel=_RESOURCES),
]
PolicyFile = Annotated[
    str,
    typer.Option("--policy", help="auto, or a file that plan --save wrote; flags replace its fields.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
WeightsResident = Annotated[
    str,
    typer.Option(help="Share of the weights kept in memory: auto or 0..1.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
RegimeName = Annotated[
    str,
    typer.Option("--regime", help="auto, stream (whole layers), cache (experts as tokens ask).",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
ExpertCache = Annotated[
    str,
    typer.Option(help="Experts kept in the cache regime: auto, 96 or 2GiB.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
Eviction = Annotated[
    str,
    typer.Option(help="Who leaves a full cache: auto, lru, lfu or mrs.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
PrefetchLayers = Annotated[
    int | None,
    typer.Option(help="Layers whose experts are predicted and read ahead; default 3.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
RoutingTrace = Annotated[
    Path | None,
    typer.Option(help="Record which experts tokens chose, for moebatch replay.",
                 rich_help_panel=_REPORTING),
]  # fmt: skip
Quantization = Annotated[
    str,
    typer.Option(help="none, int8 or int4: experts and projections are rounded to 8 or 4 bits"
                 " as they are loaded.", rich_help_panel=_RESOURCES),
]  # fmt: skip
KvCacheDtype = Annotated[
    str,
    typer.Option(help="auto (the weights'), float32, bfloat16 or float16.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
Device = Annotated[
    str,
    typer.Option(help="auto, cpu, cuda, cuda:N, or emulated:NAME (t4, l4, a100, t4-mini).",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
Schedule = Annotated[
    str,
    typer.Option(help="auto, or a pipeline by name: cgopipe, fastdecode, flexgen …",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
GpuMemory = Annotated[
    str | None,
    typer.Option(help="Accelerator memory that may be used: 16GiB; default: all of it.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
OnOom = Annotated[
    str,
    typer.Option(help="When the accelerator's memory runs out: replan smaller and go on, or fail.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
Speculate = Annotated[
    str | None,
    typer.Option(help="Guess tokens ahead and check them in one pass; the text stays the same: off "
                 "(default), ngram (from the text so far) or draft (a model).",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
DraftModel = Annotated[
    str | None, typer.Option(help="A small model of the same tokens.", rich_help_panel=_RESOURCES)
]
DraftTokens = Annotated[
    str,
    typer.Option(help="Tokens guessed per row and pass, at most: auto (as many as pay) or 1 to 16.",
                 rich_help_panel=_RESOURCES),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    typer.Option(help="Write a Chrome trace of the first passes.", rich_help_panel=_REPORTING),
]
ReportFile = Annotated[
    str | None,
    typer.Option("--report", help="Report file; default OUT.moebatch/report.json.",
                 rich_help_panel=_REPORTING),
]  # fmt: skip
Progress = Annotated[
    str, typer.Option(help="auto, bar, plain or none.", rich_help_panel=_REPORTING)
]
JsonReport = Annotated[
    bool, typer.Option("--json", help="Print the report on stdout.", rich_help_panel=_REPORTING)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only errors.", rich_help_panel=_REPORTING)
]
ConvertSchema = Annotated[
    str, typer.Option("--schema", "--to", help="auto (as it is), openai or flat.")
]
BodyModel = Annotated[
    str | None, typer.Option("--model-name", help="The model that OpenAI lines shall name.")
]
RunOutput = Annotated[
    str, typer.Argument(metavar="OUT", help="The output, as it was given to run -o.")
]
MoreOptions = Annotated[
    list[str] | None, typer.Argument(metavar="[OPTIONS OF RUN]", help="Added to the command.")
]
Shards = Annotated[
    list[str],
    typer.Argument(metavar="OUT_SHARD", help="Outputs of all shards, in any order; globs too."),
]
JsonFacts = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

CHOICES = {
    "output_format": ("auto", "jsonl", "parquet"),
    "output_schema": ("auto", "openai", "flat"),
    "schema": ("auto", "openai", "flat"),
    "order": ("input", "completion"),
    "apply_chat_template": ("auto", "always", "never"),
    "on_too_long": ("error", "truncate", "skip"),
    "truncation_side": ("left", "right", "middle"),
    "resume": ("auto", "numeric"),
    "dtype": ("auto", "float32", "bfloat16"),
    "on_duplicate": ("refuse", "row-error"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("none", "int8", "int4"),
    "attention": ("auto", "cpu", "gpu"),
    "ffn": ("auto", "cpu", "gpu"),
    "policy_space": ("full", "paper"),
    "regime": ("auto", "stream", "cache"),
    "eviction": ("auto", "lru", "lfu", "mrs"),
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


def existing_output(name: str) -> Path:
    """The output of an earlier run, as users write it.

    Raises: UsageError for what cannot be the name of a file.
    """
    path = Path(name)
    if not path.name or "\0" in name:
        raise UsageError(f"{name!r} is no output file", hint="name it as it was given to run -o")
    return path


def destination(output: str) -> "Path | Literal['-']":
    """The output as users write it; - is standard output."""
    return "-" if output == "-" else Path(output)
