"""`moebatch replay`: eviction policies and cache sizes compared on the routing that a run recorded."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moebatch.cli import options as opt
from moebatch.errors import UsageError

if TYPE_CHECKING:
    from moebatch.plan.replay import ReplayResult
    from moebatch.plan.routing_trace import TraceHeader

Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="What --routing-trace recorded.")]
Sizes = Annotated[
    str, typer.Option("--expert-cache", help="Sizes to compare: 10%,25%,50%,75% or 24,96.")
]
_DEFAULT = "10%,25%,50%,75%"


def replay(trace: Trace, expert_cache: Sizes = _DEFAULT, as_json: opt.JsonFacts = False) -> None:
    """Print the hit rate of every eviction policy and cache size on one recorded routing."""
    from moebatch.plan.replay import compare
    from moebatch.plan.routing_trace import read_trace

    header, records = read_trace(trace)
    visits = [record.visit for record in records]
    if not visits:
        raise UsageError(f"{trace} holds no routing: the run that wrote it made no pass")
    layers = len({visit.layer for visit in visits})
    results = compare(visits, num_layers=header.num_layers, num_experts=header.num_experts,
                      capacities=_capacities(expert_cache, layers * header.num_experts))  # fmt: skip
    if as_json:
        typer.echo(json.dumps({**asdict(header), "visits": len(visits),
                               "results": [_values(one) for one in results]}, indent=2))  # fmt: skip
    else:
        _show(header, len(visits), layers, results)


def _capacities(text: str, experts: int) -> list[int]:
    """Numbers of experts, from numbers or shares of all.

    Raises: UsageError for anything else.
    """
    found = []
    for part in text.split(","):
        number = part.strip().removesuffix("%")
        try:
            value = float(number) if part.strip().endswith("%") else int(number)
        except ValueError:
            value = -1.0
        most = 100 if part.strip().endswith("%") else 1 << 31
        if not 0 <= value <= most:
            raise UsageError(f"--expert-cache {part} is neither a number of experts nor a share",
                             hint=f"write them like {_DEFAULT}, or 24,96")  # fmt: skip
        found.append(round(value * experts / 100) if most == 100 else int(value))
    return sorted(set(found))


def _values(result: "ReplayResult") -> dict[str, Any]:
    return {**asdict(result), "hit_rate": result.hit_rate}


def _show(header: "TraceHeader", visits: int, layers: int, results: list["ReplayResult"]) -> None:
    from rich.console import Console
    from rich.table import Table

    from moebatch.plan.eviction import EVICTIONS
    from moebatch.plan.replay import BELADY

    names = (*EVICTIONS, BELADY)
    table = Table(
        title=f"{header.model}: {visits:,} visits to {layers} layers of {header.num_experts} "
        f"experts, {header.top_k} chosen; hit rates",
        title_justify="left",
    )
    for name in ("experts kept", *names):
        table.add_column(name, justify="right")
    rates = {(one.capacity, one.eviction): one.hit_rate for one in results}
    for capacity in sorted({one.capacity for one in results}):
        share = capacity / (layers * header.num_experts)
        table.add_row(f"{capacity:,} ({share:.0%})",
                      *(f"{rates[capacity, name]:.1%}" for name in names))  # fmt: skip
    Console(highlight=False, soft_wrap=True).print(table)
