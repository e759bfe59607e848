"""Which backend computes on the host: streaming whole layers, or a cache of experts for few rows."""

from collections.abc import Callable

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.runtime.backend import Backend, HostBackend
from moebatch.runtime.cached_backend import CachedHostBackend, Profile
from moebatch.runtime.routing_log import RoutingLog


def host_backend(checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 compute: ComputeType, profile: Profile | None, log: RoutingLog | None,
                 interrupted: Callable[[], bool]) -> Backend:  # fmt: skip
    """The backend for a policy's regime."""
    if policy.regime == "cache":
        return CachedHostBackend(
            checkpoint, spec=spec, family=family, policy=policy, compute=compute,
            profile=profile, log=log, interrupted=interrupted,
        )  # fmt: skip
    return HostBackend(checkpoint, spec=spec, family=family, policy=policy, compute=compute,
                       log=log, interrupted=interrupted)  # fmt: skip
