"""What a run keeps of its work while it goes on: finished rows, tokens of unfinished ones, counters.

The counters survive the end of the process at no cost, so the next run can tell what was lost.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from moebatch.data.durable import new_path, remove, write_error
from moebatch.data.inflight import Pace, read_inflight, write_inflight
from moebatch.data.journal import Journal, request_key
from moebatch.data.requests import Generated, Outcome, Request, RowError
from moebatch.data.side import SideDirectory

UnderWay = Callable[[], Iterable[tuple[Request, Generated]]]


@dataclass(slots=True)
class Kept:
    """What earlier runs of the same job had done, as far as this one used it.

    `tokens_lost` had been generated and were not on disk when the run before ended.
    """

    rows: int = 0
    rows_retried: int = 0
    rows_in_flight: int = 0
    tokens: int = 0
    tokens_in_flight: int = 0
    tokens_lost: int = 0
    rows_by_session: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class Cost:
    """What keeping the work has taken so far."""

    checkpoints: int = 0
    checkpoint_s: float = 0.0
    journal_s: float = 0.0


class Record:
    """The journal and the in-flight tokens of one output. Close it; it does not own the lock."""

    def __init__(self, side: SideDirectory, *, session: int, keep_errors: bool = False,
                 checkpoint_steps: int | None = None) -> None:  # fmt: skip
        """Read what earlier sessions left. `checkpoint_steps` None: as often as costs little time.

        Raises: OutputWriteError.
        """
        self._side = side
        self._keep_errors = keep_errors
        self._journal = Journal(side.path, session=session)
        earlier = read_inflight(side.inflight_path)
        self._earlier = {k: v for k, v in earlier.items() if self._journal.find(k) is None}
        self._keys: dict[int, bytes] = {}
        self._pace = Pace(checkpoint_steps)
        self.kept, self.cost = Kept(), Cost()
        safe = self._journal.num_tokens + self.tokens_in_flight
        self._meter = _Meter(side.path / "progress")
        self.kept.tokens_lost = max(0, self._meter.read() - safe)
        self._meter.start(safe)

    @property
    def has_work(self) -> bool:
        """Whether earlier sessions have left anything."""
        return bool(self._journal.num_rows or self._earlier)

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of unfinished rows that an earlier session has left and this one not yet used."""
        return sum(len(one.token_ids) for row in self._earlier.values() for one in row)

    def found(self) -> str:
        """What earlier sessions have left, in words."""
        damaged = f"; {self.num_damaged} damaged lines are left out" if self.num_damaged else ""
        return (
            f"resuming: {self._journal.num_rows:,} finished rows and the tokens of "
            f"{len(self._earlier):,} unfinished ones are kept{damaged}"
        )

    @property
    def num_damaged(self) -> int:
        """Lines of the journal that were unreadable, the torn last one not counted."""
        return self._journal.num_damaged

    def find(self, request: Request) -> Outcome | None:
        """What an earlier session made of this request; None where it has to be computed."""
        start = time.perf_counter()
        key = request_key(request)
        entry = self._journal.find(key)
        self.cost.journal_s += time.perf_counter() - start
        if entry is None or (entry.failed and not self._keep_errors):
            self.kept.rows_retried += entry is not None
            self._keys[request.index] = key
            return None
        self.kept.rows += 1
        self.kept.rows_by_session[entry.session] += 1
        self.kept.tokens += entry.num_tokens
        return entry.outcome(request)

    def resume(self, request: Request) -> Request:
        """The request with the tokens that an earlier session had generated."""
        generated = self._earlier.get(self._keys[request.index], ())
        if not generated:
            return request
        self.kept.rows_in_flight += 1
        self.kept.tokens_in_flight += sum(len(one.token_ids) for one in generated)
        return replace(request, resumed=generated)

    def put(self, outcome: Outcome) -> None:
        """Keep what the engine made of a request that `find` did not know.

        Raises: OutputWriteError.
        """
        start = time.perf_counter()
        index = outcome.index if isinstance(outcome, RowError) else outcome.request.index
        key = self._keys.pop(index)
        self._earlier.pop(key, None)
        self._journal.put(key, outcome)
        self.cost.journal_s += time.perf_counter() - start

    def step(self, generated_tokens: int, under_way: UnderWay) -> None:
        """To be called after each pass, with the tokens generated in this session so far.

        Raises: OutputWriteError.
        """
        start = time.perf_counter()
        self._journal.flush()
        self._meter.count(generated_tokens)
        self.cost.journal_s += time.perf_counter() - start
        if self._pace.step():
            self.checkpoint(under_way)

    def checkpoint(self, under_way: UnderWay) -> None:
        """Put everything on the disk: finished rows, and tokens of the others.

        Raises: OutputWriteError.
        """
        start = time.perf_counter()
        self._journal.sync()
        path = self._side.inflight_path
        try:
            write_inflight(path, self._snapshot(under_way()))
        except OSError as error:
            raise write_error(path, error) from error
        seconds = time.perf_counter() - start
        self._pace.taken(seconds)
        self.cost.checkpoints += 1
        self.cost.checkpoint_s += seconds

    def sync(self) -> None:
        """Put finished rows on the disk.

        Raises: OutputWriteError.
        """
        self._journal.sync()

    def finish(self) -> None:
        """All rows are answered and the output is there: in-flight tokens are of no more use.

        Raises: OutputWriteError.
        """
        try:
            for path in (self._side.inflight_path, new_path(self._side.inflight_path)):
                remove(path)
        except OSError as error:
            raise write_error(self._side.inflight_path, error) from error

    def close(self) -> None:
        """Close the files; what was not flushed is dropped."""
        self._journal.close()
        self._meter.close()

    def _snapshot(self, under_way: Iterable[tuple[Request, Generated]],
                  ) -> Iterator[tuple[bytes, Generated]]:  # fmt: skip
        """The engine's tokens, and those of an earlier session that the engine has not asked for."""
        for request, generated in under_way:
            key = self._keys.get(request.index)
            if key is not None:
                self._earlier.pop(key, None)
                yield key, generated
        for key, row in self._earlier.items():
            for generated in row:
                yield key, generated


class _Meter:
    """A count of tokens in a file of fixed size, good for as long as the machine is up."""

    def __init__(self, path: Path) -> None:
        self._start = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_error(path, error) from error

    def read(self) -> int:
        text = os.pread(self._fd, 20, 0)
        return int(text) if text.isdigit() else 0

    def start(self, tokens: int) -> None:
        self._start = tokens
        self.count(0)

    def count(self, tokens: int) -> None:
        try:
            os.pwrite(self._fd, b"%020d\n" % (self._start + tokens), 0)
        except OSError as error:
            raise write_error("progress", error) from error

    def close(self) -> None:
        os.close(self._fd)
