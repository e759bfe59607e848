"""The roofs of a job: what it would take if one resource alone were the limit, at its peak rate.

Processor: all FLOPs at the highest rate that its products reached. Memory: each pass reads the
weights it touches and the KV cache once. Disk and link: the weights that do not stay. A roof is
tokens per second that nothing on this machine can exceed under this policy.
"""

from dataclasses import dataclass, replace
from typing import Any

from moebatch.plan.machine import MachineSpec
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import job_time, num_pages, resident_pages
from moebatch.plan.policy import Policy
from moebatch.plan.workload import WorkloadSpec

_UNLIMITED = 1e30
NAMES = {"compute": "computing", "memory": "memory bandwidth", "disk": "the disk",
         "link": "the link"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """`seconds` by resource, a roof each; amounts of the whole job behind them."""

    seconds: dict[str, float]
    tokens: float
    flops: float
    memory_bytes: float
    disk_bytes: float
    passes: int

    @property
    def bound_by(self) -> str:
        """The resource whose roof is the lowest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def tok_s(self) -> float:
        """The lowest roof, in generated tokens per second of prefill and decode."""
        return self.tokens / max(self.seconds[self.bound_by], 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """For the record."""
        return {
            "tok_s": self.tok_s,
            "bound_by": self.bound_by,
            "by_resource": {
                name: self.tokens / seconds for name, seconds in self.seconds.items() if seconds > 0
            },
            "flops": self.flops,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "passes": self.passes,
        }


def roofs_of(spec: ModelSpec, workload: WorkloadSpec, policy: Policy, machine: MachineSpec, *,
             compute: str, link: float | None = None) -> Roofs:  # fmt: skip
    """The roofs of a job on the host, and with `link` (bytes per second) those of an accelerator
    whose streamed weights cross it in every pass and whose processor is the host's own (emulated)."""
    host = machine.host
    peak = host.peak(compute)
    plain = replace(machine, rates={})  # peaks instead of measured curves
    only_flops = replace(plain, host=replace(host, bandwidth=_UNLIMITED))
    only_bytes = replace(plain, host=replace(host, flops={compute: _UNLIMITED}))

    def job(on: MachineSpec) -> Any:
        return job_time(spec, workload, policy, machine=on, compute=compute)

    by_flops, by_bytes = job(only_flops), job(only_bytes)
    seconds = {"compute": by_flops.parts["compute"], "memory": by_bytes.parts["compute"]}
    disk = by_flops.parts["disk"]
    if link is None:
        seconds["disk"] = disk
    else:
        seconds["link"] = disk * machine.disk_bandwidth / link
    return Roofs(
        seconds=seconds,
        tokens=by_flops.generated_tokens,
        flops=by_flops.parts["compute"] * peak,
        memory_bytes=by_bytes.parts["compute"] * host.bandwidth,
        disk_bytes=0.0 if link else disk * machine.disk_bandwidth,
        passes=by_flops.passes,
    )


def streams(spec: ModelSpec, policy: Policy) -> bool:
    """Whether any weight does not stay in memory."""
    return sum(resident_pages(spec, policy)) < num_pages(spec)
