"""config.json -> ModelSpec: published sizes of real models, and what is refused."""

import math

import models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.errors import ModelError
from moebatch.model.checkpoint import read_json
from moebatch.model.families import FAMILIES, family_of
from moebatch.model.resolve import resolve_model

# The numbers of the published config.json files.
MIXTRAL_8X7B = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu", "rms_norm_eps": 1e-05,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL_8X22B = MIXTRAL_8X7B | {
    "vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
    "num_attention_heads": 48, "max_position_embeddings": 65536,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
    "attention_bias": False, "rms_norm_eps": 1e-06, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "rope_scaling": None, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 48, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_31_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-05, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "mlp_bias": False, "attention_bias": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
QWEN25_7B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "hidden_act": "silu", "rms_norm_eps": 1e-06, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 131072,
    "max_window_layers": 28, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
PUBLISHED = [MIXTRAL_8X7B, MIXTRAL_8X22B, QWEN3_30B_A3B, LLAMA_31_8B, QWEN25_7B]


def spec_of(config, **changes):
    config = config | changes
    return family_of(config).spec(config)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def assert_refused(config, *fragments):
    with pytest.raises(ModelError) as caught:
        family_of(config).spec(config)
    text = f"{caught.value} {caught.value.hint}"
    assert "\n" not in text
    for fragment in fragments:
        assert fragment in text


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248),
        (MIXTRAL_8X22B, 140_630_071_296, 39_161_468_928),
        (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
        (LLAMA_31_8B, 8_030_261_248, 8_030_261_248),
        (QWEN25_7B, 7_615_616_512, 7_615_616_512),
    ],
)
def test_parameter_counts_of_published_models(config, total, active) -> None:
    spec = spec_of(config)
    assert total == spec.total_params
    assert active == spec.active_params


def test_mixtral_8x7b_in_bytes() -> None:
    spec = spec_of(MIXTRAL_8X7B)
    assert round(spec.layer_bytes("bfloat16") / 1e9, 2) == 2.90
    assert round(spec.layer_bytes("bfloat16") / 2**30, 2) == 2.70
    assert spec.layer_bytes("float32") == 2 * spec.layer_bytes("bfloat16")
    assert spec.kv_bytes_per_token("float16") == 131_072
    assert spec.kv_bytes_per_token("bfloat16") == 131_072
    assert spec.kv_bytes_per_token("float32") == 262_144
    assert (spec.total_params // 10**8, spec.active_params // 10**8) == (467, 128)


def test_mixtral_8x7b_as_numbers() -> None:
    spec = spec_of(MIXTRAL_8X7B)
    assert (spec.num_experts, spec.top_k, spec.has_router) == (8, 2, True)
    assert (spec.head_dim, spec.q_size, spec.kv_size) == (128, 4096, 1024)
    assert spec.layer_windows == (None,) * 32
    assert (spec.rope.kind, spec.rope.theta) == ("default", 1e6)
    assert (spec.rms_norm_eps, spec.weight_dtype) == (1e-5, "bfloat16")
    assert not (spec.qkv_bias or spec.output_bias or spec.qk_norm or spec.tie_embeddings)
    assert spec.norm_top_k


def test_qwen_and_llama_as_numbers() -> None:
    moe = spec_of(QWEN3_30B_A3B)
    assert (moe.qk_norm, moe.norm_top_k, moe.qkv_bias) == (True, True, False)
    assert moe.expert_size == 768
    assert not spec_of(QWEN3_30B_A3B, norm_topk_prob=False).norm_top_k
    llama = spec_of(LLAMA_31_8B)
    assert (llama.num_experts, llama.top_k, llama.has_router) == (1, 1, False)
    assert (llama.rope.kind, llama.rope.factor) == ("llama3", 8.0)
    assert llama.rope.original_max_position == 8192
    qwen = spec_of(QWEN25_7B)
    assert (qwen.qkv_bias, qwen.output_bias, qwen.qk_norm) == (True, False, False)
    assert qwen.layer_windows == (None,) * 28


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "llama"])
def test_active_params_counts_top_k_experts(kind, tiny_models) -> None:
    spec = resolve_model(str(tiny_models(kind)[1])).spec
    idle = spec.num_layers * (spec.num_experts - spec.top_k) * spec.expert_params
    assert spec.total_params - idle == spec.active_params


def test_unsupported_model_type_lists_what_is_supported() -> None:
    for model_type in (
        "gpt2",
        "jetmoe",
        "switch_transformers",
        None,
        3,
        ["mixtral"],
        "Mixtral",
        "",
    ):
        assert_refused(MIXTRAL_8X7B | {"model_type": model_type}, *FAMILIES)
    assert_refused({}, *FAMILIES)


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["model_type"])
def test_missing_keys_are_named(config) -> None:
    needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
              "max_position_embeddings"]  # fmt: skip
    needed += [key for key in ("num_local_experts", "num_experts_per_tok") if key in config]
    needed += [
        "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    ]
    for key in needed:
        assert_refused(without(config, key), key)
        for value in (0, -1, 1.5, "8", True, [8]):
            assert_refused(config | {key: value}, key)


def test_optional_keys_have_the_reference_defaults() -> None:
    spec = spec_of(without(LLAMA_31_8B, "num_key_value_heads", "rope_scaling", "torch_dtype",
                           "rope_theta", "rms_norm_eps", "hidden_act"))  # fmt: skip
    assert spec.num_kv_heads == 32
    assert (spec.rope.theta, spec.rope.kind) == (10000.0, "default")
    assert spec.rms_norm_eps == 1e-6
    assert spec.weight_dtype == "float32"


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (MIXTRAL_8X7B, {"hidden_act": "gelu"}),
        (LLAMA_31_8B, {"hidden_act": "relu"}),
        (LLAMA_31_8B, {"mlp_bias": True}),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 49}),
        (QWEN3_30B_A3B, {"mlp_only_layers": 3}),
        (QWEN3_30B_A3B, {"mlp_only_layers": list(range(48))}),
        (MIXTRAL_8X7B, {"num_local_experts": 1}),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}),
        (MIXTRAL_8X7B, {"torch_dtype": "float8_e4m3fn"}),
        (MIXTRAL_8X7B, {"dtype": "int8"}),
        (MIXTRAL_8X7B, {"torch_dtype": ["bfloat16"]}),
        (MIXTRAL_8X7B, {"num_key_value_heads": 5}),
        (MIXTRAL_8X7B, {"num_key_value_heads": 0}),
        (MIXTRAL_8X7B, {"num_key_value_heads": "8"}),
        (MIXTRAL_8X7B, {"head_dim": 127}),
        (MIXTRAL_8X7B, {"head_dim": "128"}),
        (MIXTRAL_8X7B, {"num_attention_heads": 8192}),
        (MIXTRAL_8X7B, {"sliding_window": 0}),
        (MIXTRAL_8X7B, {"sliding_window": "4096"}),
        (MIXTRAL_8X7B, {"rms_norm_eps": "tiny"}),
        (MIXTRAL_8X7B, {"rms_norm_eps": -1e-6}),
        (MIXTRAL_8X7B, {"rms_norm_eps": float("nan")}),
        (MIXTRAL_8X7B, {"rope_theta": "1e6"}),
        (MIXTRAL_8X7B, {"rope_theta": 0}),
        (MIXTRAL_8X7B, {"partial_rotary_factor": 0.5}),
        (QWEN25_7B, {"use_sliding_window": True, "max_window_layers": "4"}),
        (QWEN25_7B, {"use_sliding_window": True, "layer_types": ["full_attention"]}),
        (QWEN25_7B, {"use_sliding_window": True, "layer_types": ["linear_attention"] * 28}),
        (QWEN25_7B, {"use_sliding_window": True, "layer_types": "full_attention"}),
    ],
)
def test_settings_that_are_not_implemented(config, changes) -> None:
    """Guards: values of another kind were a ValueError or TypeError, or were silently ignored."""
    assert_refused(config | changes)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0},
        {"type": "su", "factor": 2.0},
        {"rope_type": ["yarn"]},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "llama3"},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": "1"},
        {"rope_type": "yarn", "factor": 4.0, "mscale": "1", "mscale_all_dim": 1.0},
        {"rope_type": "default", "partial_rotary_factor": 0.25},
        {"full_attention": {"rope_type": "linear", "factor": 8.0}},
        ["yarn"],
        "yarn",
        2.0,
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_that_is_not_implemented(rope, key) -> None:
    """Guards: settings per kind of layer passed as the default; a scaling without factor as 1."""
    assert_refused(MIXTRAL_8X7B | {key: rope})


def test_rope_in_both_layouts() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    old = spec_of(QWEN3_30B_A3B, rope_scaling=scaling, rope_theta=5e5)
    new = spec_of(
        without(QWEN3_30B_A3B, "rope_theta"), rope_parameters={**scaling, "rope_theta": 5e5}
    )
    assert old.rope == new.rope
    assert (old.rope.kind, old.rope.theta, old.rope.factor) == ("yarn", 5e5, 4.0)
    assert math.isclose(old.rope.attention_factor, 0.1 * math.log(4) + 1)


def test_windows_by_layer() -> None:
    window = {"use_sliding_window": True, "sliding_window": 64}
    assert spec_of(MIXTRAL_8X7B, sliding_window=64).layer_windows == (64,) * 32
    assert spec_of(QWEN25_7B, **window, max_window_layers=27).layer_windows == (None,) * 27 + (64,)
    assert spec_of(QWEN25_7B, **window, max_window_layers=0).layer_windows == (64,) * 28
    types = ["sliding_attention", "full_attention"] * 14
    assert spec_of(QWEN25_7B, **window, layer_types=types).layer_windows == (64, None) * 14
    off = window | {"use_sliding_window": False}
    assert spec_of(QWEN25_7B, **off, max_window_layers=0).layer_windows == (None,) * 28
    # transformers gives all layers of Qwen3-MoE the window, whatever max_window_layers says
    assert spec_of(QWEN3_30B_A3B, **window).layer_windows == (64,) * 48


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral"])
def test_windows_equal_those_of_the_reference(kind, tmp_path) -> None:
    """Guards: Qwen3-MoE had the window from layer max_window_layers on only."""
    model = models.reference_model(kind, sliding_window=5, use_sliding_window=True,
                                   max_window_layers=2)  # fmt: skip
    spec = resolve_model(str(models.save(model, tmp_path))).spec
    windows = tuple(layer.self_attn.sliding_window for layer in model.model.layers) if kind not in (
        "mistral", "mixtral") else (model.config.sliding_window,) * 3  # fmt: skip
    assert windows == spec.layer_windows


@settings(deadline=None)
@given(
    st.sampled_from(PUBLISHED),
    st.data(),
    st.none() | st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.booleans()
    | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=3), st.integers()),
)  # fmt: skip
def test_any_value_anywhere_is_a_spec_or_a_model_error(config, data, value) -> None:
    key = data.draw(st.sampled_from(sorted(config)))
    changed = config | {key: value}
    try:
        spec = family_of(changed).spec(changed)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert spec.total_params > 0
        assert len(spec.layer_windows) == spec.num_layers


def test_a_directory_without_a_config(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert read_json(tmp_path / "config.json") == {}
    with pytest.raises(ModelError, match="not a supported architecture"):
        resolve_model(str(tmp_path))
