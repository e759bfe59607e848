"""An NVIDIA GPU by PyTorch: lanes are streams, signals are events, copies run on their own.

Every lane's tasks are launched from that lane's own thread, so a lane whose task waits for the host
holds up no other. Memory: weights and buffers by plain allocations that live as long as the engine;
what single operations need comes from PyTorch's caching allocator, under the same cap.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from moebatch.model.grouped import can_group
from moebatch.model.linear import ComputeType, Linear
from moebatch.plan.schedule import Lane, Task
from moebatch.runtime.device import Budget
from moebatch.runtime.executor import Handler, Queue, Signal, ThreadQueue

_STREAM_LANES = (Lane.GPU, Lane.H2D, Lane.D2H)
_MARGIN = 0.92  # of the free memory: the context of other libraries, fragmentation


class CudaDevice:
    """One CUDA device; see `moebatch.runtime.device.Device`."""

    emulated = False

    def __init__(self, index: int, *, memory_bytes: int | None = None) -> None:
        """`memory_bytes` caps what this process may use of the device, PyTorch's own use included."""
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        limit = int(free * _MARGIN) if memory_bytes is None else min(memory_bytes, free)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), self._device)
        # Matrix products must round as the host's do: full float32.
        torch.backends.cuda.matmul.allow_tf32 = False
        self.name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        self.memory = Budget(limit, self.name)
        self.grouped = torch.cuda.get_device_capability()[0] >= 8 and can_group(self._device)
        clock = _Clock(self._device)
        self._queues: dict[Lane, Queue] = {
            lane: _StreamQueue(self._device, clock, urgent=lane is not Lane.GPU)
            for lane in _STREAM_LANES
        }
        self._registered: list[Tensor] = []

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        return self._device

    @property
    def queues(self) -> Mapping[Lane, Queue]:
        """A stream each for computation and both directions of the link."""
        return self._queues

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the device; it may be used on every stream, so it is never given back early."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self.memory.take(tensor.nbytes)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Give it back once nothing that was launched can still use it."""
        torch.cuda.synchronize(self._device)
        self.memory.give(tensor.nbytes)

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked memory of exactly this size.

        By registering ordinary memory: PyTorch's own allocator rounds up to powers of two.
        """
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            code = _runtime().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
            torch.cuda.check_error(int(code))
            self._registered.append(tensor)
        return tensor

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy that is there when this returns; page traffic on other streams runs on."""
        copied = tensor.to(self._device)
        torch.cuda.current_stream(self._device).synchronize()
        return copied

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        """On the stream of the lane that calls."""
        target.copy_(source, non_blocking=True)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """On the stream of the lane that calls."""
        target.copy_(source, non_blocking=True)

    def spoil(self, tensor: Tensor) -> None:
        """Not here: it would cost bandwidth."""

    def linear(self, weight: Tensor, compute: ComputeType) -> Linear:
        """float32 weights: float32 products; 16 bits: those of the tensor cores, sums in float32."""
        return _CudaLinear(weight)

    def close(self) -> None:
        """Unpin the memory."""
        torch.cuda.synchronize(self._device)
        for tensor in self._registered:
            _runtime().cudaHostUnregister(tensor.data_ptr())
        self._registered.clear()


class _CudaLinear:
    """A weight in device memory, applied in its own type, or in fp16 where the GPU has no bf16."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        half = weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] < 8
        self.dtype = torch.float16 if half else weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] in `dtype`."""
        return linear(x.to(self.dtype), self._weight.to(self.dtype))


def _runtime() -> Any:
    """The CUDA runtime's own functions."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Clock:
    """Turns events into seconds of `time.perf_counter`."""

    def __init__(self, device: torch.device) -> None:
        self._origin = _event()
        torch.cuda.synchronize(device)
        self._origin.record(torch.cuda.current_stream(device))
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        """When an event, which must have happened, did."""
        return self._origin_s + float(self._origin.elapsed_time(event)) / 1e3


class _Launched:
    """The signal of what was launched on a stream."""

    def __init__(self, start: torch.cuda.Event, end: torch.cuda.Event, clock: _Clock) -> None:
        self.start, self.end, self._clock = start, end, clock

    def wait(self) -> None:
        """Block this thread until the device has come so far."""
        self.end.synchronize()

    def ended(self) -> bool:
        """Ask the device."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def times(self) -> tuple[float, float]:
        """By the device's clock."""
        return self._clock.seconds(self.start), self._clock.seconds(self.end)


class _StreamQueue(ThreadQueue):
    """A lane that is a stream: what it follows is waited for by the stream, not by the thread."""

    def __init__(self, device: torch.device, clock: _Clock, *, urgent: bool) -> None:
        self._device, self._clock = device, clock
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]

    def follow(self, signal: Signal) -> None:
        """An event of another stream, or the end of a task on the host."""
        if isinstance(signal, _Launched):
            self._stream.wait_event(signal.end)
        else:
            signal.wait()

    def launch(self, handler: Handler, task: Task) -> Signal:
        """Have the handler's kernels and copies queued between two events."""
        start, end = _event(), _event()
        with self._entered():
            start.record(self._stream)
            handler(task)
            end.record(self._stream)
        return _Launched(start, end, self._clock)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """This thread's device and stream."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
