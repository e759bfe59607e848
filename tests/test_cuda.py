"""The cases of the emulated accelerator on a real one. `pytest -m gpu`; skipped where there is none."""

import random
from dataclasses import replace

import models
import pytest
import run_engine
import torch
from run_device import random_rows, run_rows, worst_error
from run_engine import tokens
from test_cached_engine import random_requests
from test_device import HOMES, POLICY, TOLERANCE, random_case
from test_device_tail import run_tail
from test_engine import rows

from moebatch.plan.pipeline import STYLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none"),
]


def cuda():
    """The first device; imported late, so that machines without one can collect this file."""
    from moebatch.runtime.cuda import CudaDevice

    return CudaDevice(0)


@pytest.mark.parametrize("ffn", ["cpu", "gpu"])
@pytest.mark.parametrize("attention", ["cpu", "gpu"])
@pytest.mark.parametrize("name", sorted(STYLES))
def test_every_schedule_gives_the_logits_of_the_oracle(name, attention, ffn, tiny_models) -> None:
    model, path = tiny_models("mixtral")
    policy = replace(POLICY, schedule=name, attention=attention, ffn=ffn, kv_resident=0.4)
    case = random_rows(random.Random(1), 9, 3)
    passes = run_rows(path, case, policy, cuda(), chunk=7, homes=HOMES)
    assert worst_error(model, case) < TOLERANCE
    assert len(passes) > 3


@pytest.mark.parametrize("kind", sorted(models.CONFIGS))
def test_every_family(kind, tiny_models) -> None:
    model, path = tiny_models(kind)
    for attention in ("cpu", "gpu"):
        policy = replace(POLICY, schedule="cgopipe", attention=attention, kv_resident=0.5)
        case = random_rows(random.Random(2), 6, 2, vocab=90)
        run_rows(path, case, policy, cuda(), chunk=9)
        assert worst_error(model, case) < TOLERANCE


@pytest.mark.parametrize("seed", range(40))
def test_random_cases(seed, tmp_path_factory) -> None:
    model = models.reference_model("mixtral", num_hidden_layers=4)
    path = models.save(model, tmp_path_factory.mktemp("four"))
    policy, case, options, _ = random_case(seed)
    run_rows(path, case, policy, cuda(), **options)
    assert worst_error(model, case) < TOLERANCE


@pytest.mark.parametrize("name", sorted(STYLES))
def test_text_is_that_of_the_host(name, tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(25, seed=3)
    expected = tokens(run_engine.run(path, work))
    found = run_engine.run(
        path, work, device=cuda(), schedule=name, ffn="gpu", weights_resident=0.2
    )
    assert expected == tokens(found)


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
@pytest.mark.parametrize("resident", [0.0, 0.4, 1.0])
def test_the_tail_goes_on_with_a_cache(resident, attention, tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = random_requests(random.Random(4), 9)
    name = "cgopipe" if attention == "cpu" else "flexgen"
    found, facts, _, _ = run_tail(path, work, device=cuda(), weights_resident=resident,
                                  attention=attention, schedule=name)  # fmt: skip
    assert facts.changed_before_pass is not None
    assert found == tokens(run_engine.run(path, work))


def test_pinned_memory_is_not_rounded() -> None:
    device = cuda()
    tensor = device.pinned(3_000_001)
    assert tensor.numel() == 3_000_001
    assert tensor.is_pinned()
    device.close()
