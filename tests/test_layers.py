"""Norms against float64, rotary tables against those of `transformers`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from moebatch.model.families import family_of
from moebatch.model.layers import Rope, apply_rope, inverse_frequencies, rms_norm
from moebatch.plan.model_spec import RopeSpec

FREQUENCY_TOLERANCE = 2e-6  # relative: a few float32 roundings
TABLE_TOLERANCE = 2e-5  # absolute, at positions up to a thousand: the rounding of the angle
NORM_TOLERANCE = 1e-5  # relative to the largest value

PARAMETERS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 2.0,
     "high_freq_factor": 6.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
     "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 8.0,
     "beta_slow": 2.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0,
     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "attention_factor": 1.25,
     "truncate": False, "original_max_position_embeddings": 2048},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None,
     "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
     "original_max_position_embeddings": 5},
]  # fmt: skip


def both(parameters, head_dim=16):
    """(config of transformers, our spec) of the same config.json."""
    values = {"vocab_size": 8, "hidden_size": 4 * head_dim, "intermediate_size": 8,
              "head_dim": head_dim, "num_hidden_layers": 1, "num_attention_heads": 4,
              "max_position_embeddings": 8192, "rope_parameters": dict(parameters)}  # fmt: skip
    spec = family_of({"model_type": "llama"}).spec(values)
    return LlamaConfig(**values), spec.rope


def reference(parameters, head_dim):
    config, spec = both(parameters, head_dim)
    if parameters["rope_type"] == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    return frequencies, factor, spec


@pytest.mark.parametrize("head_dim", [4, 16, 64, 128])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_frequencies_equal_transformers(parameters, head_dim) -> None:
    frequencies, factor, spec = reference(parameters, head_dim)
    ours = inverse_frequencies(spec, head_dim)
    assert frequencies.shape == ours.shape
    assert ours.dtype == torch.float32
    assert torch.allclose(frequencies, ours, rtol=FREQUENCY_TOLERANCE, atol=0)
    assert math.isclose(factor, spec.attention_factor, rel_tol=1e-9)


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_rotated_vectors_equal_transformers(parameters) -> None:
    config, spec = both(parameters)
    positions = torch.tensor([0, 1, 2, 17, 500, 999])
    q, k = torch.randn(2, 6, 3, 16, generator=torch.Generator().manual_seed(1))
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    theirs = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    table = Rope(spec, 16).table(positions)
    assert table[0].shape == (6, 1, 8)
    for expected, x in zip(theirs, (q, k), strict=True):
        assert torch.allclose(expected[0], apply_rope(x, table), atol=TABLE_TOLERANCE, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    theta=st.floats(100, 1e7),
    factor=st.floats(1, 64),
    original=st.integers(64, 65536),
    beta_slow=st.floats(0.5, 4),
    ratio=st.floats(2, 64),
    half=st.integers(1, 64),
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
)
def test_scaled_frequencies_stand_between_both_ends(
    *, theta, factor, original, beta_slow, ratio, half, kind
) -> None:
    """Every scaling keeps a frequency, divides it by the factor, or ends between the two."""
    spec = RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_slow=beta_slow,
        beta_fast=beta_slow * ratio,
    )
    plain = inverse_frequencies(RopeSpec(theta=theta), 2 * half)
    scaled = inverse_frequencies(spec, 2 * half)
    assert (scaled <= plain * (1 + 1e-6)).all()
    assert (scaled >= plain / factor * (1 - 1e-6)).all()


@given(seed=st.integers(0, 1000), position=st.integers(0, 4000), offset=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_rotation_depends_on_distance_only(seed, position, offset) -> None:
    rope = Rope(RopeSpec(theta=10000.0), 8)
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(seed))

    def score(start: int) -> float:
        rotated = (
            apply_rope(x, rope.table(torch.tensor([p])))
            for x, p in ((q, start + offset), (k, start))
        )
        first, second = rotated
        return float((first * second).sum())

    assert math.isclose(score(0), score(position), abs_tol=5e-3)


def test_rotation_at_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 8)
    assert torch.equal(x, apply_rope(x, Rope(RopeSpec(theta=1e4), 8).table(torch.tensor([0]))))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    heads=st.none() | st.integers(1, 3),
    size=st.integers(1, 300),
    scale=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e4, 1e15]),
    eps=st.sampled_from([1e-6, 1e-5]),
    seed=st.integers(0, 1000),
)
def test_rms_norm_against_float64(*, rows, heads, size, scale, eps, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, size) if heads is None else (rows, heads, size)
    x = torch.randn(shape, generator=generator) * scale
    weight = torch.randn(size, generator=generator)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    ours = rms_norm(x, weight, eps)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= NORM_TOLERANCE * exact.abs().max()
