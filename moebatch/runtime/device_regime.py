"""Which backend computes with an accelerator: streaming whole layers, or a cache of experts."""

from collections.abc import Callable

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.runtime.backend import Backend
from moebatch.runtime.cached_backend import Profile
from moebatch.runtime.cached_device_backend import CachedDeviceBackend
from moebatch.runtime.device import Device
from moebatch.runtime.device_backend import DeviceBackend
from moebatch.runtime.regime import RegimeFacts


def device_backend(checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                   compute: ComputeType, device: Device, profile: Profile | None,
                   interrupted: Callable[[], bool]) -> Backend:  # fmt: skip
    """The backend for a policy's regime."""
    if policy.regime == "cache":
        return CachedDeviceBackend(
            checkpoint, spec=spec, family=family, policy=policy, compute=compute,
            device=device, profile=profile, interrupted=interrupted,
        )  # fmt: skip
    return DeviceBackend(checkpoint, spec=spec, family=family, policy=policy, compute=compute,
                         device=device, interrupted=interrupted)  # fmt: skip


def device_regime_facts(backend: Backend) -> RegimeFacts | None:
    """What there is to report of a backend of an accelerator; None for another one."""
    if isinstance(backend, CachedDeviceBackend):
        return RegimeFacts(regime="cache", counts=backend.counts, expert_slots=backend.num_slots,
                           lanes=backend.lane_facts)  # fmt: skip
    return RegimeFacts(regime="stream") if isinstance(backend, DeviceBackend) else None
