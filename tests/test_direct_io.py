"""Reading past the page cache against plain reads."""

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from quantised import write_both
from run_engine import request, run, tokens
from safetensors.torch import save_file
from test_quant import FORMATS, linear

import moebatch.model.checkpoint as checkpoints
from moebatch.errors import ModelError
from moebatch.model import direct_io
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.direct_io import Extent, Stage
from moebatch.plan.memory import STAGED_BYTES

SIZE = 3 * direct_io._PIECE + 12_345


@pytest.fixture(scope="module")
def data():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def file(data, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    descriptor = _open(path)
    yield descriptor
    os.close(descriptor)


def _open(path):
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        pytest.skip("this file system reads through its cache only")


def _some_extents(file, count):
    rng = random.Random(7)
    for _ in range(count):
        start = rng.choice([0, 1, 4095, 4096, 4097, rng.randrange(SIZE)])
        most = rng.choice([1, 100, 4096, 50_000, SIZE])
        yield Extent(file, start, rng.randint(0, min(most, SIZE - start)))


@pytest.mark.parametrize("announced", ["nothing", "what comes", "something else"])
def test_equals_plain_reads(file, data, announced) -> None:
    """Any offset and length, with what follows announced rightly, wrongly or not at all."""
    stage, extents = Stage(), list(_some_extents(file, 60))
    for k, extent in enumerate(extents):
        following = None
        if announced == "what comes":
            following = extents[k + 1] if k + 1 < len(extents) else None
        elif announced == "something else":
            following = extents[-k]
        target, cut = np.zeros(extent.num_bytes, dtype=np.uint8), extent.num_bytes * k // 60
        stage.read(extent, [target[:cut], target[cut:]], following)
        assert np.array_equal(target, data[extent.offset : extent.offset + extent.num_bytes])


def test_the_planner_counts_what_is_staged() -> None:
    assert direct_io.STAGED_BYTES < STAGED_BYTES <= 1.5 * direct_io.STAGED_BYTES


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("more", [-5000, 5000, 5_000_000])
def test_what_follows_turns_out_shorter_or_longer(file, data, pieces, more) -> None:
    """Its first pieces are the same as those that were begun."""
    stage, first = Stage(), Extent(file, 7, 1000)
    asked = Extent(file, 0, pieces * direct_io._PIECE - 6000)
    announced = Extent(file, 0, min(asked.num_bytes + more, SIZE))
    stage.read(first, [np.zeros(1000, dtype=np.uint8)], announced)
    for extent in (asked, first):
        target = np.zeros(extent.num_bytes, dtype=np.uint8)
        stage.read(extent, [target])
        assert np.array_equal(target, data[extent.offset : extent.offset + extent.num_bytes])


def test_threads_read_beside_each_other(file, data) -> None:
    def read(extent):
        target = np.zeros(extent.num_bytes, dtype=np.uint8)
        Stage().read(extent, [target])
        return np.array_equal(target, data[extent.offset : extent.offset + extent.num_bytes])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, _some_extents(file, 16)))


def test_a_file_that_ends_early(file) -> None:
    with pytest.raises(EOFError):
        Stage().read(Extent(file, SIZE - 10, 11), [np.zeros(11, dtype=np.uint8)])


@pytest.fixture
def large(tmp_path):
    """A checkpoint of tensors that are worth reading so, at odd offsets."""
    tensors = {name: torch.randn(n).bfloat16() for name, n in
               (("a", 3), ("b", 300_001), ("c", 5_000_017), ("d", 131_072))}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def _same(checkpoint, tensors, **how):
    for name, tensor in tensors.items():
        buffer = bytearray(tensor.numel() * 2)
        checkpoint.read_into(checkpoint.entry(name), memoryview(buffer), **how)
        if torch.frombuffer(buffer, dtype=torch.bfloat16).ne(tensor).any():
            return False
    return True


def test_a_checkpoint_reads_the_same_past_the_cache(large) -> None:
    with Checkpoint(large[0]) as checkpoint:
        _open(large[0] / "model.safetensors")  # skips where that cannot be
        assert _same(checkpoint, large[1], cached=False)
        assert list(checkpoint._direct.values()) != [None]


@pytest.mark.parametrize("cached", [True, False])
def test_neighbours_are_read_at_once(large, cached) -> None:
    """Up to a size; each goes where it belongs."""
    tensors = large[1]
    with Checkpoint(large[0]) as checkpoint:
        runs = checkpoints.runs_of(checkpoint.entry(name) for name in tensors)
        assert sorted(len(run) for run in runs) == [1, 1, 2]  # "c" is too large
        for run in runs:
            buffers = [bytearray(entry.num_bytes) for entry in run]
            checkpoint.read_run(run, [memoryview(b) for b in buffers], cached=cached,
                                following=runs[0])  # fmt: skip
            for entry, buffer in zip(run, buffers, strict=True):
                assert torch.frombuffer(buffer, dtype=torch.bfloat16).equal(tensors[entry.name])


@pytest.mark.parametrize("refused", ["when opened", "when read"])
def test_a_file_system_that_has_only_its_cache(large, refused, monkeypatch) -> None:
    opens, fill = os.open, direct_io._fill

    def no_direct(path, flags, *rest, **more):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return opens(path, flags, *rest, **more)

    def no_read(piece, memory):
        raise OSError(errno.EINVAL, "Invalid argument")

    if refused == "when opened":
        monkeypatch.setattr(os, "open", no_direct)
    else:
        monkeypatch.setattr(direct_io, "_fill", no_read)
        assert fill is not no_read
    with Checkpoint(large[0]) as checkpoint:
        assert _same(checkpoint, large[1], cached=False)
        assert list(checkpoint._direct.values()) == [None]


def test_a_disk_that_fails_says_so(large, monkeypatch) -> None:
    def broken(piece, memory):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(direct_io, "_fill", broken)
    with Checkpoint(large[0]) as checkpoint, pytest.raises(ModelError, match="Input/output"):
        checkpoint.read_into(checkpoint.entry("c"), memoryview(bytearray(10_000_034)), cached=False)


def test_small_tensors_stay_in_the_cache(large, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "_LEAST_DIRECT", 1 << 40)
    with Checkpoint(large[0]) as checkpoint:
        assert _same(checkpoint, large[1], cached=False)
        assert not checkpoint._direct


@pytest.fixture
def everything_direct(monkeypatch):
    """Tiny tensors too are read past the cache, in many pieces."""
    monkeypatch.setattr(checkpoints, "_LEAST_DIRECT", 1)
    monkeypatch.setattr(direct_io, "_PIECE", 8192)


@pytest.mark.parametrize("regime", ["stream", "cache"])
def test_the_engine_reads_the_same(regime, tiny_models, everything_direct, monkeypatch) -> None:
    work = [request(i, [5, 6, 7 + i], max_tokens=6) for i in range(4)]
    sizes = {"weights_resident": 0.0, "regime": regime, "expert_slots": 3}
    found = tokens(run(tiny_models("mixtral")[1], work, **sizes))
    monkeypatch.undo()
    assert found == tokens(run(tiny_models("mixtral")[1], work, weights_resident=1.0))


@pytest.mark.parametrize("kind", list(FORMATS))
def test_what_is_quantised_is_read_the_same(kind, tiny_models, tmp_path, everything_direct,
                                            monkeypatch) -> None:  # fmt: skip
    """Numbers and scales lie apart; what is announced is what the thread then reads."""
    reads, read = [], Checkpoint.read_run

    def listening(checkpoint, run, buffers, *, cached=True, following=(), **how):
        if not cached:
            reads.append((tuple(run), tuple(following)))
        read(checkpoint, run, buffers, cached=cached, following=following, **how)

    make, config = FORMATS[kind]
    family = "deepseek_v3" if kind == "fp8_blocks" else "mixtral"
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    write_both(tiny_models(family)[1], quantised, plain, make=make, config=config, wanted=linear)
    monkeypatch.setattr(Checkpoint, "read_run", listening)
    work = [request(i, [5, 6, 7 + i], max_tokens=6) for i in range(4)]
    found = tokens(run(quantised, work, weights_resident=0.0))
    monkeypatch.undo()
    assert found == tokens(run(plain, work, weights_resident=1.0))
    assert len(reads) > 10 and all(then for _, then in reads)
    for (_, then), (after, _) in pairwise(reads):
        assert then == after
