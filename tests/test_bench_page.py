"""The page of a benchmark, in a real browser where there is one; `moebatch report`."""

import copy
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from commands import moebatch, write_rows

from moebatch.cli.bench import curves, page, svg, table

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def an_arm(name: str, rate: float | None, **more) -> dict:
    runs = [] if rate is None else [{
        "generated": 64, "seconds": 64 / rate, "peak_bytes": 3 << 30, "disk_read_bytes": 1 << 30,
        "samples": [[-2.0, 1 << 29], [0.0, 2 << 30], [3.0, 3 << 30]],
    }]  # fmt: skip
    return {
        "name": name, "label": more.pop("label", ""), "note": None, "version": f"{name} 1",
        "status": "ok" if rate else "missing", "reason": None if rate else "not installed <here>",
        "tok_s": {"mean": rate, "sd": 0.5, "runs": [rate]} if rate else None,
        "peak_cpu_bytes": 3 << 30 if rate else None, "peak_gpu_bytes": None,
        "memory_limited": True, "planned": None, "ours_to_it": 2.0 if rate else None,
        "runs": runs, **more,
    }  # fmt: skip


def a_setting(count: int, rate: float) -> dict:
    roofs = {"tok_s": 50.0, "bound_by": "disk", "by_resource": {"disk": 50.0, "compute": 90.0},
             "flops": 4e11, "memory_bytes": 2e10, "disk_bytes": 4e10, "passes": 33,
             "disk_bandwidth": 1e9}  # fmt: skip
    planned = {
        "policy": {"batch_size": count, "micro_batch_size": 8, "schedule": "zigzag",
                   "weights_resident": 0.5, "attention": "cpu", "ffn": "cpu"},
        "compute_dtype": "bfloat16", "memory_bytes": 3 << 30, "memory_parts": {},
        "predicted": {"tok_s": rate * 1.1}, "roofs": roofs, "model": {"params": 10**9},
    }  # fmt: skip
    ours = an_arm("moebatch", rate, planned=planned)
    ours["runs"][0]["expert_tokens"] = [[5, 3, 2, 6], [4, 4, 4, 4]]
    ours["runs"][0]["timeline"] = [
        ["cpu", "pre_attn", 0, 0, 0.0, 0.1], ["cpu", "ffn", 0, 0, 0.1, 0.4],
        ["disk", "load_page", 1, 0, 0.0, 0.5], ["cpu", "ffn", 0, 1, 0.5, 0.2],
    ]  # fmt: skip
    return {
        "workload": "mtbench", "model": "a & b", "num_prompts": count, "gen_len": 32,
        "generated": 32 * count, "memory_bytes": 3 << 30, "device": "auto", "paper": None,
        "prompts": {"source": "made <up>", "count": count, "mean": 77.0, "max": 418,
                    "total": 77 * count, "padded": False, "lengths": [16, 30, 60, 418]},
        "arms": [ours, an_arm("llama.cpp", rate / 2, label="64 slots"), an_arm("vllm", None)],
    }  # fmt: skip


@pytest.fixture
def record() -> dict:
    settings = [a_setting(64, 30.0), a_setting(256, 40.0)]
    points = [{"x": float(s["num_prompts"]), "tok_s": s["arms"][0]["tok_s"]["mean"], "sd": 0.5,
               "predicted": 44.0} for s in settings]  # fmt: skip
    return {
        "kind": "moebatch-bench", "schema_version": 1, "moebatch_version": "0", "commit": None,
        "command": "moebatch bench mtbench", "started_at": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "a cpu", "cores": 2, "ram_bytes": 1 << 34, "load_before": 0.1,
                    "memory_bandwidth": 2e10, "disk_bandwidth": 1e9, "flops": {"bfloat16": 4e11}},
        "versions": {"torch": "2"}, "settings": settings,
        "curves": [{"axis": "num_prompts", "name": "x", "measured": points,
                    "predicted": [{"x": 40.0, "tok_s": 20.0}, {"x": 300.0, "tok_s": 45.0}]}],
    }  # fmt: skip


def pictures(text: str) -> list[ET.Element]:
    """Every picture of a page; each must be well-formed by itself."""
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_has_every_figure(record) -> None:
    found = [one.get("aria-label") for one in pictures(page.page(record))]
    once = ["throughput of every arm in every setting", "throughput against requests",
            "roofline with the measured points"]  # fmt: skip
    each = ["lanes over time", "memory over time", "tokens per expert and layer", "prompt lengths"]
    assert found == once + each * 2


def test_the_page_needs_nothing_from_outside(record) -> None:
    text = page.page(record)
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "http" not in text.replace("http-equiv", "") and "@import" not in text


def test_words_of_users_cannot_break_the_page(record) -> None:
    text = page.page(record)
    assert "a &amp; b" in text and "not installed &lt;here&gt;" in text
    assert "<here>" not in text and "made &lt;up&gt;" in text


def test_bars_are_as_long_as_the_rates(record) -> None:
    chart = pictures(page.page(record))[0]
    bars = [float(one.get("width")) for one in chart.iter("rect")]
    rates = [arm["tok_s"]["mean"] for s in record["settings"] for arm in s["arms"] if arm["tok_s"]]
    assert len(bars) == len(rates)
    assert [bar / bars[0] for bar in bars] == pytest.approx([r / rates[0] for r in rates], rel=0.01)


def test_measured_points_lie_under_the_roofs(record) -> None:
    """In the picture y grows downwards, so a point is below a roof where its y is larger."""
    chart = pictures(page.page(record))[2]
    lines = {one.get("class"): [tuple(map(float, p.split(","))) for p in one.get("points").split()]
             for one in chart.iter("polyline") if "roof" in one.get("class")}  # fmt: skip
    peak = lines["roof peak"][0][1]
    for dot in chart.iter("circle"):
        kind = dot.get("class").split()[1]
        (x1, y1), (x2, y2) = lines[f"roof {kind}"]
        x, y = float(dot.get("cx")), float(dot.get("cy"))
        assert y >= peak - 0.2
        if x1 <= x <= x2:
            assert y >= y1 + (x - x1) / (x2 - x1) * (y2 - y1) - 0.2


def test_a_record_without_what_is_drawn_still_is_a_page(record) -> None:
    for setting in record["settings"]:
        for arm in setting["arms"]:
            arm["planned"] = None
            for run in arm["runs"]:
                for name in ("samples", "timeline", "expert_tokens"):
                    run.pop(name, None)
    record["curves"] = []
    found = [one.get("aria-label") for one in pictures(page.page(record))]
    assert found == ["throughput of every arm in every setting", "prompt lengths", "prompt lengths"]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_real_browser_shows_every_figure_without_an_error(record, tmp_path) -> None:
    path = tmp_path / "page.html"
    probe = (
        "<script>window.onerror = m => document.title = 'ERROR ' + m;"
        "addEventListener('load', () => { const boxes = [...document.querySelectorAll('svg')]"
        ".filter(s => s.checkVisibility()).map(s => s.getBoundingClientRect());"
        "const wide = boxes.filter(b => b.width > 300 && b.height > 40).length;"
        "const pick = document.querySelector('#setting'); pick.value = '1';"
        "pick.dispatchEvent(new Event('change'));"
        "const shown = [...document.querySelectorAll('[data-setting]')]"
        ".map(p => p.checkVisibility());"
        "document.title = ['figures', boxes.length, wide, ...shown].join(' '); });</script>"
    )
    path.write_text(page.page(record).replace("</head>", probe + "</head>"))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
         f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=3000", "--dump-dom",
         path.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    # Of the second panel nothing was visible at first: 3 figures of all settings, 4 of the first.
    assert re.search(r"<title>(.*?)</title>", done.stdout).group(1) == "figures 7 7 false true"
    assert "CONSOLE" not in done.stderr, done.stderr


@pytest.mark.parametrize(("high", "low"), [(1.0, 0.0), (7.3, 0.0), (418.0, 16.0), (1e9, 0.0)])
def test_ticks_are_round_and_inside(high, low) -> None:
    found = svg.ticks(high, 5, low)
    assert 3 <= len(found) <= 8
    assert all(low - 1e-9 <= value <= high * (1 + 1e-9) for value in found)
    steps = {round(b - a, 9) for a, b in pairwise(found)}
    assert len(steps) == 1


def test_settings_that_differ_in_two_ways_are_no_sweep(record) -> None:
    other = copy.deepcopy(record["settings"][1])
    other["memory_bytes"] = 1 << 30
    record["settings"][1] = other
    found = [axis for axis in curves.AXES for _ in curves._groups(axis, record["settings"])]
    assert found == []


def test_report_shows_a_run_and_two_runs(model, tmp_path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "abc"}, {"prompt": "de"}])
    for name in ("a", "b"):
        done = moebatch("run", rows, "-m", model, "-o", tmp_path / f"{name}.jsonl", "--max-tokens", 3,
                        "--ignore-eos", "--cpu-threads", 1)  # fmt: skip
        assert done.code == 0, done.err
    one = moebatch("report", tmp_path / "a.jsonl")
    assert one.code == 0 and "generated tokens" in one.out and " 6 " in one.out
    two = moebatch("report", tmp_path / "a.jsonl.moebatch/report.json", tmp_path / "b.jsonl")
    assert two.code == 0
    line = next(line for line in two.out.splitlines() if "generated tokens" in line)
    assert line.split()[-2] == "1.00"


def test_report_shows_benchmarks(record, tmp_path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(record))
    assert moebatch("report", path).out == table.markdown(record)
    assert "after/before" in moebatch("report", path, path).out
    target = tmp_path / "page.html"
    assert moebatch("report", path, "--html", target).code == 0
    assert target.read_text() == page.page(record)


def test_records_of_one_machine_are_joined_to_one_page(record, tmp_path) -> None:
    halves = [{**record, "settings": [setting], "curves": []} for setting in record["settings"]]
    found = curves.joined(halves)
    assert [setting["num_prompts"] for setting in found["settings"]] == [64, 256]
    assert [point["x"] for point in found["curves"][0]["measured"]] == [64.0, 256.0]
    halves[1]["machine"] = {**record["machine"], "cpu": "another"}
    for name, half in zip("ab", halves, strict=True):
        (tmp_path / name).write_text(json.dumps(half))
    done = moebatch("report", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "x.html")
    assert done.code == 2 and "different machines" in done.error


@pytest.mark.parametrize(
    ("content", "arguments", "code"),
    [
        ("{}", ["{a}"], 6),
        ("no json", ["{a}"], 6),
        ("{}", ["{a}.not"], 7),
        ('{"throughput": {}}', ["{a}", "--html", "x.html"], 2),
        ("{}", ["{a}", "{a}", "{a}"], 2),
    ],
)
def test_what_is_no_report_gets_one_line(tmp_path: Path, content, arguments, code) -> None:
    (tmp_path / "a").write_text(content)
    done = moebatch("report", *(one.format(a=tmp_path / "a") for one in arguments))
    assert done.code == code
    assert done.error
