"""Weights turned into the native kernels' panels while they are read, piece by piece.

A piece that has just come from the disk is still in the caches: turning it there costs one pass over
memory less than copying it first and turning the whole page later.
"""

import numpy as np
import torch
from torch import Tensor

from moebatch.model.weights import MATRICES
from moebatch.native.kernels import Kernels
from moebatch.native.rounding import PANEL


class PanelWriter:
    """Puts pieces of weights into pages. For one kind of kernels; any number of threads."""

    def __init__(self, kernels: Kernels) -> None:
        """The kernels whose panels are written."""
        self._kernels = kernels

    def takes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether a part [O, I] becomes panels in its own memory."""
        return (
            name in MATRICES
            and len(shape) == 2
            and dtype.is_floating_point
            and self._kernels.packs_in_place(*shape)
        )

    def panel_bytes(self, inputs: int, dtype: torch.dtype) -> int:
        """Bytes of a panel: of as many rows of a weight as are one."""
        return PANEL * inputs * dtype.itemsize

    def put(self, memory: np.ndarray, found: np.ndarray, at: int, *, inputs: int,
            dtype: torch.dtype) -> None:  # fmt: skip
        """Bytes `found` of whole rows' bytes from `at` on, into `memory` that holds them all.

        All that is before `at` has come already, and `memory` begins with a panel. A panel that is
        not whole yet waits as rows where it will stand.
        """
        step, end = self.panel_bytes(inputs, dtype), at + found.size
        first, last = -(-at // step) * step, end // step * step
        if first > at:  # the rest of a panel
            stop = min(first, end)
            place(memory[at:stop], found[: stop - at])
            if stop == first:
                self._pack(
                    memory[first - step : first], memory[first - step : first], inputs, dtype
                )
        if last > first:
            self._pack(memory[first:last], found[first - at : last - at], inputs, dtype)
        begun = max(first, last)
        if begun < end:
            place(memory[begun:end], found[begun - at :])

    def pack(self, weight: Tensor) -> None:
        """A weight [O, I] whose rows are all there."""
        self._kernels.pack_in_place(weight)

    def _pack(self, panels: np.ndarray, rows: np.ndarray, inputs: int, dtype: torch.dtype) -> None:
        self._kernels.pack_rows(rows.ctypes.data, panels.ctypes.data, dtype=dtype, inputs=inputs,
                                outputs=panels.size // (inputs * dtype.itemsize))  # fmt: skip


def place(target: np.ndarray, found: np.ndarray) -> None:
    """Copy bytes to where they belong, unless they have been read there."""
    if target.ctypes.data != found.ctypes.data:
        np.copyto(target, found)
