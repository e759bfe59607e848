"""What a benchmark says while it runs: machine, setting, roofs and prediction before the runs."""

from collections.abc import Iterator
from typing import Any

from moebatch.cli.bench.measure import Setting
from moebatch.cli.bench.roofs import NAMES
from moebatch.cli.bench.table import number, policy_words
from moebatch.units import format_bytes, format_rate


def machine(document: dict[str, Any]) -> Iterator[str]:
    """The machine, as it was measured."""
    about = document["machine"]
    peaks = ", ".join(f"{name} {peak / 1e9:.0f} GFLOP/s" for name, peak in about["flops"].items())
    yield (
        f"{about['cpu']}, {about['cores']} cores, {format_bytes(about['ram_bytes'])} · "
        f"{about['threads']} threads · memory {format_rate(about['memory_bandwidth'])}, "
        f"disk {format_rate(about['disk_bandwidth'])}, {peaks}"
    )
    load = about["load_before"]
    if load is not None and load > 0.5:
        yield f"other programs are busy: load {load:.2f} before the first run"


def setting(one: Setting) -> Iterator[str]:
    """One setting, and where its prompts come from."""
    facts = one.prompts.describe()
    lens = set(one.gen_lens)
    each = f"{one.gen_lens[0]} new tokens each" if len(lens) == 1 else f"{one.tokens:,} new tokens"
    budget = "" if one.memory_bytes is None else f" · memory {format_bytes(one.memory_bytes)}"
    yield (
        f"{one.model} · {one.prompts.workload}{' padded' if facts['padded'] else ''}: "
        f"{facts['count']} prompts, mean {facts['mean']:.1f}, longest {facts['max']} tokens, "
        f"{each}{budget}"
    )
    yield f"prompts: {facts['source']}"


def plan(label: str, planned: dict[str, Any]) -> str:
    """Roofs and prediction, before the run."""
    policy = planned["policy"]
    text = (
        f"{label + ': ' if label else ''}N {policy['batch_size']}, mu {policy['micro_batch_size']}, "
        f"{policy_words(policy)}"
    )
    if roofs := planned["roofs"]:
        each = ", ".join(f"{NAMES[name]} {number(rate)}"
                         for name, rate in roofs["by_resource"].items())  # fmt: skip
        text += f" · roofs, tok/s: {each}"
    if predicted := planned["predicted"]:
        text += f" · predicted {number(predicted['tok_s'])} tok/s"
    return text
