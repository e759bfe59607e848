"""What a run keeps on disk comes back as it was, and damage costs what is damaged, no more."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.data import durable
from moebatch.data.inflight import Pace, read_inflight, write_inflight
from moebatch.data.journal import Journal, parts, read_entries, request_key
from moebatch.data.manifest import Manifest, Session, differences, read_manifest
from moebatch.data.requests import (
    Choice,
    Completion,
    Generated,
    Request,
    RowError,
    SamplingParams,
    TokenLogprob,
)

floats = st.floats(allow_nan=False)
ids = st.integers(0, 2**32 - 1)
logprobs = st.builds(
    TokenLogprob, token_id=ids, logprob=floats, top=st.lists(st.tuples(ids, floats)).map(tuple)
)
choices = st.builds(
    Choice,
    index=st.integers(0, 9),
    token_ids=st.lists(ids).map(tuple),
    text=st.text(st.characters(codec=None)),
    finish_reason=st.sampled_from(["stop", "length"]),
    stop_reason=st.none() | st.text() | ids,
    logprobs=st.none() | st.lists(logprobs).map(tuple),
)


def request(index: int, row_id: str = "", **params) -> Request:
    return Request(
        index=index,
        id=row_id or f"r{index}",
        prompt_token_ids=(1, 2, index),
        params=SamplingParams(max_tokens=5, **params),
    )


def completion(index: int, text: str = "x") -> Completion:
    choice = Choice(index=0, token_ids=(7, 8), text=text, finish_reason="length")
    return Completion(request=request(index), choices=(choice,))


def written(folder, outcomes, *, session: int = 0) -> Journal:
    journal = Journal(folder, session=session)
    for k, outcome in enumerate(outcomes):
        journal.put(request_key(request(k)), outcome)
    journal.sync()
    journal.close()
    return journal


@given(said=st.lists(choices, min_size=1), row_id=st.text(st.characters(codec=None), min_size=1))
@settings(max_examples=60, deadline=None)
def test_an_answer_comes_back_to_the_last_bit(said, row_id, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("journal")
    asked = request(3, row_id)
    done = Completion(request=asked, choices=tuple(said))
    journal = Journal(folder, session=2)
    journal.put(request_key(asked), done)
    journal.flush()
    journal.close()
    again = Journal(folder, session=3)
    entry = again.find(request_key(asked))
    again.close()
    assert entry is not None
    assert (entry.id, entry.session) == (row_id, 2)
    assert entry.outcome(asked) == done
    assert entry.num_tokens == again.num_tokens == sum(len(c.token_ids) for c in said)
    for line in parts(folder)[0].read_text().splitlines():
        json.loads(line)


def test_an_error_comes_back_too(tmp_path) -> None:
    error = RowError(index=0, id="r0", code="oom_row", message="too much\nby far", line=4)
    written(tmp_path, [error])
    journal = Journal(tmp_path, session=1)
    entry = journal.find(request_key(request(0)))
    journal.close()
    assert entry is not None
    assert entry.failed
    assert entry.outcome(request(0)) == error


def test_a_journal_cut_anywhere_keeps_every_whole_line(tmp_path) -> None:
    written(tmp_path, [completion(k, "line\n\u2028" * k) for k in range(4)])
    path = parts(tmp_path)[0]
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = content[:length].count(b"\n")
        journal = Journal(tmp_path, session=1)
        assert journal.num_rows == whole
        assert journal.num_damaged == 0
        found = [journal.find(request_key(request(k))) is not None for k in range(4)]
        assert found == [k < whole for k in range(4)]
        assert path.stat().st_size == content[:length].rfind(b"\n") + 1  # the torn line is gone
        journal.put(request_key(request(9)), completion(9))
        journal.flush()
        journal.close()
        assert [entry.id for entry in read_entries(tmp_path)][-1] == "r9"


def test_a_flipped_byte_costs_one_row(tmp_path) -> None:
    written(tmp_path, [completion(k) for k in range(5)])
    path = parts(tmp_path)[0]
    content = path.read_bytes()
    for at in range(0, len(content) - 1, 7):
        damaged = bytearray(content)
        damaged[at] ^= 0x15
        path.write_bytes(damaged)
        journal = Journal(tmp_path, session=1)
        found = sum(journal.find(request_key(request(k))) is not None for k in range(5))
        journal.close()
        newline = content[at : at + 1] == b"\n"  # then two lines are one
        assert found == (3 if newline else 4)


def test_the_later_line_of_a_row_counts(tmp_path) -> None:
    key = request_key(request(0))
    journal = Journal(tmp_path, session=0)
    journal.put(key, RowError(index=0, id="r0", code="oom_row", message="m"))
    journal.put(key, completion(0, "good"))
    journal.sync()
    journal.close()
    again = Journal(tmp_path, session=1)
    entry = again.find(key)
    again.close()
    assert entry is not None
    assert not entry.failed


def test_parts_are_bounded_and_all_of_them_are_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moebatch.data.journal._PART_BYTES", 300)
    journal = Journal(tmp_path, session=0)
    for k in range(12):
        journal.put(request_key(request(k)), completion(k))
        journal.sync()
    journal.close()
    assert len(parts(tmp_path)) > 3
    again = Journal(tmp_path, session=1)
    assert all(again.find(request_key(request(k))) for k in range(12))
    again.close()


def test_a_key_says_what_the_answer_depends_on() -> None:
    base = request_key(request(0))
    assert request_key(replace(request(0), index=5)) == base  # a row may move
    assert request_key(replace(request(0), truncated_tokens=1, clamped_from=9)) == base
    assert request_key(request(0, temperature=1.0)) == base  # said or not, it is the default
    others = [request(1), request(0, "q"), request(0, temperature=0.5), request(0, seed=1),
              request(0, n=2), request(0, stop=("a",)), request(0, logprobs=0)]  # fmt: skip
    assert len({base, *map(request_key, others)}) == 1 + len(others)


@given(
    st.dictionaries(
        st.binary(min_size=16, max_size=16),
        st.lists(
            st.tuples(st.lists(ids, min_size=1).map(tuple), st.lists(logprobs).map(tuple)),
            min_size=1,
            max_size=3,
        ),
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_tokens_come_back_to_the_last_bit(tmp_path_factory, rows) -> None:
    path = tmp_path_factory.mktemp("inflight") / "inflight.bin"
    said = {
        key: tuple(
            Generated(choice=k, token_ids=tokens, logprobs=probs)
            for k, (tokens, probs) in enumerate(of_row)
        )
        for key, of_row in rows.items()
    }
    write_inflight(path, [(key, one) for key, of_row in said.items() for one in of_row])
    assert read_inflight(path) == said
    assert not path.with_name("inflight.bin.new").exists()


def test_a_damaged_snapshot_is_no_snapshot(tmp_path) -> None:
    path = tmp_path / "inflight.bin"
    assert read_inflight(path) == {}
    write_inflight(path, [(b"k" * 16, Generated(choice=0, token_ids=(1, 2, 3)))])
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at])
        assert read_inflight(path) == {}
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert read_inflight(path) == {}


def test_snapshots_are_due_by_steps_or_by_what_they_cost(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    steps = Pace(3)
    assert [steps.step() for _ in range(3)] == [False, False, True]
    steps.taken(9.0)
    assert not steps.step()
    timed = Pace(None)
    assert not timed.step()
    now += 5.1
    assert timed.step()
    timed.taken(1.0)
    now += 100.0
    assert not timed.step()
    now += 101.0
    assert timed.step()


def test_a_manifest_comes_back(tmp_path) -> None:
    session = Session(started_at="now", argv=("moebatch", "run"), cwd="/", numeric={"dtype": "f"})
    manifest = Manifest(run_id="r", created=5, fingerprint={"a": {"b": 1}, "c": None})
    manifest = manifest.with_session(session)
    manifest.write(tmp_path / "manifest.json")
    assert read_manifest(tmp_path / "manifest.json") == manifest
    assert manifest.numeric() == {"dtype": "f"}
    assert read_manifest(tmp_path / "none.json") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 2}', '{"a": 1}', "\xff"])
def test_a_file_that_is_no_manifest(content, tmp_path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content.encode("latin-1"))
    assert read_manifest(path) is None


def test_differences_name_each_field() -> None:
    one = {"model": "m", "defaults": {"temperature": 0.5, "stop": ("a",)}, "same": [1]}
    other = {"model": "m", "defaults": {"stop": ["a"], "top_p": 0.9}, "same": [1], "seed": 1}
    assert differences(one, other) == [
        "defaults.temperature was 0.5, is not set",
        "defaults.top_p was not set, is 0.9",
        "seed was not set, is 1",
    ]


def test_a_system_that_takes_few_bytes_at_a_time_gets_them_all(tmp_path, monkeypatch) -> None:
    class Slow:
        def __getattr__(self, name):
            return getattr(os, name)

        def write(self, fd, content):
            return os.write(fd, bytes(content)[:3])

    monkeypatch.setattr(durable, "os", Slow())
    file = durable.AppendFile(tmp_path / "a")
    file.write(b"0123456789" * 5)
    assert file.read(8, 5) == b"89012"
    file.write(b"end")
    file.sync()
    file.close()
    assert (tmp_path / "a").read_bytes() == b"0123456789" * 5 + b"end"
