"""What a user may say of the cache regime with an accelerator, and of a tail in a policy file."""

from dataclasses import replace

from moebatch.errors import UsageError
from moebatch.plan.cached_fit import tail_bytes, tail_host_bytes
from moebatch.plan.device_fit import DevicePlan
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Overrides


def refuse_to_cache(schedule: str | None, fixed: Overrides, about_cache: str | None) -> None:
    """Raises: UsageError for what says how to stream, if `about_cache` is an option about the cache."""
    for option, given in (("--schedule", schedule), ("--weights-resident", fixed.weights_resident)):
        if given is not None and about_cache is not None:
            raise UsageError(f"{option} has no meaning with {about_cache}",
                             hint="leave one of them away")  # fmt: skip


def with_fitting_tail(spec: ModelSpec, plan: DevicePlan, *, device_bytes: int, budget: int,
                      emulated: bool) -> DevicePlan:  # fmt: skip
    """The plan of a policy file with the memory of its tail, or without a tail that does not fit."""
    policy, memory = plan.policy, plan.memory
    if not policy.tail_rows or policy.regime == "cache":
        return plan
    slots = min(policy.expert_slots, spec.num_expert_pages)
    more = tail_host_bytes(spec, policy, slots=slots, emulated=emulated)
    if tail_bytes(spec, policy) > device_bytes or memory.total + more > budget:
        return replace(plan, policy=replace(policy, tail_rows=0))
    return replace(plan, memory=replace(memory, resident_weights=memory.resident_weights + more))
