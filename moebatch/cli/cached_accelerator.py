"""The plan of the cache regime with an accelerator: all experts in host memory, some on the device."""

from dataclasses import replace
from typing import TYPE_CHECKING

from moebatch.cli.regime import RegimeOptions
from moebatch.errors import NoFeasiblePolicy, UsageError
from moebatch.plan.cached_fit import (
    DEVICE_EVICTION,
    DEVICE_PREFETCH_LAYERS,
    cached_host_memory,
    fit_cache,
)
from moebatch.plan.device_fit import DevicePlan
from moebatch.plan.machine import MachineSpec
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import choose
from moebatch.plan.policy import Overrides
from moebatch.plan.workload import WorkloadSpec
from moebatch.units import format_bytes

if TYPE_CHECKING:
    from moebatch.model.linear import ComputeType
    from moebatch.runtime.device import Device


def plan_cached(device: "Device", spec: ModelSpec, workload: WorkloadSpec, *, machine: MachineSpec,
                compute: "ComputeType", fixed: Overrides, budget: int, base_bytes: int,
                share: float, regime: RegimeOptions, schedule: str | None) -> DevicePlan:  # fmt: skip
    """The host's batch, halved until caches and experts fit; the rest of the device is for experts.

    Raises: NoFeasiblePolicy when the memory of either does not do; UsageError for what has no
    effect in this regime.
    """
    for option, given in (("--schedule", schedule), ("--weights-resident", fixed.weights_resident)):
        if given is not None:
            raise UsageError(f"{option} has no meaning with --regime cache",
                             hint="leave one of them away")  # fmt: skip
    asked = regime.overrides(spec, fixed)
    host = replace(fixed, kv_dtype=fixed.kv_dtype or spec.weight_dtype, attention=None, ffn=None)
    while True:
        policy = choose(spec, workload, machine=machine, compute=compute, memory_bytes=budget,
                        base_bytes=base_bytes, fixed=host)  # fmt: skip
        ahead = asked.prefetch_layers
        changed = replace(
            policy.policy,
            eviction=asked.eviction or DEVICE_EVICTION,
            prefetch_layers=DEVICE_PREFETCH_LAYERS if ahead is None else ahead,
        )
        try:
            found = fit_cache(spec, changed, device_bytes=int(share * device.memory.limit),
                              capacity=asked.expert_slots,
                              attention=fixed.attention)  # fmt: skip
            memory = cached_host_memory(spec, found, policy.memory, emulated=device.emulated)
            if memory.total > budget:
                raise NoFeasiblePolicy(
                    f"the cache regime needs {format_bytes(memory.total)} of host memory for all "
                    f"experts, the budget is {format_bytes(budget)}",
                    hint="raise --memory, or use --regime stream",
                )
            return DevicePlan(policy=found, memory=memory)
        except NoFeasiblePolicy:
            half = policy.policy.batch_size // 2
            if fixed.batch_size is not None or half == 0:
                raise
            host = replace(host, batch_size=half)
