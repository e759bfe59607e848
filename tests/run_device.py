"""Logits at every position of some rows that join, are prefilled in chunks, decode and leave."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from models import reference_logits

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import resolve_model
from moebatch.runtime.batch import Segment
from moebatch.runtime.device_backend import DeviceBackend
from moebatch.runtime.kv_cache import BlockTable


@dataclass
class Row:
    """A sequence of known tokens: `prompt_len` of them come in chunks, the others one by one."""

    ids: list[int]
    prompt_len: int
    joins: int
    micro_batch: int
    blocks: BlockTable = field(default_factory=BlockTable)
    done: int = 0
    logits: list = field(default_factory=list)

    def segment(self, chunk):
        """What it computes in the next pass."""
        left = self.prompt_len - self.done
        count = min(chunk, left) if left > 0 else 1
        ids = tuple(self.ids[self.done : self.done + count])
        return Segment(token_ids=ids, start=self.done, blocks=self.blocks)


def random_rows(rng: random.Random, count: int, micro_batches: int, vocab: int = 97) -> list[Row]:
    """Rows of random lengths that join at random passes."""
    rows = []
    for k in range(count):
        length = rng.choice([1, 2, 5, 17, 18, 20])  # a block has 16
        rows.append(
            Row(
                ids=[rng.randrange(3, vocab) for _ in range(length)],
                prompt_len=rng.randint(1, length),
                joins=0 if k == 0 else rng.randrange(3),
                micro_batch=k % micro_batches,
            )
        )
    return rows


def run_rows(path: Path, rows: list[Row], policy, device, *, chunk=64, homes=None, change=None,
             make=DeviceBackend, watch=None):  # fmt: skip
    """Fill in the rows' logits [len, V]; returns the passes that ran as (tasks, timeline) pairs.

    `change` breaks every schedule: a function of a list of tasks. `make` makes the backend, `watch` is
    called with it at the end.
    """
    model = resolve_model(str(path))
    passes = []
    with Checkpoint(path) as checkpoint:
        backend = make(
            checkpoint,
            spec=model.spec,
            family=model.family,
            policy=policy,
            device=device,
            compute="float32",
            homes=homes,
        )
        if change is not None:
            plan = backend._schedule
            backend._schedule = lambda phases: (plan(phases)[0], change(plan(phases)[1]))
        try:
            backend.load(threads=1, progress=lambda done, total: None)
            if make is DeviceBackend:
                passes.append((backend.prologue, backend.prologue_timeline))
            number = 0
            while any(row.done < len(row.ids) for row in rows):
                active = [r for r in rows if r.joins <= number and r.done < len(r.ids)]
                passes.append(_one_pass(backend, active, chunk)) if active else None
                number += 1
            if watch is not None:
                watch(backend)
        finally:
            backend.close()
            device.close()
    return passes


def _one_pass(backend, active, chunk):
    groups = [[r for r in active if r.micro_batch == j] for j in range(99)]
    groups = [group for group in groups if group]
    segments = []
    for group in groups:
        segments.append([row.segment(chunk) for row in group])
        for row, segment in zip(group, segments[-1], strict=True):
            backend.kv.extend(row.blocks, segment.end)
    result = backend.compute(segments, all_logits=True)
    logits = backend.logits(torch.arange(result.num_tokens))
    for group, parts, lasts in zip(groups, segments, result.last_tokens, strict=True):
        for row, segment, last in zip(group, parts, lasts, strict=True):
            row.logits.append(logits[last + 1 - len(segment.token_ids) : last + 1])
            row.done = segment.end
            if row.done == len(row.ids):
                backend.kv.release(row.blocks)
    return result.tasks, result.timeline


def worst_error(model, rows: list[Row]) -> float:
    """Largest difference from the oracle's logits; infinity where something is not finite."""
    worst = 0.0
    for row in rows:
        expected, found = reference_logits(model, tuple(row.ids)), torch.cat(row.logits)
        assert found.shape == expected.shape
        if not found.isfinite().all():
            return float("inf")
        worst = max(worst, (found - expected).abs().max().item())
    return worst
