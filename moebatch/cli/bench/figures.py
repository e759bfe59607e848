"""The figures of a benchmark's page: each turns a part of the record into one picture."""

from collections.abc import Callable, Sequence
from math import log10
from typing import Any

from moebatch.cli.bench import svg
from moebatch.cli.bench.curves import AXES
from moebatch.cli.bench.svg import Frame, Picture
from moebatch.cli.bench.table import number
from moebatch.units import format_bytes, format_count

_WIDTH = 920.0
_GIB = 1 << 30
_LINES = ("c0", "c1", "c2", "c3", "c4", "c5")
Setting = dict[str, Any]


def arm_words(arm: dict[str, Any]) -> str:
    """An arm's name and variant."""
    return f"{arm['name']} {arm['label']}".strip()


def throughput(settings: Sequence[Setting]) -> str:
    """Bars of tokens per second, a group for each setting; ticks for what was predicted, roofs."""
    bars = [(setting, arm) for setting in settings for arm in setting["arms"]]
    height = 26 * len(bars) + 30 * len(settings) + 46
    picture = Picture(_WIDTH, height, "throughput of every arm in every setting")
    shown = [_reach(arm) for _, arm in bars]
    scale = svg.linear(0, max(shown, default=1.0) * 1.02, 290, _WIDTH - 150)
    for value in svg.ticks(max(shown, default=1.0), 6):
        picture.line([(scale(value), 8), (scale(value), height - 30)], kind="grid")
        picture.text(scale(value), height - 12, number(value), kind="tick", anchor="middle")
    y = 10.0
    for setting in settings:
        picture.text(10, y + 18, setting_words(setting), kind="group")
        y += 30
        for arm in setting["arms"]:
            _bar(picture, scale, arm, y)
            y += 26
    return picture.render()


def _reach(arm: dict[str, Any]) -> float:
    """How far right an arm's marks go; a roof far beyond everything is left out of the picture."""
    rate = arm["tok_s"]["mean"] + (arm["tok_s"]["sd"] or 0.0) if arm["tok_s"] else 0.0
    planned = arm["planned"] or {}
    said = (planned.get("predicted") or {}).get("tok_s", 0.0)
    roof = (planned.get("roofs") or {}).get("tok_s", 0.0)
    return float(max(rate, said, roof if roof < 4 * max(rate, said, 1e-9) else 0.0))


def _bar(picture: Picture, scale: svg.Scale, arm: dict[str, Any], y: float) -> None:
    ours = arm["name"] == "moebatch"
    picture.text(280, y + 14, arm_words(arm), kind="name ours" if ours else "name", anchor="end")
    if not arm["tok_s"]:
        picture.text(scale(0) + 6, y + 14, _shortened(arm["reason"] or "not run"), kind="missing")
        return
    rate, sd = arm["tok_s"]["mean"], arm["tok_s"]["sd"] or 0.0
    picture.rect(scale(0), y, scale(rate) - scale(0), 18, kind="bar ours" if ours else "bar",
                 title=f"{arm_words(arm)}: {number(rate)} tokens/s")  # fmt: skip
    end = scale(rate)
    if sd:
        picture.line([(scale(rate - sd), y + 9), (scale(rate + sd), y + 9)], kind="error")
        end = scale(rate + sd)
    planned = arm["planned"] or {}
    for what, mark in (("predicted", (planned.get("predicted") or {}).get("tok_s")),
                       ("roof", (planned.get("roofs") or {}).get("tok_s"))):  # fmt: skip
        if mark and mark <= _reach(arm):
            picture.line([(scale(mark), y - 3), (scale(mark), y + 21)], kind=f"mark {what}",
                         title=f"{what}: {number(mark)} tokens/s")  # fmt: skip
            end = max(end, scale(mark))
    ratio = "" if ours or not arm["ours_to_it"] else f"   ours: {arm['ours_to_it']:.1f} x"
    picture.text(end + 8, y + 14, number(rate) + ratio, kind="value")


def _shortened(words: str) -> str:
    return words if len(words) < 90 else words[:88] + "…"


def setting_words(setting: Setting) -> str:
    """One setting in a line."""
    memory = setting["memory_bytes"]
    length = f"{setting['gen_len']} new tokens" if setting["gen_len"] else "lengths of the rows"
    padded = " padded" if setting["prompts"]["padded"] else ""
    return (
        f"{setting['model']} · {setting['workload']}{padded} · {setting['num_prompts']} requests · "
        f"{length}" + ("" if memory is None else f" · memory {format_bytes(memory)}")
    )


def roofline(settings: Sequence[Setting], machine: dict[str, Any]) -> str:
    """Attained FLOP/s against FLOPs per byte, under the measured roofs; log-log."""
    points = [point for setting in settings for point in _roof_points(setting)]
    if not points:
        return ""
    bandwidth, disk = machine["memory_bandwidth"], machine["disk_bandwidth"]
    used = {point["compute"] for point in points}
    peaks = {k: v for k, v in machine["flops"].items() if k in used} or machine["flops"]
    low = min(min(p["x"] for p in points) / 4, 1.0)
    high = max([*(p["x"] * 6 for p in points), max(peaks.values()) / disk * 2])
    floor = min(min(p["y"] for p in points) / 5, disk * low * 5)
    picture = Picture(_WIDTH, 430, "roofline with the measured points")
    frame = Frame(left=80, top=34, right=_WIDTH - 190, bottom=380,
                  x=svg.logarithmic(low, high, 80, _WIDTH - 190),
                  y=svg.logarithmic(floor, max(peaks.values()) * 2.5, 380, 34))  # fmt: skip
    svg.axes(picture, frame, x_ticks=svg.decades(low, high),
             y_ticks=svg.decades(floor, max(peaks.values()) * 2.5), x_words=_power,
             y_words=lambda value: f"{value / 1e9:g}", y_title="GFLOP/s",
             x_title="FLOPs per byte from the level that feeds the products")  # fmt: skip
    top = max(peaks.values())
    for name, rate, kind in (("memory", bandwidth, "roof memory"), ("disk", disk, "roof disk")):
        start = max(low, floor / rate)
        picture.line([(frame.x(start), frame.y(rate * start)), (frame.x(top / rate), frame.y(top))],
                     kind=kind, title=f"{name}: {rate / 1e9:.2f} GB/s")  # fmt: skip
        middle = (start * (top / rate)) ** 0.5
        picture.text(frame.x(middle) - 8, frame.y(rate * middle) - 8,
                     f"{name} {rate / 1e9:.1f} GB/s", kind="note", anchor="end")  # fmt: skip
    for name, peak in peaks.items():
        start, y = frame.x(max(low, peak / bandwidth)), frame.y(peak)
        picture.line([(start, y), (frame.right, y)], kind="roof peak")
        picture.text(frame.right + 8, frame.y(peak) + 4, f"{name} {peak / 1e9:.0f} GFLOP/s",
                     kind="note")  # fmt: skip
    for k, point in enumerate(points):
        x, y = frame.x(point["x"]), frame.y(point["y"])
        picture.dot(x, y, kind=f"dot {point['kind']}", radius=6, title=point["title"])
        picture.text(x + 9, y + (4 if k % 2 else -6), point["words"], kind="note")
    return picture.render()


def _roof_points(setting: Setting) -> list[dict[str, Any]]:
    """What moebatch's first run attained: seen from memory, and where it streams, from the disk."""
    arm = next((arm for arm in setting["arms"] if arm["name"] == "moebatch" and arm["runs"]), None)
    roofs = arm and (arm["planned"] or {}).get("roofs")
    if not arm or not roofs:
        return []
    run, flops = arm["runs"][0], roofs["flops"]
    rate = flops / run["seconds"]
    words = f"{setting['model']} {setting['num_prompts']}"
    common = {"y": rate, "compute": arm["planned"]["compute_dtype"]}
    points = [{**common, "x": flops / roofs["memory_bytes"], "kind": "memory", "words": words,
               "title": f"{words}: {rate / 1e9:.0f} GFLOP/s, seen from memory"}]  # fmt: skip
    if run.get("disk_read_bytes"):
        points.append({**common, "x": flops / run["disk_read_bytes"], "kind": "disk",
                       "words": words + " from disk",
                       "title": f"{words}: {rate / 1e9:.0f} GFLOP/s, seen from the disk"})  # fmt: skip
    return points


def _power(value: float) -> str:
    return f"{value:g}" if 0.01 <= value < 1e5 else f"1e{log10(value):.0f}"


def memory(setting: Setting) -> str:
    """Resident memory of each arm's first run over its time; 0 is where moebatch's rows begin."""
    arms = [arm for arm in setting["arms"] if arm["runs"] and arm["runs"][0].get("samples")]
    if not arms:
        return ""
    samples = [arm["runs"][0]["samples"] for arm in arms]
    first = min(one[0][0] for one in samples)
    last = max(one[-1][0] for one in samples)
    budget = setting["memory_bytes"]
    top = max([size for one in samples for _, size in one] + ([budget] if budget else [])) * 1.08
    picture = Picture(_WIDTH, 330, "memory over time")
    frame = Frame(left=60, top=34, right=_WIDTH - 210, bottom=280,
                  x=svg.linear(first, last, 60, _WIDTH - 210),
                  y=svg.linear(0, top / _GIB, 280, 34))  # fmt: skip
    svg.axes(picture, frame, x_ticks=svg.ticks(last, 8, first), y_ticks=svg.ticks(top / _GIB, 5),
             x_words=lambda s: f"{s:g}", y_words=lambda gib: f"{gib:g}", x_title="seconds",
             y_title="GiB resident, the process and all below it")  # fmt: skip
    if budget:
        y = frame.y(budget / _GIB)
        picture.line([(frame.left, y), (frame.right, y)], kind="budget")
        picture.text(frame.right + 8, y + 4, f"budget {format_bytes(budget)}", kind="note")
    for k, (arm, one) in enumerate(zip(arms, samples, strict=True)):
        kind = "ours" if arm["name"] == "moebatch" else _LINES[k % len(_LINES)]
        picture.line([(frame.x(at), frame.y(size / _GIB)) for at, size in one], kind=f"curve {kind}",
                     title=arm_words(arm))  # fmt: skip
    _legend(picture, [(arm_words(arm), "ours" if arm["name"] == "moebatch" else _LINES[k % 6])
                      for k, arm in enumerate(arms)], x=frame.right + 8, y=60)  # fmt: skip
    return picture.render()


def _legend(picture: Picture, entries: Sequence[tuple[str, str]], *, x: float, y: float) -> None:
    for k, (words, kind) in enumerate(entries):
        picture.line([(x, y + 20 * k), (x + 18, y + 20 * k)], kind=f"curve {kind}")
        picture.text(x + 24, y + 4 + 20 * k, words[:26], kind="note")


def experts(setting: Setting) -> str:
    """Tokens per expert and layer against the layer's mean: darker is more."""
    arm = next((arm for arm in setting["arms"] if arm["name"] == "moebatch" and arm["runs"]), None)
    layers = [row for row in (arm["runs"][0].get("expert_tokens") or [] if arm else []) if sum(row)]
    if not layers or len(layers[0]) < 2:
        return ""
    count = len(layers[0])
    cell = min(40.0, (_WIDTH - 240) / count)
    high = 18.0
    picture = Picture(_WIDTH, 60 + high * len(layers), "tokens per expert and layer")
    most = max(max(row) * count / sum(row) for row in layers)
    for k, row in enumerate(layers):
        y = 30 + high * k
        picture.text(52, y + 13, str(k), kind="tick", anchor="end")
        for expert, tokens in enumerate(row):
            share = tokens * count / sum(row)
            picture.rect(60 + cell * expert, y, cell - 1, high - 1, kind="heat",
                         style=f"opacity:{0.08 + 0.92 * share / most:.2f}",
                         title=f"layer {k}, expert {expert}: {tokens:,} tokens, "
                         f"{share:.2f} of the mean")  # fmt: skip
        peak = max(row) * count / sum(row)
        picture.text(60 + cell * count + 10, y + 13, f"busiest: {peak:.2f} x mean", kind="tick")
    picture.text(60, 20, "expert", kind="title")
    picture.text(52, 20, "layer", kind="title", anchor="end")
    picture.text(
        60, 50 + high * len(layers), f"darkest: {most:.2f} times the layer's mean", kind="note"
    )
    return picture.render()


def lengths(setting: Setting) -> str:
    """Histogram of the prompts' lengths, with mean and longest."""
    found = setting["prompts"]["lengths"]
    longest, mean = max(found), sum(found) / len(found)
    low, bins = min(found), 30
    width = max(1.0, (longest - low + 1) / bins)
    counts = [0] * (int((longest - low) / width) + 1)
    for length in found:
        counts[int((length - low) / width)] += 1
    picture = Picture(_WIDTH, 250, "prompt lengths")
    frame = Frame(left=60, top=34, right=_WIDTH - 210, bottom=200,
                  x=svg.linear(low, low + width * len(counts), 60, _WIDTH - 210),
                  y=svg.linear(0, max(counts) * 1.1, 200, 34))  # fmt: skip
    svg.axes(picture, frame, x_ticks=svg.ticks(longest, 8, low), y_ticks=svg.ticks(max(counts), 4),
             x_words=lambda v: f"{v:g}", y_words=lambda v: f"{v:g}", x_title="prompt tokens",
             y_title="requests")  # fmt: skip
    for k, count in enumerate(counts):
        left = frame.x(low + k * width)
        picture.rect(left + 0.5, frame.y(count), frame.x(low + (k + 1) * width) - left - 1,
                     frame.bottom - frame.y(count), kind="bar ours",
                     title=f"from {low + k * width:.0f} tokens on: {count}")  # fmt: skip
    picture.line([(frame.x(mean), frame.top), (frame.x(mean), frame.bottom)], kind="mark predicted")
    facts = (f"mean {mean:.1f}", f"longest {longest}", f"{len(found)} requests",
             f"padded: {longest * len(found) / sum(found):.1f} x the tokens")  # fmt: skip
    for k, words in enumerate(facts):
        picture.text(frame.right + 8, 60 + 20 * k, words, kind="note")
    return picture.render()


def _axis_words(axis: str) -> Callable[[float], str]:
    if axis == "memory_bytes":
        return format_bytes
    return format_count if axis == "params" else lambda value: f"{value:g}"


def sweep(curve: dict[str, Any]) -> str:
    """Measured points of one sweep and the planner's curve through them; the axis is logarithmic."""
    points, predicted = curve["measured"], curve["predicted"]
    xs = [p["x"] for p in points] + [p["x"] for p in predicted]
    tops = [p["tok_s"] + (p["sd"] or 0) for p in points] + [p["tok_s"] for p in predicted]
    low, high, top = min(xs) * 0.9, max(xs) * 1.1, max(tops) * 1.12
    picture = Picture(_WIDTH, 330, f"throughput against {AXES[curve['axis']]}")
    frame = Frame(left=70, top=34, right=_WIDTH - 210, bottom=280,
                  x=svg.logarithmic(low, high, 70, _WIDTH - 210),
                  y=svg.linear(0, top, 280, 34))  # fmt: skip
    show = _axis_words(curve["axis"])
    svg.axes(picture, frame, x_ticks=[p["x"] for p in points], y_ticks=svg.ticks(top, 5), x_words=show,
             y_words=number, x_title=f"{AXES[curve['axis']]} · {curve['name']}",
             y_title="generated tokens per second")  # fmt: skip
    if predicted:
        picture.line(
            [(frame.x(p["x"]), frame.y(p["tok_s"])) for p in predicted], kind="curve planner"
        )
    for point in points:
        x = frame.x(point["x"])
        if point["sd"]:
            picture.line([(x, frame.y(point["tok_s"] - point["sd"])),
                          (x, frame.y(point["tok_s"] + point["sd"]))], kind="error")  # fmt: skip
        picture.dot(x, frame.y(point["tok_s"]), kind="dot memory",
                    title=f"{show(point['x'])}: {number(point['tok_s'])} tokens/s")  # fmt: skip
        picture.text(x, frame.y(point["tok_s"]) - 12, number(point["tok_s"]), kind="value",
                     anchor="middle")  # fmt: skip
    entries = [("measured", "ours"), *([("planned", "planner")] if predicted else [])]
    _legend(picture, entries, x=frame.right + 8, y=60)
    return picture.render()
