"""Going on from tokens of an earlier run gives what one run gives."""

from dataclasses import replace

import pytest
import run_engine
from run_engine import POLICY, open_engine, request, run

from moebatch.data.requests import Completion, Generated
from moebatch.errors import Interrupted

PARAMS = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2},
    {"presence_penalty": 1.5, "min_tokens": 5, "ignore_eos": False, "stop": ("qq", "xyz")},
    {"temperature": 1.0, "stop": ("e", "ab"), "n": 2},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "stop_token_ids": (5, 9, 11, 40)},
]


def requests(max_tokens: int = 12):
    return [
        request(i, [1, 5 + i, 7, 30 + i][: 2 + i % 3], max_tokens=max_tokens, **params)
        for i, params in enumerate(PARAMS)
    ]


def cut(done: Completion, length: int) -> tuple[Generated, ...]:
    """What a checkpoint after `length` tokens holds of a request; a choice may have ended before."""
    return tuple(
        Generated(
            choice=choice.index,
            token_ids=choice.token_ids[:length],
            logprobs=(choice.logprobs or ())[:length],
        )
        for choice in done.choices
        if length
    )


def shown(outcomes):
    """All of a choice that must be equal to the last bit."""
    return [
        [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in done.choices]
        for done in outcomes
    ]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_every_cut_gives_the_same_answers(kind, tiny_models) -> None:
    path = tiny_models(kind)[1]
    plain = run(path, requests())
    with open_engine(path, POLICY) as engine:
        for length in range(12):
            resumed = [
                replace(r, resumed=cut(done, length))
                for r, done in zip(requests(), plain, strict=True)
            ]
            again = sorted(engine.run(resumed), key=run_engine._index)
            assert shown(again) == shown(plain)
            for one, other in zip(plain, again, strict=True):
                for a, b in zip(one.choices, other.choices, strict=True):
                    kept = slice(0, length)
                    assert (a.logprobs or ())[kept] == (b.logprobs or ())[kept]
                    assert len(a.logprobs or ()) == len(b.logprobs or ())


def test_tokens_kept_are_not_computed_again(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    ask = [request(0, [1, 5, 7], max_tokens=10)]
    (done,) = run(path, ask)
    with open_engine(path, POLICY) as engine:
        list(engine.run([replace(ask[0], resumed=cut(done, 6))]))
        assert engine.stats.generated_tokens == 4
        assert engine.stats.prompt_tokens == 3 + 6  # one prefill of the prompt and what was there
        assert engine.stats.passes == 4


def test_a_long_resumed_row_is_prefilled_in_pieces(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    ask = [request(i, [1, 5 + i], max_tokens=40, temperature=0.8) for i in range(3)]
    plain = run(path, ask)
    resumed = [replace(r, resumed=cut(d, 33)) for r, d in zip(ask, plain, strict=True)]
    assert shown(run(path, resumed, prefill_tokens=5)) == shown(plain)


def test_an_interrupted_run_tells_what_it_has_and_goes_on(tiny_models) -> None:
    """Stop at every third check, start a new engine from what there is, until all is done."""
    path = tiny_models("mixtral")[1]
    plain = run(path, requests(), batch_size=4)
    answered: dict[int, Completion] = {}
    under_way: dict[int, list[Generated]] = {}
    sessions = computed = 0
    while len(answered) < len(PARAMS):
        sessions += 1
        looks = 0

        def interrupted() -> bool:
            nonlocal looks
            looks += 1
            return looks > 120

        todo = [
            replace(r, resumed=tuple(under_way.get(r.index, ())))
            for r in requests()
            if r.index not in answered
        ]
        with open_engine(path, POLICY, batch_size=4, interrupted=interrupted) as engine:
            try:
                for done in engine.run(todo):
                    answered[done.request.index] = done
            except Interrupted:
                under_way = {}
                for r, generated in engine.in_flight():
                    copy = replace(
                        generated,
                        token_ids=tuple(generated.token_ids),
                        logprobs=tuple(generated.logprobs),
                    )
                    under_way.setdefault(r.index, []).append(copy)
            computed += engine.stats.generated_tokens
    assert sessions > 3
    outcomes = [answered[i] for i in range(len(PARAMS))]
    assert shown(outcomes) == shown(plain)
    assert computed == sum(len(c.token_ids) for d in outcomes for c in d.choices)


def test_a_request_that_came_complete_is_answered_all_the_same(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    ask = [request(0, [1, 5], max_tokens=4, n=2, temperature=1.0)]
    plain = run(path, ask)
    assert shown(run(path, [replace(ask[0], resumed=cut(plain[0], 4))])) == shown(plain)
