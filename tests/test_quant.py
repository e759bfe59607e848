"""Quantised checkpoints: decoded as an independent numpy form says, and run like decoded ones."""

import json
from dataclasses import replace
from functools import partial

import models
import numpy as np
import pytest
import quantised as q
import torch
from run_engine import POLICY, request, run, tokens
from run_forward import logits_everywhere
from test_logits import prompts_of

from moebatch.errors import ModelError
from moebatch.model import quant
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families.parts import Part, Source
from moebatch.model.resolve import resolve_model
from moebatch.model.stored import locate, quantization_of

INT4 = {"bits": 4, "group_size": q.GROUP}
FORMATS = {
    "gptq": (q.gptq, {"quant_method": "gptq", **INT4}),
    "gptq_shuffled": (partial(q.gptq, shuffled=True), {"quant_method": "gptq", **INT4}),
    "awq": (q.awq, {"quant_method": "awq", "version": "gemm", **INT4}),
    "packed": (q.packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "packed_zeros": (partial(q.packed, symmetric=False), {"quant_method": "compressed-tensors"}),
    "fp8_blocks": (q.fp8_blocks, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "fp8_rows": (q.fp8_rows, {"quant_method": "compressed-tensors"}),
}


def linear(name: str) -> bool:
    """What such checkpoints quantise: the projections, neither norms nor router nor vocabulary."""
    return "_proj" in name or ".experts." in name


def decoded(directory, name: str) -> torch.Tensor:
    with Checkpoint(directory) as checkpoint:
        stored = locate(checkpoint, Source(name=name))
        raw = []
        for entry in stored.entries:
            dtype = {"int32": torch.int32, "float8_e4m3": torch.float8_e4m3fn}.get(
                entry.dtype, getattr(torch, entry.dtype, None)
            )
            tensor = torch.empty(entry.shape, dtype=dtype)
            checkpoint.read_into(
                entry, memoryview(tensor.view(torch.uint8).reshape(-1).numpy()).cast("B")
            )
            raw.append(tensor)
        return quant.decode(stored, raw, checkpoint.quantization)


@pytest.mark.parametrize("kind", list(FORMATS))
@pytest.mark.parametrize("shape", [(8, 16), (56, 48), (40, 8)])
def test_decoding_equals_numpy(kind, shape, tmp_path) -> None:
    make, config = FORMATS[kind]
    pieces, matrix = make(np.random.default_rng(1), *shape)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    target = tmp_path / "made"
    tensors = {f"w.{key}": value for key, value in pieces.items()}
    q.write(tmp_path / "source", target, tensors, {"quantization_config": config})
    ours = decoded(target, "w.weight")
    assert ours.shape == shape
    assert ours.numpy() == pytest.approx(matrix, rel=1e-6, abs=1e-9)


def test_mxfp4_equals_numpy_and_fits_bf16() -> None:
    pieces, matrix = q.mxfp4(np.random.default_rng(2), 6, 96)
    ours = quant.mxfp4(pieces["blocks"], pieces["scales"])
    assert ours.tolist() == matrix.tolist()
    assert ours.bfloat16().float().tolist() == matrix.tolist()


def assert_runs_like_the_decoded_one(quantised, plain) -> None:
    prompts = prompts_of(7, [20, 1, 9])
    for resident in (0.0, 0.5, 1.0):
        policy = replace(POLICY, weights_resident=resident)
        pair = zip(
            logits_everywhere(quantised, prompts, policy, chunk=13),
            logits_everywhere(plain, prompts, policy, chunk=13),
            strict=True,
        )
        for ours, expected in pair:
            assert (ours - expected).abs().max() < 2e-5
    work = [request(k, prompt, max_tokens=10) for k, prompt in enumerate(prompts)]
    assert tokens(run(quantised, work)) == tokens(run(plain, work))


@pytest.mark.parametrize("kind", list(FORMATS))
def test_a_quantised_checkpoint_runs_like_the_decoded_one(kind, tiny_models, tmp_path) -> None:
    make, config = FORMATS[kind]
    family = "deepseek_v3" if kind == "fp8_blocks" else "mixtral"
    source, quantised, plain = tiny_models(family)[1], tmp_path / "quantised", tmp_path / "plain"
    q.write_both(source, quantised, plain, make=make, config=config, wanted=linear)
    model = resolve_model(str(quantised))
    with Checkpoint(quantised) as checkpoint:
        checkpoint.check(model.parts())
    assert_runs_like_the_decoded_one(quantised, plain)


def test_gpt_oss_with_mxfp4_experts(tmp_path) -> None:
    """Blocks lie by rows, decoded matrices transposed: both are the same experts."""
    model = models.reference_model("gpt_oss", hidden_size=64, intermediate_size=32)
    source, quantised, plain = (tmp_path / name for name in ("source", "quantised", "plain"))
    models.save(model, source)
    q.write_mxfp4(source, quantised, plain)
    with Checkpoint(quantised) as checkpoint:
        checkpoint.check(resolve_model(str(quantised)).parts())
    assert_runs_like_the_decoded_one(quantised, plain)


def test_half_precision_stays_what_config_says(tiny_models, tmp_path) -> None:
    """Quantised matrices are held in the model's type: here bf16, each rounded once."""
    make, config = FORMATS["awq"]
    source, quantised, plain = tiny_models("mixtral")[1], tmp_path / "q", tmp_path / "p"
    q.write_both(source, quantised, plain, make=make, config=config, wanted=linear)
    text = json.loads((quantised / "config.json").read_text()) | {"dtype": "bfloat16"}
    (quantised / "config.json").write_text(json.dumps(text))
    prompts = prompts_of(8, [12])
    (ours,) = logits_everywhere(quantised, prompts, POLICY, chunk=64)
    (exact,) = logits_everywhere(plain, prompts, POLICY, chunk=64)
    assert 1e-5 < (ours - exact).abs().max() < 0.1 * exact.std()


@pytest.mark.parametrize(
    "found",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 8},
        {"quant_method": "awq", "bits": 3},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "compressed-tensors",
         "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
        "gptq", ["gptq"], 4,
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused(found) -> None:
    with pytest.raises(ModelError) as caught:
        quantization_of({"quantization_config": found})
    assert "\n" not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("gptq", "scales", (3, 8)),
        ("gptq", "qzeros", (6, 3)),
        ("gptq", "g_idx", (7,)),
        ("awq", "qweight", (47, 2)),
        ("awq", "scales", (6, 17)),
        ("packed", "weight_scale", (15, 6)),
        ("packed_zeros", "weight_zero_point", (16, 6)),
        ("fp8_blocks", "weight_scale_inv", (2, 3)),
        ("fp8_rows", "weight_scale", (17, 1)),
    ],
)
def test_tensors_that_do_not_fit_are_named(kind, name, shape, tmp_path) -> None:
    make, config = FORMATS[kind]
    pieces, _ = make(np.random.default_rng(1), 16, 48)
    pieces[name] = torch.zeros(shape, dtype=pieces[name].dtype)
    (tmp_path / "config.json").write_text("{}")
    target = tmp_path / "made"
    tensors = {f"w.{key}": value for key, value in pieces.items()}
    q.write(tmp_path, target, tensors, {"quantization_config": config})
    part = Part(name="part", shape=(16, 48), sources=(Source(name="w.weight"),))
    with Checkpoint(target) as checkpoint, pytest.raises(ModelError) as caught:
        checkpoint.check([part])
    assert "w." in str(caught.value)
    assert "\n" not in str(caught.value)
