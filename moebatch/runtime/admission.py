"""Who joins the batch: waiting sequences take free places, by Algorithm 2.

The waiting window is bounded, and refilled only once everybody in it has been admitted: so memory
does not grow with the data set, and a short request is overtaken by at most one window.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from moebatch.data.requests import Request, RowError
from moebatch.plan.policy import KV_BLOCK_TOKENS, Policy
from moebatch.runtime.batcher import MicroBatchLoad, fill
from moebatch.runtime.kv_cache import KVCache, blocks_for
from moebatch.runtime.sequence import Sequence

_MIN_WINDOW = 64
_MAX_WINDOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """The tail of a job: rows in flight, passes that they take at most, and blocks of the KV cache that
    they may come to hold."""

    rows: int
    passes: int
    reserved_blocks: int


class Admission:
    """The waiting window and the sequences in flight, with the KV blocks reserved for them.

    A sequence is admitted only if its blocks at full length are free, so none ever has to give way.
    """

    def __init__(self, policy: Policy, *, kv: KVCache, requests: Iterable[Request],
                 start: Callable[[Request], list[Sequence]]) -> None:  # fmt: skip
        """`start` makes the sequences of a request, one for each choice."""
        self._policy, self._kv, self._start = policy, kv, start
        self._requests = iter(requests)
        self._window = min(max(2 * policy.batch_size, _MIN_WINDOW), _MAX_WINDOW)
        self._waiting: list[Sequence] = []
        self._refused: list[RowError] = []
        self._reserved = 0
        self._exhausted = False
        self.active: list[Sequence] = []

    def fill(self) -> bool:
        """Let sequences join while there is room; False when all work is done."""
        while len(self.active) < self._policy.batch_size:
            if not self._waiting and not self._refill():
                break
            if not self._admit():
                break
        return bool(self.active) or bool(self._refused)

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that have been taken from the requests and not yet joined."""
        return self._waiting

    @property
    def tail(self) -> "Remainder | None":
        """What is left, once nobody will join any more and all prompts have been read."""
        if not self._exhausted or self._waiting or not self.active:
            return None
        if any(sequence.remaining_prompt for sequence in self.active):
            return None
        return Remainder(
            rows=len(self.active),
            passes=max(sequence.tokens_left for sequence in self.active),
            reserved_blocks=self._reserved,
        )

    def leave(self, sequence: Sequence) -> None:
        """A sequence ends: its blocks and its place are free."""
        self.active.remove(sequence)
        self._kv.release(sequence.blocks)
        self._reserved -= blocks_for(sequence.max_len)

    def drop(self, index: int) -> None:
        """A request broke: all of its sequences go, waiting and in flight.

        What they wrote may not be finite and must not reach who gets their blocks next.
        """
        self._waiting = [s for s in self._waiting if s.request.index != index]
        for sequence in [s for s in self.active if s.request.index == index]:
            self._kv.scrub(sequence.blocks)
            self.leave(sequence)

    def take_refused(self) -> list[RowError]:
        """Requests that could never fit into the cache, since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def _refill(self) -> bool:
        """Take the next window of requests; False when there are none."""
        taken = list(islice(self._requests, self._window))
        self._exhausted = not taken
        for request in taken:
            sequences = self._start(request)
            need = blocks_for(sequences[0].max_len)
            if need <= self._kv.num_blocks:
                self._waiting += sequences
            else:
                self._refused.append(_too_long(request, need, self._kv.num_blocks))
        return bool(taken)

    def _admit(self) -> bool:
        """One round of Algorithm 2; whether anybody joined.

        Where the longest prompt does not fit its micro-batch's equal share of the cache, though the
        cache as a whole has room, it may use that room: else it would wait until it is alone.
        """
        joined = False
        for share in (self._kv.num_blocks // self._num_micro_batches, self._kv.num_blocks):
            filling = fill(
                self._waiting,
                num_micro_batches=self._num_micro_batches,
                micro_batch_size=self._policy.micro_batch_size,
                cache_tokens=share * KV_BLOCK_TOKENS,
                loads=self._loads(),
            )
            for j, newcomers in enumerate(filling.micro_batches):
                for sequence in newcomers:
                    joined |= self._try_join(sequence, j)
            if joined:
                return True
        return False

    def _try_join(self, sequence: Sequence, micro_batch: int) -> bool:
        """Join if the whole cache and the batch have room; the sequence waits on otherwise."""
        need = blocks_for(sequence.max_len)
        full = len(self.active) >= self._policy.batch_size
        if full or self._reserved + need > self._kv.num_blocks:
            return False
        self._reserved += need
        sequence.micro_batch = micro_batch
        self.active.append(sequence)
        self._waiting.remove(sequence)
        return True

    @property
    def _num_micro_batches(self) -> int:
        return self._policy.num_micro_batches

    def _loads(self) -> list[MicroBatchLoad]:
        """What each micro-batch holds now."""
        tokens = [0] * self._num_micro_batches
        reserved, requests = tokens.copy(), tokens.copy()
        for sequence in self.active:
            j, length = sequence.micro_batch, sequence.held_len
            tokens[j] += length
            reserved[j] += blocks_for(sequence.max_len) * KV_BLOCK_TOKENS - length
            requests[j] += 1
        return [
            MicroBatchLoad(tokens=t, reserved_tokens=r, num_requests=n)
            for t, r, n in zip(tokens, reserved, requests, strict=True)
        ]


def _too_long(request: Request, need: int, have: int) -> RowError:
    return RowError(
        index=request.index,
        id=request.id,
        code="oom_row",
        message=f"the row needs {need * KV_BLOCK_TOKENS} tokens of KV cache, "
        f"there is room for {have * KV_BLOCK_TOKENS}; lower max_tokens or raise --memory",
    )
