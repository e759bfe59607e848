"""Which backend computes with an accelerator: streaming whole layers, a cache of experts, or one and
then the other at the tail of a job."""

from collections.abc import Callable
from dataclasses import replace

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType
from moebatch.plan.cached_fit import tail_bytes
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.runtime.backend import Backend
from moebatch.runtime.cached_backend import Profile
from moebatch.runtime.cached_device_backend import CachedDeviceBackend
from moebatch.runtime.device import Device
from moebatch.runtime.device_backend import DeviceBackend
from moebatch.runtime.regime import RegimeFacts, TailBackend


def device_backend(checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                   compute: ComputeType, device: Device, profile: Profile | None,
                   interrupted: Callable[[], bool]) -> Backend:  # fmt: skip
    """The backend for a policy's regime. A tail that does not fit the device's memory is streamed."""

    def cached(before: DeviceBackend | None) -> CachedDeviceBackend:
        return CachedDeviceBackend(
            checkpoint, spec=spec, family=family, policy=policy, compute=compute,
            device=device, profile=profile, interrupted=interrupted, before=before,
        )  # fmt: skip

    if policy.regime == "cache":
        return cached(None)
    streaming = DeviceBackend(checkpoint, spec=spec, family=family, policy=policy, compute=compute,
                              device=device, interrupted=interrupted)  # fmt: skip
    if not policy.tail_rows or tail_bytes(spec, policy) > device.memory.limit:
        return streaming
    return TailBackend(streaming, policy=policy, cached=cached)


def device_regime_facts(backend: Backend) -> RegimeFacts | None:
    """What there is to report of a backend of an accelerator; None for another one."""
    if isinstance(backend, TailBackend) and isinstance(backend.streaming, DeviceBackend):
        after = backend.cached and device_regime_facts(backend.cached)
        since = backend.changed_before_pass
        stream = RegimeFacts(regime="stream")
        return replace(after, regime="stream", changed_before_pass=since) if after else stream
    if isinstance(backend, CachedDeviceBackend):
        return RegimeFacts(regime="cache", counts=backend.counts, expert_slots=backend.num_slots,
                           lanes=backend.lane_facts)  # fmt: skip
    return RegimeFacts(regime="stream") if isinstance(backend, DeviceBackend) else None
