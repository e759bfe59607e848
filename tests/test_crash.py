"""Kill a run at random writes and passes, start it again, again: the output is as if nothing happened.

Everything but the model is real: lock, manifest, journal, snapshots, output. The process's death is
played: from the fatal call on no write has any effect, and what was only buffered is lost.
"""

import contextlib
import os
import random
import shutil
from collections import Counter

import pytest
from crashes import (
    FakeEngine,
    Killed,
    as_rows,
    journaled,
    mortal,
    run_session,
    uninterrupted,
)

from moebatch.cli.keeping import KeepOptions
from moebatch.data import durable
from moebatch.data.inflight import read_inflight
from moebatch.data.journal import read_entries
from moebatch.data.side import side_path

CASES = int(os.environ.get("MOEBATCH_CRASH_CASES", "200"))


def random_columns(rng: random.Random, count: int, *, first: int = 0) -> list[dict]:
    columns = []
    for i in range(first, first + count):
        kind = rng.random()
        if kind < 0.05:
            columns.append({})
        elif kind < 0.1:
            columns.append({"id": f"r{i}", "nothing": i})
        else:
            row = {"id": f"r{i}" + "bad" * (kind > 0.97), "prompt": "p" * rng.randrange(1, 5)}
            row["max_tokens"] = rng.choice([1, 3, 9, 40])
            if rng.random() < 0.3:
                row["n"] = rng.randrange(2, 4)
            if rng.random() < 0.3:
                row["logprobs"] = 2
            columns.append(row)
    return columns


def edited(rng: random.Random, columns: list[dict], *, version: int) -> list[dict]:
    """The input as a user may have changed it between two starts."""
    columns = [row for row in columns if rng.random() > 0.05]
    columns += random_columns(rng, rng.randrange(3), first=1000 * version)
    return [
        {**row, "prompt": row["prompt"] + "!"} if "prompt" in row and rng.random() < 0.05 else row
        for row in columns
    ]


class Life:
    """One case: sessions that die until one does not, and what each of them did."""

    def __init__(self, rng: random.Random, folder, monkeypatch, order="input") -> None:
        self.order = order
        self.rng, self.monkeypatch = rng, monkeypatch
        self.out = folder / "out.jsonl"
        self.steps = rng.choice([1, 2, 5])
        self.options = KeepOptions(checkpoint_steps=self.steps)
        self.batch = rng.randrange(1, 7)
        self.computed = self.lost = self.sessions = 0

    def session(self, columns: list[dict]) -> bool:
        """Start once; whether it came to its end."""
        safe = set(journaled(self.out)) if side_path(self.out).exists() else set()
        in_flight = self.in_flight()
        lives = self.rng.choice([self.rng.randrange(1, 12), self.rng.randrange(1, 120), 10**9])
        passes = self.rng.randrange(1, 40) if lives < 10**9 or self.sessions < 2 else 10**9
        system = mortal(self.monkeypatch, self.rng, lives=lives)

        def before_pass() -> None:
            nonlocal passes
            passes -= 1
            if passes == 0:
                system.die()

        batch = self.rng.choice([1, self.batch])  # the next session may take fewer rows at a time
        engine = FakeEngine(batch=batch, before_pass=before_pass)
        kept = []
        self.sessions += 1
        try:
            run_session(self.out, columns, engine, self.options,
                        seen=lambda work: kept.append(work.record.kept),
                        order=self.order)  # fmt: skip
            ended = True
        except Killed:
            ended = False
        self.monkeypatch.undo()
        self.check(engine, safe)
        if not ended:
            self.check_in_flight(in_flight)
        return ended

    def in_flight(self) -> Counter:
        """Tokens of unfinished rows on disk, by row and choice."""
        rows = read_inflight(side_path(self.out) / "inflight.bin")
        return Counter({(k, g.choice): len(g.token_ids) for k, row in rows.items() for g in row})

    def check_in_flight(self, before: Counter) -> None:
        """What was safe of a row is safe still, or the row is finished."""
        after = self.in_flight()
        finished = {entry.key for entry in read_entries(side_path(self.out))}
        for (key, choice), tokens in before.items():
            assert key in finished or after[key, choice] >= tokens

    def check(self, engine, safe) -> None:
        """No finished row is asked for again, and every row that was answered is safe."""
        unchanged = Counter(engine.asked)
        again = safe & set(unchanged) - self.changed
        assert not again, f"{again} were finished and are computed again"
        assert max(unchanged.values(), default=0) <= 1
        good = {row_id for row_id in engine.done if not row_id.endswith("bad")}
        assert good <= set(journaled(self.out)), "a row of an ended pass is not safe"
        self.computed += engine.stats.generated_tokens

    changed: frozenset[str] = frozenset()


@pytest.mark.parametrize("block", range(4))
def test_killed_anywhere_the_output_is_the_same(block, tmp_path, monkeypatch) -> None:
    total = Counter()
    for case in range(CASES * block // 4, CASES * (block + 1) // 4):
        rng = random.Random(case)
        folder = tmp_path / str(case)
        folder.mkdir()
        columns = random_columns(rng, rng.randrange(1, 25))
        life = Life(rng, folder, monkeypatch)
        while not life.session(columns):
            if life.sessions > 200:
                raise AssertionError(f"case {case} does not end")
        plain = uninterrupted(folder / "plain.jsonl", columns, monkeypatch)
        assert life.out.read_bytes() == plain, f"case {case}"
        assert not (side_path(life.out) / "inflight.bin").exists()
        assert not list(folder.glob("*.partial")) and not list(folder.glob("*/*.new"))
        total["sessions"] += life.sessions
        total["tokens"] += life.computed
    assert total["sessions"] > 1.5 * CASES / 4  # they did die


@pytest.mark.parametrize("block", range(2))
def test_the_input_may_change_between_two_starts(block, tmp_path, monkeypatch) -> None:
    for case in range(CASES * block // 4, CASES * (block + 1) // 4):
        rng = random.Random(10_000 + case)
        folder = tmp_path / str(case)
        folder.mkdir()
        columns = random_columns(rng, rng.randrange(1, 20))
        life = Life(rng, folder, monkeypatch)
        while not life.session(columns):
            before = {row["id"]: row for row in columns if row}
            columns = edited(rng, columns, version=life.sessions)
            after = {row["id"]: row for row in columns if row}
            life.changed |= {i for i, row in after.items() if before.get(i) != row}
        plain = uninterrupted(folder / "plain.jsonl", columns, monkeypatch)
        assert life.out.read_bytes() == plain, f"case {case}"


def test_an_output_that_is_there_stays_whole(tmp_path, monkeypatch) -> None:
    """Death at each single write of a run that replaces an output, with what follows."""
    rng = random.Random(4)
    first, more = random_columns(rng, 6), random_columns(rng, 3, first=500)
    (tmp_path / "done").mkdir()
    run_session(tmp_path / "done" / "out.jsonl", first, FakeEngine(batch=3), KeepOptions())
    before = (tmp_path / "done" / "out.jsonl").read_bytes()
    plain = uninterrupted(tmp_path / "plain.jsonl", first + more, monkeypatch)
    deaths = 0
    for lives in range(1, 1000):
        out = shutil.copytree(tmp_path / "done", tmp_path / str(lives)) / "out.jsonl"
        system = mortal(monkeypatch, rng, lives=lives)
        with contextlib.suppress(Killed):
            run_session(out, first + more, FakeEngine(batch=3), KeepOptions(checkpoint_steps=2))
        monkeypatch.undo()
        assert out.read_bytes() in (before, plain)
        run_session(out, first + more, FakeEngine(batch=3), KeepOptions())
        assert out.read_bytes() == plain
        deaths += system.dead
        if not system.dead:
            break
    assert deaths > 30


def test_rows_are_on_the_disk_before_their_tokens_and_the_output_depend_on_it(
    tmp_path, monkeypatch
) -> None:
    """What a power cut may undo: a snapshot without a row's tokens must not outlive the row."""
    events = []

    class Watched:
        def __getattr__(self, name):
            return getattr(os, name)

        def fsync(self, fd):
            events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

        def replace(self, source, target):
            os.replace(source, target)
            events.append(("replace", os.path.basename(target)))

        def write(self, fd, content):
            events.append(("write", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
            return os.write(fd, content)

    monkeypatch.setattr(durable, "os", Watched())
    monkeypatch.setattr("moebatch.data.journal._SYNC_S", 1e9)
    monkeypatch.setattr("moebatch.data.journal._SYNC_ROWS", 10**9)
    columns = [{"id": f"r{i}", "prompt": "p", "max_tokens": 1 + i} for i in range(12)]
    run_session(
        tmp_path / "out.jsonl", columns, FakeEngine(batch=4), KeepOptions(checkpoint_steps=3)
    )
    dirty, exchanged = False, []
    for kind, name in events:
        if name.startswith("journal"):
            dirty = kind == "write"
        elif kind == "replace" and name in ("inflight.bin", "out.jsonl"):
            assert not dirty, f"{name} came before the rows it depends on"
            exchanged.append(name)
    assert exchanged.count("inflight.bin") > 2
    assert exchanged[-1] == "out.jsonl"


def test_in_the_order_of_completion_every_row_is_there_once(tmp_path, monkeypatch) -> None:
    for case in range(CASES // 8):
        rng = random.Random(30_000 + case)
        folder = tmp_path / str(case)
        folder.mkdir()
        columns = random_columns(rng, rng.randrange(1, 20))
        life = Life(rng, folder, monkeypatch, order="completion")
        while not life.session(columns):
            pass
        plain = uninterrupted(folder / "plain.jsonl", columns, monkeypatch)
        assert sorted(life.out.read_bytes().splitlines()) == sorted(plain.splitlines())


def test_failed_rows_are_tried_again_or_kept(tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    columns = [{"id": "a", "prompt": "p"}, {"id": "bbad", "prompt": "p"}, {}]
    run_session(out, columns, FakeEngine(batch=2), KeepOptions())
    before, kept = out.read_bytes(), []
    engine = FakeEngine(batch=2)
    run_session(out, columns, engine, KeepOptions(keep_errors=True),
                seen=lambda work: kept.append(work.record.kept))  # fmt: skip
    assert engine.asked == []
    assert (kept[0].rows, kept[0].rows_retried) == (2, 0)
    engine = FakeEngine(batch=2)
    run_session(out, columns, engine, KeepOptions(),
                seen=lambda work: kept.append(work.record.kept))  # fmt: skip
    assert engine.asked == ["bbad"]
    assert (kept[1].rows, kept[1].rows_retried) == (1, 1)
    assert out.read_bytes() == before


def test_tokens_lost_are_those_since_the_last_checkpoint(tmp_path, monkeypatch) -> None:
    """Counted by the engine, told by the next run, bounded by the interval."""
    for case in range(CASES // 3):
        rng = random.Random(20_000 + case)
        folder = tmp_path / str(case)
        folder.mkdir()
        out, steps, batch = folder / "out.jsonl", rng.randrange(1, 6), rng.randrange(1, 9)
        columns = [
            {"id": f"r{i}", "prompt": "p", "max_tokens": 30, "n": 1 + i % 2} for i in range(12)
        ]
        options = KeepOptions(checkpoint_steps=steps)
        generated = safe_before = 0
        for _ in range(rng.randrange(1, 5)):
            system = mortal(monkeypatch, rng, lives=10**9)
            engine = FakeEngine(batch=batch)
            left = rng.randrange(1, 40)

            def before_pass(system=system) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    system.die()

            engine._before_pass = before_pass
            try:
                run_session(out, columns, engine, options)
            except Killed:
                pass
            finally:
                monkeypatch.undo()
            generated = safe_before + engine.stats.generated_tokens
            rows = read_inflight(side_path(out) / "inflight.bin")
            finished = journaled(out)
            in_flight = sum(len(one.token_ids) for row in rows.values() for one in row)
            told = []
            run_session_start(out, options, told)
            safe = sum(finished.values()) + told[0].in_flight_safe
            assert in_flight >= told[0].in_flight_safe
            assert told[0].tokens_lost == generated - safe
            assert told[0].tokens_lost <= steps * batch
            safe_before = safe


def run_session_start(out, options, told) -> None:
    """Start, look at what was kept, and die before anything is computed."""

    class Seen:
        def __init__(self, record) -> None:
            self.tokens_lost = record.kept.tokens_lost
            self.in_flight_safe = record.tokens_in_flight

    def look(work) -> None:
        told.append(Seen(work.record))
        raise Killed

    with pytest.raises(Killed):
        run_session(out, [], FakeEngine(batch=1), options, seen=look)


def test_rows_have_places() -> None:
    rows = as_rows([{"id": "a", "prompt": "p"}, {}])
    assert [row.index for row in rows] == [0, 1]
