"""How a plan looks: text for people, JSON for programs, a policy file for run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from moebatch.cli.plan_asked import Asked, to_values
from moebatch.errors import NoFeasiblePolicy, UsageError
from moebatch.plan.explain import bottleneck, next_changes
from moebatch.plan.outlook import MemoryMap, Outlook, speed_of
from moebatch.plan.policy import Policy
from moebatch.units import format_bytes, format_count, format_duration, format_rate

_PLOTS = (".png", ".svg", ".pdf")
_BAR = 30


def check_plot(path: Path) -> None:
    """Whether a picture can be drawn there.

    Raises: UsageError for an unknown kind of file or a missing library.
    """
    if path.suffix not in _PLOTS:
        raise UsageError(f"--plot {path}: not a picture", hint="end it in " + ", ".join(_PLOTS))
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", hint="pip install 'moebatch[plot]'")


def write_policy(policy: Policy, path: Path) -> None:
    """Save a policy for `run --policy`.

    Raises: UsageError when the file cannot be written.
    """
    try:
        path.write_text(policy.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def to_json(asked: Asked, outlook: Outlook) -> str:
    """Everything as one JSON object; seconds, bytes and tokens per second."""
    answer = {
        **to_values(asked),
        "policy": asdict(outlook.policy),
        "predicted_tok_s": outlook.throughput,
        "prefill_pass_s": outlook.prefill_pass_s,
        "decode_step_s": outlook.decode_step_s,
        "job_s": outlook.seconds,
        "crossover_rows": outlook.crossover,
        "layer_busy_s": dict(outlook.layer),
        "prefill_layer_busy_s": dict(outlook.prefill_layer),
        "bottleneck": bottleneck(outlook.layer),
        "memory": [asdict(each) for each in outlook.memories],
        "alternatives": [
            {"predicted_tok_s": rate, "policy": asdict(policy)}
            for policy, rate in outlook.alternatives
        ],
    }
    return json.dumps(answer, indent=2, allow_nan=False)


def show(asked: Asked, outlook: Outlook, *, explain: bool) -> None:
    """The plan for people."""
    console = Console(highlight=False, soft_wrap=True)
    _facts(console, asked)
    _policy(console, outlook)
    for each in outlook.memories:
        _memory(console, each)
    _times(console, asked, outlook)
    if explain:
        _explain(console, asked, outlook)


def _facts(console: Console, asked: Asked) -> None:
    spec, work, machine = asked.spec, asked.workload, asked.machine
    experts = f"{spec.num_experts} experts, {spec.top_k} chosen" if spec.has_router else "dense"
    console.print(
        f"[bold]{asked.model_name}[/]  {format_count(spec.total_params)} parameters, "
        f"{format_count(spec.active_params)} active · {spec.num_layers} layers of "
        f"{format_bytes(spec.layer_bytes(spec.weight_dtype))} · {experts} · "
        f"KV {format_bytes(spec.kv_bytes_per_token(spec.weight_dtype))} a token"
    )
    rows = "any number of" if work.num_sequences is None else f"{work.num_sequences:,}"
    console.print(
        f"[bold]{asked.workload_name}[/]  {rows} sequences · prompts {_spread(asked)} · "
        f"{work.mean_gen:.0f} new tokens each"
    )
    parts = [f"host {format_bytes(machine.host.memory_bytes)} at "
             f"{format_rate(machine.host.bandwidth)}",
             f"disk {format_rate(machine.disk_bandwidth)}"]  # fmt: skip
    if machine.accelerator is not None:
        gpu = machine.accelerator
        parts.insert(0, f"{gpu.name} {format_bytes(gpu.memory_bytes)} at "
                        f"{format_rate(gpu.bandwidth)}, link {format_rate(machine.link)}")  # fmt: skip
    console.print(f"[bold]{machine.name}[/]  {' · '.join(parts)}  ({machine.source})\n")


def _spread(asked: Asked) -> str:
    lengths = sorted(p for p, _ in asked.workload.lengths)
    if not lengths:
        return f"mean {asked.workload.mean_prompt:.0f}, longest {asked.workload.max_prompt}"
    p50, p90 = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    return f"p50 {p50}, p90 {p90}, longest {lengths[-1]}"


def _policy(console: Console, outlook: Outlook) -> None:
    p = outlook.policy
    prefill = f"{p.prefill_tokens:,} tokens a pass"
    if p.prefill_micro_batch_size is not None:
        prefill += f", micro-batches of {p.prefill_micro_batch_size}"
    table = Table(title="policy", title_justify="left", show_header=False)
    rows = [
        ("batch size N", f"{p.batch_size:,}"),
        ("micro-batch size", f"{p.micro_batch_size:,} ({p.num_micro_batches:,} micro-batches)"),
        ("prefill", prefill),
        ("attention, experts", f"{p.attention}, {p.ffn}"),
        ("weights resident", f"{p.weights_resident:.1%}"),
        ("weights on disk", f"{p.weights_on_disk:.1%}" if p.prefill_micro_batch_size
         else f"{1 - p.weights_resident:.1%}"),
        ("KV cache", f"{p.kv_blocks:,} blocks of 16 tokens, {p.kv_dtype}, "
                     f"{p.kv_resident:.0%} resident"),
        ("schedule", p.schedule),
    ]  # fmt: skip
    if p.regime == "cache":
        rows += [
            ("regime", "cache: experts are read as tokens ask for them"),
            ("expert cache", f"{p.expert_slots:,} experts, {p.eviction}, prefetch for "
                             f"{p.prefetch_layers} layers"),
        ]  # fmt: skip
    elif p.tail_rows:
        rows.append(("regime", f"stream, from {p.tail_rows:,} rows on a cache of "
                               f"{p.expert_slots:,} experts"))  # fmt: skip
    if p.experts_grouped > 1:
        rows.append(("experts", f"once for {p.experts_grouped:,} micro-batches"))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _memory(console: Console, memory: MemoryMap) -> None:
    share = min(1.0, memory.peak / memory.limit)
    filled = round(share * _BAR)
    console.print(
        f"{memory.name}: {'█' * filled}{'░' * (_BAR - filled)} {format_bytes(memory.peak)} of "
        f"{format_bytes(memory.limit)} ({memory.peak / memory.limit:.0%})"
    )
    parts = sorted(memory.parts.items(), key=lambda item: -item[1])
    shown = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts if size]
    console.print("  " + " · ".join(shown), style="dim")


def _times(console: Console, asked: Asked, outlook: Outlook) -> None:
    console.print(f"\nbusy in one layer of a decode step ({_ms(max(outlook.layer.values()))}):")
    longest = max(outlook.layer.values()) or 1.0
    for name, seconds in outlook.layer.items():
        if seconds:
            bar = "█" * max(1, round(seconds / longest * _BAR))
            console.print(f"  {name.replace('_', ' '):<15} {_ms(seconds):>9}  {bar}")
    console.print(f"[bold]{bottleneck(outlook.layer)}[/]")
    console.print(f"\npredicted [bold]{outlook.throughput:.1f} tokens/s[/]", end="")
    if outlook.seconds is not None:
        console.print(f", {format_duration(outlook.seconds)} for the whole job at most", end="")
    console.print(
        " (rates as measured)" if asked.machine.rates else " (at peak rates: an upper bound)"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _explain(console: Console, asked: Asked, outlook: Outlook) -> None:
    speed = speed_of(asked.spec, asked.workload, limits=asked.limits, compute=asked.compute,
                     fixed=asked.fixed, space=asked.space)  # fmt: skip
    changes = next_changes(asked.machine, speed)
    console.print("\nwhat would help")
    for change in changes[:5]:
        console.print(f"  {change.factor:.2f}x  {change.what}")
    if not changes:
        console.print("  nothing of what was tried: twice the memory, links or processors")
    if outlook.crossover is not None:
        console.print(_crossover(outlook.crossover))
    if outlook.alternatives:
        console.print("\nother policies")
        for policy, rate in outlook.alternatives:
            console.print(
                f"  {rate:9.1f} tok/s  N {policy.batch_size:,}, µ {policy.micro_batch_size:,}, "
                f"attention {policy.attention}, experts {policy.ffn}, weights "
                f"{policy.weights_resident:.0%}, KV {policy.kv_resident:.0%}"
            )
    if asked.machine.accelerator is not None:
        _roofs(console, asked, outlook)


def _crossover(rows: int) -> str:
    """Up to how many rows the cache regime is the faster one."""
    if rows == 0:
        return "\nstreaming is faster than a cache of experts for any number of rows in flight"
    return (
        f"\ncrossover at {rows:,} rows: with so many in flight or fewer, reading the experts that "
        "tokens ask for is faster than streaming all"
    )


def _roofs(console: Console, asked: Asked, outlook: Outlook) -> None:
    from moebatch.cli.roofline_points import points

    hrm = points(asked, outlook)
    console.print("\nroofline, FLOPs per byte that crosses from the host")
    for name, value in hrm.lines():
        console.print(f"  {name:<34} {value}")


def print_sweep(asked: Asked, *, as_json: bool) -> None:
    """One line for each machine of a --what-if with several values."""
    rows: list[dict[str, Any]] = []
    for values, machine in asked.sweep:
        try:
            outlook = asked.look(machine)
        except NoFeasiblePolicy as error:
            rows.append({**values, "error": str(error)})
            continue
        p = outlook.policy
        rows.append({**values, "tok/s": round(outlook.throughput, 1), "N": p.batch_size,
                     "µ": p.micro_batch_size, "A_g": int(p.attention == "gpu"),
                     "F_g": int(p.ffn == "gpu"), "r_w": round(p.weights_resident, 3),
                     "r_c": round(p.kv_resident, 3),
                     "bound by": max(outlook.layer, key=lambda name: outlook.layer[name])})  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table(title=f"{asked.model_name}, {asked.workload_name}", title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    Console(highlight=False, soft_wrap=True).print(table)
