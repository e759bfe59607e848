"""What every family must show: equal to `transformers` in float32, whatever the policy.

Parametrised over all families of tests/models.py: a new family is tested by its entry there.
"""

import math
import random
from dataclasses import replace

import models
import pytest
import run_engine
from run_engine import request, run, tokens
from test_logits import assert_logits_equal, prompts_of

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import resolve_model
from moebatch.plan.memory import kv_block_bytes, kv_cache_bytes

ALL = list(models.CONFIGS)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("weights_resident", [0.0, 0.45, 1.0])
def test_logits_equal_at_every_position(kind, weights_resident, tiny_models) -> None:
    model, path = tiny_models(kind)
    prompts = prompts_of(1, [1, 2, 33, 7, 16, 17])
    for chunk in (64, 5):
        assert_logits_equal(model, path, prompts, chunk=chunk, weights_resident=weights_resident)


@pytest.mark.parametrize("kind", ALL)
def test_greedy_text_equals_reference_alone_and_among_50(kind, tiny_models) -> None:
    model, path = tiny_models(kind)
    rng = random.Random(2)
    prompts = prompts_of(2, [1, 40, *(rng.randint(1, 30) for _ in range(48))])
    requests = [request(i, p, max_tokens=32) for i, p in enumerate(prompts)]
    answers = tokens(run(path, requests, weights_resident=1.0, batch_size=50, micro_batch_size=20))
    assert {32} == {len(answer) for answer in answers}
    for k in (0, 1, 7, 30):
        assert models.is_greedy(model, prompts[k], answers[k])
    alone = tokens(run(path, [requests[7]], weights_resident=0.0))
    assert alone == [answers[7]]


@pytest.mark.parametrize("kind", ALL)
def test_text_is_the_same_under_any_policy(kind, tiny_models) -> None:
    """The metamorphic test, small: sampled text under policies that differ in everything."""
    path, rng = tiny_models(kind)[1], random.Random(4)
    prompts = prompts_of(3, [1, 45, 20, 3, 9, 17])
    work = [request(i, p, max_tokens=8, temperature=0.9) for i, p in enumerate(prompts)]
    expected = tokens(run(path, work))
    for _ in range(3):
        policy = {
            "batch_size": rng.randint(1, 7),
            "micro_batch_size": rng.randint(1, 7),
            "weights_resident": rng.random(),
            "page_slots": rng.randint(1, 9),
            "prefill_tokens": rng.randint(1, 80),
            "kv_blocks": rng.randint(4, 30),
        }
        assert expected == tokens(run(path, rng.sample(work, len(work)), **policy)), policy


@pytest.mark.parametrize("kind", ALL)
def test_params_and_parts_equal_the_reference_models(kind, tiny_models) -> None:
    model, path = tiny_models(kind)
    local = resolve_model(str(path))
    spec = local.spec
    assert models.num_params(model) == spec.total_params
    with Checkpoint(path) as checkpoint:
        checkpoint.check(local.parts())
    held = [part for part in local.parts() if not (spec.tie_embeddings and part.name == "head")]
    assert sum(math.prod(part.shape) for part in held) == spec.total_params
    for layer in range(spec.num_layers):
        parts = local.family.attention_parts(spec, layer)
        assert sum(math.prod(part.shape) for part in parts) == spec.base_params(layer)
    cached = run_engine.cached_numbers(path)
    assert cached == spec.kv_numbers * spec.num_layers


VARIANTS = [
    ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [],
                   "qkv_bias": False}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("olmoe", {"clip_qkv": None, "norm_topk_prob": True, "attention_bias": True}),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                     "routed_scaling_factor": 2.0, "q_lora_rank": 22}),
    ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
                     "v_head_dim": 20}),
    ("glm4_moe", {"use_qk_norm": False, "n_group": 3, "topk_group": 2, "attention_bias": False}),
    ("phimoe", {"sliding_window": 6, "attention_bias": False, "lm_head_bias": False}),
    ("ernie4_5_moe", {"use_bias": False, "tie_word_embeddings": True, "moe_layer_interval": 2,
                      "moe_num_shared_experts": 0, "num_hidden_layers": 4}),
    ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_settings_of_a_family(kind, changes, tmp_path) -> None:
    model = models.reference_model(kind, **changes)
    path = models.save(model, tmp_path)
    for resident in (0.0, 1.0):
        assert_logits_equal(
            model, path, prompts_of(5, [30, 3]), chunk=11, weights_resident=resident
        )


def test_rows_that_may_outgrow_the_original_length_use_the_long_factors(tmp_path) -> None:
    """The reference has one set of factors for a whole pass: its short ones stand for ours, long."""
    factors = [1.5, 2.0, 3.0, 4.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": factors, "short_mscale": 1.1, "long_mscale": 1.3}  # fmt: skip
    ours = models.reference_model(
        "phimoe", rope_parameters={**rope, "original_max_position_embeddings": 24}
    )
    long = {**rope, "short_factor": factors, "short_mscale": 1.3}
    model = models.reference_model(
        "phimoe", rope_parameters={**long, "original_max_position_embeddings": 200}
    )
    path = models.save(ours, tmp_path)
    short_row, long_row = prompts_of(6, [9, 20])
    work = [request(0, short_row, max_tokens=8), request(1, long_row, max_tokens=20)]
    answers = tokens(run(path, work))
    assert models.is_greedy(ours, short_row, answers[0])
    assert models.is_greedy(model, long_row, answers[1])
    assert answers == [run_engine.tokens(run(path, [row]))[0] for row in work]


def test_layers_without_experts(tmp_path) -> None:
    """Dense layers among those with experts, wider than an expert."""
    model = models.reference_model("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2,
                                   mlp_only_layers=[3])  # fmt: skip
    path = models.save(model, tmp_path)
    assert resolve_model(str(path)).spec.dense_layers == (0, 2, 3)
    for resident in (0.0, 0.5, 1.0):
        assert_logits_equal(
            model, path, prompts_of(3, [9, 40]), chunk=17, weights_resident=resident
        )


@pytest.mark.parametrize(
    ("kind", "windows"), [("gpt_oss", {}), ("mistral", {"sliding_window": 40})]
)
def test_the_cache_of_windowed_layers_is_as_large_as_planned(kind, windows, tmp_path) -> None:
    path = models.save(models.reference_model(kind, **windows), tmp_path)
    policy = replace(run_engine.POLICY, batch_size=3, kv_blocks=60)
    with run_engine.open_engine(path, policy) as engine:
        held = sum(layer.nbytes for layer in engine._kv._layers)
    spec = resolve_model(str(path)).spec
    planned = kv_cache_bytes(spec, kv_blocks=60, batch_size=3, kv_dtype=policy.kv_dtype)
    assert held == planned
    assert held < 60 * kv_block_bytes(spec, policy.kv_dtype)
