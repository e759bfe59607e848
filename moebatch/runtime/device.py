"""What an accelerator is to the rest of the program: memory with a budget, lanes, copies.

Implementations: `moebatch.runtime.cuda`, and `moebatch.runtime.emulated` that runs anywhere. A machine
without accelerator needs none: its top tier is host memory, and `Forward` computes there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from moebatch.errors import DeviceMemoryFull
from moebatch.model.linear import ComputeType, Linear
from moebatch.plan.schedule import Lane
from moebatch.runtime.executor import Queue
from moebatch.units import format_bytes

# Lanes with a thread of their own; the gpu lane is launched from the caller's thread.
BACKGROUND_LANES = (Lane.CPU, Lane.H2D, Lane.D2H, Lane.STAGE, Lane.DISK)


_HINT = "raise --gpu-memory, or lower --weights-resident or --micro-batch-size"


@contextmanager
def memory_errors() -> Iterator[None]:
    """What PyTorch says of an accelerator without memory becomes DeviceMemoryFull."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).split(".")[0]
        raise DeviceMemoryFull(f"the accelerator's memory is full: {said}", hint=_HINT) from None


@contextmanager
def closed_on_error(device: "Device") -> Iterator[None]:
    """What owns the device could not be made, so nobody else will close it."""
    try:
        yield
    except BaseException:
        device.close()
        raise


class Device(Protocol):
    """An accelerator. Handlers of gpu, h2d and d2h tasks run under the queues that it gives."""

    name: str
    emulated: bool
    memory: "Budget"
    grouped: bool  # whether it has grouped products (moebatch.model.grouped)

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors lie, for PyTorch."""
        ...

    @property
    def queues(self) -> Mapping[Lane, Queue]:
        """Its lanes."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the device. Raises: DeviceMemoryFull beyond the budget."""
        ...

    def free(self, tensor: Tensor) -> None:
        """Give memory back."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory that copies can run from and to on their own: [num_bytes] uint8, exactly."""
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """A small tensor on the device, at once; not for weights or activations."""
        ...

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        """Host to device, on the lane that calls."""
        ...

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """Device to host, on the lane that calls."""
        ...

    def spoil(self, tensor: Tensor) -> None:
        """What lies there will not be read again; an emulated device sees to it."""
        ...

    def linear(self, weight: Tensor, compute: ComputeType) -> Linear:
        """y = x W^T on the device, for a weight that lies in its memory."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Budget:
    """Bytes in use under a hard limit."""

    def __init__(self, limit: int, name: str) -> None:
        self._name = name
        self.limit, self.used, self.peak = limit, 0, 0

    def take(self, num_bytes: int) -> None:
        """Raises: DeviceMemoryFull when it is more than what is left."""
        if self.used + num_bytes > self.limit:
            raise DeviceMemoryFull(
                f"{self._name} has {format_bytes(self.limit)} of memory, and "
                f"{format_bytes(self.used + num_bytes)} are needed",
                hint=_HINT,
            )
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def give(self, num_bytes: int) -> None:
        """The inverse."""
        self.used -= num_bytes
        assert self.used >= 0


class Scratch:
    """Named buffers that live from pass to pass and grow as needed, in device memory or pinned."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._on_device: dict[str, Tensor] = {}
        self._pinned: dict[str, Tensor] = {}

    def on_device(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in device memory; what the name stood for before is gone."""
        num_bytes = _bytes(shape, dtype)
        held = self._on_device.get(name)
        if held is None or held.numel() < num_bytes:
            if held is not None:
                self._device.free(self._on_device.pop(name))
            held = self._on_device[name] = self._device.empty((num_bytes,), torch.uint8)
        self._device.spoil(held)
        return held[:num_bytes].view(dtype).view(shape)

    def pinned(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same in pinned host memory."""
        num_bytes = _bytes(shape, dtype)
        held = self._pinned.get(name)
        if held is None or held.numel() < num_bytes:
            more = 0 if held is None else held.numel() * 3 // 2  # pinning is slow: grow rarely
            held = self._pinned[name] = self._device.pinned(max(num_bytes, more))
        self._device.spoil(held)
        return held[:num_bytes].view(dtype).view(shape)

    def free(self) -> None:
        """Give the device's memory back; what lies there is gone."""
        for held in self._on_device.values():
            self._device.free(held)
        self._on_device.clear()


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize
