"""The fast forms of attention equal the plain one; the plain one equals float64 by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.model import attention as module
from moebatch.model.attention import (
    absorb_queries,
    attend_decode,
    attend_prompt,
    attention_plain,
    causal_mask,
    expand_latents,
    release_values,
)
from moebatch.plan.model_spec import LatentSpec

TOLERANCE = 2e-5  # absolute, on averages of values of order one


@st.composite
def shapes(draw):
    groups = draw(st.integers(1, 4))
    return {
        "heads": groups * draw(st.integers(1, 4)),
        "groups": groups,
        "head_dim": draw(st.integers(1, 17)),
        "window": draw(st.none() | st.integers(1, 60)),
        "scale": draw(st.sampled_from([0.0, 1.0, 10.0])),
        "seed": draw(st.integers(0, 1000)),
    }


def random_qkv(shape, queries, context):
    generator = torch.Generator().manual_seed(shape["seed"])

    def random(*size):
        return torch.randn(size, generator=generator)

    q = random(queries, shape["heads"], shape["head_dim"]) * shape["scale"]
    k, v = (random(context, shape["groups"], shape["head_dim"]) for _ in range(2))
    return q, k, v


def exact(q, k, v, window):
    """Query by query, head by head, in float64."""
    num_queries, heads, head_dim = q.shape
    context, groups, _ = k.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(num_queries):
        last = context - num_queries + i
        first = 0 if window is None else max(0, last - window + 1)
        for h in range(heads):
            g = h // (heads // groups)
            keys, values = k[first : last + 1, g].double(), v[first : last + 1, g].double()
            share = torch.softmax(keys @ q[i, h].double() * head_dim**-0.5, dim=0)
            out[i, h] = share @ values
    return out


@settings(max_examples=40, deadline=None)
@given(shape=shapes(), queries=st.integers(1, 12), earlier=st.integers(0, 30))
def test_plain_form_equals_float64(shape, queries, earlier) -> None:
    q, k, v = random_qkv(shape, queries, queries + earlier)
    expected = exact(q, k, v, shape["window"])
    assert (expected - attention_plain(q, k, v, shape["window"])).abs().max() < TOLERANCE


@settings(max_examples=120, deadline=None)
@given(
    shape=shapes(),
    queries=st.integers(1, 40),
    earlier=st.sampled_from([0, 0, 1, 5, 15, 16, 31]),
)
def test_prompt_equals_plain(shape, queries, earlier) -> None:
    """Whole prompts (no earlier context) and later chunks of one."""
    q, k, v = random_qkv(shape, queries, queries + earlier)
    expected = attention_plain(q, k, v, shape["window"])
    actual = attend_prompt(q, k, v, shape["window"])
    assert expected.shape == actual.shape
    assert (expected - actual).abs().max() < TOLERANCE


@pytest.mark.parametrize("window", [1, 6, 7, 8, 1000])
def test_window_around_the_length_of_the_prompt(window) -> None:
    shape = {"heads": 4, "groups": 2, "head_dim": 8, "scale": 1.0, "seed": 5}
    q, k, v = random_qkv(shape, 7, 7)
    expected = attention_plain(q, k, v, window)
    assert (expected - attend_prompt(q, k, v, window)).abs().max() < TOLERANCE


def test_prompt_takes_views_of_a_gather() -> None:
    """Keys and values come transposed from the cache, not contiguous."""
    shape = {"heads": 6, "groups": 2, "head_dim": 8, "scale": 1.0, "seed": 6}
    q, k, v = random_qkv(shape, 5, 21)
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    assert not k.is_contiguous()
    assert (attention_plain(q, k, v) - attend_prompt(q, k, v)).abs().max() < TOLERANCE


@settings(max_examples=120, deadline=None)
@given(
    shape=shapes(),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    padding=st.integers(0, 20),
)
def test_decode_equals_plain(shape, lengths, padding) -> None:
    """One token of each of several rows of unequal length, with garbage beyond each row's end."""
    context, window = max(lengths) + padding, shape["window"]
    generator = torch.Generator().manual_seed(shape["seed"] + 1)
    sizes = (len(lengths), shape["groups"], context, shape["head_dim"])
    keys, values = (torch.randn(sizes, generator=generator) * 100 for _ in range(2))
    mask = torch.zeros(len(lengths), context, dtype=torch.bool)
    queries, expected = [], []
    for r, length in enumerate(lengths):
        q, k, v = random_qkv(shape | {"seed": shape["seed"] + r}, 1, length)
        keys[r, :, :length], values[r, :, :length] = k.transpose(0, 1), v.transpose(0, 1)
        mask[r, 0 if window is None else max(0, length - window) : length] = True
        queries.append(q)
        expected.append(attention_plain(q, k, v, window))
    actual = attend_decode(torch.cat(queries), keys, values, mask)
    assert (torch.cat(expected) - actual).abs().max() < TOLERANCE


@given(
    queries=st.integers(1, 20), earlier=st.integers(0, 20), window=st.none() | st.integers(1, 30)
)
def test_causal_mask(queries, earlier, window) -> None:
    context = queries + earlier
    mask = causal_mask(queries, context, window)
    for i in range(queries):
        position = earlier + i
        seen = {c for c in range(context) if mask[i, c]}
        first = 0 if window is None else max(0, position - window + 1)
        assert set(range(first, position + 1)) == seen


def test_a_query_does_not_see_its_future() -> None:
    shape = {"heads": 4, "groups": 2, "head_dim": 8, "scale": 1.0, "seed": 7}
    q, k, v = random_qkv(shape, 9, 9)
    before = attend_prompt(q, k, v)
    k[5:], v[5:] = 50.0, -50.0
    assert torch.equal(before[:5], attend_prompt(q, k, v)[:5])


@settings(max_examples=40, deadline=None)
@given(shape=shapes(), queries=st.integers(1, 20), earlier=st.integers(0, 30),
       scale=st.none() | st.floats(0.1, 2.0))  # fmt: skip
def test_sinks_in_tiles_equal_the_plain_form(shape, queries, earlier, scale) -> None:
    q, k, v = random_qkv(shape, queries, queries + earlier)
    sinks = torch.randn(shape["heads"], generator=torch.Generator().manual_seed(1))
    expected = attention_plain(q, k, v, shape["window"], scale=scale, sinks=sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MAX_SCORES", 1)  # tiles of 16 queries
        tiled = attend_prompt(q, k, v, shape["window"], scale=scale, sinks=sinks)
    assert (expected - tiled).abs().max() < TOLERANCE
    if queries == 1:
        mask = causal_mask(1, earlier + 1, shape["window"])
        one = attend_decode(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, scale=scale,
                            sinks=sinks)  # fmt: skip
        assert (expected - one).abs().max() < TOLERANCE


def test_a_sink_takes_its_share_by_hand() -> None:
    """Two keys with scores 0 and a sink with score ln 2: a quarter, a quarter and a half."""
    q, k = torch.zeros(2, 1, 2), torch.zeros(2, 1, 2)
    v = torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]]])
    out = attention_plain(q, k, v, sinks=torch.tensor([2.0]).log())
    assert out[1, 0].tolist() == pytest.approx([1.0, 2.0])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_attending_latents_equals_attending_what_they_expand_to(
    heads, kv_rank, width, seed
) -> None:
    spec = LatentSpec(q_rank=None, kv_rank=kv_rank, nope_dim=width, rope_dim=4, value_dim=width + 1)
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(11, kv_rank + 4, generator=generator)
    kv_b = torch.randn(heads * (2 * width + 1), kv_rank, generator=generator) * kv_rank**-0.5
    q = torch.randn(1, heads, width + 4, generator=generator)
    keys, values = expand_latents(latents, kv_b, spec)
    expected = attention_plain(q, keys, values, scale=0.3)
    cached = latents[None, None]
    mask = torch.ones(1, 11, dtype=torch.bool)
    attended = attend_decode(absorb_queries(q, kv_b, spec), cached, cached[..., :kv_rank], mask,
                             scale=0.3)  # fmt: skip
    assert (expected - release_values(attended, kv_b, spec)).abs().max() < TOLERANCE
