"""Measures an accelerator through the interface that the engine uses: products, memory, both copies."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from moebatch.model.linear import ComputeType
from moebatch.plan.machine import Processor
from moebatch.runtime.device import Device, closed_on_error

_LONG_ENOUGH_S = 0.02
_LARGEST = 32 << 20
_SMALLEST = 1 << 20
_SIDES = (512, 1024, 2048, 4096, 8192)


def measure_device(device: Device, *, dtype: str, compute: ComputeType,
                   ) -> tuple[Processor, float, float]:  # fmt: skip
    """The accelerator's figures for weights of a type, and the bytes per second of both directions.

    About a second; it takes at most half of the device's memory and gives it back. A device that
    cannot even be measured is closed.
    """
    with closed_on_error(device):
        flops = _products(device, getattr(torch, dtype), compute)
        bandwidth = _bandwidth(device)
        link = _copies(device, device.copy_in)
        back = _copies(device, lambda on_device, pinned: device.copy_out(pinned, on_device))
        device.memory.peak = device.memory.used  # what a run reports is its own
    processor = Processor(
        name=device.name,
        memory_bytes=float(device.memory.limit),
        bandwidth=bandwidth,
        flops={dtype: flops},
    )
    return processor, link, back


def _products(device: Device, dtype: torch.dtype, compute: ComputeType) -> float:
    """FLOP/s of y = x W^T, with matrices large enough for it to take a while."""
    best = 0.0
    for side in _SIDES:
        size = side * side * dtype.itemsize
        if size > _room(device):
            break
        weight = device.empty((side, side), dtype)
        weight.zero_()
        product = device.linear(weight, compute)
        x = device.upload(torch.zeros(side // 2, side, dtype=product.dtype))
        seconds = _seconds(device, lambda product=product, x=x: product(x))  # type: ignore[misc]
        device.free(weight)
        best = max(best, side * side * side / seconds)
        if seconds > _LONG_ENOUGH_S:
            break
    return best or 1e9  # a device without room for one small matrix computes as it may


def _bandwidth(device: Device) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    size = min(_LARGEST, _room(device)) // 2
    source, target = (device.empty((size,), torch.uint8) for _ in range(2))
    seconds = _seconds(device, lambda: target.copy_(source))
    device.free(source)
    device.free(target)
    return 2 * size / seconds


def _copies(device: Device, copy: Callable[[Tensor, Tensor], object]) -> float:
    """Bytes per second of one direction, pinned."""
    size = min(_SMALLEST, _room(device))
    while True:
        held, pinned = device.empty((size,), torch.uint8), device.pinned(size)
        seconds = _seconds(device, lambda held=held, pinned=pinned: copy(held, pinned))  # type: ignore[misc]
        device.free(held)
        if seconds > _LONG_ENOUGH_S or 4 * size > min(_LARGEST, _room(device)):
            return size / seconds
        size *= 4


def pageable_bandwidth(device: Device) -> float:
    """Bytes per second from host memory that is not pinned: what a plain copy gets."""
    source = torch.zeros(min(_LARGEST, _room(device)), dtype=torch.uint8)
    target = device.empty((source.numel(),), torch.uint8)
    seconds = _seconds(device, lambda: device.copy_in(target, source))
    device.free(target)
    return source.numel() / seconds


def _room(device: Device) -> int:
    return max(1, (device.memory.limit - device.memory.used) // 2)


def _seconds(device: Device, call: Callable[[], object]) -> float:
    """The least of a few calls, each to its end on the device, after one that does not count."""
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        if device.torch_device.type == "cuda":
            torch.cuda.synchronize(device.torch_device)
        taken.append(time.perf_counter() - start)
    return max(1e-9, min(taken[1:]))
