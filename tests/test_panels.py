"""Panels written piece by piece as weights are read, against those of whole weights."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moebatch.model import checkpoint, direct_io
from moebatch.model.families.parts import Part, Source
from moebatch.model.panels import PanelWriter
from moebatch.native.kernels import load_kernels
from moebatch.native.rounding import PANEL
from moebatch.runtime.page_reader import PageReader

KERNELS = load_kernels(1)
pytestmark = pytest.mark.skipif(KERNELS is None, reason="needs the native kernels")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def packed(weight):
    """The bytes of a weight's panels, made at once."""
    whole = weight.clone()
    KERNELS.pack_in_place(whole)
    return as_bytes(whole)


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [2, 6, 64, 130])
def test_any_pieces_give_the_same_panels(dtype, inputs) -> None:
    """Cut anywhere, inside rows and numbers too, from memory that is not aligned."""
    rng = random.Random(inputs)
    weight = torch.randn(5 * PANEL, inputs).to(dtype)
    expected, rows = packed(weight), as_bytes(weight)
    for cuts in (0, 1, 2, 9, 60):
        ends = [*sorted(rng.randrange(rows.size) for _ in range(cuts)), rows.size]
        memory, start = np.full(rows.size, 255, dtype=np.uint8), 0
        for end in ends:
            odd = np.empty(end - start + 3, dtype=np.uint8)[3:]
            odd[:] = rows[start:end]
            PanelWriter(KERNELS).put(memory, odd, start, inputs=inputs, dtype=dtype)
            start = end
        assert np.array_equal(memory, expected), ends


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a few blocks, so that small files have many."""
    monkeypatch.setattr(direct_io, "_PIECE", 8192)
    monkeypatch.setattr(checkpoint, "_LEAST_DIRECT", 1)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("rows", [PANEL, 3 * PANEL, 3 * PANEL + 5])
def test_a_page_is_read_in_panels(rows, cached, tmp_path, small_pieces) -> None:
    """Two sources one above the other, panels only where both begin with one; the router is left."""
    above, below = torch.randn(rows, 96).bfloat16(), torch.randn(2 * PANEL, 96).bfloat16()
    wide, router = torch.randn(2 * PANEL, 1024).bfloat16(), torch.randn(PANEL, 96).bfloat16()
    save_file({"a": above, "b": below, "w": wide, "r": router}, tmp_path / "model.safetensors")
    parts = (
        Part(name="gate_up", shape=(rows + 2 * PANEL, 96),
             sources=(Source(name="a"), Source(name="b"))),
        Part(name="down", shape=tuple(wide.shape), sources=(Source(name="w"),)),
        Part(name="router", shape=tuple(router.shape), sources=(Source(name="r"),)),
    )  # fmt: skip
    both = torch.cat((above, below))
    with checkpoint.Checkpoint(tmp_path) as weights:
        reader = PageReader(weights, weight_dtype="bfloat16", panels=PanelWriter(KERNELS))
        plan = reader.plan(parts)
        found = reader.read(plan, torch.empty(plan.num_bytes, dtype=torch.uint8), cached=cached)
    whole = (rows + 2 * PANEL) % PANEL == 0
    assert np.array_equal(as_bytes(found["gate_up"]), packed(both) if whole else as_bytes(both))
    assert np.array_equal(as_bytes(found["down"]), packed(wide))
    assert torch.equal(found["router"], router)
