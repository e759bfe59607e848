"""The command line as a user sees it: what goes where, one clear line for each mistake."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Result, moebatch, read_rows, write_rows

COMMAND = [sys.executable, "-m", "moebatch"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


def process(*args: object, stdin: str | None = None) -> Result:
    """The command as a process of its own; most tests call it inside theirs, which starts at once."""
    done = subprocess.run(
        [*COMMAND, *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        check=False,
    )
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


def assert_one_line(result, code: int, *words: str) -> None:
    """An error is one line, perhaps with a hint, never a traceback; nothing on stdout."""
    assert result.code == code, result.err
    assert result.error
    assert result.out == ""
    for word in words:
        assert word in result.err


def test_help_answers_fast_and_without_torch() -> None:
    """Half a second on a quiet machine; here only what makes it so: nothing heavy is imported."""
    code = (
        "import sys; sys.argv = ['moebatch', 'run', '--help']\n"
        "from moebatch.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pyarrow', 'transformers', 'datasets', 'tokenizers', 'huggingface_hub'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert "HEAVY []" in result.stdout
    assert "--temperature" in result.stdout


def test_version() -> None:
    assert process("--version").out.startswith("moebatch ")


def test_rows_come_out_in_order_with_their_columns(model, tmp_path) -> None:
    rows = [{"id": f"r{i}", "prompt": "ab" * (1 + i % 5), "kept": i} for i in range(20)]
    data, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    result = process("run", data, "-m", model, "-o", out, "--max-tokens", 4, "--ignore-eos")
    assert result.code == 0, result.err
    assert result.out == ""
    written = read_rows(out)
    assert [(f"r{i}", i) for i in range(20)] == [(row["id"], row["kept"]) for row in written]
    assert {4} == {row["completion_tokens"] for row in written}
    assert {"length"} == {row["finish_reason"] for row in written}
    assert not (tmp_path / "out.jsonl.partial").exists()
    report = json.loads((tmp_path / "out.jsonl.moebatch" / "report.json").read_text())
    assert report["tokens"]["generated"] == sum(row["completion_tokens"] for row in written)
    assert report["tokens"]["prompt"] == sum(row["prompt_tokens"] for row in written)
    assert report["requests"] == {"total": 20, "succeeded": 20, "failed": 0, "skipped": 0,
                                  "by_error_code": {}}  # fmt: skip
    assert report["throughput"]["generation_throughput"] > 0


def test_bad_rows_are_error_rows_and_exit_code_3(model, tmp_path) -> None:
    data = tmp_path / "in.jsonl"
    data.write_text('{"prompt": "abc"}\nnonsense\n{"prompt": "abc", "temperature": "hot"}\n{}\n')
    result = moebatch("run", data, "-m", model, "-o", tmp_path / "out.jsonl", "--max-tokens", 2)
    assert result.code == 3, result.err
    codes = [row["error"] and row["error"]["code"] for row in read_rows(tmp_path / "out.jsonl")]
    assert codes[0] is None
    assert codes[1] == "invalid_json"
    assert codes[3] == "missing_prompt"
    allowed = moebatch("run", data, "-m", model, "-o", tmp_path / "b.jsonl", "--allow-row-errors",
                       "--max-tokens", 2)  # fmt: skip
    assert allowed.code == 0


def test_only_bad_rows(model, tmp_path) -> None:
    """No model has to be loaded, the error rows are written all the same."""
    data = tmp_path / "in.jsonl"
    data.write_text("x\ny\n")
    result = moebatch("run", data, "-m", model, "-o", tmp_path / "out.jsonl", "--json")
    assert result.code == 3, result.err
    assert len(read_rows(tmp_path / "out.jsonl")) == 2
    assert json.loads(result.out)["policy"] is None


def test_openai_rows(model, tmp_path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    line = {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    data = write_rows(tmp_path / "in.jsonl", [line])
    assert moebatch("run", data, "-m", model, "-o", tmp_path / "out.jsonl").code == 0
    (row,) = read_rows(tmp_path / "out.jsonl")
    assert row["custom_id"] == "q1"
    assert row["error"] is None
    answer = row["response"]["body"]
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] <= 3


def test_stdin_to_stdout(model) -> None:
    result = process("run", "-", "-m", model, "-o", "-", "--max-tokens", 3, "--ignore-eos",
                      stdin='{"prompt": "abc"}\n{"prompt": "d"}\n')  # fmt: skip
    assert result.code == 0, result.err
    assert [json.loads(x)["completion_tokens"] for x in result.out.splitlines()] == [3, 3]
    assert "\x1b" not in result.err


def test_a_reader_that_goes_away_is_no_error(model, tmp_path) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "abc", "kept": "x" * 999}] * 200)
    script = (  # a pipe holds 64 KiB, less than comes
        f"{sys.executable} -m moebatch run {data} -m {model} -o - -q --max-tokens 9 --ignore-eos"
        " --include token_ids | head -1"
    )
    result = subprocess.run(
        script, shell=True, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 1


def test_parquet_in_and_out(model, tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": ["ab", "abc", "d"], "label": [1, 2, 3]})
    pq.write_table(table, tmp_path / "in.parquet")
    result = moebatch("run", tmp_path / "in.parquet", "-m", model, "-o", tmp_path / "out.parquet",
                      "--max-tokens", 2)  # fmt: skip
    assert result.code == 0, result.err
    written = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert written["label"] == [1, 2, 3]
    assert len(written["generated_text"]) == 3


def test_the_same_seed_gives_the_same_text_in_any_batch(model, tmp_path) -> None:
    rows = [{"id": str(i), "prompt": "abcdef"[: 1 + i % 6]} for i in range(12)]
    data = write_rows(tmp_path / "in.jsonl", rows)
    texts = []
    for k, flags in enumerate((["--batch-size", 1], ["--batch-size", 5, "--weights-resident", 0],
                               ["--micro-batch-size", 2], ["--seed", 7])):  # fmt: skip
        out = tmp_path / f"{k}.jsonl"
        result = moebatch("run", data, "-m", model, "-o", out, "--temperature", 0.8,
                          "--max-tokens", 8, *flags)  # fmt: skip
        assert result.code == 0, result.err
        texts.append([row["generated_text"] for row in read_rows(out)])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != texts[3]


def test_stop_string_and_logprobs(model, tmp_path) -> None:
    data = write_rows(
        tmp_path / "in.jsonl", [{"prompt": "abc", "sampling_params": {"logprobs": 2}}]
    )
    base = ["run", data, "-m", model, "--max-tokens", 9, "--ignore-eos", "--greedy"]
    assert moebatch(*base, "-o", tmp_path / "a.jsonl").code == 0
    (full,) = read_rows(tmp_path / "a.jsonl")
    assert len(full["logprobs"]) == 9
    stop = full["generated_text"][3:5]
    assert moebatch(*base, "-o", tmp_path / "b.jsonl", "--stop", stop).code == 0
    (cut,) = read_rows(tmp_path / "b.jsonl")
    assert cut["finish_reason"] == "stop"
    assert cut["stop_reason"] == stop
    assert full["generated_text"].startswith(cut["generated_text"] + stop)


# --- what users do wrong ---


def test_wrong_paths(model, tmp_path) -> None:
    data, out = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    assert_one_line(moebatch("run", tmp_path / "no.jsonl", "-m", model, "-o", out), 7, "no.jsonl")
    assert_one_line(moebatch("run", data, "-m", tmp_path / "nomodel", "-o", out), 7, "nomodel")
    assert_one_line(moebatch("run", data, "-m", "no-such-name", "-o", out), 7, "short names")
    assert_one_line(moebatch("run", data, "-m", "org/model", "-o", out), 7, "org/model", "offline")
    assert_one_line(moebatch("run", data, "-m", model, "-o", data), 2, "input")
    assert_one_line(moebatch("run", data, "-m", model, "-o", tmp_path), 2, "folder")
    assert_one_line(
        moebatch("run", data, "-m", model, "-o", tmp_path / "x" / "o.jsonl"), 2, "mkdir"
    )


def test_an_existing_output_is_not_touched(model, tmp_path) -> None:
    data, out = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    out.write_text("precious")
    assert_one_line(moebatch("run", data, "-m", model, "-o", out), 8, "--overwrite")
    assert out.read_text() == "precious"
    assert moebatch("run", data, "-m", model, "-o", out, "--overwrite").code == 0
    assert len(read_rows(out)) == 1


def test_wrong_columns_and_empty_files(model, tmp_path) -> None:
    data, out = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    wrong = moebatch("run", data, "-m", model, "-o", out, "--prompt-column", "question")
    assert_one_line(wrong, 6, "question", "prompt")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert_one_line(moebatch("run", tmp_path / "empty.jsonl", "-m", model, "-o", out), 6, "no rows")
    assert not out.exists()
    assert not (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--memory", "lots"],
        ["--weights-resident", "2"],
        ["--batch-size", "0"],
        ["--progress", "fancy"],
        ["--output-format", "xml"],
        ["--on-too-long", "pray"],
        ["--top-p", "7"],
        ["--greedy", "--temperature", "1"],
        ["--max-model-len", "999999"],
        ["--include", "everything"],
        ["--chat-template", "nope"],
    ],
)
def test_wrong_options(flags, model, tmp_path) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert_one_line(moebatch("run", data, "-m", model, "-o", tmp_path / "o.jsonl", *flags), 2)


def test_a_wrong_command_line(model, tmp_path) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert_one_line(process("bogus"), 2, "bogus", "--help")
    assert_one_line(moebatch("run"), 2, "--help")
    assert_one_line(moebatch("run", data, "-m", model), 2, "output")
    assert_one_line(moebatch("run", data, "-m", model, "-o", "x", "--no-such-flag"), 2, "flag")
    assert_one_line(moebatch("run", data, "-m", model, "-o", "x", "--top-k", "many"), 2, "--top-k")
    assert moebatch().code in (0, 2)


def copy_model(model: Path, to: Path) -> Path:
    to.mkdir()
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_broken_checkpoints(model, tmp_path) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])

    def attempt(path: Path):
        return moebatch("run", data, "-m", path, "-o", tmp_path / "out.jsonl")

    cut = copy_model(model, tmp_path / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert_one_line(attempt(cut), 7, "cut off")

    shard = copy_model(model, tmp_path / "shard")
    (shard / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (shard / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_one_line(attempt(shard), 7, "model-00002-of-00002.safetensors")

    shape = copy_model(model, tmp_path / "shape")
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps({**config, "intermediate_size": 57}))
    assert_one_line(attempt(shape), 7, "shape")

    other = copy_model(model, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({**config, "model_type": "rwkv"}))
    assert_one_line(attempt(other), 7, "rwkv", "mixtral")

    garbled = copy_model(model, tmp_path / "garbled")
    (garbled / "config.json").write_text("{")
    assert_one_line(attempt(garbled), 7, "config.json")

    mute = copy_model(model, tmp_path / "mute")
    (mute / "tokenizer.json").unlink()
    assert_one_line(attempt(mute), 7, "tokenizer")


def test_too_little_memory(model, tmp_path) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    result = moebatch("run", data, "-m", model, "-o", tmp_path / "o.jsonl", "--memory", "20MiB")
    assert_one_line(result, 5, "--memory", "MiB")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(model, tmp_path) -> None:
    """The partial file is a link to a device that is always full."""
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "abc"}] * 3)
    (tmp_path / "out.jsonl.partial").symlink_to("/dev/full")
    result = moebatch("run", data, "-m", model, "-o", tmp_path / "out.jsonl", "--max-tokens", 2)
    assert_one_line(result, 1, "space")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_keep_finished_rows(number, code, model, tmp_path) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "abc"}] * 3000)
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [*COMMAND, "run", str(data), "-m", str(model), "-o", str(out), "--batch-size", "4",
         "--max-tokens", "20", "--ignore-eos"],
        stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    partial = tmp_path / "out.jsonl.partial"
    while not (partial.exists() and partial.stat().st_size > 0):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "out.jsonl.partial" in err
    assert not out.exists()
    assert len(read_rows(partial)) >= 1
