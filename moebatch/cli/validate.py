"""`moebatch validate`: every row as a run would read it, without weights."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer

from moebatch.cli import options as opt

if TYPE_CHECKING:
    from moebatch.data.parse import RequestBuilder
    from moebatch.data.requests import RawRow, RowError

_BAR = 40  # characters of the longest bar
_FIRST_BIN = 16  # tokens


def validate(
    dataset: opt.Dataset,
    model: opt.Model,
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
    revision: opt.Revision = None,
    cache_dir: opt.CacheDir = None,
    offline: opt.Offline = False,
    max_model_len: opt.MaxModelLen = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    generation_config: opt.GenerationConfig = "auto",
    chat_template: opt.ChatTemplate = None,
    apply_chat_template: opt.ApplyChatTemplate = "auto",
    on_too_long: opt.OnTooLong = "error",
    json_report: opt.JsonFacts = False,
) -> None:
    """Check rows, ids and lengths against a model's tokenizer, without its weights.

    Prints each bad row with its place and error code, then counts and prompt lengths.
    Exit code 6 when a row is bad.
    """
    from moebatch.cli import asked, prompts
    from moebatch.data.columns import ColumnNames
    from moebatch.data.tokenizer import load_tokenizer
    from moebatch.model.resolve import resolve_model

    opt.check_choices(apply_chat_template=apply_chat_template, on_too_long=on_too_long)
    columns = ColumnNames(prompt=prompt_column, messages=messages_column,
                          prompt_token_ids=token_ids_column, id=id_column)  # fmt: skip
    rows = asked.InputOptions(sources=dataset, input_format=input_format, limit=limit,
                              offset=offset, subset=hf_subset, split=hf_split,
                              columns=columns)  # fmt: skip
    flags = {"max_tokens": max_tokens, "min_tokens": min_tokens}
    wanted = asked.PromptOptions(
        sampling={name: value for name, value in flags.items() if value is not None},
        generation_config=generation_config, chat_template=chat_template, strict=strict,
        apply_chat_template=apply_chat_template, system=asked.text_or_file(system),
        on_too_long=on_too_long, truncation_side="left", max_model_len=max_model_len,
    )  # fmt: skip
    found = resolve_model(model, revision=revision, cache_dir=cache_dir, offline=offline,
                          weights=False)  # fmt: skip
    builder = prompts.request_builder(
        found, wanted, tokenizer=load_tokenizer(found.path), columns=columns,
        template=prompts.chat_template(found, wanted), defaults=prompts.row_defaults(found, wanted),
    )  # fmt: skip
    with rows.open() as data:
        survey = data.survey(on_duplicate="row-error")
        findings = Findings(model=found.name)
        bad = findings.check(data.places(survey), builder)
        (_print_json if json_report else _print_text)(findings, bad)
    raise typer.Exit(6 if findings.num_bad else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that a run would answer with an error."""

    place: str
    error: "RowError"

    def to_dict(self) -> dict[str, Any]:
        """The fields of the JSON form."""
        return {
            "place": self.place,
            "line": self.error.line,
            "id": self.error.id,
            "code": self.error.code,
            "param": self.error.param,
            "message": self.error.message,
        }


@dataclass(slots=True)
class Findings:
    """Counts over all rows; grows while `check` goes through them."""

    model: str
    num_rows: int = 0
    num_skipped: int = 0
    by_code: Counter[str] = field(default_factory=Counter)
    truncated_tokens: int = 0
    num_clamped: int = 0
    most_generated: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    @property
    def num_bad(self) -> int:
        """Rows that would fail."""
        return self.by_code.total()

    def check(self, rows: "Iterable[tuple[RawRow | RowError, str]]",
              builder: "RequestBuilder") -> Iterator[BadRow]:  # fmt: skip
        """Go through the rows and yield those that would fail."""
        from moebatch.data.requests import RowError

        for row, place in rows:
            self.num_rows += 1
            made = row if isinstance(row, RowError) else builder.build(row)
            if not isinstance(made, RowError):
                self.lengths[len(made.prompt_token_ids)] += 1
                self.truncated_tokens += made.truncated_tokens
                self.num_clamped += made.clamped_from is not None
                self.most_generated += (made.params.max_tokens or 0) * made.params.n
            elif made.skipped:
                self.num_skipped += 1
            else:
                self.by_code[made.code] += 1
                yield BadRow(place=place, error=made)
        self.warnings = list(builder.warnings)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the JSON form, without the bad rows."""
        from moebatch.report import percentiles

        return {
            "schema_version": 1,
            "valid": not self.num_bad,
            "model": self.model,
            "rows": {
                "total": self.num_rows,
                "good": self.lengths.total(),
                "bad": self.num_bad,
                "skipped": self.num_skipped,
                "by_error_code": dict(self.by_code),
                "max_tokens_clamped": self.num_clamped,
            },
            "tokens": {
                "prompt": sum(length * count for length, count in self.lengths.items()),
                "truncated": self.truncated_tokens,
                "generated_at_most": self.most_generated,
            },
            "prompt_lengths": percentiles(self.lengths),
            "histogram": [
                {"from": low, "to": high, "rows": count} for low, high, count in bins(self.lengths)
            ],
            "warnings": self.warnings,
        }


def bins(lengths: Counter[int]) -> list[tuple[int, int, int]]:
    """(from, to, rows) of a histogram over lengths; each bin is twice as wide as the one before."""
    if not lengths:
        return []
    edges = [0, _FIRST_BIN]
    while edges[-1] <= max(lengths):
        edges.append(edges[-1] * 2)
    counts = [
        (low, high - 1, sum(n for length, n in lengths.items() if low <= length < high))
        for low, high in pairwise(edges)
    ]
    first = next(i for i, (_, _, count) in enumerate(counts) if count)
    return counts[first:]


def _print_json(findings: Findings, bad: Iterator[BadRow]) -> None:
    """One object; the bad rows are written as they come, so that none has to be kept."""
    write = sys.stdout.write
    write('{"bad_rows": [')
    for count, row in enumerate(bad):
        write((",\n" if count else "\n") + json.dumps(row.to_dict()))
    write("],\n" + json.dumps(findings.to_dict(), indent=2, allow_nan=False)[1:] + "\n")


def _print_text(findings: Findings, bad: Iterator[BadRow]) -> None:
    for row in bad:
        error = row.error
        typer.echo(f"{row.place}: {error.code}: {error.message}")
    facts = findings.to_dict()
    rows, tokens = facts["rows"], facts["tokens"]
    codes = ", ".join(f"{code} {count}" for code, count in findings.by_code.most_common())
    skipped = f", {findings.num_skipped:,} skipped" if findings.num_skipped else ""
    typer.echo(
        f"{rows['total']:,} rows · {rows['good']:,} good, {rows['bad']:,} bad"
        + (f" ({codes})" if codes else "")
        + skipped
    )
    if findings.lengths:
        spread = " · ".join(f"{name} {value:,}" for name, value in facts["prompt_lengths"].items())
        typer.echo(f"prompt tokens: {tokens['prompt']:,} · {spread}")
        typer.echo(f"new tokens: at most {tokens['generated_at_most']:,}")
        _print_histogram(findings.lengths)
    if findings.num_clamped:
        typer.echo(f"max_tokens is clamped to the context in {findings.num_clamped:,} rows")
    for text in findings.warnings:
        typer.echo(f"warning: {text}", err=True)


def _print_histogram(lengths: Counter[int]) -> None:
    """A bar for each bin: rich on a terminal, plain characters elsewhere."""
    rows = bins(lengths)
    most = max(count for _, _, count in rows)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table("prompt tokens", "rows", "", box=None)
        for low, high, count in rows:
            table.add_row(f"{low:,}-{high:,}", f"{count:,}", "█" * round(_BAR * count / most))
        Console().print(table)
        return
    for low, high, count in rows:
        bar = "#" * round(_BAR * count / most)
        typer.echo(f"{f'{low:,}-{high:,}':>15} {count:>9,} {bar}".rstrip())
