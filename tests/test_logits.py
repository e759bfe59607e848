"""Golden tests: our forward pass against `transformers`, float32, streamed and resident."""

import random
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_engine import POLICY
from run_forward import logits_everywhere

from moebatch.model.linear import has_bf16

TOLERANCE = 1e-4  # absolute, on logits of order one


def prompts_of(seed: int, lengths: list[int], vocab_size: int = 97) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def assert_logits_equal(
    model, path: Path, prompts, *, chunk: int, native: bool = True, **changes
) -> None:
    policy = replace(POLICY, **changes)
    ours = logits_everywhere(path, prompts, policy, chunk=chunk, native=native)
    for prompt, mine in zip(prompts, ours, strict=True):
        reference = models.reference_logits(model, tuple(prompt))
        assert (mine - reference).abs().max().item() < TOLERANCE


def test_tied_embeddings_and_biases(tmp_path) -> None:
    model = models.reference_model("llama", tie_word_embeddings=True, attention_bias=True)
    path = models.save(model, tmp_path)
    for resident in (0.0, 1.0):
        assert_logits_equal(model, path, prompts_of(3, [9, 4]), chunk=64, weights_resident=resident)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ["mistral", "mixtral"])
def test_sliding_window(kind, native, tmp_path) -> None:
    """Windows shorter than the prompt, in whole prompts, in chunks and in decode."""
    model = models.reference_model(kind, sliding_window=6)
    path = models.save(model, tmp_path)
    prompts = prompts_of(4, [20, 3, 7])
    for chunk in (64, 4, 1):
        assert_logits_equal(model, path, prompts, chunk=chunk, native=native)


def test_sharded_checkpoint_reads_the_same(tmp_path) -> None:
    model = models.reference_model("mixtral")
    path = models.save(model, tmp_path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    assert_logits_equal(model, path, prompts_of(5, [12]), chunk=64, weights_resident=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_resident", [0.0, 1.0])
def test_half_precision_weights_are_used_as_they_are(dtype, weights_resident, tmp_path) -> None:
    """16-bit weights, float32 arithmetic: equal to the reference that was upcast to float32."""
    model = models.reference_model("mixtral")
    path = models.save(model, tmp_path, dtype=dtype)
    prompts = prompts_of(6, [15, 2])
    assert_logits_equal(model, path, prompts, chunk=64, weights_resident=weights_resident)


@pytest.mark.skipif(not has_bf16(), reason="this processor has no bf16 arithmetic")
@pytest.mark.parametrize("kind", list(models.CONFIGS))
def test_bf16_arithmetic_is_close_under_any_policy(kind, tmp_path) -> None:
    """bf16 rounds to 2^-9; noise, and now and then a token that goes to another expert, stay small."""
    model = models.reference_model(kind)
    path = models.save(model, tmp_path, dtype=torch.bfloat16)
    prompts = prompts_of(7, [30, 3, 18])
    with torch.no_grad():
        exact = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    for chunk, resident, size in ((64, 1.0, 3), (64, 0.0, 1), (7, 0.5, 2)):
        policy = replace(
            POLICY, weights_resident=resident, micro_batch_size=size, kv_dtype="bfloat16"
        )
        ours = logits_everywhere(path, prompts, policy, chunk=chunk, compute="bfloat16")
        for mine, reference in zip(ours, exact, strict=True):
            error = (mine - reference).square().mean().sqrt() / reference.std()
            assert error < 0.2


@st.composite
def shapes(draw):
    heads_per_group = draw(st.integers(1, 3))
    num_kv_heads = draw(st.integers(1, 3))
    experts = draw(st.integers(2, 9))
    return {
        "hidden_size": draw(st.integers(3, 40)),
        "intermediate_size": draw(st.integers(1, 45)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": num_kv_heads * heads_per_group,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 2 * draw(st.integers(1, 9)),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "vocab_size": draw(st.integers(17, 130)),
    }


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=shapes(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    resident=st.floats(0, 1),
    chunk=st.integers(1, 50),
    slots=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_any_shape(tmp_path_factory, shape, lengths, resident, chunk, slots, seed) -> None:
    model = models.reference_model("mixtral", seed=seed, **shape)
    path = models.save(model, tmp_path_factory.mktemp("shape"))
    prompts = prompts_of(seed, lengths, shape["vocab_size"])
    assert_logits_equal(
        model, path, prompts, chunk=chunk, weights_resident=resident, page_slots=slots
    )
