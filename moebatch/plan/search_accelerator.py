"""Exhaustive search for machines with an accelerator: every policy of a grid, evaluated as arrays.

Prefill and decode are searched apart wherever they share nothing but memory that is needed one at a
time; the result is still the best of the whole product of the grids.
Source: MoE-Lightning (arXiv 2411.11217), section 3.3; the paper's MILP becomes a search over a grid.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from moebatch.plan.accelerator_time import AcceleratorModel, Setting
from moebatch.plan.cost import Amount, expert_page_bytes
from moebatch.plan.machine import Numbers
from moebatch.plan.model_spec import ModelSpec

Space = Literal["paper", "full"]
# Of equals the first is taken.
_MICRO_BATCHES = (1024, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 4, 2, 1)
_MAX_BATCH = 20_000
_PAGE_LEVELS = 33


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is searched. `prefill_parts`: in how many passes a batch's prompts are prefilled; `groups`
    counts micro-batches that share a visit to an expert, 0 standing for all of them."""

    batches: tuple[int, ...]
    micro_batches: tuple[int, ...] = _MICRO_BATCHES
    prefill_parts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    pages: tuple[int, ...] = ()
    gpu_attention: tuple[int, ...] = (0, 1)
    gpu_ffn: tuple[int, ...] = (0, 1)
    kv_resident: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    groups: tuple[int, ...] = (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One policy of the grid, as numbers, and the tokens that it is predicted to generate a second."""

    setting: Setting
    throughput: float


def batch_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes up to `most`: all small ones, then steps of 4 %, and `most` itself."""
    sizes, size = [], 1
    while size < min(most, _MAX_BATCH):
        sizes.append(size)
        size = max(size + 1, int(size * 1.04))
    return (*sizes, min(most, _MAX_BATCH))


def page_levels(spec: ModelSpec) -> tuple[int, ...]:
    """Numbers of pages that may stay on the accelerator, whole experts spread evenly."""
    total = spec.num_layers + spec.num_expert_pages
    return tuple(sorted({round(total * k / (_PAGE_LEVELS - 1)) for k in range(_PAGE_LEVELS)}
                        | {spec.num_layers}))  # fmt: skip


def settings_of(spec: ModelSpec, pages: Amount) -> tuple[Amount, Amount]:
    """Attention pages and expert pages of so many resident pages: attention is kept first."""
    attention = np.minimum(pages, spec.num_layers)
    return attention, pages - attention


def disk_pages(spec: ModelSpec, model: AcceleratorModel, at: Setting, limit: float) -> Amount:
    """The fewest expert pages that must stay on the disk so that the rest fits into host memory."""
    excess = model.host_memory(at).total - limit
    pages = np.ceil(np.maximum(0.0, excess) / expert_page_bytes(spec))
    return np.minimum(pages, spec.num_expert_pages - at.expert_pages)


def search(spec: ModelSpec, model: AcceleratorModel, grid: Grid, *, gpu_bytes: float,
           host_bytes: float, space: Space = "full") -> list[Found]:  # fmt: skip
    """The best policy of each kind (A_g, F_g, r_c), best first; empty when none fits.

    `space` "paper": one micro-batch size, the whole batch prefilled in one pass, experts per
    micro-batch. That is a part of the full space.
    """
    found = []
    for kind in kinds(grid):
        limits = _Limits(gpu_bytes, host_bytes)
        best = (_best_of_paper if space == "paper" else _best)(spec, model, grid, kind, limits)
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda one: -one.throughput)


def least_memory(spec: ModelSpec, model: AcceleratorModel, grid: Grid) -> tuple[float, float]:
    """The least accelerator memory, and the least host memory, that any policy of the grid takes."""
    attention, experts = settings_of(spec, np.array(grid.pages, dtype=float))
    least_gpu = least_host = np.inf
    for attention_on, ffn_on, kept in kinds(grid):
        small = float(min(grid.batches))
        at = Setting(
            batch=small, micro_batch=min(small, float(min(grid.micro_batches))),
            prefill_batch=1.0, prefill_micro_batch=1.0, gpu_attention=float(attention_on),
            gpu_ffn=float(ffn_on), attention_pages=attention, expert_pages=experts,
            kv_resident=kept,
        )  # fmt: skip
        least_gpu = min(least_gpu, float(np.min(model.accelerator_memory(at).total)))
        # All experts that are away may lie on the disk, if the host need not compute them.
        on_disk = replace(at, disk_pages=ffn_on * (spec.num_expert_pages - experts))
        least_host = min(least_host, float(np.min(model.host_memory(on_disk).total)))
    return least_gpu, least_host


def kinds(grid: Grid) -> Iterator[tuple[int, int, float]]:
    """The combinations of A_g, F_g and r_c; with A_g = 0 the cache is on the host."""
    for attention, ffn in product(grid.gpu_attention, grid.gpu_ffn):
        for kept in grid.kv_resident if attention else (0.0,):
            yield attention, ffn, kept


@dataclass(frozen=True, slots=True)
class _Limits:
    gpu: float
    host: float


def _feasible(spec: ModelSpec, model: AcceleratorModel, grid: Grid, kind: tuple[int, int, float],
              limits: _Limits) -> Setting | None:  # fmt: skip
    """All (N, pages) that host memory can hold, as two flat arrays in one setting."""
    batch, pages = (x.ravel() for x in np.meshgrid(
        np.array(grid.batches, dtype=float), np.array(grid.pages, dtype=float), indexing="ij"
    ))  # fmt: skip
    attention, experts = settings_of(spec, pages)
    attention_on, ffn_on, kept = kind
    at = Setting(
        batch=batch, micro_batch=1.0, prefill_batch=1.0, prefill_micro_batch=1.0,
        gpu_attention=float(attention_on), gpu_ffn=float(ffn_on), attention_pages=attention,
        expert_pages=experts, kv_resident=kept,
    )  # fmt: skip
    at = replace(at, disk_pages=disk_pages(spec, model, at, limits.host))
    # An expert that the host is to compute must not be on the accelerator or on the disk.
    allowed = np.full(batch.shape, True) if ffn_on else (experts == 0) & (at.disk_pages == 0)
    fits = allowed & (model.host_memory(at).total <= limits.host)
    fits &= model.accelerator_memory(at).total <= limits.gpu
    return _taken(at, fits) if fits.any() else None


def _taken(at: Setting, mask: Any) -> Setting:
    return replace(
        at,
        batch=at.batch[mask],
        attention_pages=at.attention_pages[mask],
        expert_pages=at.expert_pages[mask],
        disk_pages=at.disk_pages[mask],
    )


def _wide(at: Setting, axes: int) -> Setting:
    """The flat arrays of a setting with new axes behind them, for broadcasting."""
    shape = (-1, *(1,) * axes)
    return replace(
        at,
        batch=at.batch.reshape(shape),
        attention_pages=at.attention_pages.reshape(shape),
        expert_pages=at.expert_pages.reshape(shape),
        disk_pages=at.disk_pages.reshape(shape),
    )


def _best(spec: ModelSpec, model: AcceleratorModel, grid: Grid, kind: tuple[int, int, float],
          limits: _Limits) -> Found | None:  # fmt: skip
    flat = _feasible(spec, model, grid, kind, limits)
    if flat is None:
        return None
    micro = np.array(grid.micro_batches, dtype=float)
    at = _wide(flat, 2)
    count = at.batch / np.minimum(micro[None, :, None], at.batch)
    groups = np.array(grid.groups, dtype=float)[None, None, :]
    decode = replace(
        at,
        micro_batch=np.minimum(micro[None, :, None], at.batch),
        group=np.where(groups == 0, np.maximum(1.0, count), np.minimum(groups, count)),
    )
    decode_s = model.decode(decode).total
    # With a prefill of one request, what counts in accelerator memory is decode; and the reverse.
    decode_s = np.where(model.accelerator_memory(decode).total <= limits.gpu, decode_s, np.inf)
    parts = np.array(grid.prefill_parts, dtype=float)[None, :, None]
    prefill_batch = np.maximum(1.0, at.batch / parts)
    prefill = replace(
        at,
        prefill_batch=prefill_batch,
        prefill_micro_batch=np.minimum(micro[None, None, :], prefill_batch),
    )
    passes = np.maximum(1.0, at.batch / prefill_batch)
    prefill_s = passes * model.prefill(prefill).total
    prefill_s = np.where(_within(model, prefill, limits), prefill_s, np.inf)
    micro_batch, group = _at_least(decode_s, decode.micro_batch, decode.group)
    batch, prefill_micro = _at_least(prefill_s, prefill.prefill_batch, prefill.prefill_micro_batch)
    done = replace(flat, micro_batch=micro_batch, group=group, prefill_batch=batch,
                   prefill_micro_batch=prefill_micro)  # fmt: skip
    return _top(model, done, limits)


def _at_least(seconds: Numbers, *values: Numbers) -> list[Numbers]:
    """For each (N, pages), the first axis, the values where the seconds are least."""
    best = seconds.reshape(len(seconds), -1).argmin(axis=1)[:, None]
    spread = (np.broadcast_to(x, seconds.shape).reshape(len(seconds), -1) for x in values)
    return [np.take_along_axis(x, best, 1)[:, 0] for x in spread]


def _best_of_paper(spec: ModelSpec, model: AcceleratorModel, grid: Grid,
                   kind: tuple[int, int, float], limits: _Limits) -> Found | None:  # fmt: skip
    flat = _feasible(spec, model, grid, kind, limits)
    if flat is None:
        return None
    micro = np.array(grid.micro_batches, dtype=float)
    index = np.repeat(np.arange(len(flat.batch)), len(micro))
    each = _taken(flat, index)
    size = np.minimum(np.tile(micro, len(flat.batch)), each.batch)
    at = replace(each, micro_batch=size, prefill_batch=each.batch, prefill_micro_batch=size)
    return _top(model, at, limits)


def _within(model: AcceleratorModel, at: Setting, limits: _Limits) -> Any:
    """Which settings both memories can hold."""
    fits_host = model.host_memory(at).total <= limits.host
    return fits_host & (model.accelerator_memory(at).total <= limits.gpu)


def _top(model: AcceleratorModel, at: Setting, limits: _Limits) -> Found | None:
    """The setting with the highest throughput among those that fit."""
    rate = model.throughput(at, prefill_s=model.prefill(at).total, decode_s=model.decode(at).total)
    rate = np.where(_within(model, at, limits), rate, -np.inf)
    k = int(np.argmax(rate))
    if not np.isfinite(rate[k]):
        return None
    fields = {name: _scalar(getattr(at, name), k) for name in Setting.__slots__}
    return Found(setting=Setting(**fields), throughput=float(rate[k]))


def _scalar(value: Amount, k: int) -> float:
    return float(value[k]) if isinstance(value, np.ndarray) else float(value)
