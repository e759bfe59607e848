"""Stand-ins for what drafts, and a draft model around a tiny model, for tests."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import resolve_model
from moebatch.plan.policy import Policy
from moebatch.runtime.draft_model import ModelSource
from moebatch.runtime.drafts import NO_DRAFT, Draft


class Oracle:
    """Knows the answers, and errs as often as it is told to."""

    name, step_s = "oracle", 0.0

    def __init__(self, answers: Any, *, right: float = 1.0, wrong: int | None = None,
                 seed: int = 0) -> None:  # fmt: skip
        self._answers, self._right, self._wrong = answers, right, wrong
        self._random = random.Random(seed)

    def propose(self, sequences: Any, most: Any, foresight: Any = None) -> list[Draft]:
        return [self._draft(s, count) for s, count in zip(sequences, most, strict=True)]

    def _draft(self, sequence: Any, count: int) -> Draft:
        if count < 1:
            return NO_DRAFT
        done = len(sequence.generated)
        answer = self._answers[sequence.request.index][sequence.choice][done : done + count]
        ids = [t if self._random.random() < self._right else self._other(t) for t in answer]
        return Draft(token_ids=tuple(ids), kinds=(0,) * len(ids))

    def _other(self, token: int) -> int:
        return (token + 1) % 97 if self._wrong is None else self._wrong

    def close(self) -> None:
        self._answers = None


@contextmanager
def model_source(path: Path, *, vocab_size: int = 97, **changes: Any) -> Iterator[ModelSource]:
    """A tiny model that drafts."""
    model = resolve_model(str(path))
    policy = Policy(**{"batch_size": 12, "micro_batch_size": 12, "kv_blocks": 200,
                       "prefill_tokens": 32, **changes})  # fmt: skip
    with Checkpoint(path) as checkpoint:
        source = ModelSource(checkpoint, spec=model.spec, family=model.family, policy=policy,
                             compute="float32", vocab_size=vocab_size)  # fmt: skip
        source.load(threads=1)
        yield source
