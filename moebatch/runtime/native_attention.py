"""Attention of a micro-batch by the native kernels: all rows in one call, from the cache itself.

In layers with a window the cache forgets, so a prompt's tokens are attended before they are written:
from a copy of what they can see. A row's result is the same bit for bit either way, and whichever
rows share the call.
Shapes: Q tokens of a micro-batch, H query heads, G key/value heads, d head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.native.kernels import CHUNK_TOKENS, MAX_SHARED_QUERIES, Context, Kernels
from moebatch.plan.model_spec import ModelSpec
from moebatch.runtime.kv_cache import KVCache, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRun:
    """A prompt's tokens [first, last) of the micro-batch, in a layer with a window.

    They are the tokens from `start` on of the copy; `past` [P, G] are the slots of the P before them,
    `kept` [K, G] those into which their last K are written in the end.
    """

    first: int
    last: int
    start: int
    past: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeContext:
    """What the rows of a micro-batch see: in layers without a window, and in those with one.

    There `ring` is for the rows that decode, the first `num_decode`; None where there are none.
    """

    full: Context
    num_decode: int
    ring: Context | None
    runs: tuple[WindowRun, ...]


def attends_natively(spec: ModelSpec, kernels: Kernels | None) -> bool:
    """Whether the kernels can do a model's attention: not that over latents."""
    shared = spec.num_q_heads // max(1, spec.num_kv_heads)
    return kernels is not None and spec.latent is None and shared <= MAX_SHARED_QUERIES


def native_context(spans: Sequence[Span], num_decode: int, *, kv: KVCache,
                   windows: Sequence[int | None]) -> NativeContext:  # fmt: skip
    """Lay out a micro-batch whose first `num_decode` spans are single tokens."""
    ring, runs = None, []
    if kv.ring_tokens:
        if num_decode:
            ring = kv.context(spans[:num_decode], ring=True)
        widest = max(window for window in windows if window is not None)
        end = num_decode
        for span in spans[num_decode:]:
            first, end = end, end + span[2] - span[1]
            runs.append(_window_run(span, first, kv, widest))
    return NativeContext(full=kv.context(spans), num_decode=num_decode, ring=ring, runs=tuple(runs))


def _window_run(span: Span, first: int, kv: KVCache, widest: int) -> WindowRun:
    table, start, end = span
    seen = max(0, start - widest + 1)
    # Sums run by chunks of context: the copy begins with one, so that they are the same sums.
    base = seen // CHUNK_TOKENS * CHUNK_TOKENS
    return WindowRun(
        first=first,
        last=first + end - start,
        start=start - base,
        past=kv.ring_slots(table, seen, start),
        kept=kv.ring_slots(table, max(start, end - kv.ring_tokens), end),
    )


def attend(qkv: tuple[Tensor, Tensor, Tensor], context: NativeContext, *, layer: int, kv: KVCache,
           kernels: Kernels, window: int | None, scale: float, sinks: Tensor | None,
           round_x: bool) -> Tensor:  # fmt: skip
    """Softmax attention of queries [Q, H, d] -> [Q, H, d]; k and v [Q, G, d] are the new tokens'.

    Without a window they are in the cache already, with one only those of rows that decode.
    """
    q, k, v = qkv
    if window is None or not kv.ring_tokens:
        pools = kv.pools(layer)
        return kernels.attend(q, *pools, context.full, window=window, scale=scale, sinks=sinks,
                              round_x=round_x)  # fmt: skip
    out = torch.empty_like(q)
    if context.ring is not None:
        rows, pools = slice(context.num_decode), kv.pools(layer)
        out[rows] = kernels.attend(q[rows], *pools, context.ring, window=window, scale=scale,
                                   sinks=sinks, round_x=round_x)  # fmt: skip
    if context.runs:
        cache, spans = _copy(context.runs, k, v, layer, kv)
        rows = slice(context.num_decode, None)
        seen = cache.context(spans)
        out[rows] = kernels.attend(q[rows], *cache.pools(0), seen, window=window, scale=scale,
                                   sinks=sinks, round_x=round_x)  # fmt: skip
    return out


def _copy(runs: Sequence[WindowRun], k: Tensor, v: Tensor, layer: int,
          kv: KVCache) -> tuple[KVCache, list[Span]]:  # fmt: skip
    """A cache of what the runs can see, themselves included, which are then written into `kv`."""
    ends = [run.start + run.last - run.first for run in runs]
    cache, tables = kv.scratch(ends)
    spans: list[Span] = []
    for run, table, end in zip(runs, tables, ends, strict=True):
        num_past = run.past.shape[0]
        if num_past:
            before = kv.gather_tokens(layer, run.past)
            cache.write(0, cache.slots(table, run.start - num_past, run.start), *before)
        rows = slice(run.first, run.last)
        cache.write(0, cache.slots(table, run.start, end), k[rows], v[rows])
        kept = run.kept.shape[0]
        kv.write(layer, run.kept, k[rows][-kept:], v[rows][-kept:])
        spans.append((table, run.start, end))
    return cache, spans
