"""Drafts by a smaller model of the same vocabulary, which stays in memory with a cache of its own.

It draws with the noise that the target will draw with: a draft model that is as sure of something as
the target says the same, at any temperature.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType
from moebatch.native.kernels import Kernels
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.runtime.backend import HostBackend, Progress
from moebatch.runtime.batch import Segment
from moebatch.runtime.drafts import NO_DRAFT, Draft
from moebatch.runtime.foresight import Foresight
from moebatch.runtime.kv_cache import BlockTable, blocks_for
from moebatch.runtime.sampling import sample
from moebatch.runtime.sequence import Sequence

_NEWEST = 0.1  # weight of the newest measurement
_SURENESS = 8  # kinds of drafts: by how sure the model is of them


@dataclass(slots=True)
class _Held:
    """What the draft's cache holds of a sequence: `known` tokens of its text, `guessed` behind."""

    blocks: BlockTable = field(default_factory=BlockTable)
    known: int = 0
    guessed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    """A sequence that is being drafted for: tokens that its next pass computes, tokens guessed."""

    sequence: Sequence
    held: _Held
    most: int
    due: list[int]
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def draft(self) -> Draft:
        return Draft(token_ids=tuple(self.tokens), kinds=tuple(self.kinds))


class ModelSource:
    """A `DraftSource`. `load` it first; the checkpoint is the caller's to close."""

    name = "draft"

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 compute: ComputeType, vocab_size: int,
                 kernels: Kernels | None = None) -> None:  # fmt: skip
        """The policy keeps all weights; `vocab_size` is the target's, no other token is drafted.

        Sequences that its cache has no room for get no drafts.
        """
        self._spec, self._vocab_size = spec, vocab_size
        self._prefill_tokens = policy.prefill_tokens
        self._backend = HostBackend(checkpoint, spec=spec, family=family, policy=policy,
                                    compute=compute, kernels=kernels,
                                    attended=self._attended)  # fmt: skip
        self._foresight: Foresight | None = None
        self._kv = self._backend.kv
        self._held: dict[Sequence, _Held] = {}
        self.step_s = 0.0

    def load(self, *, threads: int, progress: Progress = lambda done, total: None) -> None:
        """Read the weights.

        Raises: ModelError when a file cannot be read.
        """
        self._backend.load(threads=threads, progress=progress)

    def propose(self, sequences: Seq[Sequence], most: Seq[int],
                foresight: Foresight | None = None) -> list[Draft]:  # fmt: skip
        """See DraftSource; the kind of a token says how sure the model is of it."""
        self._leave(sequences)
        rows = [self._row(sequence, count) for sequence, count in zip(sequences, most, strict=True)]
        active = [row for row in rows if row is not None]
        self._catch_up(active)
        if active and foresight is not None:
            drafts = max(row.most for row in active)
            self._foresight = foresight if foresight.begin(self._spec, drafts=drafts) else None
        start, steps = time.perf_counter(), 0
        while active := [row for row in active if len(row.tokens) < row.most]:
            self._step(active)
            steps += 1
        if self._foresight is not None:
            self._foresight.drafted(time.perf_counter() - start, steps)
            self._foresight = None
        return [NO_DRAFT if row is None else row.draft() for row in rows]

    def close(self) -> None:
        """See DraftSource."""
        self._backend.close()

    def _attended(self, layer: int, states: Tensor) -> None:
        if self._foresight is not None:
            self._foresight.attended(layer, states)

    def _leave(self, sequences: Seq[Sequence]) -> None:
        """Sequences that are not among these have ended."""
        staying = set(sequences)
        for gone in [sequence for sequence in self._held if sequence not in staying]:
            self._kv.release(self._held.pop(gone).blocks)

    def _forget(self, sequence: Sequence) -> None:
        """Numbers that are not finite must not reach who gets the blocks next."""
        held = self._held.pop(sequence)
        self._kv.scrub(held.blocks)
        self._kv.release(held.blocks)

    def _row(self, sequence: Sequence, most: int) -> _Row | None:
        """None where nothing is wanted, or the cache or the model has no room."""
        length = len(sequence.prompt) + len(sequence.generated)
        most = min(most, self._spec.max_model_len - length)
        if most < 1:
            return None
        held = self._held.setdefault(sequence, _Held())
        fresh = sequence.tokens_from(held.known)
        right = 0  # guesses that came true stay in the cache
        while (
            right < min(len(held.guessed), len(fresh) - 1) and held.guessed[right] == fresh[right]
        ):
            right += 1
        held.known, held.guessed = held.known + right, []
        self._kv.shrink(held.blocks, held.known)
        due = fresh[right:]
        missing = blocks_for(length + most) - len(held.blocks)
        if missing > self._kv.num_free or max(due) >= self._spec.vocab_size:
            return None
        self._kv.extend(held.blocks, length + most)
        return _Row(sequence, held, most, due)

    def _catch_up(self, rows: Seq[_Row]) -> None:
        """Compute prompts, and whatever else there is but the last token of each row."""
        while True:
            budget, part = self._prefill_tokens, []
            for row in rows:
                count = min(budget, len(row.due) - 1)
                if count > 0:
                    part.append((row, self._segment(row, count)))
                    budget -= count
            if not part:
                return
            self._backend.compute([[segment for _, segment in part]])
            for row, segment in part:
                row.held.known = segment.end
                del row.due[: len(segment.token_ids)]

    def _step(self, rows: Seq[_Row]) -> None:
        """One token more of each row."""
        start = time.perf_counter()
        done = self._backend.compute([[self._segment(row, 1) for row in rows]])
        logits = self._backend.logits(torch.tensor(done.last_tokens[0]))
        sure = (logits.max(dim=1).values - logits.logsumexp(dim=1)).exp()
        states = [row.sequence.guessing_state(row.tokens) for row in rows]
        for row, token, share in zip(rows, sample(logits, states), sure.tolist(), strict=True):
            if row.tokens:
                row.held.guessed += row.due
            else:
                row.held.known += 1
            if not token.finite or token.token_id >= self._vocab_size:
                row.most = len(row.tokens)
                if not token.finite:
                    self._forget(row.sequence)
                continue
            row.due = [token.token_id]
            row.tokens.append(token.token_id)
            row.kinds.append(min(int(share * _SURENESS), _SURENESS - 1))
        spent = time.perf_counter() - start
        self.step_s += (spent - self.step_s) * (_NEWEST if self.step_s else 1.0)

    def _segment(self, row: _Row, count: int) -> Segment:
        start = row.held.known + len(row.held.guessed)
        return Segment(token_ids=tuple(row.due[:count]), start=start, blocks=row.held.blocks,
                       max_len=row.sequence.max_len)  # fmt: skip
