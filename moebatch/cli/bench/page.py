"""A record as one HTML page that needs nothing else: no network, no library, pictures drawn here."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from moebatch.cli.bench import figures, lanes, table
from moebatch.cli.bench.curves import AXES
from moebatch.cli.bench.figures import setting_words
from moebatch.cli.bench.roofs import NAMES
from moebatch.cli.bench.table import number
from moebatch.units import format_bytes, format_rate

_HERE = Path(__file__).parent
_SHARED = ("workload", "model", "prompts", "gen_len", "memory")
_NUMBERS = ("prompts", "gen_len", "N", "mu", "predicted", "measured", "% of roof", "peak gpu GiB",
            "peak cpu GiB", "ours/it", "paper")  # fmt: skip


def page(record: dict[str, Any]) -> str:
    """The page of a benchmark's record."""
    body = [_header(record), _warning(record), _tiles(record), _throughput(record),
            _table(record), *_sweeps(record), _roofline(record), _pick(record["settings"]),
            *_panels(record["settings"]), _footer(record)]  # fmt: skip
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(_title(record))}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + f"\n</main>\n<script>\n{script}</script>\n</body></html>\n"
    )


def _title(record: dict[str, Any]) -> str:
    models = list(dict.fromkeys(setting["model"] for setting in record["settings"]))
    return "moebatch: throughput of " + ", ".join(models)


def _header(record: dict[str, Any]) -> str:
    about = record["machine"]
    peaks = ", ".join(f"{name} {peak / 1e9:.0f} GFLOP/s" for name, peak in about["flops"].items())
    machine = (
        f"{about['cpu']}, {about['cores']} cores, {format_bytes(about['ram_bytes'])} · measured: "
        f"memory {format_rate(about['memory_bandwidth'])}, "
        f"disk {format_rate(about['disk_bandwidth'])}, {peaks}"
    )
    sources = dict.fromkeys(setting["prompts"]["source"] for setting in record["settings"])
    return (
        f"<header><h1>{escape(_title(record))}</h1><p>{escape(machine)}</p>"
        f"<p>prompts: {escape('; '.join(sources))}</p>"
        f"<p>{escape(record['started_at'][:10])} · "
        f"<code>{escape(record['command'])}</code></p></header>"
    )


def _warning(record: dict[str, Any]) -> str:
    """On a busy machine rates and ratios say little: that stands above them."""
    arms = [arm for setting in record["settings"] for arm in setting["arms"]]
    most = max((table.others_share(arm) for arm in arms), default=0.0)
    if most <= table.BUSY:
        return ""
    words = (f"Other programs took up to {most:.0%} of the processors during these runs. "
             "Rates and ratios would be others on a quiet machine.")  # fmt: skip
    return f'<p class="warning">{escape(words)}</p>'


def _tiles(record: dict[str, Any]) -> str:
    """The four numbers that one looks for, of the setting with the highest rate."""
    pairs = [(setting, arm) for setting in record["settings"] for arm in setting["arms"]
             if arm["name"] == "moebatch" and arm["tok_s"]]  # fmt: skip
    if not pairs:
        return ""
    setting, arm = max(pairs, key=lambda pair: pair[1]["tok_s"]["mean"])
    rate, planned = arm["tok_s"]["mean"], arm["planned"] or {}
    tiles = [
        (
            number(rate),
            f"generated tokens/s · {setting['model']}, {setting['num_prompts']} requests",
        )
    ]
    ratios = [other["ours_to_it"] for other in setting["arms"] if other["ours_to_it"]
              and other["name"] != "moebatch"]  # fmt: skip
    if ratios:
        tiles.append((f"{min(ratios):.1f} x", "the fastest rival in the same run"))
    if roofs := planned.get("roofs"):
        tiles.append((f"{rate / roofs['tok_s']:.0%}", f"of the roof, which is {_bound(roofs)}"))
    if predicted := planned.get("predicted"):
        tiles.append((f"{predicted['tok_s'] / rate:.2f}", "predicted before the run / measured"))
    if arm["peak_cpu_bytes"]:
        tiles.append((format_bytes(arm["peak_cpu_bytes"]), "peak memory of the whole process"))
    cells = "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>'
                    for a, b in tiles)  # fmt: skip
    return f'<div class="tiles">{cells}</div>'


def _bound(roofs: dict[str, Any]) -> str:
    return NAMES[str(roofs["bound_by"])]


def _throughput(record: dict[str, Any]) -> str:
    keys = (
        '<p class="keys"><span><i class="key experts"></i>moebatch</span>'
        '<span><i class="key predicted"></i>predicted before the run</span>'
        '<span><i class="key roof"></i>roof</span></p>'
    )
    words = ("Generated tokens per second of prefill and decode, loading excluded. Every arm had the "
             "same prompts and lengths in the same call; repeats were interleaved.")  # fmt: skip
    return _section("Throughput", words, keys + figures.throughput(record["settings"]))


def _table(record: dict[str, Any]) -> str:
    rows = list(table.rows(record))
    said = [name for name in table.COLUMNS
            if name != "sd" and any(row[name] is not None for row in rows)]  # fmt: skip
    # What all rows share stands above the table, once.
    same = [name for name in said if name in _SHARED and len({row[name] for row in rows}) == 1]
    used = [name for name in said if name not in same]
    words = ", ".join(f"{name} {table.shown(rows[0], name)}" for name in same)
    head = "".join(f"<th>{escape(name)}</th>" for name in used)
    lines = []
    for row in rows:
        kind = ' class="ours"' if row["arm"].startswith("moebatch") else ""
        cells = "".join(f"<td{_cell(name)}>{escape(table.shown(row, name))}</td>" for name in used)
        lines.append(f"<tr{kind}>{cells}</tr>")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return _section("Every setting", words and f"In all rows: {words}.", body)


def _cell(name: str) -> str:
    if name in _NUMBERS:
        return ' class="number"'
    kinds = {"note": ' class="note"', "policy": ' class="wide"', "arm": ' class="wide"'}
    return kinds.get(name, "")


def _sweeps(record: dict[str, Any]) -> Iterator[str]:
    words = "Measured points, and the planner's curve where it has one."
    for curve in record.get("curves", []):
        if len(curve["measured"]) > 1:
            title = f"Throughput against {AXES[curve['axis']]}"
            yield _section(title, words, figures.sweep(curve))


def _roofline(record: dict[str, Any]) -> str:
    words = ("Where the runs lie under the machine's measured roofs: FLOPs against bytes read from "
             "memory, and where weights stream, from disk.")  # fmt: skip
    return _section("Roofline", words, figures.roofline(record["settings"], record["machine"]))


def _pick(settings: Sequence[dict[str, Any]]) -> str:
    if len(settings) < 2:
        return ""
    options = "".join(f'<option value="{k}">{escape(setting_words(one))}</option>'
                      for k, one in enumerate(settings))  # fmt: skip
    return (f'<div class="pick"><label for="setting">Figures of</label>'
            f'<select id="setting">{options}</select></div>')  # fmt: skip


def _panels(settings: Sequence[dict[str, Any]]) -> Iterator[str]:
    for k, setting in enumerate(settings):
        parts = "".join(_panel(setting))
        yield f'<div data-setting="{k}">{parts}</div>'


def _panel(setting: dict[str, Any]) -> Iterator[str]:
    keys = "".join(f'<span><i class="key {kind}"></i>{escape(words)}</span>'
                   for kind, words in lanes.legend(setting))  # fmt: skip
    drawn = lanes.lanes(setting)
    yield _section("Lanes", "What the processor and the disk did in the first passes; a pass carries "
                   "every row in flight through all layers.",
                   f'<p class="keys">{keys}</p>{drawn}' if drawn else "")  # fmt: skip
    yield _section("Memory", "Seen from outside, ten times a second, loading included.",
                   figures.memory(setting))  # fmt: skip
    yield _section("Expert load", "Tokens that each expert of each layer computed.",
                   figures.experts(setting))  # fmt: skip
    yield _section("Prompt lengths", setting["prompts"]["source"], figures.lengths(setting))


def _section(title: str, words: str, body: str) -> str:
    if not body:
        return ""
    lead = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def _footer(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    rivals = dict.fromkeys(arm["version"] for setting in record["settings"]
                           for arm in setting["arms"] if arm["version"])  # fmt: skip
    said = [f"moebatch {record['moebatch_version']}", f"commit {record['commit']}", versions, *rivals,
            f"load before the first run {record['machine']['load_before'] or 0:.2f}"]  # fmt: skip
    return f"<footer>{escape(' · '.join(part for part in said if part))}</footer>"
