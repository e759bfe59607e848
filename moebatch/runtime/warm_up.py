"""Times the three lanes on real experts, so that a layer can be simulated before it runs."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moebatch.model.experts import Expert, swiglu
from moebatch.plan.eviction import ExpertId
from moebatch.plan.hybrid import ExpertCosts, fitted_line
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.schedule import Lane, Op, Task
from moebatch.runtime.device import Device
from moebatch.runtime.executor import ThreadQueue
from moebatch.runtime.pinned_experts import PinnedExperts

_TOKENS = (1, 8, 32)
_REPEATS = 3


Held = Sequence[tuple[int, ExpertId]]


def measured_costs(store: PinnedExperts, held: Held, *, device: Device,
                   spec: ModelSpec) -> ExpertCosts:  # fmt: skip
    """Costs of one expert of this model on this machine.

    `held`: some slots and whom they hold; some of them are loaded again. Without any the accelerator
    computes nothing and the link brings nothing.
    """
    host_samples = []
    turn = itertools.cycle(store.experts)  # another one each time: a cache would flatter them
    for tokens in _TOKENS:
        x = torch.randn(tokens, spec.hidden_size) * 0.1
        samples = [
            _timed(device, Lane.CPU, _computing(x, store.on_host(next(turn))))
            for _ in range(_REPEATS)
        ]
        host_samples.append((tokens, statistics.median(samples)))
    host_expert_s, host_token_s = fitted_line(host_samples)
    device_expert_s, device_token_s, transfer_s = _device_side(store, held, device, spec)
    return ExpertCosts(
        device_expert_s=device_expert_s,
        device_token_s=device_token_s,
        host_expert_s=host_expert_s,
        host_token_s=host_token_s,
        host_start_s=_round_trip_s(device, spec),
        transfer_s=transfer_s,
    )


def _device_side(store: PinnedExperts, held: Held, device: Device, spec: ModelSpec,
                 ) -> tuple[float, float, float]:  # fmt: skip
    """Seconds of an expert, of a token, and of a transfer."""
    if not held:
        return 1.0, 0.0, 1.0
    transfers = []
    for number, which in held[:_REPEATS]:
        slot, image = store.slot(number, which), store.image(which)
        copy = lambda slot=slot, image=image: device.copy_in(slot, image)  # noqa: E731
        transfers.append(_timed(device, Lane.H2D, copy))
    turn = itertools.cycle(held)
    samples = []
    for tokens in _TOKENS:
        x = device.upload(torch.randn(tokens, spec.hidden_size) * 0.1)
        runs = []
        for _ in range(_REPEATS):
            number, which = next(turn)
            runs.append(_timed(device, Lane.GPU, _computing(x, store.on_device(number, which))))
        samples.append((tokens, statistics.median(runs)))
    return *fitted_line(samples), statistics.median(transfers)


def _computing(x: Tensor, expert: Expert) -> Callable[[], object]:
    return lambda: swiglu(x, expert)


def _round_trip_s(device: Device, spec: ModelSpec) -> float:
    """A token's hidden state to the host and a result back."""
    there = device.upload(torch.zeros(1, spec.hidden_size))
    here = device.pinned(there.nbytes).view(torch.float32).view(1, -1)
    out = [_timed(device, Lane.D2H, lambda: device.copy_out(here, there)) for _ in range(_REPEATS)]
    back = [_timed(device, Lane.H2D, lambda: device.copy_in(there, here)) for _ in range(_REPEATS)]
    return statistics.median(out) + statistics.median(back)


def _timed(device: Device, lane: Lane, work: Callable[[], object]) -> float:
    """Seconds from the launch to the end."""
    queue = device.queues.get(lane, ThreadQueue())
    start = time.perf_counter()
    queue.launch(lambda task: _discard(work()), Task(Op.FFN, lane, 0)).wait()
    return time.perf_counter() - start


def _discard(result: object) -> None:
    del result
