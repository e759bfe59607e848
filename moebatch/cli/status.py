"""`moebatch status`: how far a run is, live or dead, from what lies beside its output."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from moebatch.cli import options as opt
from moebatch.errors import InputNotFound
from moebatch.units import format_count


def status(
    output: opt.RunOutput,
    json_report: opt.JsonFacts = False,
) -> None:
    """Show what a run has done and what is left, from the folder OUT.moebatch; changes nothing.

    Rows that fail before the model sees them (such as lines that are no JSON) are counted once the
    run is over.
    """
    facts = look(opt.existing_output(output))
    if json_report:
        typer.echo(json.dumps(facts, indent=2, allow_nan=False))
        return
    _print(facts)


@dataclass(slots=True)
class _Tally:
    """Rows of a journal, the last word on each."""

    answered: int = 0
    failed: int = 0
    tokens: int = 0


def look(output: Path) -> dict[str, Any]:
    """Everything known about the run of an output; the fields of the JSON form.

    Raises: InputNotFound when no run has left anything there.
    """
    from moebatch.data.inflight import read_inflight
    from moebatch.data.manifest import read_manifest
    from moebatch.data.rows_file import read_rows_file
    from moebatch.data.side import has_output, is_locked, side_path

    folder = side_path(output)
    manifest = read_manifest(folder / "manifest.json")
    if manifest is None:
        raise InputNotFound(
            f"there is no run of {output}: {folder} "
            + ("holds no manifest that can be read" if folder.is_dir() else "does not exist"),
            hint="name the output as it was given to run -o; of a shard with its shard in the name",
        )
    writer, made = is_locked(output), read_rows_file(folder)
    finished = made is not None and made.diverted is not None and has_output(output)
    in_flight = read_inflight(folder / "inflight.bin")
    tally, codes = _tally(folder)
    report = _report(folder) if finished and writer is None else {}
    total = made.num_rows if made is not None else None
    answered, failed = _counts(report, tally)
    return {
        "schema_version": 1,
        "output": str(output),
        "state": "running" if writer else "finished" if finished else "stopped",
        "writer": writer,
        "model": manifest.fingerprint.get("model"),
        "shard": f"{made.shard[0]}/{made.shard[1]}" if made is not None else None,
        "rows": {
            "total": total,
            "answered": answered,
            "failed": failed,
            "skipped": report.get("requests", {}).get("skipped", 0),
            "left": 0 if finished else _left(total, answered + failed),
            "in_flight": len(in_flight),
            "by_error_code": report.get("requests", {}).get("by_error_code") or dict(codes),
        },
        "tokens": {
            "generated": tally.tokens,
            "in_flight": sum(len(one.token_ids) for row in in_flight.values() for one in row),
        },
        "sessions": [
            {"started_at": session.started_at, "command": list(session.argv)}
            for session in manifest.sessions
        ],
    }


def _tally(folder: Path) -> tuple[_Tally, Counter[str]]:
    """Rows by their last line in the journal."""
    from moebatch.data.journal import read_entries

    last: dict[bytes, str | None] = {}  # 16 bytes and a short word a row
    tally = _Tally()
    for entry in read_entries(folder):
        last[entry.key] = sys.intern(entry.body["error"]["code"]) if entry.failed else None
        tally.tokens += entry.num_tokens
    codes = Counter(code for code in last.values() if code is not None)
    tally.failed, tally.answered = codes.total(), len(last) - codes.total()
    return tally, codes


def _report(folder: Path) -> Mapping[str, Any]:
    """The report of the last session that ended; it may lie elsewhere (--report)."""
    try:
        said = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(said, dict) and isinstance(said.get("requests"), dict)
    return said if whole and said.get("status") == "completed" else {}


def _counts(report: Mapping[str, Any], tally: _Tally) -> tuple[int, int]:
    requests = report.get("requests", {})
    return requests.get("succeeded", tally.answered), requests.get("failed", tally.failed)


def _left(total: int | None, done: int) -> int | None:
    return None if total is None else max(0, total - done)


def _print(facts: Mapping[str, Any]) -> None:
    """A table on a terminal, plain lines elsewhere."""
    rows, tokens = facts["rows"], facts["tokens"]
    codes = ", ".join(f"{code} {count}" for code, count in rows["by_error_code"].items())
    lines = {
        "output": facts["output"],
        "state": facts["state"] + (f" ({facts['writer']})" if facts["writer"] else ""),
        "model": str(facts["model"]),
        "rows": _shown(rows["total"]),
        "answered": _shown(rows["answered"]),
        "failed": _shown(rows["failed"]) + (f" ({codes})" if codes else ""),
        "left": _shown(rows["left"])
        + (f", {rows['in_flight']} begun" if rows["in_flight"] else ""),
        "tokens": f"{format_count(tokens['generated'])} in finished rows"
        + (f", {format_count(tokens['in_flight'])} in begun ones" if tokens["in_flight"] else ""),
        "starts": f"{len(facts['sessions'])}, the last at {facts['sessions'][-1]['started_at']}"
        if facts["sessions"]
        else "none",
    }
    if facts["shard"] not in (None, "0/1"):
        lines["shard"] = facts["shard"]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False, box=None)
        for name, value in lines.items():
            table.add_row(f"[bold]{name}[/bold]", value)
        Console().print(table)
    else:
        for name, value in lines.items():
            typer.echo(f"{name:<9} {value}")
    if facts["state"] == "stopped":
        typer.echo("the same command goes on; so does: moebatch retry " + facts["output"], err=True)


def _shown(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"
