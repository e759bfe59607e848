"""The engine: the policy never changes the text; rows come and go without disturbing each other."""

import random

import pytest
import run_engine
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_engine import POLICY, plain, request, run, tokens
from safetensors.torch import load_file, save_file

from moebatch.data.requests import Completion, RowError


def rows(count: int, *, seed: int = 0, **params):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randint(1, 45))] for _ in range(count)]
    return [request(i, p, max_tokens=rng.randint(1, 14), **params) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_text_is_the_same_for_every_batch_and_micro_batch_size(
    kind, temperature, tiny_models
) -> None:
    path = tiny_models(kind)[1]
    work = rows(40, temperature=temperature, seed=3)
    expected = tokens(run(path, work, batch_size=32, micro_batch_size=16))
    for batch_size, micro_batch_size in ((1, 1), (7, 3), (7, 16), (32, 1)):
        out = tokens(run(path, work, batch_size=batch_size, micro_batch_size=micro_batch_size))
        assert expected == out


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch_size=st.integers(1, 30),
    micro_batch_size=st.integers(1, 30),
    weights_resident=st.floats(0, 1),
    page_slots=st.integers(1, 9),
    prefill_tokens=st.integers(1, 200),
    kv_blocks=st.integers(4, 60),
    order=st.randoms(use_true_random=False),
)
def test_text_is_the_same_under_any_policy(tiny_models, order, **policy) -> None:
    """The metamorphic test, with the rows in another order each time."""
    path = tiny_models("mixtral")[1]
    work = rows(9, temperature=0.9, top_p=0.95, seed=5)
    expected = tokens(plain(path, work))
    shuffled = order.sample(work, len(work))
    assert expected == tokens(run(path, shuffled, **policy))


def test_a_row_alone_equals_the_row_among_others(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(50, temperature=1.0, seed=8)
    together = tokens(run(path, work, batch_size=50, micro_batch_size=50))
    for k in (0, 17, 49):
        assert tokens(run(path, [work[k]])) == [together[k]]


def test_choices_of_one_row_differ_and_do_not_depend_on_n(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    (three,) = run(path, [request(0, [5, 6, 7], n=3, temperature=1.0, max_tokens=12)])
    (one,) = run(path, [request(0, [5, 6, 7], n=1, temperature=1.0, max_tokens=12)])
    texts = [choice.token_ids for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == one.choices[0].token_ids


def test_seed_and_row_id_choose_the_stream(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    same = {"temperature": 1.0, "max_tokens": 20}
    a, b, c = tokens(
        run(
            path,
            [
                request(0, [5, 6], seed=1, **same),
                request(1, [5, 6], seed=1, **same),
                request(2, [5, 6], seed=2, **same),
            ],
        )
    )
    assert a != b
    assert b != c


def test_eos_ends_a_row_early_and_another_takes_its_place(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(40, temperature=1.0, seed=1)
    full = run(path, work)
    seen = {token for outcome in full for token in outcome.choices[0].token_ids}
    stop = min(seen)
    stopped = run(path, [request(r.index, r.prompt_token_ids, temperature=1.0,
                                 max_tokens=r.params.max_tokens, stop_token_ids=(stop,))
                         for r in work])  # fmt: skip
    assert len(stopped) == 40
    for long, short in zip(tokens(full), tokens(stopped), strict=True):
        expected = long[: long.index(stop) + 1] if stop in long else long
        assert expected == short
    assert {"stop", "length"} == {outcome.choices[0].finish_reason for outcome in stopped}


def test_logprobs_belong_to_the_tokens(tiny_models) -> None:
    model, path = tiny_models("mixtral")
    (outcome,) = run(path, [request(0, [9, 8, 7], logprobs=3, max_tokens=4)])
    ids = [9, 8, 7, *outcome.choices[0].token_ids]
    with torch.no_grad():
        reference = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for k, entry in enumerate(outcome.choices[0].logprobs):
        values, top = reference[2 + k].topk(3)
        assert entry.token_id == ids[3 + k]
        assert entry.logprob == pytest.approx(reference[2 + k, ids[3 + k]].item(), abs=1e-4)
        assert top.tolist() == [token for token, _ in entry.top]
        assert values.tolist() == pytest.approx([value for _, value in entry.top], abs=1e-4)


def test_non_finite_logits_are_row_errors_and_harm_nobody(tiny_models, tmp_path) -> None:
    """A token whose embedding is NaN poisons its own row only, also for who gets its blocks next."""
    source = tiny_models("mixtral")[1]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][13] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    good = [request(i, [20 + i, 30, 40], max_tokens=9) for i in range(12)]
    bad = [request(100 + i, [13, 5], n=2, temperature=0.5) for i in range(6)]
    outcomes = run(tmp_path, [*bad[:3], *good, *bad[3:]], batch_size=4, kv_blocks=12)
    errors = [outcome for outcome in outcomes if isinstance(outcome, RowError)]
    assert [100 + i for i in range(6)] == [error.index for error in errors]
    assert {"non_finite_logits"} == {error.code for error in errors}
    answered = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    alone = tokens(run(source, good))
    assert alone == tokens(answered)


def test_a_row_too_large_for_the_cache_is_a_row_error(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = [request(0, [4] * 100, max_tokens=50), request(1, [4, 5], max_tokens=3)]
    large, small = run(path, work, kv_blocks=4)
    assert large.code == "oom_row"
    assert len(small.choices[0].token_ids) == 3


def test_the_cache_is_used_up_to_its_last_block(tiny_models) -> None:
    """Rows that fit only one at a time still all get through, in micro-batches with equal shares."""
    path = tiny_models("mixtral")[1]
    work = [request(i, [4] * 60, max_tokens=5) for i in range(5)]
    assert len(run(path, work, kv_blocks=4, batch_size=4, micro_batch_size=1)) == 5


def test_no_requests(tiny_models) -> None:
    assert run(tiny_models("mixtral")[1], []) == []


def test_requests_are_taken_only_as_needed(tiny_models) -> None:
    """The window is bounded, so memory does not grow with the data set."""
    path, taken = tiny_models("mixtral")[1], 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield request(taken, [5, 6], max_tokens=2)

    with run_engine.open_engine(path, POLICY) as engine:
        results = engine.run(endless())
        for _ in range(100):
            next(results)
    assert taken < 100 + 3 * 64


def test_pass_time_is_split_between_prefill_and_decode(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    with run_engine.open_engine(path, POLICY) as engine:
        seen = []
        list(engine.run(rows(9), on_pass=lambda stats: seen.append(stats.passes)))
        stats = engine.stats
    assert list(range(1, len(seen) + 1)) == seen
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in rows(9))
    assert stats.generated_tokens == sum(r.params.max_tokens for r in rows(9))
    assert stats.prefill_s > 0
    assert stats.decode_s > 0


def test_a_file_that_shrinks_while_it_is_streamed(tiny_models, tmp_path) -> None:
    """An error on the reader's thread reaches the caller as one clear error and nothing hangs."""
    from moebatch.errors import ModelError

    for file in tiny_models("mixtral")[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with run_engine.open_engine(tmp_path, POLICY, weights_resident=0.0) as engine:
        results = engine.run(rows(30))
        next(results)
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(20_000)
        with pytest.raises(ModelError, match="ends inside tensor"):
            list(results)
