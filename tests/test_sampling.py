"""Fast against plain, filters against Transformers, rows that cannot tell who is beside them."""

import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.data.requests import SamplingParams
from moebatch.runtime.sampling import (
    SamplingState,
    _draw,
    _kept,
    edited,
    edited_plain,
    kept_plain,
    philox,
    row_key,
    sample,
    sample_plain,
    uniforms,
)


def state(*, key=0, position=0, choice=0, prompt=(), generated=(), forbidden=(), **params):
    return SamplingState(
        params=SamplingParams(**params),
        row_key=key,
        choice=choice,
        position=position,
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        forbidden_token_ids=forbidden,
    )


def random_logits(num_rows, vocab_size, *, seed=0, scale=3.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def token_ids(tokens):
    return [token.token_id for token in tokens]


# One of each: everything that a row may need, side by side in one batch.
MIXED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_p": 0.9, "temperature": 0.3},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_p": 0.95, "top_k": 100},
    {"logprobs": 5},
    {"temperature": 0.0, "logprobs": 0},
    {"repetition_penalty": 1.2, "top_p": 0.7},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": ((3, 4.0), (5, -100.0)), "temperature": 0.0},
]


def mixed_rows(count):
    return [
        state(
            key=row_key(f"row {k}"),
            position=k % 7,
            choice=k % 3,
            prompt=range(k, k + 20),
            generated=[k, k + 1, k],
            forbidden=[2] if k % 5 == 0 else [],
            **MIXED[k % len(MIXED)],
            seed=k // 4,
        )
        for k in range(count)
    ]


# --- fast against plain ---


@st.composite
def params(draw):
    def maybe(strategy, off):
        return draw(st.one_of(st.just(off), strategy))

    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-9, 0.2, 0.7, 1.0, 1.7, 50.0])),
        top_p=maybe(st.floats(0.0, 1.0), 1.0),
        top_k=maybe(st.integers(1, 300), 0),
        min_p=maybe(st.floats(0.0, 1.0), 0.0),
        repetition_penalty=maybe(st.floats(0.5, 2.0), 1.0),
        presence_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        logit_bias=tuple(
            draw(st.dictionaries(st.integers(-1, 400), st.floats(-100, 100), max_size=3)).items()
        ),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 4])),
    )


ids = st.lists(st.integers(0, 400), max_size=8)
states = st.builds(
    SamplingState,
    params=params(),
    row_key=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 4),
    position=st.integers(0, 1000),
    prompt_token_ids=ids,
    generated_token_ids=ids,
    forbidden_token_ids=st.lists(st.integers(0, 400), max_size=3),
)


@st.composite
def batches(draw):
    """Smooth logits, logits full of ties, and spread ones, over short and long vocabularies."""
    rows = draw(st.lists(states, min_size=1, max_size=4))
    vocab_size = draw(st.sampled_from([2, 7, 64, 300, 1000, 5000]))
    scale = draw(st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]))
    logits = random_logits(len(rows), vocab_size, seed=draw(st.integers(0, 999)), scale=scale)
    return (logits.round() if draw(st.booleans()) else logits), rows


@given(batches())
@settings(deadline=None, max_examples=300)
def test_fast_picks_what_plain_picks(batch):
    logits, rows = batch
    fast, plain = sample(logits, rows), sample_plain(logits, rows)
    assert token_ids(fast) == token_ids(plain)
    assert [token.finite for token in plain] == [token.finite for token in fast]
    for a, b in zip(plain, fast, strict=True):
        assert (a.logprob is None) == (b.logprob is None)
        if a.logprob and b.logprob:
            assert math.isclose(a.logprob.logprob, b.logprob.logprob, abs_tol=1e-9)
            assert [i for i, _ in a.logprob.top] == [i for i, _ in b.logprob.top]
            assert [p for _, p in a.logprob.top] == pytest.approx([p for _, p in b.logprob.top])


@given(batches())
@settings(deadline=None)
def test_fast_edits_are_the_plain_ones(batch):
    logits, rows = batch
    for raw, row in zip(logits.numpy(), rows, strict=True):
        assert edited_plain(raw, row).tobytes() == edited(raw, row).tobytes()


@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
def test_fast_picks_what_plain_picks_from_real_vocabularies(vocab_size):
    logits = random_logits(len(MIXED), vocab_size)
    rows = mixed_rows(len(MIXED))
    assert token_ids(sample(logits, rows)) == token_ids(sample_plain(logits, rows))


@given(st.integers(0, 2**53 - 1), st.integers(2, 2000), st.integers(0, 99))
@settings(deadline=None)
def test_every_draw_lands_where_a_plain_running_sum_says(numerator, vocab_size, seed):
    """Also at the very ends of [0, 1), which the noise itself almost never reaches."""
    weights = np.exp(random_logits(1, vocab_size, seed=seed)[0].double().numpy())
    weights[seed % 2 :: 3] = 0.0
    weights[: min(6 * seed, vocab_size - 2)] = 0.0  # often whole runs of nothing
    weights[-2] = 1.0
    mass = np.cumsum(weights)
    for uniform in (numerator * 2.0**-53, 0.0, 1 - 2.0**-53):
        drawn = _draw(weights, uniform)
        assert weights[drawn] > 0
        assert mass[drawn] >= uniform * mass[-1] * (1 - 1e-12)
        assert mass[drawn] - weights[drawn] <= uniform * mass[-1] * (1 + 1e-12)


# --- independence of the batch ---


def test_a_row_alone_is_the_row_among_64():
    rows = mixed_rows(64)
    for vocab_size in (50, 1000, 32_003):
        logits = random_logits(64, vocab_size)
        together = sample(logits, rows)
        alone = [sample(logits[k : k + 1], [rows[k]])[0] for k in range(64)]
        assert together == alone  # log-probabilities too, to the last bit
        order = np.random.default_rng(0).permutation(64)
        shuffled = sample(logits[order], [rows[k] for k in order])
        assert shuffled == [together[k] for k in order]


def test_the_layout_of_the_logits_does_not_matter():
    logits, rows = random_logits(14, 1000), mixed_rows(14)
    transposed = logits.T.contiguous().T
    padded = torch.cat([logits, logits], dim=1)[:, :1000]
    assert sample(logits, rows) == sample(transposed, rows) == sample(padded, rows)


def test_logits_are_not_changed():
    logits = random_logits(28, 500)
    before = logits.clone()
    sample(logits, mixed_rows(28))
    assert torch.equal(before, logits)


def test_a_broken_row_is_reported_and_disturbs_no_one():
    rows = mixed_rows(28)
    logits = random_logits(28, 500)
    expected = sample(logits, rows)
    for bad in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[3, 7] = bad
        broken[4, :] = bad
        for run in (sample, sample_plain):
            tokens = run(broken, rows)
            assert [k for k, token in enumerate(tokens) if not token.finite] == [3, 4]
            if run is sample:
                assert expected[:3] + expected[5:] == tokens[:3] + tokens[5:]


def test_a_row_whose_tokens_are_all_forbidden_is_reported():
    rows = [state(forbidden=[0, 1, 2]), state(temperature=0.0, forbidden=[0, 1, 2])]
    logits = random_logits(2, 3)
    for run in (sample, sample_plain):
        assert [token.finite for token in run(logits, rows)] == [False, False]


def test_no_rows():
    assert sample(torch.empty(0, 10), []) == []
    assert sample_plain(torch.empty(0, 10), []) == []


# --- noise ---


def test_philox_is_the_one_of_numpy():
    """numpy counts up before its first output, so its counter starts one lower."""
    dice = np.random.default_rng(0)
    numbers = dice.integers(0, 2**64, size=(50, 4), dtype=np.uint64)
    c0, c1, k0, k1 = numbers.T
    ours = philox(counter=(c0, c1), key=(k0, k1))
    for row, word in zip(numbers.tolist(), ours.tolist(), strict=True):
        counter = (row[0] | row[1] << 64) - 1
        assert np.random.Philox(key=row[2] | row[3] << 64, counter=counter).random_raw() == word


def test_each_of_seed_row_choice_and_position_has_noise_of_its_own():
    here = state(key=1, choice=1, position=1, seed=1)
    others = [
        here,
        replace(here, row_key=2),
        replace(here, choice=2),
        replace(here, position=2),
        replace(here, params=SamplingParams(seed=2)),
        replace(here, params=SamplingParams(seed=-1)),
        replace(here, row_key=2, choice=0),
    ]
    assert len(others) == len(set(uniforms(others).tolist()))
    assert uniforms(others)[2] == uniforms(others[2:3])[0]


def test_noise_is_even_and_in_range():
    rows = [state(key=k % 50, position=k // 50) for k in range(20_000)]
    noise = uniforms(rows)
    assert noise.min() >= 0 and noise.max() < 1
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    assert chi_square(counts, np.full(20, 0.05)) < 43.8  # 19 degrees of freedom, p = 0.001


def test_row_keys_are_stable():
    """A resumed run in a new process must go on with the same noise."""
    assert row_key("a") == 0x2F42665B399EF840
    assert row_key("a") != row_key("b")


# --- distributions ---


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize(
    ("settings_of_row", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [0, 2, 4]),
        ({"top_p": 0.5}, [0, 2]),
        ({"min_p": 0.3}, [0, 2, 4]),
    ],
)
def test_tokens_come_as_often_as_they_should(settings_of_row, kept):
    """Fixed seed, so it cannot be flaky; 20.5 is p = 0.001 at five degrees of freedom."""
    logits = torch.tensor([1.0, -1.0, 0.8, -0.5, 0.2, -2.0])
    rows = [state(key=7, position=k, **settings_of_row) for k in range(10_000)]
    drawn = np.array(token_ids(sample(logits.expand(len(rows), -1), rows)))
    temperature = settings_of_row.get("temperature", 1.0)
    probabilities = torch.softmax(logits.double()[kept] / temperature, 0).numpy()
    counts = np.bincount(drawn, minlength=6)
    assert kept == np.flatnonzero(counts).tolist()
    assert chi_square(counts[kept], probabilities) < 20.5


def test_choices_of_a_row_differ():
    logits = random_logits(1, 1000, scale=1.0).expand(8, -1)
    rows = [state(key=1, choice=k) for k in range(8)]
    assert len(set(token_ids(sample(logits, rows)))) == 8


# --- greedy ---


def test_temperature_0_takes_the_lowest_of_the_best_and_no_filter_matters():
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0]]).expand(3, -1)
    rows = [
        state(temperature=0.0),
        state(temperature=0.0, top_p=0.01, top_k=1, min_p=0.9, seed=5),
        state(temperature=0.0, top_p=0.0, position=9),
    ]
    assert token_ids(sample(logits, rows)) == [1, 1, 1]


def test_forbidden_tokens_wait():
    logits = torch.tensor([[0.0, 5.0, 1.0, 4.0]])
    assert token_ids(sample(logits, [state(temperature=0.0, forbidden=[1])])) == [3]
    assert token_ids(sample(logits, [state(temperature=0.0, forbidden=[1, 3, 99])])) == [2]
    drawn = sample(logits.expand(500, -1), [state(position=k, forbidden=[1]) for k in range(500)])
    assert set(token_ids(drawn)) == {0, 2, 3}


def test_ids_beyond_the_vocabulary_are_void():
    """A stop id or bias unknown to the model must not end the run, nor count from the end."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    bias = ((-1, -100.0), (3, 100.0))
    row = state(
        temperature=0.0, logit_bias=bias, forbidden=[-1, 3], prompt=[7], repetition_penalty=9.0
    )
    assert token_ids(sample(logits, [row])) == [2]


def test_bias_and_penalties_by_hand():
    logits = torch.tensor([[4.0, 2.0, -2.0, 1.0]])
    row = state(
        logit_bias=((3, 2.0),),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        prompt=[0],
        generated=[2, 2, 3],
    )
    # 0: 4 / 2.  2: -2 * 2 - 0.5 - 2 * 0.25.  3: (1 + 2) / 2 - 0.5 - 0.25.
    assert edited(logits.numpy()[0], row).tolist() == [2.0, 2.0, -5.0, 0.75]


def test_ids_may_come_as_arrays():
    logits = random_logits(3, 50)
    kinds = [tuple, np.array, lambda numbers: array("q", numbers)]
    rows = [
        state(
            temperature=0.0,
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            prompt=kind([1, 2, 3]),
            generated=kind([4, 4]),
        )
        for kind in kinds
    ]
    assert len(set(token_ids(sample(logits[:1].expand(3, -1), rows)))) == 1


# --- log-probabilities ---


def test_logprobs_are_those_of_the_raw_logits():
    logits = random_logits(1, 300)
    row = state(
        temperature=0.4, top_k=2, logit_bias=((7, 50.0),), forbidden=[3], logprobs=4, seed=1
    )
    token = sample(logits, [row])[0]
    expected = torch.log_softmax(logits[0].double(), 0)
    assert 7 == token.token_id == token.logprob.token_id
    assert float(expected[7]) == pytest.approx(token.logprob.logprob, abs=1e-12)
    values, best = expected.topk(4)
    assert [i for i, _ in token.logprob.top] == best.tolist()
    assert values.tolist() == pytest.approx([p for _, p in token.logprob.top], abs=1e-12)


def test_equal_logprobs_come_by_id():
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    token = sample(logits, [state(temperature=0.0, logprobs=3)])[0]
    assert [i for i, _ in token.logprob.top] == [1, 3, 0]


def test_logprobs_asked_for_in_part():
    logits = random_logits(3, 20)
    rows = [state(), state(logprobs=0), state(logprobs=100)]
    none, empty, full = sample(logits, rows)
    assert none.logprob is None
    assert empty.logprob.top == ()
    assert len(full.logprob.top) == 20
    assert sum(math.exp(p) for _, p in full.logprob.top) == pytest.approx(1.0)


# --- filters against Transformers ---


def kept_by_fast(x, row_params):
    kept, weights = _kept(x, row_params, peak=x.max())
    return set(range(len(x)) if kept is None else kept.tolist()), weights


def kept_by_transformers(logits, row_params):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList([TemperatureLogitsWarper(row_params.temperature)])
    if row_params.min_p:
        chain.append(MinPLogitsWarper(row_params.min_p))
    if row_params.top_k:
        chain.append(TopKLogitsWarper(row_params.top_k))
    if row_params.top_p < 1:
        chain.append(TopPLogitsWarper(row_params.top_p))
    return set(torch.isfinite(chain(None, logits[None])[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_p": 0.001},
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 5000},
        {"min_p": 0.05},
        {"min_p": 0.9},
        {"min_p": 0.01, "top_k": 20, "top_p": 0.8},
    ],
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_filters_keep_what_transformers_keeps(filters, temperature):
    row_params = SamplingParams(temperature=temperature, **filters)
    for seed, vocab_size in enumerate([10, 100, 2000, 32_000]):
        logits = random_logits(1, vocab_size, seed=seed)[0]
        expected = kept_by_transformers(logits, row_params)
        assert set(kept_plain(logits.numpy(), row_params)[0].tolist()) == expected
        assert kept_by_fast(logits.numpy(), row_params)[0] == expected


def test_tokens_tied_with_the_kth_stay_as_in_transformers():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    row_params = SamplingParams(top_k=2)
    assert kept_by_transformers(logits, row_params) == {1, 2, 3, 4}
    assert kept_by_fast(logits.numpy(), row_params)[0] == {1, 2, 3, 4}


def test_top_p_takes_the_lowest_ids_of_equals():
    kept, weights = kept_by_fast(np.zeros(10, dtype=np.float32), SamplingParams(top_p=0.35))
    assert kept == {0, 1, 2, 3}
    assert weights.tolist() == [1.0] * 4


def test_repetition_penalty_is_the_one_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = random_logits(1, 200)
    prompt, generated = [3, 3, 190, 7], [7, 11, 12, 11]
    history = torch.tensor([prompt + generated])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())[0]
    row = state(repetition_penalty=1.3, prompt=prompt, generated=generated)
    assert expected.tolist() == pytest.approx(edited(logits.numpy()[0], row).tolist(), rel=1e-6)
