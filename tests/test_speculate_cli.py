"""--speculate and its kin: same bytes, figures in the report, one clear line for what cannot be."""

import json
import shutil

import pytest
from commands import moebatch, read_rows, write_rows
from test_resume import stop_after

ROWS = [{"id": f"r{i}", "prompt": "abcabc"[: 2 + i % 4], "n": 1 + (i == 2)} for i in range(5)]
FLAGS = ("--max-tokens", 14, "--temperature", 0.7, "--progress", "none", "--cpu-threads", 1,
         "--ignore-eos")  # fmt: skip


@pytest.fixture
def job(model, tmp_path):
    """`run(name, *flags)` is the same command to another output; (result, bytes, report)."""
    data = write_rows(tmp_path / "in.jsonl", ROWS)

    def run(name, *flags):
        out = tmp_path / f"{name}.jsonl"
        done = moebatch("run", data, "-m", model, "-o", out, *FLAGS, *flags)
        side = out.with_name(out.name + ".moebatch") / "report.json"
        return done, out, json.loads(side.read_text()) if side.exists() else None

    return run


@pytest.mark.parametrize("tokens", ["auto", 3])
@pytest.mark.parametrize("source", ["ngram", "draft"])
def test_the_output_is_the_same(source, tokens, job, model) -> None:
    plain, plain_out, plain_report = job("plain")
    assert plain.code == 0, plain.err
    assert plain_report["speculation"] is None
    flags = ("--draft-model", model) if source == "draft" else ("--speculate", "ngram")
    done, out, report = job("drafted", *flags, "--draft-tokens", tokens)
    assert done.code == 0, done.err
    assert out.read_bytes() == plain_out.read_bytes()
    said = report["speculation"]
    assert said["source"] == source
    assert said["chosen_by_cost"] == (tokens == "auto")
    assert f"drafts ({source}): " in done.err
    if source == "draft":
        assert said["accepted"] == said["drafted"]
    if source == "draft" and tokens == 3:
        assert said["accepted"] > 0
        assert said["tokens_per_pass"] > 2
        assert report["passes"] < plain_report["passes"]
        assert (
            report["memory_peak"]["planned"]["base"]
            > plain_report["memory_peak"]["planned"]["base"]
        )


def test_a_run_with_drafts_goes_on_without_and_the_other_way(job, model, monkeypatch) -> None:
    plain_out = job("plain")[1]
    flags = ("--draft-model", model, "--draft-tokens", 2)
    for k, (before, after) in enumerate([(flags, ()), ((), flags), (flags, flags)]):
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            assert job(f"cut{k}", *before)[0].code == 143
        done, out, _ = job(f"cut{k}", *after)
        assert done.code == 0, done.err
        assert read_rows(out) == read_rows(plain_out)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--speculate", "often"), "--speculate often does not exist"),
        (("--speculate", "draft"), "--speculate draft needs a model"),
        (("--speculate", "ngram", "--draft-model", "demo"), "contradict each other"),
        (("--speculate", "off", "--draft-model", "demo"), "contradict each other"),
        (("--draft-tokens", "4"), "--draft-tokens needs drafts"),
        (("--speculate", "ngram", "--draft-tokens", "0"), "neither auto nor 1 to 16"),
        (("--speculate", "ngram", "--draft-tokens", "17"), "neither auto nor 1 to 16"),
        (("--speculate", "ngram", "--draft-tokens", "x"), "neither auto nor 1 to 16"),
        (("--draft-model", "demo"), "has other tokens than"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(flags, said, job) -> None:
    done, out, _ = job("refused", *flags)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not [path for path in out.parent.iterdir() if path.name.startswith("refused")]


def test_no_draft_model(job) -> None:
    done, _, _ = job("refused", "--draft-model", "./nowhere")
    assert done.code == 7
    assert "./nowhere is not a model directory" in done.err


def test_a_draft_model_without_its_tokenizer_files_but_the_same_tokens(
    job, model, tmp_path
) -> None:
    """Not the files must be the same, but what the tokens mean."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "tokenizer_config.json").write_text('{"bos_token": "<s>", "model_max_length": 77}')
    assert job("drafted", "--draft-model", other)[0].code == 0
