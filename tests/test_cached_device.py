"""The cache regime on the emulated accelerator: the same text and logits, whatever lanes do."""

import random
from dataclasses import replace

import models
import pytest
from run_device import random_rows, run_rows, worst_error

from moebatch.plan.cached_fit import CacheSettings
from moebatch.plan.hybrid import ExpertCosts
from moebatch.plan.policy import Policy
from moebatch.plan.profiles import PROFILES, LinkProfile
from moebatch.runtime.cached_device_backend import CachedDeviceBackend
from moebatch.runtime.emulated import EmulatedDevice

FREE = PROFILES["unthrottled"]
SLOW = LinkProfile(name="slow", memory_bytes=2**30, h2d_bytes_per_s=5e6, d2h_bytes_per_s=5e6,
                   latency_s=1e-4)  # fmt: skip
SMALL = Policy(batch_size=9, micro_batch_size=3, kv_blocks=64, attention="gpu")
# All three lanes about as fast: every split occurs.
EVEN = ExpertCosts(device_expert_s=1e-3, host_expert_s=5e-4, host_token_s=5e-4, transfer_s=1.5e-3)
TOLERANCE = 1e-4


def cached(settings, costs=EVEN):
    """A maker of backends for `run_rows`."""

    def make(checkpoint, **options):
        options.pop("homes")
        return CachedDeviceBackend(checkpoint, settings=settings, costs=costs, **options)

    return make


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", sorted(models.CONFIGS))
def test_every_family(kind, attention, tiny_models) -> None:
    model, path = tiny_models(kind)
    policy = replace(SMALL, attention=attention)
    rows = random_rows(random.Random(2), 6, 2, vocab=90)
    settings = CacheSettings(capacity=3)
    run_rows(path, rows, policy, EmulatedDevice(FREE), chunk=9, make=cached(settings))
    assert worst_error(model, rows) < TOLERANCE
