"""Machines by name: accelerators with a usual host, a source for each number.

Peaks are dense 16-bit figures with 32-bit accumulation, from the vendors' data sheets. The T4 and L4
machines are those of MoE-Lightning's table 2 with the constants of its published planner; other hosts
are a typical cloud instance or desktop of that accelerator. Links are what a copy reaches of PCIe.
"""

import re
from dataclasses import replace

from moebatch.errors import UsageError
from moebatch.plan.machine import MachineSpec, Processor

_GB, _TERA = 1e9, 1e12
_GIB = float(1 << 30)


def _machine(name: str, *, memory: float, bandwidth: float, tflops: float, link: float,
             host_memory: float, host_bandwidth: float, host_tflops: float,
             source: str) -> MachineSpec:  # fmt: skip
    return MachineSpec(
        name=name,
        accelerator=Processor(
            name=name.upper(),
            memory_bytes=memory * _GIB,
            bandwidth=bandwidth * _GB,
            flops={"float16": tflops * _TERA, "bfloat16": tflops * _TERA,
                   "float32": tflops / 8 * _TERA},
        ),
        host=Processor(
            name="host",
            memory_bytes=host_memory * _GIB,
            bandwidth=host_bandwidth * _GB,
            flops={"any": host_tflops * _TERA},
        ),
        link=link * _GB,
        link_back=link * _GB,
        disk_bandwidth=2 * _GB,
        source=source,
    )  # fmt: skip


_DESKTOP = "data sheet; host: desktop with two channels of DDR5, 16 cores"
MACHINES: dict[str, MachineSpec] = {
    m.name: m
    for m in (
        _machine("t4", memory=15, bandwidth=300, tflops=65, link=12, host_memory=192,
                 host_bandwidth=76, host_tflops=0.8,
                 source="MoE-Lightning S1: 24-core Xeon 2.3 GHz, 192 GB; PCIe 3.0 x16"),
        _machine("l4", memory=22.5, bandwidth=285, tflops=121, link=16, host_memory=192,
                 host_bandwidth=100, host_tflops=1.6,
                 source="MoE-Lightning S2: 24-core Xeon 2.2 GHz, 192 GB; PCIe 4.0 (16 GB/s in its "
                        "planner)"),
        _machine("a10", memory=22.5, bandwidth=600, tflops=125, link=24, host_memory=180,
                 host_bandwidth=150, host_tflops=1.6, source="data sheet; host: 30-core instance"),
        _machine("rtx3090", memory=24, bandwidth=936, tflops=71, link=24, host_memory=64,
                 host_bandwidth=65, host_tflops=1.0, source=_DESKTOP),
        _machine("rtx4090", memory=24, bandwidth=1008, tflops=165, link=24, host_memory=64,
                 host_bandwidth=65, host_tflops=1.0, source=_DESKTOP),
        _machine("a100-40", memory=40, bandwidth=1555, tflops=312, link=24, host_memory=85,
                 host_bandwidth=100, host_tflops=1.6, source="data sheet; host: 12-core instance"),
        _machine("a100-80", memory=80, bandwidth=1935, tflops=312, link=24, host_memory=170,
                 host_bandwidth=100, host_tflops=1.6, source="data sheet; host: 12-core instance"),
        _machine("h100", memory=80, bandwidth=3350, tflops=989, link=50, host_memory=234,
                 host_bandwidth=200, host_tflops=3.2, source="data sheet; host: 26-core instance"),
        _machine("h200", memory=141, bandwidth=4800, tflops=989, link=50, host_memory=256,
                 host_bandwidth=200, host_tflops=3.2, source="data sheet; host: 26-core instance"),
        replace(
            _machine("figure10", memory=160, bandwidth=2 * 1935, tflops=2 * 312, link=100,
                     host_memory=100, host_bandwidth=200, host_tflops=1.6,
                     source="MoE-Lightning, figure 10: two A100-80G, base host, link of 100 GB/s"),
            num_accelerators=2,
        ),
    )
}  # fmt: skip
_COUNTED = re.compile(r"(\d+)x(.+)")


def catalogued(name: str) -> MachineSpec:
    """A machine by name; `2xt4` is one with two of them, tensor-parallel: m_g, b_g, p_g and the links
    scale (MoE-Lightning, section 4.3), the host stays one.

    Raises: UsageError for an unknown name.
    """
    counted = _COUNTED.fullmatch(name.lower())
    count, single = (int(counted[1]), counted[2]) if counted else (1, name.lower())
    if single not in MACHINES or not 1 <= count <= 64:
        raise UsageError(
            f"no machine is called {name}",
            hint="known are: " + ", ".join(MACHINES) + "; with a count like 2xt4; or a JSON file",
        )
    machine = MACHINES[single]
    if count == 1:
        return machine
    gpu = machine.accelerator
    assert gpu is not None
    return replace(
        machine,
        name=name.lower(),
        num_accelerators=machine.num_accelerators * count,
        link=machine.link * count,
        link_back=machine.link_back * count,
        accelerator=replace(
            gpu,
            name=f"{count}x{gpu.name}",
            memory_bytes=gpu.memory_bytes * count,
            bandwidth=gpu.bandwidth * count,
            flops={dtype: peak * count for dtype, peak in gpu.flops.items()},
        ),
    )
