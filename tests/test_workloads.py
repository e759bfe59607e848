"""The named workloads: their lengths against the paper's table 3, HELM's generator, prompts."""

import json
import re
import statistics
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moebatch.cli.bench import prompts as prompts_of
from moebatch.cli.bench.pattern_match import make_item, make_prompts
from moebatch.errors import InputError, ModelError, UsageError
from moebatch.model.resolve import resolve_model
from moebatch.plan.definitions import NAMES, definition, directory
from moebatch.plan.workload import named_workload

# MoE-Lightning, table 3: mean and longest prompt.
TABLE_3 = {"mtbench": (77, 418), "helm-synthetic": (242, 256), "helm-summarization": (1693, 1984)}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def demo():
    return resolve_model("demo")


@pytest.mark.parametrize("count", [64, 80, 256, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_drawn_lengths_are_the_papers(name, count) -> None:
    lengths = definition(name).draw(count)
    mean, longest = TABLE_3[name]
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.05)
    assert max(lengths) == pytest.approx(longest, rel=0.05)
    assert len(lengths) == count


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_and_a_benchmark_mean_the_same_workload(name) -> None:
    planned, known = named_workload(name), definition(name)
    assert (planned.mean_prompt, planned.max_prompt) == TABLE_3[name]
    assert planned.mean_gen == known.gen_len in known.gen_lens


def test_definitions_are_the_files_of_the_folder() -> None:
    assert {path.stem for path in directory().glob("*.json")} == set(NAMES)


def test_an_installed_package_has_the_definitions_within(tmp_path, monkeypatch) -> None:
    """As CMakeLists.txt installs them: no workloads folder beside the package."""
    import moebatch.plan.definitions as module

    inside = tmp_path / "site/moebatch"
    (inside / "plan").mkdir(parents=True)
    (inside / "workloads").mkdir()
    for path in directory().glob("*.json"):
        (inside / "workloads" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(module, "__file__", str(inside / "plan/definitions.py"))
    assert directory() == inside / "workloads"
    assert definition("mtbench").paper_max == 418


def test_the_papers_figures_are_found_by_setting() -> None:
    known = definition("mtbench")
    found = known.published(model="mixtral-8x7b", device="t4", padded=True, gen_len=128)
    assert found is not None and found.tok_s == 30.1
    assert known.published(model="mixtral-8x7b", device="t4", padded=True, gen_len=100) is None


def test_an_item_of_pattern_match_is_solved_by_its_target() -> None:
    """Put the words of the result back into letters: only the right pattern gives the result."""
    import random

    rng = random.Random(3)
    for _ in range(300):
        item = make_item(rng)
        rules, result = re.fullmatch(r"Rules: (.*) \| Result: (.*)", item.question).groups()
        assert len(rules.split(" | ")) == 4 and item.target in rules.split(" | ")
        assert explains(item.target.split(), result.split(), {})


def explains(pattern: list[str], result: list[str], words: dict[str, tuple[str, ...]]) -> bool:
    """Whether letters can stand for one or two words each, the same ones everywhere."""
    if not pattern:
        return not result
    first, rest = pattern[0], pattern[1:]
    if first not in "XYZ":
        return bool(result) and result[0] == first and explains(rest, result[1:], words)
    sizes = [len(words[first])] if first in words else [1, 2]
    return any(
        len(result) >= size
        and words.get(first, tuple(result[:size])) == tuple(result[:size])
        and explains(rest, result[size:], {**words, first: tuple(result[:size])})
        for size in sizes
    )


def test_prompts_of_pattern_match_share_their_examples() -> None:
    made = make_prompts(5)
    heads = {prompt.rpartition("\n\n")[0] for prompt in made}
    assert len(heads) == 1 and len(set(made)) == 5
    assert heads.pop().count("Target: ") == 5
    assert all(prompt.endswith("\nTarget:") for prompt in made)
    assert made == make_prompts(5) != make_prompts(5, seed=1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pattern_match_is_as_long_as_the_papers(shared, seed) -> None:
    tokenizer = Tokenizer.from_file(str(shared / "data/mixtral-tokenizer/tokenizer.json"))
    lengths = [len(tokenizer.encode(prompt).ids) for prompt in make_prompts(500, seed=seed)]
    mean, longest = TABLE_3["helm-synthetic"]
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.05)
    assert max(lengths) == pytest.approx(longest, rel=0.05)


def test_stored_lengths_are_those_of_the_data(shared) -> None:
    tokenizer = Tokenizer.from_file(str(shared / "data/mixtral-tokenizer/tokenizer.json"))
    rows = [json.loads(line) for line in (shared / "data/mt_bench.jsonl").read_text().splitlines()]
    lengths = sorted(len(tokenizer.encode(row["turns"][0]).ids) for row in rows)
    assert tuple(lengths) == definition("mtbench").lengths


def test_mtbench_without_questions_says_so(demo) -> None:
    made = prompts_of.make("mtbench", demo, count=20)
    assert "stored lengths" in made.source
    assert all(0 <= token < demo.spec.vocab_size for ids in made.token_ids for token in ids)
    assert made == prompts_of.make("mtbench", demo, count=20)
    assert made != prompts_of.make("mtbench", demo, count=20, seed=1)


def test_mtbench_from_a_question_file(demo, tmp_path) -> None:
    path = tmp_path / "question.jsonl"
    rows = [{"turns": [f"What is {'very ' * k}big?", "And small?"]} for k in range(5)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    made = prompts_of.make("mtbench", demo, count=12, dataset=path)
    assert made.source == "questions of question.jsonl"
    assert len(made.token_ids) == 12 and len(set(made.token_ids)) == 5
    few = prompts_of.make("mtbench", demo, count=2, dataset=path)
    assert len(set(few.token_ids)) == 2


@pytest.mark.parametrize("line", ["{}", "[1]", "no json", '{"turns": []}', '{"turns": [3]}'])
def test_a_bad_question_file_is_named_with_its_line(demo, tmp_path, line) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["fine"]}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        prompts_of.make("mtbench", demo, count=2, dataset=path)


def test_synthetic_reasoning_uses_the_models_tokenizer(demo) -> None:
    made = prompts_of.make("helm-synthetic", demo, count=4)
    assert "pattern_match" in made.source
    without = prompts_of.make("helm-synthetic", demo, count=4, has_tokenizer=False)
    assert "stored lengths" in without.source


def test_padding_makes_all_prompts_as_long_as_the_longest(demo) -> None:
    made = prompts_of.make("mtbench", demo, count=10)
    padded = made.pad()
    longest = max(map(len, made.token_ids))
    assert {len(ids) for ids in padded.token_ids} == {longest}
    assert all(long[longest - len(ids) :] == ids for ids, long in zip(
        made.token_ids, padded.token_ids, strict=True))  # fmt: skip
    assert padded.describe()["padded"] and not made.describe()["padded"]


def test_rows_of_a_file(demo, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Once", "max_tokens": 7}\n{"prompt_token_ids": [5, 6, 7]}\n')
    made = prompts_of.make(str(path), demo, count=9)
    assert made.workload == "rows" and made.token_ids[1] == (5, 6, 7)
    assert made.gen_lens[0] == 7


def test_random_prompts_have_the_length_that_was_asked_for(demo) -> None:
    made = prompts_of.make("random", demo, count=3, input_len=20)
    assert [len(ids) for ids in made.token_ids] == [20, 20, 20]


@pytest.mark.parametrize(
    ("workload", "more"),
    [
        ("mtbanch", {}),
        ("random", {"dataset": Path("q.jsonl")}),
        ("mtbench", {"input_len": 5}),
    ],
)
def test_what_does_not_go_together_is_refused(demo, workload, more) -> None:
    with pytest.raises(UsageError):
        prompts_of.make(workload, demo, count=2, **more)


def test_prompts_beyond_the_context_are_refused(demo) -> None:
    made = prompts_of.make("random", demo, count=1, input_len=demo.spec.max_model_len)
    with pytest.raises(ModelError, match="too many"):
        prompts_of.check_lengths(made, demo, 1)


def test_the_warm_up_has_other_prompts(demo) -> None:
    made = prompts_of.make("mtbench", demo, count=30)
    warm = prompts_of.warm_up(made, demo, count=3, seed=0)
    assert len(warm) == 3
    assert not {tuple(ids) for ids in warm} & set(made.token_ids)
