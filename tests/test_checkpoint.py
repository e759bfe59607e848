"""Safetensors files: what was written is read byte by byte, and damage is always a `ModelError`."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moebatch.errors import ModelError
from moebatch.model.checkpoint import Checkpoint, read_json
from moebatch.model.families.parts import Part, Source

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILES = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def tensors_of(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "a": random(3, 5),
        "b.half": random(7, 2).to(torch.bfloat16),
        "c.fp16": random(1, 9).to(torch.float16),
        "d.vector": random(11),
        "e.scalar": random(),
        "f.empty": random(0, 4),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def read(checkpoint: Checkpoint, name: str) -> bytes:
    entry = checkpoint.entry(name)
    buffer = bytearray(entry.num_bytes)
    checkpoint.read_into(entry, memoryview(buffer))
    return bytes(buffer)


def write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Two shards and an index; returns the index's map."""
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    write_index(directory, {"metadata": {}, "weight_map": weight_map})
    return weight_map


def write_index(directory: Path, index: object) -> None:
    (directory / INDEX).write_text(json.dumps(index))


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def assert_model_error(directory: Path, *fragments: str) -> None:
    with pytest.raises(ModelError) as caught:
        Checkpoint(directory).close()
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("sharded", [False, True])
def test_reads_what_safetensors_wrote(sharded, tmp_path) -> None:
    tensors = tensors_of()
    if sharded:
        write_shards(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            entry = checkpoint.entry(name)
            assert tuple(tensor.shape) == entry.shape
            assert str(tensor.dtype) == f"torch.{entry.dtype}"
            assert raw(tensor) == read(checkpoint, name)


@FILES
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_shapes_read_back(tmp_path, shapes, dtype) -> None:
    tensors = {f"t{k}": torch.randn(shape).to(dtype) for k, shape in enumerate(shapes)}
    save_file(tensors, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        assert all(raw(t) == read(checkpoint, name) for name, t in tensors.items())


def test_close_gives_all_files_back(tmp_path) -> None:
    write_shards(tmp_path, tensors_of())
    before = num_open_files()
    with Checkpoint(tmp_path) as checkpoint:
        assert before + 2 == num_open_files()
    assert before == num_open_files()
    checkpoint.close()


def test_a_damaged_shard_leaves_no_file_open(tmp_path) -> None:
    """Guards: the shards before a damaged one stayed open."""
    write_shards(tmp_path, tensors_of())
    (tmp_path / "two.safetensors").write_bytes(b"12345678 garbage")
    before = num_open_files()
    assert_model_error(tmp_path, "two.safetensors")
    assert before == num_open_files()


def test_missing_files(tmp_path) -> None:
    assert_model_error(tmp_path, "holds no model.safetensors")
    write_shards(tmp_path, tensors_of())
    (tmp_path / "two.safetensors").unlink()
    assert_model_error(tmp_path, "1 of 2 weight files", "two.safetensors")
    (tmp_path / "one.safetensors").unlink()
    assert_model_error(tmp_path, "2 of 2 weight files")


def test_a_directory_in_place_of_the_file(tmp_path) -> None:
    (tmp_path / SINGLE).mkdir()
    assert_model_error(tmp_path, "cannot read")


@pytest.mark.parametrize(
    "index",
    [
        [],
        {},
        {"weight_map": {}},
        {"weight_map": ["one.safetensors"]},
        {"weight_map": {"a": 3}},
        {"weight_map": {"a": None, "b": "one.safetensors"}},
        {"weight_map": {"a": ["one.safetensors"]}},
        {"weight_map": {"a": ""}},
        {"weight_map": {"a": ".."}},
        {"weight_map": {"a": "../one.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "x" * 300}},
        {"weight_map": {"a": "nul\x00.safetensors"}},
        {"weight_map": {"a": "two\nlines.safetensors"}},
    ],
)
def test_nonsense_in_the_index(index, tmp_path) -> None:
    """Guards: names that are no text were a TypeError, long ones an OSError."""
    write_index(tmp_path, index)
    assert_model_error(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\xfa", b"[" * 100_000, b"null", b'"a"'])
def test_nonsense_in_json(text, tmp_path) -> None:
    """Guards: deeply nested brackets were a RecursionError."""
    (tmp_path / INDEX).write_bytes(text)
    assert_model_error(tmp_path, INDEX)
    with pytest.raises(ModelError):
        read_json(tmp_path / INDEX)
    with pytest.raises(ModelError):
        read_json(tmp_path / "absent.json")


def test_missing_tensor(tmp_path) -> None:
    save_file(tensors_of(), tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
            checkpoint.entry("lm_head.weight")
        with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
            checkpoint.check(
                [Part(name="head", shape=(3, 5), sources=(Source(name="lm_head.weight"),))]
            )


def test_check_compares_shapes_and_types(tmp_path) -> None:
    tensors = {
        "q": torch.zeros(6, 4),
        "k": torch.zeros(2, 4),
        "wide": torch.zeros(2, 5),
        "half": torch.zeros(2, 4, dtype=torch.bfloat16),
        "norm": torch.zeros(4),
        "scalar": torch.zeros(()),
    }
    save_file(tensors, tmp_path / SINGLE)

    def part(shape: tuple[int, ...], *sources: str) -> Part:
        found = tuple(Source(name=source) for source in sources)
        return Part(name="part", shape=shape, sources=found)

    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.check([part((8, 4), "q", "k"), part((4,), "norm"), part((2, 4), "half")])
        for wrong in (
            part((9, 4), "q", "k"),
            part((4, 8), "q", "k"),
            part((8, 4), "q", "wide"),
            part((8, 4), "q", "half"),
            part((5,), "norm"),
            part((1, 4), "norm"),
            part((4, 1), "norm"),
            part((1,), "scalar"),
        ):
            with pytest.raises(ModelError) as caught:
                checkpoint.check([part((4,), "norm"), wrong])
            assert "\n" not in str(caught.value)


@FILES
@given(data=st.data())
def test_truncation_at_any_point(tmp_path, data) -> None:
    save_file(tensors_of(), tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    (tmp_path / SINGLE).write_bytes(whole[:cut])
    assert_model_error(tmp_path, SINGLE)


def test_bytes_after_the_last_tensor(tmp_path) -> None:
    save_file(tensors_of(), tmp_path / SINGLE)
    with (tmp_path / SINGLE).open("ab") as file:
        file.write(b"x")
    assert_model_error(tmp_path, "too long")


def test_a_file_that_shrinks_after_it_was_opened(tmp_path) -> None:
    save_file({"a": torch.randn(64)}, tmp_path / SINGLE)
    size = (tmp_path / SINGLE).stat().st_size
    with Checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / SINGLE, size - 1)
        with pytest.raises(ModelError, match="ends inside tensor a"):
            read(checkpoint, "a")


@FILES
@given(content=st.binary(max_size=60))
def test_garbage_file(tmp_path, content) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    assert_model_error(tmp_path, SINGLE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)  # fmt: skip


@FILES
@given(
    dtype=st.sampled_from(["F32", "BF16"]) | json_values,
    shape=st.lists(st.integers(-3, 3) | st.floats() | json_values, max_size=3) | json_values,
    offsets=st.lists(st.integers(-4, 20) | st.floats() | json_values, max_size=3) | json_values,
    key=st.sampled_from(["data_offsets", "dtype", "shape", None]),
)
def test_header_fields_of_any_kind(tmp_path, dtype, shape, offsets, key) -> None:
    """A header of JSON values of any kind either describes the file exactly, or is a ModelError."""
    info = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    info.pop(key, None)
    write_header(tmp_path / SINGLE, {"t": info}, bytes(12))
    try:
        with Checkpoint(tmp_path) as checkpoint:
            assert bytes(12) == read(checkpoint, "t")
    except ModelError as error:
        assert "\n" not in str(error)


def entry_json(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"a"' * 3000,
        b"[" * 100_000,
        {"a": 3},
        {"a": {}},
        {"a": entry_json("F32", [4], -4, 12)},  # begins in the header
        {"a": entry_json("F32", [4], 16, 0)},
        {"a": entry_json("F32", [-4], 16, 0)},
        {"a": entry_json("F32", [-2, -2], 0, 16)},
        {"a": entry_json("F32", [3], 0, 16)},
        {"a": entry_json("F32", [3], 4, 16)},  # a gap before
        {"a": entry_json("F32", [4], 0.0, 16.0)},
        {"a": entry_json("F32", ["4"], 0, 16)},
        {"a": entry_json("F32", [4.5], 0, 16)},
        {"a": entry_json("F32", [float("inf")], 0, 16)},
        {"a": entry_json("F32", [float("nan")], 0, 16)},
        {"a": entry_json("F32", [True, 4], 0, 16)},
        {"a": entry_json("F32", [10**4299], 0, 4 * 10**4299)},
        {"a": entry_json(["F32"], [4], 0, 16)},
        {"a": entry_json("F32", [2], 0, 8), "b": entry_json("F32", [3], 4, 16)},  # overlap
        {"a": entry_json("F32", [2], 0, 8), "b": entry_json("F32", [2], 0, 8)},
        {"a": entry_json("F32", [1], 0, 4), "b": entry_json("F32", [2], 8, 16)},  # a gap between
        {"two\nlines": entry_json("I8", [16], 0, 16)},
        {"a": entry_json("I8\n", [16], 0, 16)},
    ],
)
def test_headers_that_lie(header, tmp_path) -> None:
    """Guards: negative, overlapping and fractional offsets were believed, infinity overflowed."""
    write_header(tmp_path / SINGLE, header, bytes(16))
    assert_model_error(tmp_path, "its header cannot be read")


@pytest.mark.parametrize("length", [0, 1, 10**6, 10**9, 2**63, 2**64 - 1])
def test_header_length_that_lies(length, tmp_path) -> None:
    header = json.dumps({"a": entry_json("F32", [4], 0, 16)}).encode()
    (tmp_path / SINGLE).write_bytes(length.to_bytes(8, "little") + header + bytes(16))
    assert_model_error(tmp_path, "its header cannot be read")


@pytest.mark.parametrize("dtype", ["F64", "I8", "BOOL", "F8_E5M2", "NEW"])
def test_unsupported_types_are_named(dtype, tmp_path) -> None:
    write_header(tmp_path / SINGLE, {"a": entry_json(dtype, [16], 0, 16)}, bytes(16))
    assert_model_error(tmp_path, dtype, "not supported")


def test_a_shard_that_cannot_be_opened(tmp_path, monkeypatch) -> None:
    """Guards: an OSError, and the files opened before it stayed open."""
    write_shards(tmp_path, tensors_of())
    really_open, before = os.open, num_open_files()

    def refuse(path: Path, *args: int) -> int:
        if Path(path).name == "two.safetensors":
            raise OSError(24, "Too many open files")
        return really_open(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    assert_model_error(tmp_path, "Too many open files")
    monkeypatch.undo()
    assert before == num_open_files()
