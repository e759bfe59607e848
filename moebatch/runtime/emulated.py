"""An accelerator that is none: host memory with a hard limit behind a link of a given speed.

It moves real bytes and computes real results, on the host's own cores. A copy takes as long as the
profile's link would take. Memory that is new, given back, read for the last time, or about to be
filled by a copy holds NaN: a use too early or too late shows in the results.
"""

import random
import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.model.linear import ComputeType, Linear, in_place
from moebatch.plan.profiles import LinkProfile
from moebatch.plan.schedule import Lane, Task
from moebatch.runtime.device import BACKGROUND_LANES, Budget
from moebatch.runtime.executor import Ended, Handler, Queue, Signal, ThreadQueue

_SPOILED = 0xFF  # all bits set is NaN in float32, bfloat16 and float16


class EmulatedDevice:
    """The emulated accelerator; see `moebatch.runtime.device.Device`."""

    emulated = True

    def __init__(self, profile: LinkProfile, *, memory_bytes: int | None = None,
                 delays: random.Random | None = None, max_delay_s: float = 0.0,
                 grouped: bool = False) -> None:  # fmt: skip
        """`memory_bytes` replaces the profile's capacity.

        `grouped`: experts in one product, which here is only slower: for tests.
        With `delays` every lane stops for a random while before and after each task: for tests.
        """
        self.name = f"emulated:{profile.name}"
        self.memory = Budget(memory_bytes or profile.memory_bytes, self.name)
        self.grouped = grouped
        self._profile, self._copy_rate = profile, _copy_bytes_per_s()
        lanes = (Lane.GPU, *BACKGROUND_LANES)
        self._queues: dict[Lane, Queue] = {}
        if delays is not None:
            self._queues = {
                lane: _Hesitant(random.Random(delays.random()), max_delay_s) for lane in lanes
            }

    @property
    def torch_device(self) -> torch.device:
        """The host's."""
        return torch.device("cpu")

    @property
    def queues(self) -> Mapping[Lane, Queue]:
        """None of its own: its lanes are threads."""
        return self._queues

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Spoiled memory."""
        tensor = torch.empty(shape, dtype=dtype)
        self.memory.take(tensor.nbytes)
        self.spoil(tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Spoil it and give it back."""
        self.spoil(tensor)
        self.memory.give(tensor.nbytes)

    def pinned(self, num_bytes: int) -> Tensor:
        """Ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy."""
        return tensor.clone()

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        """Take the link's time, then copy: until then the target holds NaN."""
        self._copy(target, source, self._profile.h2d_bytes_per_s)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """The same in the other direction."""
        self._copy(target, source, self._profile.d2h_bytes_per_s)

    def spoil(self, tensor: Tensor) -> None:
        """Fill it with NaN."""
        tensor.view(torch.uint8).fill_(_SPOILED)

    def linear(self, weight: Tensor, compute: ComputeType) -> Linear:
        """The host's arithmetic on the weight where it lies."""
        return in_place(weight, compute)

    def close(self) -> None:
        """Nothing to give back."""

    def _copy(self, target: Tensor, source: Tensor, bytes_per_s: float) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        arrival = time.perf_counter() + self._profile.latency_s + source.nbytes / bytes_per_s
        self.spoil(target)
        # The bytes are moved at the last moment, so that what is written to the source meanwhile,
        # or read from the target, is an error here as it is on a real link.
        if (rest := arrival - source.nbytes / self._copy_rate - time.perf_counter()) > 0:
            time.sleep(rest)
        target.copy_(source)
        if (
            rest := arrival - time.perf_counter()
        ) > 0:  # the host copied faster than it was measured
            time.sleep(rest)


class _Hesitant(ThreadQueue):
    """A lane that stops for a random while around its tasks."""

    def __init__(self, rng: random.Random, max_delay_s: float) -> None:
        self._rng, self._max_delay_s = rng, max_delay_s
        self._pace = rng.choice([0.0, 0.2, 1.0])  # some lanes are far slower than others

    def launch(self, handler: Handler, task: Task) -> Signal:
        """Stop, run, stop."""
        self._stop()
        start = time.perf_counter()
        handler(task)
        end = time.perf_counter()
        self._stop()
        return Ended(start, end)

    def _stop(self) -> None:
        time.sleep(self._rng.random() ** 3 * self._pace * self._max_delay_s)


_RATE: list[float] = []
_RATE_LOCK = threading.Lock()


def _copy_bytes_per_s() -> float:
    """How fast this machine copies memory: measured once."""
    with _RATE_LOCK:
        if not _RATE:
            # larger than a cache: weights come from main memory
            source, target = (torch.zeros(1 << 25, dtype=torch.uint8) for _ in range(2))
            best = 1.0
            for _ in range(3):
                start = time.perf_counter()
                target.copy_(source)
                best = min(best, time.perf_counter() - start)
            _RATE.append(source.nbytes / best)
        return _RATE[0]
