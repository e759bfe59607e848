"""Which backend computes: streaming whole layers, or a cache of experts for few rows."""

from collections.abc import Callable

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.runtime.backend import Backend, HostBackend
from moebatch.runtime.cached_backend import CachedHostBackend, Profile
from moebatch.runtime.cached_device_backend import CachedDeviceBackend
from moebatch.runtime.device import Device
from moebatch.runtime.device_backend import DeviceBackend
from moebatch.runtime.routing_log import RoutingLog


def host_backend(checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 compute: ComputeType, profile: Profile | None, log: RoutingLog | None,
                 interrupted: Callable[[], bool]) -> Backend:  # fmt: skip
    """The backend for a policy's regime on the host alone."""
    if policy.regime == "cache":
        return CachedHostBackend(
            checkpoint, spec=spec, family=family, policy=policy, compute=compute,
            profile=profile, log=log, interrupted=interrupted,
        )  # fmt: skip
    return HostBackend(checkpoint, spec=spec, family=family, policy=policy, compute=compute,
                       log=log, interrupted=interrupted)  # fmt: skip


def device_backend(checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                   compute: ComputeType, device: Device, profile: Profile | None,
                   interrupted: Callable[[], bool]) -> Backend:  # fmt: skip
    """The backend for a policy's regime with an accelerator."""
    if policy.regime == "cache":
        return CachedDeviceBackend(
            checkpoint, spec=spec, family=family, policy=policy, compute=compute,
            device=device, profile=profile, interrupted=interrupted,
        )  # fmt: skip
    return DeviceBackend(checkpoint, spec=spec, family=family, policy=policy, compute=compute,
                         device=device, interrupted=interrupted)  # fmt: skip
