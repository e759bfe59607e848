"""Policies as JSON: what is written is read, and what is no policy is a usage error."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import UsageError
from moebatch.plan.policy import Policy

counts = st.integers(1, 10**9)
shares = st.floats(0, 1)
processors = st.sampled_from(["cpu", "gpu"])
policies = st.builds(
    Policy,
    batch_size=counts,
    micro_batch_size=counts,
    attention=processors,
    ffn=processors,
    weights_resident=shares,
    kv_resident=shares,
    prefill_tokens=counts,
    page_slots=counts,
    kv_blocks=counts,
    kv_dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    schedule=st.just("zigzag"),
)
LEAST = {"batch_size": 4, "micro_batch_size": 2}


def assert_usage_error(text: str, *fragments: str) -> None:
    with pytest.raises(UsageError) as caught:
        Policy.from_json(text)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


@given(policies)
def test_json_round_trip(policy) -> None:
    assert policy == Policy.from_json(policy.to_json())
    assert policy.to_json() == Policy.from_json(policy.to_json()).to_json()


def test_json_is_an_object_of_plain_fields() -> None:
    values = json.loads(Policy(**LEAST).to_json())
    assert LEAST.items() <= values.items()
    assert all(isinstance(value, int | float | str | None) for value in values.values())


def test_fields_left_out_have_their_defaults() -> None:
    assert Policy(**LEAST) == Policy.from_json(json.dumps(LEAST))


@given(batch=st.integers(1, 1000), micro=st.integers(1, 1000))
def test_num_micro_batches(batch, micro) -> None:
    num = Policy(batch_size=batch, micro_batch_size=micro).num_micro_batches
    assert num * micro >= batch > (num - 1) * micro


@pytest.mark.parametrize(
    "name", ["batch_size", "micro_batch_size", "prefill_tokens", "page_slots", "kv_blocks"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "3", True, None, [1], float("nan")])
def test_counts_out_of_range(name, value) -> None:
    """Guards: fractions and true passed as counts."""
    assert_usage_error(json.dumps(LEAST | {name: value}), name)


@pytest.mark.parametrize("name", ["weights_resident", "kv_resident"])
@pytest.mark.parametrize(
    "value", [-0.1, 1.1, 2, "0.5", True, None, [0.5], float("nan"), float("inf")]
)
def test_shares_out_of_range(name, value) -> None:
    assert_usage_error(json.dumps(LEAST | {name: value}), name)


@pytest.mark.parametrize("name", ["attention", "ffn", "kv_dtype", "schedule"])
@pytest.mark.parametrize("value", ["", "tpu", "CPU", "int3", 1, None, ["cpu"], {"cpu": 1}])
def test_unknown_names(name, value) -> None:
    """Guards: any processor, schedule and data type passed, and failed later or did nothing."""
    assert_usage_error(json.dumps(LEAST | {name: value}), name)


@given(policies, st.text(min_size=1))
def test_unknown_fields_are_named(policy, name) -> None:
    values = json.loads(policy.to_json())
    if name not in values:
        assert_usage_error(json.dumps(values | {name: 1}), "unknown field", repr(name))


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "3", '"batch_size"', "[]", '["batch_size"]', '[["batch_size", 4]]', "{}",
     '{"batch_size": 4}', "\ufeff{}", "[" * 100_000, "\x00"],
)  # fmt: skip
def test_what_is_no_policy(text) -> None:
    assert_usage_error(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@given(st.sampled_from(sorted(json.loads(Policy(**LEAST).to_json()))), json_values)
def test_any_value_is_a_policy_or_a_usage_error(name, value) -> None:
    text = json.dumps(LEAST | {name: value})
    try:
        assert json.loads(Policy.from_json(text).to_json())[name] == value
    except UsageError as error:
        assert "\n" not in str(error)
