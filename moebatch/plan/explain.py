"""What a plan means in words and numbers: per-resource times, the bottleneck, what would help."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.machine import MachineSpec

Speed = Callable[[MachineSpec], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the machine and the factor by which the job would be faster."""

    what: str
    factor: float


_RESOURCES = {
    "accelerator": "the accelerator's processor and memory",
    "host": "the host's processor and memory",
    "to_accelerator": "the link from host to accelerator",
    "to_host": "the link from accelerator to host",
    "disk": "the disk",
}


def bottleneck(seconds: Mapping[str, float]) -> str:
    """The busiest resource in words, with how far the next one is behind."""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    name, most = ordered[0]
    text = f"{_RESOURCES[name]} binds"
    if len(ordered) > 1 and most > 0 and ordered[1][1] > 0:
        other, second = ordered[1]
        text += f"; {_RESOURCES[other]} is busy {second / most:.0%} of that time"
    return text


def next_changes(machine: MachineSpec, speed: Speed) -> list[Change]:
    """Changes of the machine that would pay, best first; `speed` plans anew for a changed machine."""
    now = speed(machine)
    found = []
    for what, changed in _changes(machine):
        try:
            factor = speed(changed) / now if now else 0.0
        except NoFeasiblePolicy:
            continue
        if factor > 1.02:
            found.append(Change(what=what, factor=factor))
    return sorted(found, key=lambda change: -change.factor)


def _changes(machine: MachineSpec) -> list[tuple[str, MachineSpec]]:
    host, gpu = machine.host, machine.accelerator
    changes = [
        ("twice the host memory",
         replace(machine, host=replace(host, memory_bytes=2 * host.memory_bytes))),
        ("a disk twice as fast", replace(machine, disk_bandwidth=2 * machine.disk_bandwidth)),
        ("a host processor with twice the bandwidth and FLOP/s", _faster_host(machine)),
    ]  # fmt: skip
    if gpu is not None:
        changes += [
            ("twice the link bandwidth", replace(machine, link=2 * machine.link,
                                                 link_back=2 * machine.link_back)),
            ("twice the accelerator memory", replace(
                machine, accelerator=replace(gpu, memory_bytes=2 * gpu.memory_bytes))),
            ("twice the accelerator's bandwidth", replace(
                machine, accelerator=replace(gpu, bandwidth=2 * gpu.bandwidth))),
        ]  # fmt: skip
    return changes


def _faster_host(machine: MachineSpec) -> MachineSpec:
    """Twice the host's rates, measured ones included; its memory stays."""
    host = machine.host
    rates = {name: each.scaled(2.0) for name, each in machine.rates.items()}
    faster = replace(host, bandwidth=2 * host.bandwidth,
                     flops={name: 2 * peak for name, peak in host.flops.items()})  # fmt: skip
    return replace(machine, host=faster, rates=rates)
