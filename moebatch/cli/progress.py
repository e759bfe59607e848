"""Progress on stderr: two bars on a terminal, a line now and then elsewhere, or nothing."""

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from moebatch.errors import UsageError
from moebatch.units import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_PLAIN_INTERVAL_S = 30.0
_RATE_WINDOW_S = 60.0
CHOICES = ("auto", "bar", "plain", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run is. `expected_tokens` is an upper bound: rows may end early; None if unknown."""

    phase: str
    rows_done: int
    rows_total: int | None
    tokens: int
    expected_tokens: int | None
    in_flight: int


class Rate:
    """Tokens per second over the last minute, and since the start."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._start: float | None = None

    def update(self, tokens: int) -> tuple[float, float]:
        """(over the last minute, since the first call) in tokens per second."""
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        self._marks.append((now, tokens))
        while now - self._marks[0][0] > _RATE_WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()
        first_time, first_tokens = self._marks[0]
        recent = (tokens - first_tokens) / (now - first_time) if now > first_time else 0.0
        total = tokens / (now - self._start) if now > self._start else 0.0
        return recent, total


def eta_s(state: State, tokens_per_s: float) -> float | None:
    """Seconds left at this rate, if every row generates all it may."""
    if state.expected_tokens is None or tokens_per_s <= 0:
        return None
    return max(0, state.expected_tokens - state.tokens) / tokens_per_s


def describe(state: State, recent: float, total: float) -> str:
    """One line of text, the same in every form of progress."""
    rows = f"{state.rows_done:,}" + (f"/{state.rows_total:,}" if state.rows_total else "")
    left = eta_s(state, recent)
    eta = f" · ETA ≤ {format_duration(left)}" if left is not None else ""
    return (
        f"{state.phase} · {rows} rows · {state.tokens:,} tokens · {state.in_flight} in flight · "
        f"{recent:.1f} tok/s (1 min) · {total:.1f} tok/s (all){eta}"
    )


class View(ABC):
    """Where progress goes. Use it in a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    @abstractmethod
    def loading(self, done: int, total: int) -> None:
        """Pages of weights that are in memory."""

    @abstractmethod
    def running(self, state: State) -> None:
        """After every pass."""

    def note(self, text: str) -> None:
        """Something the user should know once."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def note_all(self, texts: Iterable[str]) -> None:
        """Some of these."""
        for text in texts:
            self.note(text)


class Silent(View):
    """No progress at all."""

    def loading(self, done: int, total: int) -> None:
        """Nothing."""

    def running(self, state: State) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class Plain(View):
    """A line at the start of each phase and every half minute; no control codes."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._said_s = 0.0

    def loading(self, done: int, total: int) -> None:
        """A line now and then while weights are read."""
        if self._due() or done == total:
            self.note(f"loading · {done}/{total} pages of weights")

    def running(self, state: State) -> None:
        """A line now and then while rows are computed."""
        recent, total = self._rate.update(state.tokens)
        if self._due():
            self.note(describe(state, recent, total))

    def _due(self) -> bool:
        now = time.monotonic()
        due = now - self._said_s >= _PLAIN_INTERVAL_S
        if due:
            self._said_s = now
        return due


class Bars(View):
    """Two bars, rows and tokens, with phase, rates and ETA."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._rate = Rate()
        self._bars: RichProgress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._load = self._bars.add_task("loading", total=None, text="")
        self._rows = self._bars.add_task("rows", total=None, visible=False, text="")
        self._tokens = self._bars.add_task("tokens", total=None, visible=False, text="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.stop()

    def loading(self, done: int, total: int) -> None:
        """Move the loading bar."""
        text = f"{done}/{total} pages of weights"
        self._bars.update(self._load, completed=done, total=total, text=text)

    def running(self, state: State) -> None:
        """Move the bars of rows and tokens."""
        recent, total = self._rate.update(state.tokens)
        left = eta_s(state, recent)
        eta = f" · ETA ≤ {format_duration(left)}" if left is not None else ""
        rows = f"{state.rows_done:,}" + (f"/{state.rows_total:,}" if state.rows_total else "")
        rates = f"{recent:.1f} tok/s (1 min) · {total:.1f} (all)"
        self._bars.update(self._load, visible=False)
        self._bars.update(self._rows, visible=True, completed=state.rows_done,
                          total=state.rows_total, text=f"{rows} · {state.phase}{eta}")  # fmt: skip
        text = f"{state.tokens:,} · {rates}"
        self._bars.update(self._tokens, visible=True, completed=state.tokens,
                          total=state.expected_tokens, text=text)  # fmt: skip

    def note(self, text: str) -> None:
        """Above the bars."""
        self._bars.console.print(text, highlight=False, soft_wrap=True, markup=False)


def make_view(choice: str, *, quiet: bool) -> View:
    """The form of progress for a choice; auto looks whether stderr is a terminal.

    Raises: UsageError for a choice that does not exist.
    """
    if choice not in CHOICES:
        raise UsageError(f"--progress {choice} does not exist", hint=f"one of {', '.join(CHOICES)}")
    if quiet or choice == "none":
        return Silent()
    if choice == "bar" or (choice == "auto" and sys.stderr.isatty()):
        return Bars()
    return Plain()
