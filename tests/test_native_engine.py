"""The engine on the native kernels: bit-equal logits in any passes, rounded weights, no kernels."""

import random
from dataclasses import replace

import models
import pytest
import torch
from run_engine import POLICY, request, run, tokens
from run_forward import logits_everywhere

from moebatch.errors import ModelError, UsageError
from moebatch.model.linear import has_bf16, quantize
from moebatch.native import kernels as module
from moebatch.native.extension import SIMD_VARIABLE
from moebatch.native.kernels import load_kernels
from moebatch.runtime.engine import quantization_type

pytestmark = pytest.mark.skipif(
    load_kernels(1) is None, reason="installed without native kernels, or they are switched off"
)
COMPUTE = ["float32", "bfloat16"] if has_bf16() else ["float32"]


def prompts_of(seed, lengths):
    rng = random.Random(seed)
    return [[rng.randrange(3, 97) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def bf16_model(tmp_path_factory):
    model = models.reference_model("mixtral")
    return model, models.save(model.bfloat16(), tmp_path_factory.mktemp("bf16"))


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_logits_are_bit_equal_in_any_passes(compute, quantization, bf16_model) -> None:
    """Prompts whole, in pieces or token by token as in decode; streamed or resident; alone."""
    path, prompts = bf16_model[1], prompts_of(1, [40, 3, 17, 33])

    def logits(some, *, chunk, **changes):
        policy = replace(POLICY, kv_dtype="bfloat16", **changes)
        return logits_everywhere(
            path, some, policy, chunk=chunk, compute=compute, quantization=quantization
        )

    whole = logits(prompts, chunk=64, weights_resident=1.0)
    for chunk, resident, size in ((1, 0.0, 1), (7, 0.5, 4), (16, 1.0, 3)):
        other = logits(prompts, chunk=chunk, weights_resident=resident, micro_batch_size=size)
        for a, b in zip(whole, other, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(whole[2], logits([prompts[2]], chunk=5)[0])


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.04), ("int4", 0.7)])
def test_rounded_logits_are_near_those_of_the_weights(
    compute, quantization, most, bf16_model
) -> None:
    path, prompts = bf16_model[1], prompts_of(2, [30, 9])
    exact = torch.cat(logits_everywhere(path, prompts, POLICY, chunk=64))
    rounded = torch.cat(
        logits_everywhere(
            path, prompts, POLICY, chunk=64, compute=compute, quantization=quantization
        )
    )
    errors = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
    # Each product loses about a percent in 8 bits and ten in 4, and this model's weights are noise; a
    # token that changes its experts loses more.
    assert most / 100 < errors.median() < most


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("resident", [0.0, 0.6])
def test_rounded_text_is_the_same_under_any_policy(resident, quantization, bf16_model) -> None:
    work = [request(i, p, max_tokens=6) for i, p in enumerate(prompts_of(3, [5, 20, 1, 33]))]
    expected = tokens(run(bf16_model[1], work, quantization=quantization))
    alone = {"batch_size": 1, "micro_batch_size": 1, "weights_resident": resident}
    assert expected == tokens(run(bf16_model[1], work, quantization=quantization, **alone))


def test_quantising_what_cannot_be() -> None:
    weight = torch.ones(16, 16)
    weight[3, 4] = float("inf")
    with pytest.raises(ModelError, match="not finite"):
        quantize(weight, "float32", load_kernels(1), "int4")


def test_without_kernels(monkeypatch) -> None:
    """An installation without a compiler: PyTorch computes, quantisation says what is missing."""
    monkeypatch.setattr(module, "extension", lambda: None)
    monkeypatch.setattr(module, "variants", list)
    assert load_kernels(2) is None

    assert quantization_type("none", None) == "none"
    with pytest.raises(UsageError, match="native kernels"):
        quantization_type("int8", None)
    monkeypatch.setenv(SIMD_VARIABLE, "avx2")
    with pytest.raises(UsageError, match="cannot run here"):
        load_kernels(2)


@pytest.mark.parametrize("window", [5, 20])
def test_windows_are_bit_equal_in_any_passes(window, tmp_path) -> None:
    """Prompts longer than the ring of a layer with a window, in pieces and token by token."""
    path = models.save(models.reference_model("mixtral", sliding_window=window), tmp_path)
    prompts = prompts_of(4, [150, 3, 61])

    def logits(chunk, **changes):
        return logits_everywhere(path, prompts, replace(POLICY, **changes), chunk=chunk)

    whole = logits(512)
    for chunk, size in ((1, 3), (7, 1), (64, 2)):
        for a, b in zip(whole, logits(chunk, micro_batch_size=size), strict=True):
            assert torch.equal(a, b)
