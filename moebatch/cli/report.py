"""`moebatch report A [B]`: what a run's report or a benchmark's record says, alone or side by side."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from moebatch.errors import InputError, InputNotFound, UsageError
from moebatch.units import format_bytes, format_duration

Reports = Annotated[
    list[str],
    typer.Argument(
        metavar="A [B]", help="report.json, the OUT it belongs to, or a benchmark's JSON."
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Of benchmarks: write their page into this file.")
]
Value = float | str | None
Line = tuple[str, Value, Callable[[float], str]]


def report(reports: Reports, html: Html = None) -> None:
    """Show a report, or two with their ratios."""
    if len(reports) > 2 and html is None:
        raise UsageError("report takes one or two reports", hint="moebatch report A.json B.json")
    found = [_read(name) for name in reports]
    benchmarks = [one.get("kind") == "moebatch-bench" for one in found]
    if html is not None:
        _write_page(found, html, are_benchmarks=all(benchmarks))
        return
    if len(set(benchmarks)) > 1:
        raise UsageError("one is a run's report, the other a benchmark's record")
    if benchmarks[0]:
        _show_benchmarks(found)
    elif len(found) == 1:
        _show_run(found[0])
    else:
        _show_two(found[0], found[1], names=reports)


def _read(name: str) -> dict[str, Any]:
    """The report behind a name.

    Raises: InputNotFound, InputError.
    """
    path = Path(name)
    beside = Path(f"{name}.moebatch") / "report.json"
    if beside.is_file():
        path = beside
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputNotFound(f"cannot read {path}: {error.strerror}",
                            hint="name a report.json, or the OUT of a run") from None  # fmt: skip
    except ValueError:
        raise InputError(f"{path} is no JSON") from None
    if not isinstance(value, dict) or not {"throughput", "kind"} & set(value):
        raise InputError(f"{path} is neither a run's report nor a benchmark's record")
    return value


def _write_page(found: list[dict[str, Any]], target: Path, *, are_benchmarks: bool) -> None:
    from moebatch.cli.bench.curves import joined
    from moebatch.cli.bench.page import page

    if not are_benchmarks:
        raise UsageError("--html is for records of benchmarks",
                         hint="moebatch bench … --output-json FILE writes one")  # fmt: skip
    try:
        target.write_text(page(joined(found)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None


def _show_benchmarks(found: list[dict[str, Any]]) -> None:
    from moebatch.cli.bench import compare, table

    if len(found) == 1:
        typer.echo(table.markdown(found[0]), nl=False)
    else:
        typer.echo(compare.markdown(compare.compare(found[0], found[1])), nl=False)


def _lines(report: dict[str, Any]) -> Iterator[Line]:
    """Name, value and how it is written, in the order in which one asks."""
    rate, tokens = report["throughput"], report["tokens"]
    times, memory = report["time_s"], report["memory_peak"]
    yield "tokens/s, generated", rate["generation_throughput"], _three
    yield "tokens/s, prefill", rate["prefill_tok_s"], _three
    yield "tokens/s, decode", rate["decode_tok_s"], _three
    yield "rows answered", report["requests"]["succeeded"], _whole
    yield "rows failed", report["requests"]["failed"], _whole
    yield "prompt tokens", tokens["prompt"], _whole
    yield "generated tokens", tokens["generated"], _whole
    for name in ("total", "load", "prefill", "decode"):
        yield f"time, {name}", times[name], format_duration
    yield "memory, peak", memory["cpu_rss"], format_bytes
    yield "memory, budget", memory["budget"] or None, format_bytes
    yield "read from disk", report["io"]["disk_read_bytes"], format_bytes
    yield "passes", report["passes"], _whole
    for lane, busy in report["lanes_busy_s"].items():
        yield f"lane {lane} busy", busy, format_duration
    compared = (report.get("predicted_vs_measured") or {}).get("generation_throughput")
    if compared:
        yield "tokens/s, predicted", compared["predicted"], _three
        yield "predicted / measured", compared["ratio"], _three
    load = report.get("moe") or {}
    yield "busiest expert / mean", load.get("max_over_mean"), _three


def _three(value: float) -> str:
    from moebatch.cli.bench.table import number

    return number(value)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _shown(value: Value, write: Callable[[float], str]) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else write(value)


def _show_run(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=_title(report), title_justify="left", show_header=False)
    shown.add_column("what")
    shown.add_column("value", justify="right")
    for name, value, write in _lines(report):
        if value is not None:
            shown.add_row(name, _shown(value, write))
    console = Console()
    console.print(shown)
    for text in report["warnings"]:
        console.print(f"warning: {text}", markup=False)


def _show_two(a: dict[str, Any], b: dict[str, Any], *, names: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"A {_title(a)}\nB {_title(b)}", title_justify="left")
    shown.add_column("")
    for head in ("A", "B", "B / A"):
        shown.add_column(head, justify="right")
    second = {name: (value, write) for name, value, write in _lines(b)}
    rows = {name: (value, write) for name, value, write in _lines(a)}
    for name in [*rows, *(name for name in second if name not in rows)]:
        value, write = rows.get(name, (None, _three))
        other, write_other = second.get(name, (None, write))
        if value is None and other is None:
            continue
        ratio = other / value if _number(value) and _number(other) and value else None  # type: ignore[operator]
        shown.add_row(name, _shown(value, write), _shown(other, write_other),
                      "" if ratio is None else f"{ratio:.2f}")  # fmt: skip
    console = Console()
    console.print(shown)
    console.print(f"A is {names[0]}, B is {names[1]}", markup=False)


def _number(value: Value) -> bool:
    return isinstance(value, int | float)


def _title(report: dict[str, Any]) -> str:
    name = str(report["model"]["id"]).rstrip("/").rpartition("/")[2]
    return f"{name}: {report['status']} {report['finished_at'][:16].replace('T', ' ')}"
