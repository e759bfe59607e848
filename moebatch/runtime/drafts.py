"""Where drafts come from: guesses of a sequence's next tokens, which a pass then checks.

A draft may be anything at all: it decides how fast an answer comes, never what it says.
Shapes: N tokens of a sequence so far.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moebatch.runtime.foresight import Foresight
from moebatch.runtime.sequence import Sequence

Ids = NDArray[np.int64]

_LONGEST_MATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Tokens that may come next, in order; `kinds` groups tokens that are accepted alike."""

    token_ids: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()

    def first(self, count: int) -> "Draft":
        """Its first `count` tokens."""
        return Draft(token_ids=self.token_ids[:count], kinds=self.kinds[:count])


NO_DRAFT = Draft()


class DraftSource(Protocol):
    """Guesses tokens. Close it when the job is over."""

    name: str
    step_s: (
        float  # seconds of one token more for each row; 0: none worth counting, or not known yet
    )

    def propose(self, sequences: Seq[Sequence], most: Seq[int],
                foresight: Foresight | None = None) -> list[Draft]:  # fmt: skip
        """A draft of each sequence, of at most so many tokens; all that are decoding are given.

        `foresight` is told what a model that drafts knows of the experts to come.
        """
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class NgramSource:
    """Takes what followed the last tokens where they stood before: no model, no time.

    Source: prompt lookup decoding (A. Saxena, 2023). The longest match counts, of equals the last;
    a draft that reaches the end of the text goes on from its own beginning, as a loop would.
    """

    name, step_s = "ngram", 0.0

    def __init__(self, *, shortest: int = 2) -> None:
        """Matches of fewer than `shortest` tokens do not count."""
        self._texts: dict[Sequence, _Text] = {}
        self._shortest = shortest

    def propose(self, sequences: Seq[Sequence], most: Seq[int],
                foresight: Foresight | None = None) -> list[Draft]:  # fmt: skip
        """See DraftSource; the kind of a token is the length of the match."""
        self._texts = {s: self._texts.get(s) or _Text() for s in sequences}
        return [
            self._texts[sequence].draft(sequence, count, self._shortest)
            for sequence, count in zip(sequences, most, strict=True)
        ]

    def close(self) -> None:
        """See DraftSource."""
        self._texts.clear()


class _Text:
    """A sequence's tokens as an array that grows with it."""

    def __init__(self) -> None:
        self._ids = np.empty(0, dtype=np.int64)
        self._length = 0

    def draft(self, sequence: Sequence, most: int, shortest: int) -> Draft:
        ids = self._grown(sequence)
        at, length = longest_match(ids)
        if length < shortest or most < 1:
            return NO_DRAFT
        after = ids[at + 1 :]
        token_ids = np.resize(after, most).tolist()
        return Draft(token_ids=tuple(token_ids), kinds=(length,) * most)

    def _grown(self, sequence: Sequence) -> Ids:
        prompt, generated = sequence.prompt, sequence.generated
        length = len(prompt) + len(generated)
        if length > len(self._ids):
            self._ids = np.resize(np.array([*prompt, *generated]), 2 * length)
        else:
            self._ids[self._length : length] = generated[self._length - len(prompt) :]
        self._length = length
        return self._ids[:length]


def longest_match(ids: Ids) -> tuple[int, int]:
    """Where the last tokens of ids [N] stood before: the place of the last one, and how many.

    At most _LONGEST_MATCH are compared; (0, 0) where even the last token is new.
    """
    last = len(ids) - 1
    at = np.flatnonzero(ids[:last] == ids[last])
    if not len(at):
        return 0, 0
    length = 1
    while length < _LONGEST_MATCH:
        longer = at[at >= length]
        longer = longer[ids[longer - length] == ids[last - length]]
        if not len(longer):
            break
        at, length = longer, length + 1
    return int(at[-1]), length
