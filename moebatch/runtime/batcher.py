"""Fills micro-batches so that all of them hold close to the same number of tokens.

Numbers only: a request is two lengths, and a micro-batch may already be decoding others.
Source: MoE-Lightning (arXiv 2411.11217) appendix A.2, Algorithm 2.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Lengths(Protocol):
    """Anything that has a prompt of `prompt_len` tokens and may generate up to `gen_len`."""

    @property
    def prompt_len(self) -> int: ...

    @property
    def gen_len(self) -> int: ...


T = TypeVar("T", bound=Lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoad:
    """What a micro-batch holds: tokens in its cache, and tokens that its requests may still add."""

    tokens: int = 0
    reserved_tokens: int = 0
    num_requests: int = 0

    def can_add(self, request: Lengths, *, cache_tokens: int) -> bool:
        """Whether the cache has room for the request when everyone generates all they may."""
        held = self.tokens + self.reserved_tokens
        return held + request.prompt_len + request.gen_len <= cache_tokens

    def add(self, request: Lengths) -> "MicroBatchLoad":
        """The load with this request in it."""
        return MicroBatchLoad(
            tokens=self.tokens + request.prompt_len,
            reserved_tokens=self.reserved_tokens + request.gen_len,
            num_requests=self.num_requests + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling(Generic[T]):
    """Newcomers of each micro-batch, longest prompt first; the loads with them; and who must wait.

    `deferred` is in input order, ready to stand at the head of the next batch.
    """

    micro_batches: tuple[tuple[T, ...], ...]
    loads: tuple[MicroBatchLoad, ...]
    deferred: tuple[T, ...]


def fill(requests: Sequence[T], *, num_micro_batches: int, micro_batch_size: int, cache_tokens: int,
         loads: Sequence[MicroBatchLoad] = ()) -> Filling[T]:  # fmt: skip
    """Assign requests to micro-batches of at most `micro_batch_size` requests and `cache_tokens`.

    The longest prompt goes first, to the open micro-batch with the fewest tokens; where it does not
    fit it is deferred, though another might have room, because only that keeps the loads equal.
    Beyond the paper each request has its own gen_len, and `loads` tells what the micro-batches hold
    already (default: nothing). A request larger than an empty micro-batch is deferred for ever: the
    caller must refuse it. Equal prompts keep their order, equal micro-batches go by index.

    Source: MoE-Lightning appendix A.2, Algorithm 2.
    """
    filled = list(loads) or [MicroBatchLoad()] * num_micro_batches
    assert len(filled) == num_micro_batches, f"{len(filled)} loads, {num_micro_batches} expected"
    open_ = [
        (load.tokens, j) for j, load in enumerate(filled) if load.num_requests < micro_batch_size
    ]
    heapq.heapify(open_)
    members: list[list[T]] = [[] for _ in filled]
    waiting = []
    for k in sorted(range(len(requests)), key=lambda k: -requests[k].prompt_len):
        j = open_[0][1] if open_ else None
        if j is None or not filled[j].can_add(requests[k], cache_tokens=cache_tokens):
            waiting.append(k)
            continue
        members[j].append(requests[k])
        filled[j] = filled[j].add(requests[k])
        if filled[j].num_requests < micro_batch_size:
            heapq.heapreplace(open_, (filled[j].tokens, j))
        else:
            heapq.heappop(open_)
    return Filling(
        micro_batches=tuple(map(tuple, members)),
        loads=tuple(filled),
        deferred=tuple(requests[k] for k in sorted(waiting)),
    )


def balance(loads: Sequence[MicroBatchLoad]) -> float:
    """Largest number of tokens over the mean: 1 is even, and what the slowest costs in time."""
    total = sum(load.tokens for load in loads)
    return max(load.tokens for load in loads) * len(loads) / total if total else 1.0
