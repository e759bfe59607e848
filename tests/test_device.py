"""Every schedule on the emulated accelerator: the logits of the oracle, whatever lanes and link do."""

import os
import random
from dataclasses import replace

import models
import pytest
import torch
from run_device import Row, random_rows, run_rows, worst_error

from moebatch.errors import NoFeasiblePolicy, UsageError
from moebatch.plan.pipeline import STYLES
from moebatch.plan.policy import Policy
from moebatch.plan.profiles import PROFILES, LinkProfile, link_profile
from moebatch.plan.schedule import Lane, Op
from moebatch.plan.timeline import check_executed
from moebatch.runtime.emulated import EmulatedDevice

FREE = PROFILES["unthrottled"]
SLOW = LinkProfile(name="slow", memory_bytes=2**30, h2d_bytes_per_s=1e7, d2h_bytes_per_s=1e7,
                   latency_s=1e-4)  # fmt: skip
POLICY = Policy(batch_size=9, micro_batch_size=3, kv_blocks=64, weights_resident=0.3, ffn="gpu")
HOMES = ("disk", "cpu", "pinned")
TOLERANCE = 1e-4


@pytest.mark.parametrize("ffn", ["cpu", "gpu"])
@pytest.mark.parametrize("attention", ["cpu", "gpu"])
@pytest.mark.parametrize("name", sorted(STYLES))
def test_every_schedule_gives_the_logits_of_the_oracle(name, attention, ffn, tiny_models) -> None:
    model, path = tiny_models("mixtral")
    policy = replace(POLICY, schedule=name, attention=attention, ffn=ffn, kv_resident=0.4)
    rows = random_rows(random.Random(1), 9, 3)
    passes = run_rows(path, rows, policy, EmulatedDevice(FREE), chunk=7, homes=HOMES)
    assert worst_error(model, rows) < TOLERANCE
    check_executed(passes)


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", sorted(models.CONFIGS))
def test_every_family_on_a_device(kind, attention, tiny_models) -> None:
    """Latent attention, sinks, shared experts, dense layers: where the weights are, they apply."""
    model, path = tiny_models(kind)
    policy = replace(POLICY, schedule="cgopipe", attention=attention, kv_resident=0.5)
    rows = random_rows(random.Random(2), 6, 2, vocab=90)
    run_rows(path, rows, policy, EmulatedDevice(FREE), chunk=9)
    assert worst_error(model, rows) < TOLERANCE


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    """Sizes that nothing divides."""
    model = models.reference_model(
        "mixtral", hidden_size=44, intermediate_size=37, num_hidden_layers=4, head_dim=6,
        num_attention_heads=6, num_key_value_heads=3, num_local_experts=5, num_experts_per_tok=3,
    )  # fmt: skip
    return model, models.save(model, tmp_path_factory.mktemp("odd"))


def random_case(seed):
    """(policy, rows, keyword arguments of `run_rows`): anything goes."""
    rng = random.Random(seed)
    count, size = rng.randint(1, 8), rng.randint(1, 4)
    attention = rng.choice(["cpu", "gpu"])
    policy = Policy(
        batch_size=count,
        micro_batch_size=min(size, count),
        kv_blocks=64,
        weights_resident=rng.choice([0.0, 0.0, 1.0, rng.random()]),
        kv_resident=rng.choice([0.0, 1.0, rng.random()]),
        attention=attention,
        ffn=rng.choice(["cpu", "gpu", "gpu"]),
        schedule=rng.choice(sorted(STYLES)),
    )
    rows = random_rows(rng, count, policy.num_micro_batches)
    homes = tuple(rng.choice(["pinned", "pinned", "cpu", "disk"]) for _ in range(4))
    return policy, rows, {"homes": homes, "chunk": rng.choice([1, 3, 16, 64])}, rng


@pytest.mark.parametrize("part", range(10))
def test_random_cases_with_random_delays(part, odd_model) -> None:
    """Poisoned buffers and lanes that stop for a while: no fault, in any policy.

    MOEBATCH_FUZZ_CASES sets how many cases there are in all.
    """
    model, path = odd_model
    cases = int(os.environ.get("MOEBATCH_FUZZ_CASES", "30"))
    for seed in range(part, cases, 10):
        policy, rows, options, rng = random_case(seed)
        device = EmulatedDevice(FREE, delays=rng, max_delay_s=rng.choice([0.0, 0.0005, 0.002]))
        passes = run_rows(path, rows, policy, device, **options)
        assert worst_error(model, rows) < TOLERANCE, f"case {seed}"
        check_executed(passes)


def without(op, *waits):
    """A change of a schedule: tasks of `op` do not wait for tasks of kinds `waits`."""

    def change(tasks):
        return [
            replace(
                t,
                deps=tuple(d for d in t.deps if d[0] not in waits),
                carried=tuple(d for d in t.carried if d[0] not in waits),
            )
            if t.op is op
            else t
            for t in tasks
        ]

    return change


def freed_early(tasks):
    """Each layer is given back before its first expert runs."""
    frees = {t.layer: t for t in tasks if t.op is Op.FREE_LAYER}
    rest = []
    for task in tasks:
        if task.op is Op.FFN and task.micro_batch == 0:
            rest.append(replace(frees[task.layer], deps=()))
        rest += [task] if task.op is not Op.FREE_LAYER else []
    return rest


BROKEN = {
    "experts before their pages": ("cgopipe", "gpu", without(Op.FFN, Op.LOAD_PAGE)),
    "attention before its page": ("cgopipe", "cpu", without(Op.PRE_ATTN, Op.LOAD_PAGE)),
    "a page into a buffer in use": ("layerwise", "gpu", without(Op.LOAD_PAGE, Op.FREE_LAYER)),
    "hidden states before attention": ("cgopipe", "cpu", without(Op.LOAD_HIDDEN, Op.CPU_ATTN)),
    "host attention before its queries": ("cgopipe", "cpu", without(Op.CPU_ATTN, Op.OFFLOAD_QKV)),
    "device attention before its context": ("flexgen", "gpu", without(Op.GPU_ATTN, Op.LOAD_KV)),
    "a layer given back too early": ("cgopipe", "cpu", freed_early),
}


@pytest.mark.parametrize("broken", sorted(BROKEN))
def test_a_broken_schedule_is_caught(broken, tiny_models) -> None:
    """By NaN in the logits, by a buffer that is not free, and by the check of the trace."""
    name, attention, change = BROKEN[broken]
    model, path = tiny_models("mixtral")
    ahead = (
        "buffer in use" in broken or "hidden" in broken
    )  # only a fast link runs ahead of the computation
    policy = replace(POLICY, schedule=name, attention=attention, weights_resident=0.0,
                     kv_resident=float("pages" in broken or ahead))  # fmt: skip
    rows = random_rows(random.Random(3), 9, 3)
    try:
        run_rows(path, rows, policy, EmulatedDevice(FREE if ahead else SLOW), change=change)
    except (IndexError, KeyError, AssertionError):  # what is taken is not there
        return
    assert worst_error(model, rows) > 1.0


def test_the_good_schedule_on_the_slow_link_is_right(tiny_models) -> None:
    """The twin of the test above: it is the change that breaks, not the link."""
    model, path = tiny_models("mixtral")
    for name, attention in (("cgopipe", "cpu"), ("flexgen", "gpu")):
        policy = replace(POLICY, schedule=name, attention=attention, weights_resident=0.0,
                         kv_resident=0.0)  # fmt: skip
        rows = random_rows(random.Random(3), 9, 3)
        check_executed(run_rows(path, rows, policy, EmulatedDevice(SLOW)))
        assert worst_error(model, rows) < TOLERANCE


def test_copies_take_the_links_time() -> None:
    device = EmulatedDevice(SLOW)
    target = device.empty((100_000,), torch.uint8)
    source = torch.zeros(100_000, dtype=torch.uint8)
    queue = EmulatedDevice(FREE, delays=random.Random(0)).queues[Lane.H2D]
    signal = queue.launch(lambda task: device.copy_in(target, source), None)
    start, end = signal.times()
    assert end - start >= 0.0099  # 100 kB at 10 MB/s, less the clock's grain
    assert torch.equal(target, source)


def test_memory_has_a_hard_limit() -> None:
    device = EmulatedDevice(FREE, memory_bytes=1000)
    held = device.empty((100,), torch.float32)
    assert held.isnan().all()
    device.empty((150,), torch.float32)
    with pytest.raises(NoFeasiblePolicy, match="1000 B"):
        device.empty((1,), torch.uint8)
    held.zero_()
    device.free(held)
    assert held.isnan().all()
    device.empty((400,), torch.uint8)
    assert (device.memory.used, device.memory.peak) == (1000, 1000)


def test_a_model_that_is_too_large_for_the_device(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    rows = [Row(ids=[5, 6, 7], prompt_len=3, joins=0, micro_batch=0)]
    policy = replace(POLICY, schedule="cgopipe", weights_resident=1.0)
    with pytest.raises(NoFeasiblePolicy, match="are needed"):
        run_rows(path, rows, policy, EmulatedDevice(FREE, memory_bytes=100_000))


def test_unknown_profile() -> None:
    with pytest.raises(UsageError, match="no emulated accelerator 'h9000'"):
        link_profile("h9000")
