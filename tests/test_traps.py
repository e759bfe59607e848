"""What other tools get wrong, end to end; what one part can show alone is tested with that part."""

import json
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import moebatch, read_rows, refuse_constant, write_rows

import moebatch as package

MODEL = Path(package.__file__).parent / "demo" / "model"
COMMANDS = ("run", "validate", "status", "retry", "merge", "convert")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: object):
    return moebatch("run", "in.jsonl", "-m", "demo", "-o", "out.jsonl", "--max-tokens", 4, *args)


def report() -> dict:
    text = Path("out.jsonl.moebatch/report.json").read_text()
    return json.loads(text, parse_constant=refuse_constant)


def test_numbers_that_json_lacks(here) -> None:
    """NaN in a table of the user is null in the rows, and the report is JSON for any parser."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"prompt": ["a", "b"], "score": [float("nan"), float("-inf")]})
    pq.write_table(table, here / "in.parquet")
    assert moebatch("run", "in.parquet", "-m", "demo", "-o", "out.jsonl", "-q").code == 0
    assert [row["score"] for row in read_rows(here / "out.jsonl")] == [None, None]
    assert report()["requests"]["succeeded"] == 2
    # Also where nothing was computed, and rates would be divided by zero.
    write_rows(here / "in.jsonl", [b"x"])
    assert run("--overwrite", "--json").code == 3
    assert report()["throughput"]["generation_throughput"] is None


def test_the_report_sums_up_the_rows(here) -> None:
    """Tokens are counted from ids: a text that is cut at a stop string has fewer."""
    rows = [{"id": str(i), "prompt": "p" * i, "sampling_params": {"n": 1 + i % 3}}
            for i in range(1, 9)]  # fmt: skip
    write_rows(
        here / "in.jsonl", [*rows, b"x", {"id": "s", "prompt": "a", "stop": ["e", "a", " "]}]
    )
    assert run("--include", "token_ids").code == 3
    written, said = read_rows(here / "out.jsonl"), report()
    good = [row for row in written if row["error"] is None]
    assert said["requests"]["total"] == len(written)
    assert said["requests"]["failed"] == len(written) - len(good)
    for name, column in (("prompt", "prompt_tokens"), ("generated", "completion_tokens")):
        assert said["tokens"][name] == sum(row[column] for row in written)
    choices = 0
    for row in good:
        many = isinstance(row["generated_text"], list)
        ids = row["token_ids"] if many else [row["token_ids"]]
        assert row["completion_tokens"] == sum(map(len, ids))
        choices += len(ids)
    assert sum(said["finish_reasons"].values()) == choices


def test_a_clamped_max_tokens_is_said_in_its_row(here) -> None:
    write_rows(here / "in.jsonl", [{"prompt": "hello", "max_tokens": 100_000},
                                   {"custom_id": "c", "body": {"prompt": "a", "max_tokens": 999}},
                                   {"prompt": "hello", "max_tokens": 3}])  # fmt: skip
    assert run("--max-model-len", 20, "--ignore-eos").code == 0
    flat, openai, small = read_rows(here / "out.jsonl")
    assert flat["max_tokens_clamped"] == flat["completion_tokens"] == 20 - flat["prompt_tokens"]
    body = openai["response"]["body"]
    assert body["max_tokens_clamped"] == 20 - body["usage"]["prompt_tokens"]
    assert "max_tokens_clamped" not in small


def test_a_row_that_breaks_the_numbers_takes_no_other_down(here) -> None:
    """Logits divided by next to nothing are infinite."""
    rows = [{"id": str(i), "prompt": f"row {i}", "temperature": 0.8} for i in range(4)]
    write_rows(here / "in.jsonl", rows)
    assert run().code == 0
    alone = read_rows(here / "out.jsonl")
    broken = {"id": "broken", "prompt": "x", "repetition_penalty": 1e-300}
    write_rows(here / "in.jsonl", [*rows[:2], broken, *rows[2:]])
    assert run("--overwrite").code == 3
    with_it = read_rows(here / "out.jsonl")
    error = with_it.pop(2)["error"]
    assert (error["code"], error["retryable"]) == ("non_finite_logits", True)
    assert with_it == alone


@pytest.mark.parametrize("side", ["error", "truncate", "skip"])
def test_a_prompt_alone_too_long_follows_the_policy(here, side) -> None:
    write_rows(here / "in.jsonl", [{"prompt": "x" * 500}])
    codes = {"error": 3, "truncate": 0, "skip": 0}
    assert run("--max-model-len", 20, "--on-too-long", side).code == codes[side]
    (row,) = read_rows(here / "out.jsonl")
    assert row["truncated_tokens"] == (485 if side == "truncate" else 0)
    assert row["finish_reason"] == {"error": "error", "skip": "skipped"}.get(side, "length")


# --- streams ---


def test_without_a_terminal_there_are_no_codes_and_none_is_silent(here) -> None:
    write_rows(here / "in.jsonl", [{"prompt": "a"}])
    plain = run("--progress", "auto")
    assert plain.code == 0
    assert plain.out == ""
    assert "\x1b" not in plain.err
    silent = run("--progress", "none", "-q", "--overwrite")
    assert (silent.code, silent.out, silent.err) == (0, "", "")


def test_no_color_on_a_terminal(here) -> None:
    """Bars may move the cursor; colours must not come."""
    write_rows(here / "in.jsonl", [{"prompt": "a"}])
    ours, theirs = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(Path(__file__).parents[1])}  # fmt: skip
    command = [sys.executable, "-m", "moebatch", "run", "in.jsonl", "-m", "demo", "-o", "out.jsonl",
               "--max-tokens", "4", "--progress", "bar"]  # fmt: skip
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # how a terminal says that the other side is gone
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"1 ok, 0 failed" in seen
    assert not re.search(rb"\x1b\[[0-9;]*(3|4|9|10)[0-8][0-9;]*m", seen)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_nothing_heavy_and_shows_exit_codes(command) -> None:
    code = (
        f"import sys; sys.argv = ['moebatch', '{command}', '--help']\n"
        "from moebatch.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'datasets', 'tokenizers', 'huggingface_hub'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    assert "Exit codes" in done.stdout
    assert "\x1b" not in done.stdout


# --- the hub ---


@pytest.fixture
def cached(here) -> Path:
    """A cache of the hub's that holds the demo model as org/demo."""
    folder = here / "hub" / "models--org--demo"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in MODEL.iterdir():
        (snapshot / file.name).symlink_to(file)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    write_rows(here / "in.jsonl", [{"prompt": "a"}])
    return here / "hub"


def test_offline_asks_no_network(here, cached, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    args = ["in.jsonl", "-m", "org/demo", "--cache-dir", cached]
    assert moebatch("run", *args, "-o", "out.jsonl", "--max-tokens", 1, "-q").code == 0
    assert report()["model"]["revision"] == "0" * 40
    assert moebatch("validate", *args, "--offline").code == 0
    missing = moebatch("run", "in.jsonl", "-m", "org/other", "--cache-dir", cached, "-o", "o.jsonl")
    assert missing.code == 7
    assert "offline" in missing.error


def test_validate_wants_no_weights_from_the_hub(here, cached) -> None:
    for file in cached.rglob("*.safetensors"):
        file.unlink()
    args = ["in.jsonl", "-m", "org/demo", "--cache-dir", cached, "--offline"]
    assert moebatch("validate", *args).code == 0
    assert moebatch("run", *args, "-o", "out.jsonl").code == 7


def test_a_gated_model_is_one_line(here, monkeypatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def refuse(*_: object, **__: object) -> None:
        raise GatedRepoError.__new__(GatedRepoError, "gated")  # it wants a response to be made from

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    write_rows(here / "in.jsonl", [{"prompt": "a"}])
    result = moebatch("run", "in.jsonl", "-m", "org/gated", "-o", "out.jsonl")
    assert result.code == 7
    assert "gated" in result.error
    assert "hf auth login" in result.err


def test_structured_output_is_refused_by_row_never_repaired(here) -> None:
    """It is not supported: such a row is an error, not a text that somebody mends, and others go on."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    rows = [{"id": "a", "prompt": "x", "response_format": schema}, {"id": "b", "prompt": "x"}]
    write_rows(here / "in.jsonl", rows)
    assert run("-q").code == 3
    refused, answered = read_rows(here / "out.jsonl")
    assert refused["error"]["code"] == "unsupported_parameter"
    assert refused["error"]["param"] == "response_format"
    assert refused["generated_text"] is None and "parsed" not in refused
    assert answered["finish_reason"] == "length" and answered["completion_tokens"] == 4
