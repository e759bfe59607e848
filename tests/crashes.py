"""A run that dies at any write, and an engine that makes tokens out of hashes: for tests of resume."""

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moebatch.cli.flow import Rows
from moebatch.cli.keeping import KeepOptions, open_work
from moebatch.cli.limits import ErrorLimit, Tolerance
from moebatch.cli.stop import Stop
from moebatch.data import durable, record, side
from moebatch.data.journal import read_entries
from moebatch.data.output_rows import RowFormat
from moebatch.data.requests import (
    Choice,
    Completion,
    Generated,
    Outcome,
    RawRow,
    Request,
    RowError,
    SamplingParams,
    TokenLogprob,
)
from moebatch.data.writer import OutputWriter

FORMAT = RowFormat(model_name="fake", run_id="run", include=("token_ids",))


class Killed(BaseException):
    """The process is gone: nothing that comes after has any effect."""


class MortalOs:
    """`os`, until the n-th call that changes a file: that one is done in part, or not, and no more."""

    CHANGES = ("write", "pwrite", "fsync", "replace", "unlink", "ftruncate")

    def __init__(self, rng: random.Random, *, lives: int) -> None:
        self._rng, self._lives = rng, lives
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name) if name != "fsync" else _nothing  # the machine itself lives on
        return self._mortal(name, real) if name in self.CHANGES else real

    def die(self) -> None:
        self.dead = True
        raise Killed

    def _mortal(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.dead:
                raise Killed
            self._lives -= 1
            if self._lives > 0:
                return real(*args)
            if name == "write":  # torn anywhere
                fd, content = args
                real(fd, bytes(content)[: self._rng.randrange(len(content) + 1)])
            elif self._rng.random() < 0.5:
                real(*args)
            self.die()

        return call


def _nothing(fd: int) -> None:
    """Forces nothing to the disk."""


def token(request: Request, choice: int, position: int) -> int:
    """The token that the fake model always generates there."""
    facts = (request.id, request.prompt_token_ids, request.params.seed, choice, position)
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=2).digest(), "little")


@dataclass
class State:
    """One choice under way."""

    request: Request
    choice: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def ended(self) -> bool:
        at_end = bool(self.token_ids) and self.token_ids[-1] % 13 == 0
        return at_end or len(self.token_ids) >= (self.request.params.max_tokens or 1)

    def step(self) -> None:
        new = token(self.request, self.choice, len(self.token_ids))
        self.token_ids.append(new)
        if self.request.params.logprobs is not None:
            top = tuple((new + k, -1.0 / (new + k + 3)) for k in range(new % 3))
            self.logprobs.append(TokenLogprob(token_id=new, logprob=-(new / 7), top=top))

    def to_choice(self) -> Choice:
        return Choice(
            index=self.choice,
            token_ids=tuple(self.token_ids),
            text="".join(chr(0x61 + t % 26) if t % 5 else "é\n\u2028" for t in self.token_ids),
            finish_reason="stop" if self.token_ids[-1] % 13 == 0 else "length",
            logprobs=None if self.request.params.logprobs is None else tuple(self.logprobs),
        )


@dataclass
class Stats:
    generated_tokens: int = 0


class FakeEngine:
    """Takes `batch` choices at a time, one token each a pass; `asked` names the requests it saw."""

    def __init__(self, *, batch: int, before_pass: Callable[[], None] = lambda: None) -> None:
        self.stats, self.asked = Stats(), list[str]()
        self.done: list[str] = []  # rows answered in passes that are over, kept ones included
        self._batch, self._before_pass = batch, before_pass
        self._active: list[State] = []
        self._ended: dict[int, list[State]] = {}

    def run(self, requests: Iterable[Request], on_pass: Callable[..., None]) -> Iterator[Outcome]:
        source = iter(requests)
        while True:
            while len(self._active) < self._batch and (request := next(source, None)):
                self._start(request)
            if not self._active and not self._ended:
                return
            self._before_pass()
            answered = []
            for state in [s for s in self._active if not s.ended()]:
                self.stats.generated_tokens += 1
                state.step()
            for state in [s for s in self._active if s.ended()]:
                self._active.remove(state)
                self._ended.setdefault(state.request.index, []).append(state)
            for outcome in self._complete():
                answered.append(outcome)
                yield outcome
            on_pass(self.stats)
            self.done += [o.id if isinstance(o, RowError) else o.request.id for o in answered]

    def in_flight(self) -> Iterator[tuple[Request, Generated]]:
        ended = [state for states in self._ended.values() for state in states]
        for state in [*self._active, *ended]:
            if state.token_ids:
                yield (
                    state.request,
                    Generated(
                        choice=state.choice, token_ids=state.token_ids, logprobs=state.logprobs
                    ),
                )

    def _start(self, request: Request) -> None:
        self.asked.append(request.id)
        states = {c: State(request, c) for c in range(request.params.n)}
        for earlier in request.resumed:
            state = states[earlier.choice]
            state.token_ids += earlier.token_ids
            state.logprobs += earlier.logprobs
            for position, found in enumerate(earlier.token_ids):
                assert found == token(request, earlier.choice, position)
        self._active += states.values()

    def _complete(self) -> Iterator[Outcome]:
        for index in [i for i, s in self._ended.items() if len(s) == s[0].request.params.n]:
            states = sorted(self._ended.pop(index), key=lambda state: state.choice)
            request = states[0].request
            if request.id.endswith("bad"):
                yield RowError(index=index, id=request.id, code="non_finite_logits", message="no")
            else:
                yield Completion(request=request, choices=tuple(s.to_choice() for s in states))


class FakeBuilder:
    """Requests out of columns; a row without a prompt is an error."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def build(self, row: RawRow) -> Request | RowError:
        asked = dict(row.columns)
        if "prompt" not in asked:
            return RowError(index=row.index, id=row.id, code="missing_prompt", message="none",
                            line=row.line, raw=row)  # fmt: skip
        params = SamplingParams(
            max_tokens=asked.get("max_tokens", 9), n=asked.get("n", 1),
            logprobs=asked.get("logprobs"), temperature=0.8,
        )  # fmt: skip
        ids = tuple(map(ord, asked["prompt"]))
        return Request(index=row.index, id=row.id, prompt_token_ids=ids, params=params)


def as_rows(columns: Sequence[dict[str, Any]]) -> list[RawRow | RowError]:
    """Rows in order; an empty dict is a line that could not be read."""
    return [
        RawRow(index=i, line=i + 1, id=row["id"], schema=row.get("schema", "flat"), columns=row)
        if row
        else RowError(index=i, id=str(i), code="invalid_json", message=f"line {i + 1}", line=i + 1)
        for i, row in enumerate(columns)
    ]


def run_session(out: Path, columns: Sequence[dict[str, Any]], engine: FakeEngine,
                options: KeepOptions, *, seen: Callable[[Any], None] = lambda work: None,
                order: Any = "input") -> None:  # fmt: skip
    """One start of the command, from the lock to the output under its name."""
    rows = as_rows(columns)
    with open_work(out, {"model": "fake"}, options) as work:
        seen(work)
        limit = ErrorLimit(Tolerance(share=1.0), num_rows=len(rows))
        writer = OutputWriter(out, format=FORMAT, order=order)
        flow = Rows(writer, FakeBuilder(), limit, Stop(), work.record)
        with flow.writer:
            flow.compute(engine, flow.requests(rows), lambda stats: None)
            flow.writer.close()
        work.finish()


def uninterrupted(out: Path, columns: Sequence[dict[str, Any]], monkeypatch: Any) -> bytes:
    """The output of a run that nothing disturbs."""
    mortal(monkeypatch, random.Random(0), lives=10**9)
    run_session(out, columns, FakeEngine(batch=4), KeepOptions())
    monkeypatch.undo()
    return out.read_bytes()


def mortal(monkeypatch: Any, rng: random.Random, *, lives: int) -> MortalOs:
    """Let every module that changes files do so through a mortal `os`."""
    system = MortalOs(rng, lives=lives)
    for module in (durable, record, side):
        monkeypatch.setattr(module, "os", system)
    return system


def journaled(out: Path) -> dict[str, int]:
    """Rows that are safe, with their tokens."""
    folder = side.side_path(out)
    return {e.id: e.num_tokens for e in read_entries(folder) if not e.failed}
