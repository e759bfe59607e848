"""Short names: sizes without a download, equal to published ones; and `moebatch models`."""

import json

import pytest
from commands import moebatch, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.errors import ModelError
from moebatch.model.families import FAMILIES, REFUSED, family_of
from moebatch.model.families.known import KNOWN
from moebatch.model.resolve import SHORT_NAMES

# Billions of parameters, in all and active; bytes of one bf16 expert in MB; KiB of KV a token in 16
# bits. Active ones count both vocabulary matrices, which some publications leave out.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9, 352.3, 128),
    "mixtral-8x22b": (140.6, 39.2, 604.0, 224),
    "dbrx": (131.6, 36.5, 396.4, 160),
    "phi-3.5-moe": (41.9, 6.6, 157.3, 128),
    "deepseek-v2-lite": (15.7, 2.7, 17.3, 30.375),
    "deepseek-v2": (235.7, 21.4, 47.2, 67.5),
    "deepseek-v3": (671.0, 37.6, 88.1, 68.625),
    "qwen1.5-moe-a2.7b": (14.3, 2.7, 17.3, 192),
    "qwen2-57b-a14b": (57.4, 14.2, 55.1, 56),
    "qwen3-30b-a3b": (30.5, 3.4, 9.4, 96),
    "qwen3-235b-a22b": (235.1, 22.2, 37.7, 188),
    "olmoe-1b-7b": (6.9, 1.3, 12.6, 128),
    "gpt-oss-20b": (20.9, 4.2, 49.8, 48),
    "gpt-oss-120b": (116.8, 5.7, 49.8, 72),
    "granite-1b-a400m": (1.3, 0.4, 3.1, 48),
    "granite-3b-a800m": (3.3, 0.9, 4.7, 64),
    "glm-4.5-air": (106.9, 13.4, 34.6, 184),
    "ernie-4.5-21b-a3b": (21.8, 3.4, 23.6, 56),
    "llama-3.1-8b": (8.0, 8.0, 352.3, 128),
    "mistral-7b": (7.2, 7.2, 352.3, 128),
    "qwen2.5-7b": (7.6, 7.6, 407.4, 56),
    "qwen3-8b": (8.2, 8.2, 302.0, 144),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_sizes_equal_published_ones(name) -> None:
    spec = KNOWN[name].spec
    total, active, expert_mb, kv_kib = PUBLISHED[name]
    assert round(spec.total_params / 1e9, 1) == total
    assert round(spec.active_params / 1e9, 1) == active
    assert round(2 * spec.expert_params / 1e6, 1) == expert_mb
    assert spec.kv_bytes_per_token("float16") / 1024 == kv_kib


def test_layers_of_deepseek_and_gpt_oss() -> None:
    lite = KNOWN["deepseek-v2-lite"].spec
    assert (lite.dense_layers, lite.experts_in(0), lite.experts_in(1)) == ((0,), 0, 64)
    assert (lite.base_ffn_size(0), lite.base_ffn_size(1)) == (10944, 2816)
    assert lite.num_expert_pages == 26 * 64
    assert lite.kv_size * 2 * 27 * 2 == 27 * 2 * 16 * 192 * 2  # what attention sees, expanded
    oss = KNOWN["gpt-oss-20b"].spec
    assert round(oss.stored_expert_bytes / 1e6, 1) == 13.2  # mxfp4
    assert round(2 * oss.expert_params / 1e6, 1) == 49.8
    assert oss.layer_windows == (128, None) * 12


@pytest.mark.parametrize("name", list(KNOWN))
def test_parts_add_up_to_the_spec(name) -> None:
    known = KNOWN[name]
    spec, family = known.spec, known.family
    for layer in {0, spec.last_sparse}:
        sizes = [_count(part.shape) for part in family.attention_parts(spec, layer)]
        assert sum(sizes) == spec.base_params(layer)
    sizes = [_count(part.shape) for part in family.expert_parts(spec, spec.last_sparse, 0)]
    assert sum(sizes) == spec.expert_params
    base = sum(spec.base_params(layer) for layer in range(spec.num_layers))
    assert base == spec.all_base_params
    assert max(map(spec.base_params, range(spec.num_layers))) == spec.largest_base_params


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def test_every_family_of_a_short_name_is_supported() -> None:
    assert SHORT_NAMES.keys() == KNOWN.keys()
    assert {known.spec.family for known in KNOWN.values()} <= FAMILIES.keys()


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(KNOWN)),
    st.data(),
    st.none() | st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.booleans()
    | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=3), st.integers()),
)  # fmt: skip
def test_any_value_anywhere_is_a_spec_or_a_model_error(name, data, value) -> None:
    config = KNOWN[name].config
    changed = config | {data.draw(st.sampled_from(sorted(config))): value}
    try:
        spec = family_of(changed).spec(changed)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert spec.total_params > 0


def test_models_lists_families_names_and_formats() -> None:
    done = moebatch("models")
    assert done.code == 0
    assert done.err == ""
    for word in (*FAMILIES, *SHORT_NAMES, *SHORT_NAMES.values(), *REFUSED, "mxfp4", "GPTQ"):
        assert word in done.out
    assert "deepseek-v2-lite" in done.out
    assert "30.4 KiB" in done.out


def test_models_as_json() -> None:
    found = json.loads(moebatch("models", "--json").out)
    assert found["families"] == list(FAMILIES)
    facts = found["short_names"]["mixtral-8x7b"]
    assert (facts["params"], facts["kv_bytes_per_token"]) == (46_702_792_704, 131_072)


@pytest.mark.parametrize("model_type", ["gpt2", "jetmoe", "switch_transformers"])
def test_an_unknown_architecture_is_exit_code_7(model_type, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    done = moebatch("run", rows, "-m", tmp_path, "-o", tmp_path / "out.jsonl")
    assert done.code == 7, done.err
    assert model_type in done.err
    assert REFUSED.get(model_type, "") in done.err
    for family in FAMILIES:
        assert family in done.err
