"""How many tokens it pays to guess ahead: what a pass gains by drafts, against what it costs.

A row of a pass brings its own token and some drafts behind it; they are kept as far as they are what
the model itself says. Source: speculative decoding (arXiv 2211.17192), section 3; the choice by the
seconds of a streamed pass, and per row and token, is ours.
Shapes: K drafts of a pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Amount = Any  # a whole number, or an array of them
PassSeconds = Callable[[Numbers], Numbers]
"""Seconds of passes that carry so many tokens, each of which is sampled."""

MAX_DRAFT_TOKENS = 16
MAX_PASS_DRAFTS = 256  # of all rows: by then computing binds, and memory must be set aside for them
_PRIOR_TRIALS, _PRIOR_RATE = 4.0, 0.6  # before anything is known: hopeful, so that it is tried
_TRIALS_KEPT = 256.0  # older trials fade, so that the estimate follows the text
_PASSES_KEPT = 32.0
_SHAPE_PRIOR = 0.5  # how much spread of log(tokens) it takes to correct the predicted shape by half


def pass_drafts(rows: Amount, drafts: Amount) -> Amount:
    """The most drafts of a pass with up to so many rows, and at most `drafts` for each."""
    return np.minimum(rows * drafts, MAX_PASS_DRAFTS)


def expected_tokens(alpha: float, drafts: int) -> float:
    """Tokens that a row gains in a pass with so many drafts, each accepted with chance `alpha`."""
    return float(sum(alpha**k for k in range(drafts + 1)))


def gain(alpha: float, drafts: int, *, rows: int, seconds: PassSeconds,
         draft_seconds: float = 0.0) -> float:  # fmt: skip
    """Tokens per second with so many drafts per row over those without; `draft_seconds` for each."""
    plain, checked = seconds(np.array([rows, rows * (1.0 + drafts)]))
    return float(expected_tokens(alpha, drafts) * plain / (checked + drafts * draft_seconds))


def best_drafts(alpha: float, *, rows: int, seconds: PassSeconds, draft_seconds: float = 0.0,
                most: int = MAX_DRAFT_TOKENS) -> int:  # fmt: skip
    """Drafts per row with the highest gain; 0 where none is above 1."""
    choices = range(most + 1)
    return max(choices, key=lambda k: (gain(alpha, k, rows=rows, seconds=seconds,
                                            draft_seconds=draft_seconds), -k))  # fmt: skip


def break_even(alpha: float, drafts: int, *, seconds: PassSeconds, draft_seconds: float = 0.0,
               most_rows: int = 4096) -> int | None:  # fmt: skip
    """The fewest rows with which so many drafts per row gain nothing; None: they always do."""
    for rows in range(1, most_rows + 1):
        if gain(alpha, drafts, rows=rows, seconds=seconds, draft_seconds=draft_seconds) <= 1:
            return rows
    return None


def share_drafts(chances: Sequence[Sequence[float]], *, tokens: int, seconds: PassSeconds,
                 ) -> list[int]:  # fmt: skip
    """How many of each row's drafts a pass should carry that has `tokens` tokens without them.

    `chances[r][k]`: that row r's draft k and all before it are accepted; falling in k. The drafts
    most likely to be accepted come first, up to the number with most expected tokens per second.
    """
    offered = sorted((-c, r) for r, row in enumerate(chances) for c in row)
    worth = np.concatenate([[0.0], np.cumsum([-c for c, _ in offered])])
    costs = seconds(tokens + np.arange(len(worth), dtype=np.float64))
    best = int(np.argmax((len(chances) + worth) / costs))
    counts = [0] * len(chances)
    for _, row in offered[:best]:
        counts[row] += 1
    return counts


@dataclass(slots=True)
class AcceptanceRate:
    """The share of drafts of one kind that were accepted; recent ones count more."""

    trials: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: bool) -> None:
        """One draft that was compared: those before it had been accepted."""
        fade = 1.0 - 1.0 / _TRIALS_KEPT
        self.trials = self.trials * fade + 1.0
        self.accepted = self.accepted * fade + accepted

    @property
    def value(self) -> float:
        """An estimate that is never 0 or 1."""
        prior = _PRIOR_TRIALS * _PRIOR_RATE
        return (self.accepted + prior) / (self.trials + _PRIOR_TRIALS)


class PassCost:
    """Seconds of a pass by its tokens: predicted, and corrected by the passes that were measured.

    What is corrected is the shape, log(measured / predicted) being a line in log(tokens): a common
    factor changes no decision, but makes the seconds comparable with those of drafting.
    """

    def __init__(self, predicted: PassSeconds) -> None:
        """Before the first measurement it is what was predicted."""
        self._predicted = predicted
        self._sums = np.zeros(5)  # of weights, x, y, x x, x y

    def add(self, tokens: int, seconds: float) -> None:
        """A pass that took so long."""
        if seconds <= 0:
            return
        predicted = float(self._predicted(np.array([float(tokens)]))[0])
        x, y = np.log(tokens), np.log(seconds / predicted)
        self._sums *= 1.0 - 1.0 / _PASSES_KEPT
        self._sums += (1.0, x, y, x * x, x * y)

    def __call__(self, tokens: Numbers) -> Numbers:
        """Seconds of passes with so many tokens."""
        predicted = self._predicted(tokens)
        count, x, y, xx, xy = self._sums
        if count == 0:
            return predicted
        slope = (xy - x * y / count) / (xx - x * x / count + _SHAPE_PRIOR)
        corrected: Numbers = predicted * np.exp(y / count + slope * (np.log(tokens) - x / count))
        return corrected
