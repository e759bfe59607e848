"""What may end a run before its rows do: Ctrl-C, SIGTERM, --time-limit. The work so far is kept.

A first signal is noted while work must not be torn, and ends the run between two steps; elsewhere it
ends the run at once. A second signal ends it at once wherever it is.
"""

import contextlib
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Self, TypeVar

from moebatch.errors import Interrupted

T = TypeVar("T")

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGALRM: 75}
_REASONS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGALRM: "time_limit",
}
_END: Any = object()


class Stop:
    """Handlers of the signals that end a run. Use it in a `with`, in the main thread."""

    def __init__(self, *, time_limit_s: float | None = None) -> None:
        """`time_limit_s` counts from entering the `with`."""
        self._time_limit_s = time_limit_s
        self._signal: signal.Signals | None = None
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """The exit code that the signal asks for."""
        return _EXIT_CODES[self._signal or signal.SIGINT]

    @property
    def reason(self) -> str:
        """The signal as a word for the report."""
        return _REASONS[self._signal or signal.SIGINT]

    def requested(self) -> bool:
        """Whether the run should end."""
        return self._signal is not None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Work that must not be torn: a signal is only noted."""
        with self._mode(deferred=True):
            yield

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """Within deferred work, a part that may take long and can be left anywhere.

        Raises: Interrupted.
        """
        with self._mode(deferred=False):
            if self._signal is not None:
                raise Interrupted
            yield

    def interruptible(self, items: Iterable[T]) -> Iterator[T]:
        """The items, waiting for each of which may be interrupted.

        Raises: Interrupted.
        """
        iterator = iter(items)
        while True:
            with self.immediate():
                item = next(iterator, _END)
            if item is _END:
                return
            yield item

    def __enter__(self) -> Self:
        for number in _EXIT_CODES:
            self._before[number] = signal.signal(number, self._handle)
        if self._time_limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._time_limit_s)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self._signal is None
        if first:
            self._signal = signal.Signals(number)
            if self._deferred:
                return
            raise Interrupted
        if number != signal.SIGALRM:  # the time limit adds nothing to a stop under way
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _mode(self, *, deferred: bool) -> Iterator[None]:
        before, self._deferred = self._deferred, deferred
        try:
            yield
        finally:
            self._deferred = before
