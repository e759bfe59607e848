"""One pass over the layers: which tokens of which sequences it computes, and where they lie.

A sequence contributes a segment: one token when it decodes, a run of prompt tokens when it is
prefilled. Tokens of a micro-batch are contiguous; nothing is padded.
Shapes: T tokens of the pass, Q tokens of a micro-batch, R rows, C context tokens, G key/value heads.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.model.layers import Rope
from moebatch.runtime.kv_cache import BlockTable, KVCache
from moebatch.runtime.native_attention import NativeContext, native_context

# Decode rows are attended in groups whose shortest block table is at least this share of the
# longest: bounds the padding of a gather and keeps the number of calls small.
_MIN_FILL = 0.5
# Bytes that one gather may bring together; larger groups are cut.
_MAX_GATHER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens of one sequence from position `start` on, and the sequence's block table.

    `max_len` is how long it may become: some models turn long rows by other angles. The logits of
    the last `wanted` tokens may be asked for.
    """

    token_ids: tuple[int, ...]
    start: int
    blocks: BlockTable
    max_len: int = 0
    wanted: int = 1

    @property
    def end(self) -> int:
        """Context length after this pass."""
        return self.start + len(self.token_ids)


def has_prompts(groups: Seq[Seq[Segment]]) -> bool:
    """Whether a pass computes more than rows that decode, with their drafts."""
    return any(len(one.token_ids) > one.wanted for group in groups for one in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Decode rows attended in one call: tokens [first, last) of the micro-batch.

    `masks` gives, for each attention window of the model, who sees what: [R, C] bool. With a window
    C are the slots of a ring, which `ring_rows` gathers.
    """

    first: int
    last: int
    block_rows: Tensor
    ring_rows: Tensor | None
    masks: Mapping[int | None, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRun:
    """A prompt's tokens in a layer with a window.

    `past` [P, G] are the slots of the tokens before the run that it can see, `kept` [K, G] those into
    which its last K tokens are written once it has been attended: they may take the past's places.
    """

    past: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """A prompt's tokens [first, last) of the micro-batch and their context.

    `block_rows` says where the context lies in the cache; None where the run is all of it.
    """

    first: int
    last: int
    context: int
    block_rows: Tensor | None
    ring: RingRun | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tokens [first, last) of the pass, with all that attention needs to know of them.

    `slots` [Q, G] is where they are written, `ring_slots` [N, G] where the N decode tokens, which come
    first, are written in layers with a window.
    With `native` the native kernels attend all rows at once; without it, `decode` and `prompts` say
    what PyTorch does piece by piece.
    """

    first: int
    last: int
    slots: Tensor
    ring_slots: Tensor | None
    rope: tuple[Tensor, Tensor]
    decode: tuple[DecodeGroup, ...]
    prompts: tuple[PromptRun, ...]
    native: NativeContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Token ids [T] and micro-batches. `last_tokens[j][k]` is the last token of segment k of
    micro-batch j, counted in the pass; `wanted` are the tokens whose logits may be asked for.

    A prompt that is not finished in this pass gives no logits, but asking for its last token costs
    nothing and keeps this independent of what is sampled.
    """

    token_ids: Tensor
    micro_batches: tuple[MicroBatch, ...]
    last_tokens: tuple[tuple[int, ...], ...]
    wanted: Tensor


def build_pass(groups: Seq[Seq[Segment]], *, kv: KVCache, rope: Rope,
               windows: Seq[int | None], native: bool = False) -> Pass:  # fmt: skip
    """Lay out the segments of each micro-batch; their blocks must already be allocated.

    `native`: attention is the native kernels'.
    """
    first, ids = 0, []
    micro_batches, last_tokens = [], []
    wanted: list[int] = []
    for segments in groups:
        order = sorted(range(len(segments)), key=lambda k: _rank(segments[k]))
        ordered = [segments[k] for k in order]
        ends = _ends(ordered, first)
        position = dict(zip(order, ends, strict=True))
        last_tokens.append(tuple(position[k] - 1 for k in range(len(segments))))
        for segment, end in zip(ordered, ends, strict=True):
            wanted += range(end - segment.wanted, end)
        micro_batches.append(
            _micro_batch(first, ordered, kv=kv, rope=rope, windows=windows, native=native)
        )
        ids += [token for segment in ordered for token in segment.token_ids]
        first = micro_batches[-1].last
    return Pass(
        token_ids=torch.tensor(ids),
        micro_batches=tuple(micro_batches),
        last_tokens=tuple(last_tokens),
        wanted=torch.tensor(wanted),
    )


def _rank(segment: Segment) -> tuple[bool, int]:
    """Single tokens first, by context length, so that neighbours make good decode groups."""
    return (len(segment.token_ids) > 1, segment.end)


def _ends(segments: Seq[Segment], first: int) -> list[int]:
    ends, end = [], first
    for segment in segments:
        end += len(segment.token_ids)
        ends.append(end)
    return ends


def _micro_batch(first: int, segments: Seq[Segment], *, kv: KVCache, rope: Rope,
                 windows: Seq[int | None], native: bool) -> MicroBatch:  # fmt: skip
    num_decode = sum(len(segment.token_ids) == 1 for segment in segments)
    decode: tuple[DecodeGroup, ...] = ()
    prompts: tuple[PromptRun, ...] = ()
    context = None
    if native:
        spans = [(s.blocks, s.start, s.end) for s in segments]
        context = native_context(spans, num_decode, kv=kv, windows=windows)
    else:
        decode = _decode_groups(segments[:num_decode], kv, windows)
        prompts = _prompt_runs(segments[num_decode:], num_decode, kv, windows)
    positions = torch.cat([torch.arange(s.start, s.end) for s in segments])
    limits = torch.cat([torch.full((s.end - s.start,), max(s.max_len, s.end)) for s in segments])
    slots = torch.cat([kv.slots(s.blocks, s.start, s.end) for s in segments])
    ring_slots = None
    if kv.ring_tokens:
        rings = [kv.ring_slots(s.blocks, s.start, s.end) for s in segments[:num_decode]]
        ring_slots = torch.cat(rings) if rings else slots[:0]
    return MicroBatch(
        first=first,
        last=first + positions.numel(),
        slots=slots,
        ring_slots=ring_slots,
        rope=rope.table(positions, limits),
        decode=decode,
        prompts=prompts,
        native=context,
    )


def _decode_groups(segments: Seq[Segment], kv: KVCache,
                   windows: Seq[int | None]) -> tuple[DecodeGroup, ...]:  # fmt: skip
    return tuple(
        _decode_group(segments[a:b], a, kv=kv, windows=windows)
        for a, b in _decode_bounds(segments, kv)
    )


def _prompt_runs(segments: Seq[Segment], first: int, kv: KVCache,
                 windows: Seq[int | None]) -> tuple[PromptRun, ...]:  # fmt: skip
    end, runs = first, []
    for segment in segments:
        begin, end = end, end + len(segment.token_ids)
        earlier = kv.block_rows([segment.blocks]) if segment.start else None
        ring = _ring_run(segment, kv, windows) if kv.ring_tokens else None
        runs.append(
            PromptRun(first=begin, last=end, context=segment.end, block_rows=earlier, ring=ring)
        )
    return tuple(runs)


def _ring_run(segment: Segment, kv: KVCache, windows: Seq[int | None]) -> RingRun:
    widest = max(window for window in windows if window is not None)
    first_seen = max(0, segment.start - widest + 1)
    first_kept = max(segment.start, segment.end - kv.ring_tokens)
    return RingRun(
        past=kv.ring_slots(segment.blocks, first_seen, segment.start),
        kept=kv.ring_slots(segment.blocks, first_kept, segment.end),
    )


def _decode_bounds(segments: Seq[Segment], kv: KVCache) -> Iterator[tuple[int, int]]:
    """Cut rows that are sorted by length into groups of similar length and bounded bytes."""
    first = 0
    for k in range(1, len(segments) + 1):
        if k < len(segments):
            longest = len(segments[k].blocks)
            full = longest * (k + 1 - first) * kv.gather_bytes_per_block > _MAX_GATHER_BYTES
            if len(segments[first].blocks) >= _MIN_FILL * longest and not full:
                continue
        yield first, k
        first = k


def _decode_group(segments: Seq[Segment], first: int, *, kv: KVCache,
                  windows: Seq[int | None]) -> DecodeGroup:  # fmt: skip
    tables = [segment.blocks for segment in segments]
    block_rows = kv.block_rows(tables)
    length = torch.tensor([segment.end for segment in segments])[:, None]
    position = torch.arange(block_rows.shape[2] * kv.block_tokens)
    visible = position < length
    masks: dict[int | None, Tensor] = {None: visible}
    ring_rows = None
    if kv.ring_tokens:
        ring_rows = kv.ring_rows(tables)
        slot = torch.arange(ring_rows.shape[2] * kv.block_tokens)
        held = length - 1 - (length - 1 - slot) % kv.ring_tokens  # negative: nothing yet
        for window in {window for window in windows if window is not None}:
            masks[window] = (held >= 0) & (held >= length - window)
    else:  # a cache without rings keeps all of a row, whatever the window
        for window in {window for window in windows if window is not None}:
            masks[window] = visible & (position >= length - window)
    return DecodeGroup(
        first=first,
        last=first + len(segments),
        block_rows=block_rows,
        ring_rows=ring_rows,
        masks=masks,
    )
