"""`moebatch doctor`: measures this machine, keeps the figures, shows them."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moebatch.errors import UsageError
from moebatch.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moebatch.plan.machine import Curve, HostRates, MachineSpec

AsJson = Annotated[bool, typer.Option("--json", help="Print the machine as JSON on stdout.")]
Threads = Annotated[int | None, typer.Option(help="Threads; default: all cores.")]
DeviceName = Annotated[
    str,
    typer.Option("--device", help="Accelerator: auto, cpu (none), cuda, cuda:N, emulated:NAME."),
]
Directory = Annotated[
    Path | None,
    typer.Option("--disk", help="Measure the disk of this folder (where the models lie)."),
]


def doctor(as_json: AsJson = False, cpu_threads: Threads = None, disk: Directory = None,
           device: DeviceName = "auto") -> None:  # fmt: skip
    """Measure this machine (about 10 seconds) and keep the figures for plan and run."""
    from moebatch.cli import this_machine
    from moebatch.runtime import probe

    if cpu_threads is not None and cpu_threads < 1:
        raise UsageError("--cpu-threads must be at least 1")
    if disk is not None and not disk.is_dir():
        raise UsageError(f"--disk {disk} is not a folder")
    if device != "auto":
        from moebatch.runtime.devices import find_device

        find_device(device, memory_bytes=None)
    threads = cpu_threads or this_machine.num_cores()
    folder = disk or this_machine.cache_directory()
    say = (lambda name: None) if as_json else (lambda name: typer.echo(f"… {name}", err=True))
    try:
        machine = probe.measure(directory=folder, threads=threads, step=say)
    except OSError as error:
        raise UsageError(
            f"cannot measure the disk at {folder}: {error.strerror}",
            hint="name a folder that can be written with --disk",
        ) from None
    machine, copies = _with_accelerator(machine, device, say)
    emulated = device.startswith("emulated")  # what is not there is not kept
    path = None if emulated else this_machine.keep(machine, threads)
    if as_json:
        typer.echo(json.dumps(machine.to_dict(), indent=1))
        return
    _show(machine, threads, copies)
    if emulated:
        typer.echo("an emulated accelerator: the figures are not kept", err=True)
    elif path is None:
        typer.echo("the figures could not be kept; plan and run will measure again", err=True)
    else:
        typer.echo(f"kept in {path}", err=True)


def _with_accelerator(machine: "MachineSpec", name: str, say: Any,
                      ) -> tuple["MachineSpec", list[tuple[str, str]]]:  # fmt: skip
    """The machine with the accelerator it has, and what copies to and from it reach."""
    from dataclasses import replace

    from moebatch.runtime.devices import open_device
    from moebatch.runtime.probe_device import measure_device, pageable_bandwidth

    device = open_device(name, memory_bytes=None)
    if device is None:
        return machine, []
    say("accelerator")
    dtype = "bfloat16" if "bfloat16" in machine.rates or not device.emulated else "float32"
    processor, link, back = measure_device(device, dtype=dtype, compute=dtype)  # type: ignore[arg-type]
    pageable = pageable_bandwidth(device)
    device.close()
    copies = [
        ("accelerator memory", format_bytes(processor.memory_bytes)),
        ("accelerator memory, copying", format_rate(processor.bandwidth)),
        (f"accelerator, products in {dtype}", f"{processor.flops[dtype] / 1e12:.2f} TFLOP/s"),
        ("host to accelerator, pinned", format_rate(link)),
        ("host to accelerator, pageable", format_rate(pageable)),
        ("accelerator to host, pinned", format_rate(back)),
    ]
    return replace(machine, accelerator=processor, link=link, link_back=back), copies


def _show(machine: "MachineSpec", threads: int, copies: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    facts = Table(title=f"{machine.host.name}, {threads} threads", title_justify="left")
    facts.add_column("figure")
    facts.add_column("measured", justify="right")
    for name, value in [*_facts(machine), *copies]:
        facts.add_row(name, value)
    console.print(facts)
    for compute, rates in machine.rates.items():
        console.print(_products(compute, rates))
    rates = next(iter(machine.rates.values()))
    console.print(_curve("decode attention", "context", rates.decode_attention, _gigabytes))
    console.print(_curve("prompt attention", "prompt length", rates.prefill_attention, _gigaflops))


def _facts(machine: "MachineSpec") -> list[tuple[str, str]]:
    from moebatch.runtime import host

    swap = Path("/proc/swaps")
    facts = [
        ("memory that a run may use", format_bytes(machine.host.memory_bytes)),
        ("limit of the control group", _limit(host.cgroup_limit_bytes())),
        ("memory, reading", format_rate(machine.host.bandwidth)),
        ("disk, reading pages of 16 MiB", format_rate(machine.disk_bandwidth)),
        ("accelerator", machine.accelerator.name if machine.accelerator else "none"),
    ]
    if os.path.exists(swap) and len(swap.read_text().splitlines()) > 1:
        facts.append(("swap", "on: a plan never counts on it"))
    return facts


def _limit(value: int | None) -> str:
    return "none" if value is None else format_bytes(value)


def _products(compute: str, rates: "HostRates") -> Any:
    from rich.table import Table

    table = Table(title=f"matrix products in {compute}, GFLOP/s by tokens", title_justify="left")
    table.add_column("weights")
    for tokens, _ in rates.gemm["packed"].points:
        table.add_column(f"{tokens:.0f}", justify="right")
    for form, curve in rates.gemm.items():
        table.add_row(form, *(f"{rate / 1e9:.0f}" for _, rate in curve.points))
    return table


def _curve(title: str, axis: str, curve: "Curve", show: Any) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(axis)
    for x, _ in curve.points:
        table.add_column(f"{x:.0f}", justify="right")
    table.add_row(show.__doc__, *(show(rate) for _, rate in curve.points))
    return table


def _gigabytes(rate: float) -> str:
    """GB/s of cache"""
    return f"{rate / 1e9:.1f}"


def _gigaflops(rate: float) -> str:
    """GFLOP/s"""
    return f"{rate / 1e9:.0f}"
