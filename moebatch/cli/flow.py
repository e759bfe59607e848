"""The stream of a run: rows become requests, outcomes become output rows, and what is done is kept.

Memory holds the rows that are under way, never the data set.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from moebatch.cli.limits import ErrorLimit
from moebatch.cli.progress import State
from moebatch.cli.stop import Stop
from moebatch.data.output_rows import index_of
from moebatch.data.record import Record
from moebatch.data.requests import Generated, Outcome, RawRow, Request, RowError
from moebatch.data.writer import OutputWriter
from moebatch.errors import Interrupted, OutputError
from moebatch.report import RowCounts


class Builds(Protocol):
    """Makes the request of a row, or says what is wrong with it; collects what to tell the user."""

    @property
    def warnings(self) -> list[str]: ...

    def build(self, row: RawRow, /) -> Request | RowError: ...


class Stats(Protocol):
    """What an engine counts."""

    @property
    def generated_tokens(self) -> int: ...

    @property
    def phase(self) -> str: ...

    @property
    def in_flight(self) -> int: ...


class Computes(Protocol):
    """An engine, as far as the stream of rows knows it."""

    def run(
        self, requests: Iterable[Request], on_pass: Callable[..., None], /
    ) -> Iterator[Outcome]: ...

    def in_flight(self) -> Iterable[tuple[Request, Generated]]: ...


@dataclass(slots=True)
class Rows:
    """From rows to requests, and from outcomes back to rows.

    `record` None: nothing is kept, the output is a pipe. What was finished by an earlier run of the
    same job is written again from what that run kept.
    """

    writer: OutputWriter
    builder: Builds
    limit: ErrorLimit
    stop: Stop
    record: Record | None = None
    counts: RowCounts = field(default_factory=RowCounts)
    kept: RowCounts = field(default_factory=RowCounts)
    _under_way: dict[int, RawRow] = field(default_factory=dict)

    def requests(self, rows: Iterable[RawRow | RowError]) -> Iterator[Request]:
        """The requests of all rows that are in order and not yet answered.

        Raises: Interrupted, MoebatchError.
        """
        for row in self.stop.interruptible(rows):
            if isinstance(row, RowError):
                self._finish(row.raw, row)
                continue
            made = self.builder.build(row)
            if isinstance(made, RowError):
                self._finish(row, made)
            elif (kept := self.record.find(made) if self.record else None) is not None:
                self.kept.add(kept)
                self._finish(row, kept)
            else:
                self._under_way[row.index] = row
                yield self.record.resume(made) if self.record else made

    def compute(self, engine: Computes, requests: Iterable[Request],
                on_pass: Callable[..., None]) -> None:  # fmt: skip
        """Take what the engine makes of the requests, to the end.

        Whatever ends it early, the work so far is on the disk.
        Raises: Interrupted, MoebatchError.
        """

        def after_pass(stats: Stats) -> None:
            if self.record is not None:
                self.record.step(stats.generated_tokens, engine.in_flight)
            on_pass(stats)

        try:
            for outcome in engine.run(requests, after_pass):
                self._take(outcome)
            if self.record is not None:
                self.record.sync()
        except Interrupted:
            if self.record is not None:
                self.record.checkpoint(engine.in_flight)
            raise
        except Exception:
            with contextlib.suppress(OutputError):  # the first error is the one to tell
                if self.record is not None:
                    self.record.checkpoint(engine.in_flight)
            raise

    def state(self, stats: Stats, total: int | None, mean_tokens: float) -> State:
        """Where the run is; `total` rows are expected, of `mean_tokens` generated tokens each."""
        return State(
            phase=stats.phase,
            rows_done=self.counts.total,
            rows_total=total,
            tokens=stats.generated_tokens + self.tokens_kept,
            expected_tokens=None if total is None else int(total * mean_tokens),
            in_flight=stats.in_flight,
        )

    @property
    def warnings(self) -> list[str]:
        """What the user should know about the rows."""
        return self.builder.warnings

    @property
    def tokens_kept(self) -> int:
        """Generated tokens that earlier sessions had kept, as far as rows have been read."""
        in_flight = self.record.kept.tokens_in_flight if self.record is not None else 0
        return self.kept.generated_tokens + in_flight

    def _take(self, outcome: Outcome) -> None:
        if self.record is not None:
            self.record.put(outcome)
        self._finish(self._under_way.pop(index_of(outcome)), outcome)

    def _finish(self, row: RawRow | None, outcome: Outcome) -> None:
        self.counts.add(outcome)
        self.writer.put(row, outcome)
        self.limit.see(outcome)
