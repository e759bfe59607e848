"""Speculative decoding: drafts change when a token comes, never which."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from drafts import Oracle, model_source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_engine import POLICY, open_engine, plain, request, run, tokens
from safetensors.torch import load_file, save_file

from moebatch.data.requests import Completion, Generated
from moebatch.native.kernels import load_kernels
from moebatch.plan.profiles import PROFILES
from moebatch.plan.speculation import MAX_PASS_DRAFTS
from moebatch.runtime.drafts import NO_DRAFT, NgramSource, longest_match
from moebatch.runtime.emulated import EmulatedDevice
from moebatch.runtime.speculative import Speculator


def rows(count: int, *, rng: int = 0, longest: int = 45, **params):
    """Prompts with repetition, so that n-grams have something to find."""
    draw = random.Random(rng)
    work = []
    for i in range(count):
        motif = [draw.randrange(3, 97) for _ in range(draw.randint(1, 6))]
        prompt = (motif * longest)[: draw.randint(1, longest)]
        work.append(request(i, prompt, **{"max_tokens": draw.randint(1, 30), **params}))
    return work


def answers(outcomes):
    return {o.request.index: [list(c.token_ids) for c in o.choices] for o in outcomes}


def bare(outcome):
    """A completion without its log-probabilities: kernels may round by who shares the pass."""
    return replace(
        outcome, choices=tuple(replace(choice, logprobs=None) for choice in outcome.choices)
    )


def logprobs(outcomes):
    choices = [choice for outcome in outcomes for choice in outcome.choices]
    return [x for c in choices for t in c.logprobs for x in (t.logprob, *(p for _, p in t.top))]


def speculated(path, work, source, *, most: int = 4, whole: bool = True, **changes):
    """Outcomes in the order of the rows, and what became of the drafts."""
    speculator = Speculator(source, most=most)
    with open_engine(path, POLICY, draft_tokens=most, speculator=speculator, **changes) as engine:
        free = engine._kv.num_free
        done = sorted(engine.run(work), key=lambda o: o.request.index)
        assert engine._kv.num_free == free or not whole  # a tail gives memory back
        new = sum(len(c.token_ids) for o in done for c in o.choices)
        new -= sum(len(earlier.token_ids) for o in done for earlier in o.request.resumed)
        assert engine.stats.generated_tokens == new
        return done, speculator.stats, engine.stats


PARAMS = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"temperature": 1.1, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
     "presence_penalty": -0.3, "logit_bias": ((5, 4.0), (9, 2.0))},
    {"temperature": 0.7, "n": 3},
    {"temperature": 0.9, "ignore_eos": False, "min_tokens": 9, "stop_token_ids": (5, 6, 7, 8)},
    {"temperature": 0.9, "stop": ("ab", "c", "zzz"), "min_tokens": 4},
]  # fmt: skip


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: "-".join(p) or "greedy")
@pytest.mark.parametrize("source", ["ngram", "right", "half", "wrong"])
def test_answers_are_those_without_drafts(source, params, tiny_models) -> None:
    """Whole completions are compared: tokens, text, reasons, log-probabilities to rounding."""
    path = tiny_models("mixtral")[1]
    work = rows(9, rng=4, logprobs=3, **params)
    expected = plain(path, work)
    oracle = Oracle(answers(expected), right={"right": 1.0, "half": 0.5}.get(source, 0.0))
    done, stats, _ = speculated(
        path, work, NgramSource(shortest=1) if source == "ngram" else oracle
    )
    assert [bare(outcome) for outcome in done] == [bare(outcome) for outcome in expected]
    np.testing.assert_allclose(logprobs(done), logprobs(expected), atol=2e-5)
    if load_kernels(1) is not None:  # with them, log-probabilities are the same to the last bit
        assert done == expected
    assert stats.drafted > 0
    if source == "right" and not params.get("stop") and params.get("ignore_eos", True):
        assert stats.accepted == stats.drafted
    assert (stats.accepted == 0) == (source == "wrong") or source == "ngram"


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "llama", "qwen2_moe"]
)
def test_every_family(kind, tiny_models) -> None:
    """gpt_oss has layers with a window of 7, deepseek caches latents, llama has no experts."""
    path = tiny_models(kind)[1]
    work = rows(6, rng=6, temperature=0.8, max_tokens=40)
    expected = plain(path, work)
    done, stats, _ = speculated(path, work, Oracle(answers(expected), right=0.6), most=9)
    assert done == expected
    assert stats.accepted > 0


def test_windows_of_whole_blocks_have_room_for_drafts(tiny_models, tmp_path) -> None:
    """A window of 16 fills a ring of one block: without slack a draft overwrites what is still seen."""
    import models

    path = models.save(models.reference_model("mixtral", sliding_window=16), tmp_path)
    work = rows(4, rng=2, temperature=0.8, max_tokens=60)
    expected = plain(path, work)
    assert speculated(path, work, Oracle(answers(expected), right=0.6), most=8)[0] == expected


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    right=st.floats(0, 1),
    most=st.integers(1, 16),
    seed=st.integers(0, 99),
    batch_size=st.integers(1, 12),
    micro_batch_size=st.integers(1, 12),
    kv_blocks=st.integers(5, 40),
    prefill_tokens=st.integers(1, 64),
    weights_resident=st.floats(0, 1),
)
def test_answers_under_any_policy(tiny_models, right, most, seed, **policy) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(7, rng=5, temperature=0.9, top_p=0.95)
    expected = plain(path, work)
    source = Oracle(answers(expected), right=right, seed=seed)
    assert tokens(speculated(path, work, source, most=most, **policy)[0]) == tokens(expected)


@pytest.mark.parametrize("prompt_len", range(13, 19))
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 16, 17])
def test_block_borders_and_the_last_token(prompt_len, max_tokens, tiny_models) -> None:
    """A row reserves blocks for its full length and no more: drafts must fit into them."""
    path = tiny_models("mixtral")[1]
    work = [request(0, range(3, 3 + prompt_len), max_tokens=max_tokens, temperature=1.0)]
    need = -(-(prompt_len + max_tokens - 1) // 16)
    expected = plain(path, work)
    for right in (1.0, 0.5):
        source = Oracle(answers(expected), right=right)
        done, stats, engine = speculated(path, work, source, most=16, kv_blocks=need, batch_size=1)
        assert done == expected
        if right == 1.0:
            assert engine.passes == 1 + (max_tokens > 1)
            assert stats.tokens == max_tokens - 1


def test_passes_fall_with_what_is_accepted(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = [request(0, [5, 6, 7], max_tokens=41)]
    expected = plain(path, work)
    for most, passes in ((1, 21), (3, 11), (7, 6)):
        _, stats, engine = speculated(path, work, Oracle(answers(expected)), most=most)
        assert engine.passes == passes
        assert stats.tokens / stats.row_passes == 40 / (passes - 1)


@pytest.mark.parametrize("right", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_resumed_rows_end_alike(kind, right, tiny_models) -> None:
    """Guards: rows of a model with a window, resumed, saw a ring without their prompt."""
    path = tiny_models(kind)[1]
    work = rows(5, rng=9, temperature=0.9, max_tokens=30)
    expected = plain(path, work)
    source = Oracle(answers(expected), right=right)
    half = [_resumed(w, o, 1 + 5 * i) for i, (w, o) in enumerate(zip(work, expected, strict=True))]
    assert tokens(run(path, half)) == tokens(expected)
    assert tokens(speculated(path, half, source)[0]) == tokens(expected)


def _resumed(work, outcome, count: int):
    choice = outcome.choices[0]
    return replace(work, resumed=(Generated(choice=0, token_ids=choice.token_ids[:count]),))


def test_a_token_that_breaks_the_logits_is_not_to_blame_on_the_row(tiny_models, tmp_path) -> None:
    """A draft's token may have an embedding of NaN that the answer itself never touches."""
    source = tiny_models("mixtral")[1]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][96] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    work = [request(i, [5 + i, 6, 7], max_tokens=12, logit_bias=((96, -90.0),)) for i in range(4)]
    expected = run(tmp_path, work)
    assert all(isinstance(outcome, Completion) for outcome in expected)
    oracle = Oracle(answers(expected), right=0.5, wrong=96, seed=1)
    assert speculated(tmp_path, work, oracle)[0] == expected
    bad = run(tmp_path, [request(0, [96], max_tokens=3)])
    assert bad[0].code == "non_finite_logits"


def test_auto_turns_drafts_off_where_they_are_wrong_and_uses_them_where_they_are_right(
    tiny_models,
) -> None:
    path = tiny_models("mixtral")[1]
    work = [request(i, [5, 6, 7 + i], max_tokens=120) for i in range(2)]
    expected = plain(path, work)
    passes = {}
    for right in (0.0, 1.0):
        # Predicted and measured alike: each token costs as much as the pass itself.
        speculator = Speculator(Oracle(answers(expected), right=right), most=4,
                                seconds=lambda tokens: 10.0 + tokens)  # fmt: skip
        speculator.timed = lambda tokens, seconds: None
        with open_engine(path, POLICY, draft_tokens=4, speculator=speculator) as engine:
            assert tokens(sorted(engine.run(work), key=lambda o: o.request.index)) == tokens(
                expected
            )
            passes[right] = engine.stats.passes
    assert passes[1.0] < 40
    assert passes[0.0] == 120
    assert speculator.stats.drafted


def test_longest_match() -> None:
    def match(*ids):
        return longest_match(np.array(ids))

    assert match(1, 2, 3) == (0, 0)
    assert match(3, 3) == (0, 1)
    assert match(1, 2, 9, 1, 2) == (1, 2)
    assert match(1, 2, 8, 5, 2, 9, 1, 2) == (1, 2)  # longer beats later
    assert match(1, 2, 8, 1, 2, 9, 1, 2) == (4, 2)  # later of equals
    assert match(*[7] * 20) == (18, 8)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=25))
def test_longest_match_equals_the_plain_search(ids) -> None:
    def length(at):
        count = 0
        while count <= at and count < 8 and ids[at - count] == ids[len(ids) - 1 - count]:
            count += 1
        return count

    best = max(((length(at), at) for at in range(len(ids) - 1)), default=(0, 0))
    expected = (best[1], best[0]) if best[0] else (0, 0)
    assert longest_match(np.array(ids)) == expected


def test_an_ngram_that_reaches_the_end_goes_on_as_a_loop() -> None:
    source = NgramSource()
    row = type("Row", (), {"prompt": [1, 2, 3, 1, 2, 3, 1], "generated": [2]})()
    assert source.propose([row], [7])[0].token_ids == (3, 1, 2, 3, 1, 2, 3)
    row.generated.extend([3, 9])
    assert source.propose([row], [3]) == [NO_DRAFT]
    assert source.propose([row], [0]) == [NO_DRAFT]
    row.generated.extend([2, 3, 9, 4] * 9 + [2])
    assert source.propose([row], [3])[0].token_ids == (3, 9, 4)


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: "-".join(p) or "greedy")
@pytest.mark.parametrize("draft", ["mixtral", "qwen2"])
def test_a_draft_model_changes_no_answer(draft, params, tiny_models) -> None:
    """The target as its own draft is always right: it draws with the same noise."""
    path = tiny_models("mixtral")[1]
    work = rows(7, rng=4, **params)
    expected = plain(path, work)
    with model_source(tiny_models(draft)[1]) as source:
        done, stats, _ = speculated(path, work, source)
        assert done == expected
        source.propose([], [])
        assert source._kv.num_free == source._kv.num_blocks
    rate = stats.accepted / stats.drafted
    if draft == "mixtral" and not params.get("stop") and params.get("ignore_eos", True):
        assert rate == 1
    elif draft == "qwen2" and "logit_bias" not in params:
        assert rate < 0.3


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kv_blocks=st.integers(1, 12),
    prefill_tokens=st.integers(1, 40),
    most=st.integers(1, 9),
    batch_size=st.integers(1, 12),
)
def test_a_draft_model_with_little_room(tiny_models, kv_blocks, prefill_tokens, most, batch_size):
    """Rows that its cache has no room for go without drafts; what is kept is what was right."""
    path = tiny_models("mixtral")[1]
    work = rows(8, rng=5, temperature=0.9)
    expected = plain(path, work)
    with model_source(path, kv_blocks=kv_blocks, prefill_tokens=prefill_tokens) as source:
        done, stats, _ = speculated(path, work, source, most=most, batch_size=batch_size)
    assert tokens(done) == tokens(expected)
    assert stats.accepted == stats.drafted


def test_rejected_guesses_leave_no_trace_in_the_draft_model(tiny_models) -> None:
    """After a rejection it goes on as if it had read the right text: the drafts of a fresh one."""
    path = tiny_models("mixtral")[1]
    work = [request(0, [5, 6, 7], max_tokens=60, temperature=1.2)]
    seen = []

    class Both:
        name, step_s = "both", 0.0

        def __init__(self, old):
            self._old = old

        def propose(self, sequences, most, foresight=None):
            with model_source(tiny_models("llama")[1]) as fresh:
                seen.append((self._old.propose(sequences, most), fresh.propose(sequences, most)))
                fresh.close()
            return seen[-1][0]

        def close(self):
            self._old.close()

    with model_source(tiny_models("llama")[1]) as old:
        _, stats, _ = speculated(path, work, Both(old))
    assert stats.accepted < stats.drafted
    assert all(a[0].token_ids == b[0].token_ids for a, b in seen)


def test_tokens_beyond_either_vocabulary_are_not_drafted(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(5, rng=3, temperature=1.0)
    expected = plain(path, work)
    with model_source(path, vocab_size=40) as source:
        done, stats, _ = speculated(path, work, source)
    assert tokens(done) == tokens(expected)
    assert 0 < stats.accepted == stats.drafted


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_drafts_on_an_accelerator(kind, attention, tiny_models) -> None:
    """There a row's drafts are one run of tokens, attended like the rest of a prompt."""
    path = tiny_models(kind)[1]
    work = rows(6, rng=8, temperature=0.8)
    expected = plain(path, work)
    policy = {"schedule": "cgopipe", "attention": attention, "ffn": "gpu", "kv_resident": 0.5,
              "weights_resident": 0.3}  # fmt: skip
    for right in (0.0, 0.6, 1.0):
        source, device = (
            Oracle(answers(expected), right=right),
            EmulatedDevice(PROFILES["unthrottled"]),
        )
        done, stats, _ = speculated(path, work, source, device=device, **policy)
        assert tokens(done) == tokens(expected)
        assert stats.drafted


@pytest.mark.parametrize("changes", [
    {"regime": "cache", "expert_slots": 3, "weights_resident": 0.0},
    {"regime": "cache", "expert_slots": 9, "weights_resident": 0.2, "prefetch_layers": 2},
    {"tail_rows": 3, "expert_slots": 5, "weights_resident": 0.3},
], ids=["few", "prefetch", "tail"])  # fmt: skip
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_drafts_in_the_cache_regime(right, changes, tiny_models) -> None:
    """What is missing is read for the drafts too; the tail changes over with drafts in flight."""
    path = tiny_models("mixtral")[1]
    work = rows(12, rng=8, temperature=0.8)
    expected = plain(path, work)
    done, stats, _ = speculated(path, work, Oracle(answers(expected), right=right), whole=False,
                                **changes)  # fmt: skip
    assert tokens(done) == tokens(expected)
    assert (stats.accepted == stats.drafted) == (right == 1.0)


@pytest.mark.parametrize("changes", [
    {"regime": "cache", "schedule": "flexgen-cpu"},
    {"schedule": "cgopipe", "tail_rows": 3, "weights_resident": 0.3},
    {"schedule": "flexgen", "tail_rows": 3, "attention": "gpu", "kv_resident": 0.4},
], ids=["cache", "tail", "tail, attention there"])  # fmt: skip
def test_drafts_in_the_cache_regime_of_an_accelerator(changes, tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(5, rng=8, temperature=0.8)
    expected = plain(path, work)
    policy = {"expert_slots": 5, "ffn": "gpu", **changes}
    device = EmulatedDevice(PROFILES["unthrottled"])
    source = Oracle(answers(expected), right=0.6)
    done, stats, _ = speculated(path, work, source, device=device, whole="regime" in changes,
                                **policy)  # fmt: skip
    assert tokens(done) == tokens(expected)
    assert stats.accepted


def test_a_pass_carries_no_more_drafts_than_memory_is_set_aside_for(tiny_models) -> None:
    path = tiny_models("mixtral")[1]
    work = rows(60, rng=7, max_tokens=20)
    expected = plain(path, work, batch_size=40, micro_batch_size=40)
    sums = []

    class Counted(Oracle):
        def propose(self, sequences, most, foresight=None):
            sums.append(sum(most))
            return super().propose(sequences, most)

    source = Counted(answers(expected), right=0.8)
    done, _, _ = speculated(path, work, source, most=16, batch_size=40, micro_batch_size=40,
                            kv_blocks=300)  # fmt: skip
    assert tokens(done) == tokens(expected)
    assert 100 < max(sums) <= MAX_PASS_DRAFTS


def test_a_draft_model_that_does_not_pay_is_tried_now_and_then(tiny_models) -> None:
    """Each of its tokens takes as long as a pass: no drafts, but for one try in 32 passes."""
    path = tiny_models("mixtral")[1]
    work = [request(0, [5, 6, 7], max_tokens=100)]
    expected = plain(path, work)
    asked = []

    class Slow(Oracle):
        step_s = 1e9

        def propose(self, sequences, most, foresight=None):
            asked.append(max(most))
            return super().propose(sequences, most)

    speculator = Speculator(
        Slow(answers(expected), right=1.0), seconds=lambda tokens: 0 * tokens + 1.0
    )
    with open_engine(path, POLICY, draft_tokens=8, speculator=speculator) as engine:
        assert tokens(list(engine.run(work))) == tokens(expected)
    assert asked == [1] * 3
