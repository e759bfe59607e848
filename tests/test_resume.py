"""The command line starts, stops and goes on: same bytes, right exit code, one clear line."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from commands import moebatch, read_rows, write_rows
from test_cli import process

from moebatch.cli import keeping
from moebatch.data import durable
from moebatch.data.record import Record
from moebatch.data.side import SideDirectory, is_locked

FLAGS = ("--max-tokens", 12, "--batch-size", 5, "--ignore-eos", "--progress", "none",
         "--cpu-threads", 1)  # fmt: skip


def rows(count: int = 14) -> list[dict]:
    return [
        {"id": f"r{i}", "prompt": "abcdef"[: 1 + i % 6], "n": 1 + (i % 4 == 0), "kept": i}
        for i in range(count)
    ]


@pytest.fixture
def job(model, tmp_path):
    """(run, data, out): `run(*flags)` is the same command each time."""
    data, out = write_rows(tmp_path / "in.jsonl", rows()), tmp_path / "out.jsonl"

    def run(*flags: object, to: Path = out):
        return moebatch("run", data, "-m", model, "-o", to, *FLAGS, *flags)

    return run, data, out


def stop_after(monkeypatch, passes: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal once so many passes are over."""
    real, left = Record.step, passes

    def step(self, *args):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
        return real(self, *args)

    monkeypatch.setattr(Record, "step", step)


def report(out: Path) -> dict:
    return json.loads((out.with_name(out.name + ".moebatch") / "report.json").read_text())


@pytest.mark.parametrize("flags", [("--greedy",), ("--temperature", 0.8, "--seed", 5)])
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_stopped_and_started_again_it_writes_the_same(
    flags, number, code, word, job, tmp_path, monkeypatch
) -> None:  # fmt: skip
    run, _, out = job
    assert run(*flags, to=tmp_path / "plain.jsonl").code == 0
    for passes in (3, 9, 5):
        with monkeypatch.context() as patch:
            stop_after(patch, passes, number)
            stopped = run(*flags)
        assert stopped.code == code, stopped.err
        assert "the same command goes on" in stopped.err
        assert "out.jsonl.partial" in stopped.err
        assert not out.exists()
        assert report(out)["status"] == word
        assert report(out)["exit_code"] == code
    before = report(out)
    done = run(*flags)
    assert done.code == 0, done.err
    assert "resuming" not in done.out
    assert out.read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    after = report(out)
    assert [s["rows"] for s in after["resumed_from"]] != [0, 0, 0]
    assert after["resumed"]["rows"] > 0
    assert after["resumed"]["rows_in_flight"] > 0
    assert after["resumed"]["tokens_in_flight"] > 0
    assert after["resumed"]["tokens_lost"] == 0
    assert before["resumed"]["tokens_lost"] == 0
    written = read_rows(out)
    assert after["tokens"]["generated"] == sum(row["completion_tokens"] for row in written)
    assert not (tmp_path / "out.jsonl.moebatch" / "inflight.bin").exists()


def test_a_time_limit_ends_with_75_and_can_be_gone_on_with(
    job, model, tmp_path, monkeypatch
) -> None:
    run, data, out = job
    assert run(to=tmp_path / "plain.jsonl").code == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGALRM)
        stopped = run("--time-limit", "3h50m")
    assert stopped.code == 75
    assert report(out)["status"] == "time_limit"
    assert run().code == 0
    assert out.read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    # While it is loading: there it may end anywhere, and leave a file for the process's end to close.
    early = process("run", data, "-m", model, "-o", out, *FLAGS, "--time-limit", "0.001s",
                    "--overwrite")  # fmt: skip
    assert early.code == 75, early.err


def test_a_second_signal_ends_at_once(job, monkeypatch) -> None:
    """Also the last checkpoint; the one before it is still good."""
    run, _, out = job
    real = Record.checkpoint

    def checkpoint(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        real(self, *args)

    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGINT)
        patch.setattr(Record, "checkpoint", checkpoint)
        stopped = run()
    assert stopped.code == 130
    assert "at once" in stopped.err
    assert "Traceback" not in stopped.err
    assert run().code == 0
    assert report(out)["resumed"]["tokens_lost"] > 0  # there was no checkpoint


def test_a_signal_ends_a_pass_in_the_middle(job, monkeypatch) -> None:
    from moebatch.runtime.forward import Forward

    run, _, out = job
    real, left = Forward.begin, 3

    def begin(self, *args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Forward, "begin", begin)
        assert run().code == 143
    assert report(out)["passes"] == 2


def test_a_finished_job_computes_nothing(job, monkeypatch) -> None:
    run, _, out = job
    assert run().code == 0
    before = out.read_bytes()

    def refuse(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("moebatch.runtime.engine.Engine.__init__", refuse)
    again = run("--resume")
    assert again.code == 0, again.err
    assert out.read_bytes() == before
    assert report(out)["resumed"]["rows"] == len(rows())
    out.unlink()
    assert run("--batch-size", 3, "--micro-batch-size", 2).code == 0  # free to change
    assert out.read_bytes() == before


def test_the_input_grows_shrinks_and_is_edited(job, tmp_path) -> None:
    run, data, out = job
    assert run().code == 0
    changed = [row | {"kept": "new"} for row in rows(18)[2:]]  # two are gone, four are new
    changed[5]["prompt"] = "zz"
    changed[7]["max_tokens"] = 3
    write_rows(data, changed)
    assert run().code == 0
    assert report(out)["resumed"]["rows"] == 16 - 4 - 2
    assert run(to=tmp_path / "plain.jsonl").code == 0
    assert out.read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def test_openai_rows_keep_their_ids(model, tmp_path, monkeypatch) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 6, "temperature": 0.8}
    lines = [{"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
             for i in range(8)]  # fmt: skip
    data, out = write_rows(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ("run", data, "-m", model, "-o", out, *FLAGS)

    class Earlier(datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) - timedelta(hours=1)

    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        patch.setattr(keeping, "datetime", Earlier)  # or else `created` would be the same anyway
        assert moebatch(*command).code == 143
    first = read_rows(tmp_path / "out.jsonl.partial")
    assert moebatch(*command).code == 0
    assert first
    assert read_rows(out)[: len(first)] == first


def test_a_table_is_resumed_too(model, tmp_path, monkeypatch) -> None:
    import pyarrow.parquet as pq

    data = write_rows(tmp_path / "in.jsonl", rows())
    command = ("run", data, "-m", model, *FLAGS)
    assert moebatch(*command, "-o", tmp_path / "plain.parquet").code == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 15)
        assert moebatch(*command, "-o", tmp_path / "out.parquet").code == 143
    assert moebatch(*command, "-o", tmp_path / "out.parquet").code == 0
    one, other = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("plain", "out"))
    assert one.to_pydict() == other.to_pydict()
    said = json.loads(other.schema.metadata[b"moebatch.manifest"])
    assert said["fingerprint"]["model"] == str(model)


# --- what does not match ---


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--seed", 7), "seed was 0, is 7"),
        (("--temperature", 0.5), "generation_defaults.temperature was not set, is 0.5"),
        (("--output-schema", "openai"), 'output_schema was "auto", is "openai"'),
        (("--system", "be kind"), "prompts.system"),
    ],
)
def test_another_run_is_refused_field_by_field(flags, field, job) -> None:
    run, _, out = job
    assert run().code == 0
    before = out.read_bytes()
    refused = run(*flags)
    assert refused.code == 8
    assert field in refused.error
    assert "--overwrite" in refused.err
    assert "new -o" in refused.err
    assert out.read_bytes() == before
    assert run(*flags, "--overwrite").code == 0
    assert out.read_bytes() != before or flags[0] == "--system"


def test_another_model_template_or_tokenizer_is_refused(job, model, tmp_path) -> None:
    _, data, out = job
    other = tmp_path / "model"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    command = ("run", data, "-m", other, "-o", out, *FLAGS)
    assert moebatch(*command).code == 0
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-100:] = bytes(100)  # the same shapes, another training
    (other / "model.safetensors").write_bytes(weights)
    assert "weights was" in moebatch(*command).error
    (other / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert "chat_template was" in moebatch(*command).error
    (other / "tokenizer_config.json").write_text("{}")
    refused = moebatch(*command)
    assert refused.code == 8
    assert "tokenizer was" in refused.error


def test_other_arithmetic_needs_a_word(job, monkeypatch) -> None:
    run, _, out = job
    with monkeypatch.context() as patch:
        stop_after(patch, 20)
        assert run().code == 143
    refused = run("--kv-cache-dtype", "float16")
    assert refused.code == 8
    assert 'kv_cache_dtype was "float32", is "float16"' in refused.error
    assert "--resume numeric" in refused.err
    assert run("--kv-cache-dtype", "float16", "--resume=numeric").code == 0
    (first, *_) = report(out)["resumed_from"]
    assert first["numeric"]["kv_cache_dtype"] == "float32"
    assert first["rows"] > 0


def test_nothing_was_done_so_nothing_has_to_match(job) -> None:
    run, _, out = job
    assert run("--memory", "20MiB").code == 5
    assert run("--seed", 3).code == 0
    assert len(read_rows(out)) == len(rows())


def test_no_resume_refuses_what_is_begun(job) -> None:
    run, _, _ = job
    assert run().code == 0
    refused = run("--no-resume")
    assert refused.code == 8
    assert "begun" in refused.error
    assert run("--no-resume", "--overwrite").code == 0


def test_a_manifest_that_cannot_be_read_drops_nothing(job) -> None:
    run, _, out = job
    assert run().code == 0
    manifest = out.with_name("out.jsonl.moebatch") / "manifest.json"
    manifest.write_text("{")
    before = out.read_bytes()
    assert run().code == 8
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "flags",
    [
        ("--memory", "0"),
        ("--checkpoint-tokens", 0),
        ("--time-limit", "soon"),
        ("--time-limit", "0"),
        ("--resume=maybe",),
        ("--resume", "numeric", "--no-resume"),
    ],
)
def test_wrong_options(flags, job) -> None:
    run, _, out = job
    result = run(*flags)
    assert result.code == 2, result.err
    assert result.error
    assert not out.with_name("out.jsonl.moebatch").exists()


# --- locks, full disks, places that cannot be written ---

HOLD = """
import sys
from pathlib import Path
from moebatch.data.side import SideDirectory
side = SideDirectory(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_on_one_output(job) -> None:
    run, _, out = job
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        refused = run()
        assert refused.code == 9
        assert str(holder.pid) in refused.error
        assert run("--overwrite").code == 9
        assert is_locked(out) is not None
        assert str(holder.pid) in str(is_locked(out))
    finally:
        holder.kill()
        holder.communicate()
    assert is_locked(out) is None
    assert run().code == 0  # the file is still there, the lock is not


def test_a_lock_is_let_go(tmp_path) -> None:
    with SideDirectory(tmp_path / "o.jsonl") as side:
        side.log("a line")
        side.log("another")
    assert len((tmp_path / "o.jsonl.moebatch" / "log.txt").read_text().splitlines()) == 2
    SideDirectory(tmp_path / "o.jsonl").close()


@contextlib.contextmanager
def small_disk(path: Path, options: str):
    """A tmpfs of its own; skips where that is not permitted."""
    path.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)],
                           capture_output=True, check=False)  # fmt: skip
    if mount.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_a_disk_that_runs_full_and_is_enlarged(job, tmp_path) -> None:
    """Whatever size is too small: one line, exit code 1, and what was finished stays finished."""
    run, _, _ = job
    flags = ("--checkpoint-tokens", 2, "--include", "token_ids")
    plain = tmp_path / "plain.jsonl"
    assert run(*flags, to=plain).code == 0
    with small_disk(tmp_path / "disk", "size=16k") as disk:
        codes = []
        for size in range(16, 200, 8):
            subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
            result = run(*flags, to=disk / "out.jsonl")
            codes.append(result.code)
            if result.code == 0:
                break
            assert "space" in result.error
        assert codes[-1] == 0
        assert len(codes) > 2
        assert set(codes[:-1]) == {1}
        assert (disk / "out.jsonl").read_bytes() == plain.read_bytes()
        assert report(disk / "out.jsonl")["resumed"]["rows"] > 0


def test_a_disk_that_is_full_now_and_then(job, tmp_path, monkeypatch) -> None:
    """The same without a disk of its own: any write may fail, in part."""
    run, _, out = job
    plain = tmp_path / "plain.jsonl"
    assert run(to=plain).code == 0
    rng = random.Random(1)

    class FullOs:
        def __init__(self, lives: int) -> None:
            self.lives = lives

        def __getattr__(self, name):
            return getattr(os, name)

        def write(self, fd, content):
            self.lives -= 1
            if self.lives > 0:
                return os.write(fd, content)
            if self.lives == 0 and len(content) > 1:
                return os.write(fd, bytes(content)[: rng.randrange(1, len(content))])
            raise OSError(28, os.strerror(28))

    codes = []
    for lives in (1, 2, 4, 6, 9, 13, 20, 30, 10**9):
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", FullOs(lives))
            result = run("--checkpoint-tokens", 3)
        codes.append(result.code)
        if result.code:
            assert "No space left" in result.error
            assert not out.exists() or out.read_bytes() == plain.read_bytes()
    assert set(codes[:3]) == {1}
    assert codes[-1] == 0
    assert out.read_bytes() == plain.read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_a_place_that_is_read_only(job, tmp_path, monkeypatch) -> None:
    """Found before weights are loaded, also where the folder beside it is there already."""
    run, _, _ = job
    with small_disk(tmp_path / "disk", "size=400k") as disk:
        assert run(to=disk / "out.jsonl").code == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

        def refuse(*args, **kwargs):
            raise AssertionError("a model is loaded")

        monkeypatch.setattr("moebatch.runtime.engine.Engine.__init__", refuse)
        for name in ("out.jsonl", "other.jsonl"):
            result = run(to=disk / name)
            assert result.code == 2
            assert "cannot be written" in result.error


# --- real deaths ---


def test_kill_minus_nine(model, tmp_path) -> None:
    """A few real ones; hundreds are played in test_crash."""
    data = write_rows(tmp_path / "in.jsonl", [{"id": str(i), "prompt": "abc"} for i in range(50)])
    out, rng = tmp_path / "out.jsonl", random.Random(3)
    flags = [str(flag) for flag in (*FLAGS, "--temperature", 0.8, "--checkpoint-tokens", 4)]
    flags[flags.index("--max-tokens") + 1] = "50"
    command = [sys.executable, "-m", "moebatch", "run", str(data), "-m", str(model), *flags]
    side = tmp_path / "out.jsonl.moebatch"
    deaths = 0
    for _ in range(2):
        lines = journal_lines(side)
        process = subprocess.Popen(
            [*command, "-o", str(out)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        while process.poll() is None and journal_lines(side) <= lines:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        deaths += process.wait() == -signal.SIGKILL
    finished = journal_lines(side)
    assert deaths >= 1
    assert moebatch(*command[3:], "-o", out).code == 0
    assert report(out)["resumed"]["rows"] == finished
    assert report(out)["resumed"]["tokens_lost"] <= 5 * 5  # a batch times an interval and a pass
    assert moebatch(*command[3:], "-o", tmp_path / "plain.jsonl").code == 0
    assert out.read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def journal_lines(side: Path) -> int:
    journal = side / "journal-00000.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_rows_that_come_back_from_the_journal_count_as_the_others(job) -> None:
    run, _, out = job
    assert run().code == 0
    first = report(out)
    assert run().code == 0
    second = report(out)
    for field in ("requests", "tokens", "lengths", "finish_reasons"):
        assert first[field] == second[field]
    assert second["throughput"]["generation_throughput"] is None  # nothing was computed
