"""What a run was asked to do with an accelerator, and its trace file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moebatch.cli.regime import RegimeOptions
from moebatch.errors import NoFeasiblePolicy, UsageError
from moebatch.plan.cached_fit import (
    DEVICE_EVICTION,
    DEVICE_PREFETCH_LAYERS,
    cached_device_bytes,
    cached_host_memory,
    fit_cache,
)
from moebatch.plan.calibrate import predicted
from moebatch.plan.device_fit import (
    DevicePlan,
    device_memory,
    fit,
    host_memory,
    with_disk_layers,
)
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import Plan, memory_of
from moebatch.plan.pipeline import STYLES
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.timeline import chrome_trace
from moebatch.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from moebatch.runtime.backend import PassResult
    from moebatch.runtime.device import Device

_ANY_REGIME = RegimeOptions()
TRACED_PASSES = 64  # the first ones: a trace of a whole job would not open


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorOptions:
    """`schedule` None: what suits the device. `memory_bytes` None: all that it has.

    `replans`: whether a run goes on with a smaller plan when the device's memory runs out.
    """

    device: str = "auto"
    schedule: str | None = None
    memory_bytes: int | None = None
    trace: Path | None = None
    replans: bool = True


def accelerator_options(device: str, *, schedule: str, gpu_memory: str | None,
                        trace: Path | None, on_oom: str = "replan",
                        ) -> AcceleratorOptions:  # fmt: skip
    """The options, checked as far as that goes without looking at the machine.

    Raises: UsageError for a schedule that does not exist, or a trace that cannot be written.
    """
    if schedule not in ("auto", "zigzag", *STYLES):
        raise UsageError(f"--schedule {schedule} does not exist",
                         hint="one of: auto, zigzag, " + ", ".join(STYLES))  # fmt: skip
    if trace is not None and (trace.is_dir() or not trace.absolute().parent.is_dir()):
        raise UsageError(f"--trace {trace} cannot be written: no such folder, or it is one")
    if on_oom not in ("replan", "fail"):
        raise UsageError(f"--on-oom {on_oom} is neither replan nor fail")
    return AcceleratorOptions(
        replans=on_oom == "replan",
        device=device,
        schedule=None if schedule == "auto" else schedule,
        memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
        trace=trace,
    )


def open_accelerator(options: AcceleratorOptions) -> "Device | None":
    """The device that was asked for, None for the host alone.

    Raises: UsageError when it is not there, or the schedule is none for it.
    """
    from moebatch.runtime.devices import open_device

    check_accelerator(options)
    return open_device(options.device, memory_bytes=options.memory_bytes)


def check_accelerator(options: AcceleratorOptions) -> None:
    """Raises: UsageError when the device is not there, or the schedule is none for it."""
    from moebatch.runtime.devices import find_device

    kind, _ = find_device(options.device, memory_bytes=options.memory_bytes)
    if kind == "cpu" and options.schedule not in (None, "zigzag"):
        raise UsageError(
            f"--schedule {options.schedule} needs an accelerator, and --device is {options.device}",
            hint="leave --schedule away, or name a device: --device emulated:t4",
        )
    if kind != "cpu" and options.schedule == "zigzag":
        raise UsageError("--schedule zigzag is for the host alone",
                         hint="use --device cpu, or one of: " + ", ".join(STYLES))  # fmt: skip


def fit_to(device: "Device", spec: ModelSpec, plan: Plan, *, schedule: str | None,
           fixed: Overrides, budget: int, share: float = 1.0,
           regime: RegimeOptions = _ANY_REGIME) -> DevicePlan:  # fmt: skip
    """The plan with an accelerator: the host's batch, its policy and memory fitted to the device.

    `share` of the device's memory is planned with. `regime`: the cache's if that was asked for.
    What host memory cannot hold of the streamed weights stays on disk, in whole layers.
    Raises: NoFeasiblePolicy when the memory of either does not do.
    """
    if regime.regime == "cache":
        return _fit_cache(device, spec, plan, regime=regime, fixed=fixed, budget=budget,
                          share=share)  # fmt: skip
    policy = fit(
        spec,
        plan.policy,
        schedule=schedule or "cgopipe",
        device_bytes=int(share * device.memory.limit),
        micro_batch_size=fixed.micro_batch_size,
        weights_resident=fixed.weights_resident,
    )
    for on_disk in range(spec.num_layers + 1):
        found = with_disk_layers(spec, policy, on_disk)
        memory = host_memory(spec, found, plan.memory, emulated=device.emulated)
        if memory.total <= budget:
            return DevicePlan(policy=found, memory=memory)
    raise _too_large_for_host(memory.total, budget)


def _fit_cache(device: "Device", spec: ModelSpec, plan: Plan, *, regime: RegimeOptions,
               fixed: Overrides, budget: int, share: float) -> DevicePlan:  # fmt: skip
    """The plan of the cache regime: all experts in host memory, some of them on the device."""
    asked = regime.overrides(spec, fixed)
    policy = replace(
        plan.policy,
        eviction=asked.eviction or DEVICE_EVICTION,
        prefetch_layers=(
            DEVICE_PREFETCH_LAYERS if asked.prefetch_layers is None else asked.prefetch_layers
        ),
    )
    found = fit_cache(spec, policy, device_bytes=int(share * device.memory.limit),
                      capacity=asked.expert_slots)  # fmt: skip
    memory = cached_host_memory(spec, found, plan.memory, emulated=device.emulated)
    if memory.total > budget:
        raise _too_large_for_host(memory.total, budget)
    return DevicePlan(policy=found, memory=memory)


def _too_large_for_host(need: int, budget: int) -> NoFeasiblePolicy:
    return NoFeasiblePolicy(
        f"with this accelerator the run needs {format_bytes(need)} of host memory, "
        f"the budget is {format_bytes(budget)}",
        hint="raise --memory, or lower --batch-size",
    )


def given_plan(device: "Device", spec: ModelSpec, policy: Policy, *, budget: int,
               base_bytes: int) -> DevicePlan:  # fmt: skip
    """The plan that a policy file for an accelerator stands for.

    Raises: UsageError for a policy of the host alone; NoFeasiblePolicy when it does not fit.
    """
    if policy.schedule == "zigzag":
        raise UsageError("the policy is for the host alone, and this run has an accelerator",
                         hint="use --device cpu, or another policy")  # fmt: skip
    host = memory_of(spec, policy, base_bytes=base_bytes)
    cache = policy.regime == "cache"
    memory = (cached_host_memory if cache else host_memory)(
        spec, policy, host, emulated=device.emulated
    )
    plan = DevicePlan(policy=policy, memory=memory)
    need = cached_device_bytes(spec, policy) if cache else device_memory(spec, policy).total
    for what, size, limit in (
        ("accelerator", need, device.memory.limit),
        ("host", plan.memory.total, budget),
    ):
        if size > limit:
            raise NoFeasiblePolicy(
                f"this policy needs {format_bytes(size)} of {what} memory, "
                f"there are {format_bytes(limit)}",
                hint="raise --memory or --gpu-memory, or leave --policy away",
            )
    return plan


def device_line(name: str, device: "Device", plan: DevicePlan, budget: int) -> str:
    """The plan in one line, before a run."""
    policy = plan.policy
    if policy.regime == "cache":
        kept = f"cache of {policy.expert_slots} experts, {policy.eviction}"
    else:
        kept = f"weights resident {policy.weights_resident:.0%}"
    return (
        f"{name} on {device.name} ({format_bytes(device.memory.limit)}): {policy.schedule} · "
        f"batch {policy.batch_size}, micro-batch {policy.micro_batch_size} · "
        f"{kept} · planned host memory "
        f"{format_bytes(plan.memory.total)} of {format_bytes(budget)}"
    )


def write_trace(path: Path, passes: "Sequence[PassResult]") -> None:
    """Measured passes and, as a second process, what the simulator makes of the same durations.

    Raises: UsageError when the file cannot be written.
    """
    measured = [one.timeline for one in passes]
    simulated = predicted([(one.tasks, one.timeline) for one in passes])
    try:
        path.write_text(chrome_trace({"measured": measured, "simulated": simulated}))
    except OSError as error:
        raise UsageError(f"cannot write the trace {path}: {error.strerror}") from None
