"""When failed rows end a run: too many of them, or nothing but the same failure from the start."""

from dataclasses import dataclass

from moebatch.data.output_rows import index_of
from moebatch.data.requests import Outcome, RowError
from moebatch.errors import TooManyErrors, UsageError

_START_ROWS = 20  # equal failures of that many first rows end a run that was told nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How many failed rows are borne: a number, or a share of all rows; None is any number."""

    most: int | None = None
    share: float | None = None

    @property
    def given(self) -> bool:
        """Whether the user said anything."""
        return self.most is not None or self.share is not None


def parse_tolerance(max_errors: str | None, *, fail_fast: bool) -> Tolerance:
    """What --max-errors N|P% and --fail-fast mean together.

    Raises: UsageError.
    """
    if fail_fast:
        if max_errors is not None:
            raise UsageError("--fail-fast and --max-errors contradict each other")
        return Tolerance(most=0)
    if max_errors is None:
        return Tolerance()
    digits = max_errors.removesuffix("%")
    if max_errors.endswith("%"):
        try:
            share = float(digits) / 100
        except ValueError:
            share = -1.0
        if 0 <= share <= 1:
            return Tolerance(share=share)
    elif digits.isascii() and digits.isdecimal():
        return Tolerance(most=int(digits))
    raise UsageError(
        f"--max-errors {max_errors} is neither a number of rows nor a share of them",
        hint="write it like 100 or 2.5%",
    )


class ErrorLimit:
    """Sees the outcome of every row of a run and ends the run when too many are failures.

    Rows that the user's own length policy skips are no failures. Outcomes may come in any order.
    """

    def __init__(self, tolerance: Tolerance, *, num_rows: int) -> None:
        self._tolerance = tolerance
        self._most = tolerance.most
        if tolerance.share is not None:
            self._most = int(tolerance.share * num_rows)
        self._failed = 0
        # The first rows' failures, until one of these rows does well or fails in another way.
        self._start: dict[int, RowError] | None = None if tolerance.given else {}

    def see(self, outcome: Outcome) -> None:
        """Take note of one row.

        Raises: TooManyErrors.
        """
        failed = isinstance(outcome, RowError) and not outcome.skipped
        self._failed += failed
        if self._most is not None and self._failed > self._most:
            raise TooManyErrors(
                f"stopped: {_rows(self._failed)} failed, "
                + (f"{_rows(self._most)} may" if self._most else "none may")
                + f"; the last: {_shown(outcome)}",
                hint="mend the rows or allow more with --max-errors, and run the command again",
            )
        if self._start is not None and index_of(outcome) < _START_ROWS:
            self._see_start(outcome)

    def _see_start(self, outcome: Outcome) -> None:
        assert self._start is not None
        if not isinstance(outcome, RowError) or outcome.skipped:
            self._start = None
            return
        self._start[outcome.index] = outcome
        kinds = {(error.code, error.param) for error in self._start.values()}
        if len(kinds) > 1:
            self._start = None
        elif len(self._start) == _START_ROWS:
            raise TooManyErrors(
                f"stopped: the first {_START_ROWS} rows all failed alike: {_shown(outcome)}",
                hint="mend the rows or the options; --max-errors 100% goes on whatever fails",
            )


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _shown(outcome: Outcome) -> str:
    assert isinstance(outcome, RowError)
    line = "" if outcome.line is None else f" (line {outcome.line})"
    return f"{outcome.code}{line}: {outcome.message}"
