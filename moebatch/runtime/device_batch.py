"""A pass as the device sees it: where each micro-batch's rows lie, and what attention there needs.

Shapes: T tokens of the pass, Q tokens of a micro-batch, R rows, C context tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.plan.pipeline import Phase
from moebatch.runtime.batch import DecodeGroup, MicroBatch, Segment
from moebatch.runtime.device import Device, Scratch
from moebatch.runtime.kv_cache import KVCache


def phase_of(segments: Sequence[Segment]) -> Phase:
    """What the rows of a micro-batch do; single tokens decode, also those of a prompt."""
    if all(len(segment.token_ids) == 1 for segment in segments):
        return Phase.DECODE
    return Phase.RESUME if any(segment.start for segment in segments) else Phase.PREFILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A buffer with a place for every token of a pass, in device memory or pinned."""

    flat: Tensor
    width: int

    def of(self, part: MicroBatch, width: int | None = None) -> Tensor:
        """[Q, width] of a micro-batch, contiguous whatever part of the place is used."""
        return self.between(part.first, part.last, width)

    def between(self, first: int, last: int, width: int | None = None) -> Tensor:
        """The same for tokens [first, last)."""
        width, start = width or self.width, first * self.width
        return self.flat[start : start + (last - first) * width].view(last - first, width)


def rows_on_device(scratch: Scratch, name: str, num_tokens: int, width: int,
                   dtype: torch.dtype) -> Rows:  # fmt: skip
    """Places in device memory."""
    return Rows(flat=scratch.on_device(name, (num_tokens * width,), dtype), width=width)


def rows_pinned(scratch: Scratch, name: str, num_tokens: int, width: int,
                dtype: torch.dtype) -> Rows:  # fmt: skip
    """Places in pinned host memory."""
    return Rows(flat=scratch.pinned(name, (num_tokens * width,), dtype), width=width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The cached tokens of some rows: bytes [offset, offset + num_bytes) of a micro-batch's context.

    `block_rows` lies in host memory, for the host's cache; `on_device` is the same for a cache there.
    """

    block_rows: Tensor
    on_device: Tensor
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Decode rows [first, last) of a micro-batch. `last_token` [R] is each row's newest position."""

    first: int
    last: int
    context: Context
    masks: Mapping[int | None, Tensor]
    last_token: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """A prompt's tokens [first, last) of the micro-batch; `context` None where they are all of it."""

    first: int
    last: int
    length: int
    context: Context | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """What a micro-batch needs on the device; groups and runs only where it is attended there."""

    rope: tuple[Tensor, Tensor]
    slots: Tensor
    groups: tuple[DeviceGroup, ...] = ()
    runs: tuple[DeviceRun, ...] = ()
    context_bytes: int = 0

    @property
    def contexts(self) -> list[Context]:
        """All that must be there of the cache."""
        runs = [run.context for run in self.runs if run.context is not None]
        return [group.context for group in self.groups] + runs


def device_batch(part: MicroBatch, *, kv: KVCache, device: Device, attended: bool) -> DeviceBatch:
    """Bring the indices of a micro-batch to the device; `attended`: attention runs there."""
    rope = (device.upload(part.rope[0]), device.upload(part.rope[1]))
    if not attended:
        return DeviceBatch(rope=rope, slots=part.slots)
    end, groups, runs = 0, [], []

    def context(block_rows: Tensor) -> Context:
        nonlocal end
        size = kv.gather_bytes(block_rows)
        end += size
        return Context(block_rows=block_rows, on_device=device.upload(block_rows),
                       offset=end - size, num_bytes=size)  # fmt: skip

    for group in part.decode:
        groups.append(
            DeviceGroup(
                first=group.first,
                last=group.last,
                context=context(group.block_rows),
                masks={window: device.upload(mask) for window, mask in group.masks.items()},
                last_token=device.upload(_last_token(group)),
            )
        )
    for run in part.prompts:
        earlier = None if run.block_rows is None else context(run.block_rows)
        runs.append(DeviceRun(first=run.first, last=run.last, length=run.context, context=earlier))
    return DeviceBatch(rope=rope, slots=device.upload(part.slots), groups=tuple(groups),
                       runs=tuple(runs), context_bytes=end)  # fmt: skip


def _last_token(group: DecodeGroup) -> Tensor:
    """[R] the newest position of each row: the last that any mask shows."""
    mask = next(iter(group.masks.values()))
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
