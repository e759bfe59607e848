"""What a run was asked to do with an accelerator, and its trace file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moebatch.cli.cached_accelerator import refuse_to_cache, with_fitting_tail
from moebatch.cli.regime import RegimeOptions
from moebatch.errors import NoFeasiblePolicy, UsageError
from moebatch.plan.cached_fit import cached_device_bytes, cached_host_memory
from moebatch.plan.calibrate import predicted
from moebatch.plan.device_fit import (
    ON_DEVICE,
    DevicePlan,
    device_memory,
    disk_layers,
    host_memory,
    settle,
    with_disk_layers,
)
from moebatch.plan.device_regime import DeviceQuestion, cached_plan, choose_on_device
from moebatch.plan.machine import MachineSpec, Numbers
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import memory_of
from moebatch.plan.outlook import Limits, look, predicted_throughput
from moebatch.plan.pipeline import STYLES
from moebatch.plan.policy import Overrides, Policy
from moebatch.plan.schedule import Processor
from moebatch.plan.timeline import chrome_trace
from moebatch.plan.workload import WorkloadSpec
from moebatch.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from moebatch.model.linear import ComputeType
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


def plan_for(device: "Device", spec: ModelSpec, workload: WorkloadSpec, *, machine: MachineSpec,
             compute: "ComputeType", schedule: str | None, fixed: Overrides, budget: int,
             base_bytes: int, share: float = 1.0, regime: RegimeOptions = _ANY_REGIME,
             shares: Numbers | None = None) -> DevicePlan:  # fmt: skip
    """The best policy for this machine with this accelerator, by the hierarchical roofline model.

    The accelerator is measured first; `machine` are the host's figures. `share` of the device's
    memory is planned with. What host memory cannot hold of the streamed weights stays on disk.
    `shares` [L, E]: how tokens spread over the experts. Who says how to stream wants no cache.
    Raises: NoFeasiblePolicy when the memory of either does not do; UsageError for what has no effect.
    """
    asked = DeviceQuestion(
        spec=spec, workload=workload, machine=machine, compute=compute, memory_bytes=budget,
        device_bytes=int(share * device.memory.limit), base_bytes=base_bytes,
        fixed=regime.overrides(spec, fixed), shares=shares, emulated=device.emulated,
    )  # fmt: skip
    refuse_to_cache(schedule, fixed, regime.given)
    if regime.regime == "cache":
        return cached_plan(asked)
    from moebatch.runtime.probe_device import measure_device

    processor, link, back = measure_device(device, dtype=spec.weight_dtype, compute=compute)
    machine = replace(machine, accelerator=processor, link=link, link_back=back)
    asked = replace(asked, machine=machine)
    streamed = _streaming_plan(asked, schedule)
    return choose_on_device(asked, streamed) if schedule is None else streamed


def _streaming_plan(asked: DeviceQuestion, schedule: str | None) -> DevicePlan:
    """The best policy that streams.

    Raises: NoFeasiblePolicy.
    """
    spec, workload, machine = asked.spec, asked.workload, asked.machine
    attention: Processor = "gpu" if schedule in ON_DEVICE else "cpu"
    given = replace(asked.fixed, kv_dtype=asked.fixed.kv_dtype or spec.weight_dtype,
                    attention=attention if schedule else asked.fixed.attention,
                    regime="stream")  # fmt: skip
    limits = Limits(host=asked.memory_bytes, accelerator=asked.device_bytes, reserve=0, usable=1.0)
    fixed = given
    while True:
        outlook = look(spec, workload, machine, limits=limits, compute=asked.compute, fixed=fixed)
        for policy in (outlook.policy, *(other for other, _ in outlook.alternatives)):
            found = settle(spec, policy, schedule=schedule or policy.schedule, fixed=given,
                           device_bytes=asked.device_bytes)  # fmt: skip
            plan = found and _with_host(spec, found, budget=asked.memory_bytes,
                                        base_bytes=asked.base_bytes,
                                        emulated=asked.emulated)  # fmt: skip
            if plan:
                if asked.emulated:  # which computes with the host's own cores
                    return plan
                rate = predicted_throughput(spec, workload, machine, plan.policy)
                return replace(plan, throughput=rate)
        half = outlook.policy.batch_size // 2
        if given.batch_size is not None or half == 0:
            raise NoFeasiblePolicy(
                f"no policy for this model fits {format_bytes(asked.device_bytes)} of accelerator "
                f"memory and {format_bytes(asked.memory_bytes)} of host memory",
                hint="raise --gpu-memory or --memory, lower --batch-size, or use --device cpu",
            )
        fixed = replace(fixed, batch_size=half)


def _with_host(spec: ModelSpec, policy: Policy, *, budget: int, base_bytes: int,
               emulated: bool) -> DevicePlan | None:  # fmt: skip
    """The policy with as few layers on disk as host memory allows, None where it never does."""
    on_host = memory_of(spec, policy, base_bytes=base_bytes)
    for count in range(disk_layers(spec, policy), spec.num_layers + 1):
        found = with_disk_layers(spec, policy, count)
        memory = host_memory(spec, found, on_host, emulated=emulated)
        if memory.total <= budget:
            return DevicePlan(policy=found, memory=memory)
        if policy.ffn == "cpu":  # what the host computes must be in its memory
            return None
    return None


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
    return with_fitting_tail(spec, plan, device_bytes=device.memory.limit, budget=budget,
                             emulated=device.emulated)  # fmt: skip


def device_line(name: str, device: "Device", plan: DevicePlan, budget: int) -> str:
    """The plan in one line, before a run."""
    policy = plan.policy
    if policy.regime == "cache":
        kept = f"cache of {policy.expert_slots} experts, {policy.eviction}"
    else:
        kept = f"weights resident {policy.weights_resident:.0%}"
        if policy.tail_rows:
            kept += f" · expert cache from {policy.tail_rows} rows on"
    return (
        f"{name} on {device.name} ({format_bytes(device.memory.limit)}): {policy.schedule} · "
        f"batch {policy.batch_size}, micro-batch {policy.micro_batch_size} · "
        f"attention on {policy.attention}, experts on {policy.ffn} · "
        f"{kept} · planned host memory "
        f"{format_bytes(plan.memory.total)} of {format_bytes(budget)}"
        + (f" · at most {plan.throughput:.1f} tok/s" if plan.throughput else "")
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
