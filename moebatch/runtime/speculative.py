"""Speculative decoding: drafts are checked by the pass that computes them.

The noise of sampling is a function of the position alone, so the token that a row gets at a position
is fixed by the logits there. A draft is accepted exactly when it is that token: the answer is the
same with and without drafts, at any temperature.
"""

import itertools
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor

from moebatch.plan.speculation import (
    MAX_DRAFT_TOKENS,
    MAX_PASS_DRAFTS,
    AcceptanceRate,
    PassCost,
    PassSeconds,
    best_drafts,
    share_drafts,
)
from moebatch.runtime.drafts import NO_DRAFT, Draft, DraftSource
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.kv_cache import KVCache
from moebatch.runtime.sampling import sample
from moebatch.runtime.sequence import Sequence

_PROBE_PASSES = 32  # a source that takes time and does not pay is tried again so often


@dataclass(slots=True)
class SpeculationStats:
    """Drafts that were checked and accepted; rows of decode passes and the tokens they gave."""

    drafted: int = 0
    accepted: int = 0
    row_passes: int = 0
    tokens: int = 0
    draft_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A sequence whose next tokens are chosen: tokens of the pass whose logits say them.

    The logits of the k-th token [k of 1 + drafts] hold if the k drafts before it are accepted.
    """

    sequence: Sequence
    tokens: Seq[int]
    before: int
    draft: Draft = NO_DRAFT

    @property
    def pushed(self) -> list[int]:
        """What it has got since: `before` is how many tokens it had generated."""
        return self.sequence.generated[self.before :]


def chunks(due: Seq[Due], rows: int) -> Iterator[list[Due]]:
    """Cut so that each part has at most so many rows of logits, if a sequence alone has no more."""
    part: list[Due] = []
    for one in due:
        if part and sum(len(other.tokens) for other in part) + len(one.tokens) > rows:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def choose_tokens(logits: Tensor, due: Seq[Due]) -> list[Sequence]:
    """Push onto each sequence what its logits [tokens of all due, V] say, as far as drafts reach.

    Position by position, each with the state that the tokens before it left: penalties, stops and
    lengths are those of decoding without drafts. Returns the sequences whose logits were not finite;
    where drafts may be to blame, they are not trusted again and the sequence is tried without.
    """
    first, starts = 0, []
    for one in due:
        starts.append(first)
        first += len(one.tokens)
    alive, at, broken = list(range(len(due))), 0, []
    while alive:
        rows = logits if len(alive) == len(logits) else logits[[starts[k] + at for k in alive]]
        states = [due[k].sequence.sampling_state() for k in alive]
        still = []
        for k, token in zip(alive, sample(rows, states), strict=True):
            sequence, guessed = due[k].sequence, due[k].draft.token_ids
            if not token.finite:
                if guessed:
                    sequence.trusts_drafts = False
                else:
                    broken.append(sequence)
                continue
            sequence.push(token.token_id, token.logprob)
            if sequence.finish is None and at < len(guessed) and guessed[at] == token.token_id:
                still.append(k)
            elif at < len(guessed) and not _finite(logits, starts[k] + at + 1, len(guessed) - at):
                sequence.trusts_drafts = False
        alive, at = still, at + 1
    return broken


def take_back(one: Due, kv: KVCache) -> None:
    """Take the drafts of a sequence that were rejected out of the cache."""
    sequence, drafted = one.sequence, len(one.draft.token_ids)
    if not drafted:
        return
    end = sequence.computed
    sequence.computed = end - drafted - 1 + len(one.pushed)
    if not sequence.trusts_drafts:  # masked positions are still multiplied: they must be finite
        kv.scrub_tokens(sequence.blocks, sequence.computed, end)
    kv.shrink(sequence.blocks, sequence.computed)


def _finite(logits: Tensor, first: int, count: int) -> bool:
    return bool(torch.isfinite(logits[first : first + count]).all())


class Speculator:
    """Decides how many drafts a pass carries, and learns from what became of them."""

    def __init__(self, source: DraftSource, *, most: int = MAX_DRAFT_TOKENS,
                 seconds: PassSeconds | None = None) -> None:  # fmt: skip
        """At most `most` drafts per row and pass; always so many where `seconds`, the predicted
        seconds of a pass, is None; else as many as pay."""
        self._source, self._most = source, most
        self._cost = None if seconds is None else PassCost(seconds)
        self._rates: dict[int, AcceptanceRate] = {}
        self._any = AcceptanceRate()
        self._offers: dict[Sequence, Draft] = {}
        self._passes = 0
        self.stats = SpeculationStats()

    def drafts(self, decoding: Seq[Sequence], *, tokens: int,
               foresight: Foresight | None = None) -> list[Draft]:  # fmt: skip
        """The drafts of the rows that decode, for a pass of `tokens` tokens without them."""
        self._passes += 1
        self._offers.clear()
        limit = min(self._limit(len(decoding), tokens), MAX_PASS_DRAFTS // max(1, len(decoding)))
        most = [min(limit, self._room(sequence)) for sequence in decoding]
        if not any(room > 0 for room in most):
            return [NO_DRAFT] * len(decoding)
        offers = self._offer(decoding, most, foresight)
        if self._cost is None:
            return offers
        counts = share_drafts([self._chances(offer) for offer in offers], tokens=tokens,
                              seconds=self._cost)  # fmt: skip
        self._offers.update(zip(decoding, offers, strict=True))
        return [offer.first(count) for offer, count in zip(offers, counts, strict=True)]

    def learn(self, sequence: Sequence, draft: Draft, pushed: Seq[int]) -> None:
        """What became of a row's draft: the tokens that the row got in this pass.

        What was offered and not checked is compared too, as far as the answer reaches.
        """
        offer = self._offers.pop(sequence, draft)
        pairs = zip(offer.token_ids, offer.kinds, pushed, strict=False)
        for guess, kind, token in pairs:
            for rate in (self._any, self._rates.setdefault(kind, AcceptanceRate())):
                rate.add(guess == token)
            if guess != token:
                break
        stats = self.stats
        stats.drafted += len(draft.token_ids)
        stats.accepted += max(0, len(pushed) - 1)
        stats.row_passes += 1
        stats.tokens += len(pushed)

    def timed(self, tokens: int, seconds: float) -> None:
        """How long a pass took that carried nothing but rows that decode, drafts included."""
        if self._cost is not None:
            self._cost.add(tokens, seconds)

    def describe(self) -> dict[str, Any]:
        """For a report; without drafts, tokens per pass (and row) are 1."""
        stats = self.stats
        return {
            "source": self._source.name,
            "draft_tokens": self._most,
            "chosen_by_cost": self._cost is not None,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "acceptance": stats.accepted / stats.drafted if stats.drafted else None,
            "tokens_per_pass": stats.tokens / stats.row_passes if stats.row_passes else None,
            "draft_s": stats.draft_s,
        }

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def _room(self, sequence: Sequence) -> int:
        """Drafts that could be accepted: a pass gives one token more than it accepts drafts."""
        return min(self._most, sequence.tokens_left - 1) if sequence.trusts_drafts else 0

    def _limit(self, rows: int, tokens: int) -> int:
        """Drafts per row worth asking the source for."""
        if self._cost is None or not self._source.step_s or not rows:
            return self._most
        cost, others = self._cost, tokens - rows
        best = best_drafts(self._any.value, rows=rows, seconds=lambda n: cost(n + others),
                           draft_seconds=self._source.step_s, most=self._most)  # fmt: skip
        return best or int(self._passes % _PROBE_PASSES == 0)

    def _offer(self, decoding: Seq[Sequence], most: Seq[int],
               foresight: Foresight | None) -> list[Draft]:  # fmt: skip
        """The source's drafts."""
        start = time.perf_counter()
        offers = self._source.propose(decoding, most, foresight)
        self.stats.draft_s += time.perf_counter() - start
        return offers

    def _chances(self, offer: Draft) -> list[float]:
        """That each token of a draft and all before it are accepted."""
        rates = [self._rates.setdefault(kind, AcceptanceRate()).value for kind in offer.kinds]
        return list(itertools.accumulate(rates, mul))
