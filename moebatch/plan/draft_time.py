"""Seconds of a decode pass by its tokens, as predicted: what drafts are weighed with."""

import numpy as np

from moebatch.plan.cache_time import CacheTime
from moebatch.plan.host_time import HostTime, PassLoad
from moebatch.plan.job_time import JobTime
from moebatch.plan.machine import MachineSpec
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import resident_pages
from moebatch.plan.policy import Policy
from moebatch.plan.speculation import Numbers, PassSeconds
from moebatch.plan.workload import WorkloadSpec


def unknown_seconds(tokens: Numbers) -> Numbers:
    """A shape to start from where nothing is predicted: reading the weights, and a little a token."""
    return 1.0 + tokens / 256.0


def pass_seconds(spec: ModelSpec, workload: WorkloadSpec, policy: Policy, *, machine: MachineSpec,
                 compute: str, job: JobTime | None = None) -> PassSeconds:  # fmt: skip
    """On the host: every token of the pass is attended and sampled like a row of its own.

    What the disk takes in a pass is that of `job`, if it is given and streams to its end: there the
    bandwidth was measured.
    """
    attention, experts = resident_pages(spec, policy)
    disk_s = None
    if job is not None and job.passes and policy.regime == "stream" and not policy.tail_rows:
        disk_s = job.parts.get("disk", 0.0) / job.passes
    time = HostTime(spec, machine, compute=compute, kv_dtype=policy.kv_dtype)
    if policy.regime == "cache":  # more tokens ask for more experts
        experts = policy.expert_slots
        time = CacheTime(spec, machine, compute=compute, kv_dtype=policy.kv_dtype,
                         eviction=policy.eviction)  # fmt: skip

    def seconds(tokens: Numbers) -> Numbers:
        load = PassLoad(
            rows=tokens,
            context=tokens * workload.mean_context,
            sampled=tokens,
            micro_batches=float(policy.num_micro_batches),
        )
        costs = time.seconds(load, attention_pages=attention, expert_pages=experts)
        if disk_s is None:
            return np.asarray(costs.total, dtype=np.float64) + 0.0 * tokens
        return np.maximum(np.asarray(costs.compute, dtype=np.float64), disk_s)

    return seconds
