"""Any bytes in a file: one output row for each line that is not blank, never a traceback.

MOEBATCH_FUZZ=100000 looks longer; tests/fuzz_reader.py goes on for as long as it is told.
"""

import os
import random
from pathlib import Path

import pytest
from fuzz_reader import SEEDS, check, mutated, output_lines
from hypothesis import example, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("MOEBATCH_FUZZ", "150"))
any_case = settings(max_examples=EXAMPLES, deadline=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@any_case
@given(st.binary(max_size=300))
@example(b"\xef\xbb\xbf\xef\xbb\xbf{}")
@example(b"\r\n\r{}\r\r\n\x0b\x0c\x1c\n")
@example(b"\xff\xfe{\x00}\x00")
@example(b'{"prompt":"a"}\n' * 30)
@example(b'{"id":"\\ud800","prompt":"a"}\n' * 2)
@example(b'{"id":"x","body":{"prompt":"a"},"custom_id":{"a":[]}}')
def test_arbitrary_bytes(folder, data) -> None:
    check(folder / "x.jsonl", data)


@any_case
@given(st.integers(0, 2**32))
def test_lines_with_some_damage(folder, seed) -> None:
    check(folder / "x.jsonl", mutated(random.Random(seed)))


@any_case
@given(st.integers(0, 2**32), st.sampled_from(["x.csv", "x.txt", "x.json", "x.parquet"]))
def test_other_formats_with_some_damage(folder, seed, name) -> None:
    check(folder / name, mutated(random.Random(seed)))


def test_the_seeds_are_worth_damaging(folder) -> None:
    """Most of them are good rows: damage to nonsense would find nothing."""
    path = folder / "x.jsonl"
    path.write_bytes(b"\n".join(SEEDS))
    answered = [line for line in output_lines(path) if b'"error": null' in line]
    assert len(answered) >= 5
