"""Decides when a sequence ends and what its text is.

The rules are vLLM's. EOS and stop tokens end a sequence from its min_tokens-th token on and leave
no text; a stop string ends it once it stands complete in text that comes after the first min_tokens
tokens; the length limits come last. Knows neither tokenizer nor tensors: it is given a decoder.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moebatch.data.requests import FinishReason, SamplingParams


class TextStream(Protocol):
    """Turns tokens into text as they come, and keeps back characters that are not complete."""

    def push(self, token_id: int, /) -> str:
        """The text that this token completes; often empty within a UTF-8 character."""
        ...


OpenStream = Callable[[bool], TextStream]
"""A new stream; the argument is skip_special_tokens."""

Decode = Callable[[Sequence[int], bool], str]
"""The text of all tokens at once; the second argument is skip_special_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a sequence ended; `stop_reason` is the stop string or stop token id, None for EOS."""

    reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    """A stop string, and its place in the text: characters [start, end)."""

    stop: str
    start: int
    end: int


class StopChecker:
    """Follows one sequence from its first generated token to its end.

    Tokens become text one by one only where stop strings ask for it; else once, in `text`.
    """

    def __init__(self, params: SamplingParams, *, eos_token_ids: tuple[int, ...], prompt_len: int,
                 max_model_len: int, open_stream: OpenStream, decode: Decode) -> None:  # fmt: skip
        self._params = params
        self._eos = frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._limit = min(params.max_tokens or max_model_len, max_model_len - prompt_len)
        self._decode = decode
        self._scanner = _StopScanner(params.stop) if params.stop else None
        self._stream = open_stream(params.skip_special_tokens) if params.stop else None
        self._token_ids = array("q")
        self._match: _Match | None = None
        self._finish: Finish | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        """Everything generated so far, a final EOS included. Grows with `push`: copy to keep it."""
        return self._token_ids

    @property
    def finish(self) -> Finish | None:
        """How the sequence ended; None while it goes on."""
        return self._finish

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """What the next token must not be, because min_tokens is not reached.

        As in vLLM, EOS stays forbidden under ignore_eos too.
        """
        return self.forbidden_after(len(self._token_ids))

    def forbidden_after(self, num_tokens: int) -> tuple[int, ...]:
        """The same once so many tokens have been generated."""
        if num_tokens >= self._params.min_tokens:
            return ()
        return tuple(sorted(self._eos | self._stop_ids))

    def push(self, token_id: int) -> Finish | None:
        """Take the next token; says how the sequence ends if it ends here."""
        assert self._finish is None, f"token {token_id} after the end: {self._finish}"
        self._token_ids.append(token_id)
        self._finish = self._by_token(token_id) or self._by_text(token_id) or self._by_length()
        return self._finish

    def text(self) -> str:
        """The text so far, without what ended it.

        include_stop_str_in_output keeps the stop string, and the text of a stop token or EOS
        as far as skip_special_tokens lets it through.
        """
        keep_stop = self._params.include_stop_str_in_output
        if self._match and self._scanner:
            return self._scanner.text(self._match.end if keep_stop else self._match.start)
        ids = self._token_ids.tolist()
        if not keep_stop and self._ended_by_token():
            ids.pop()
        return self._decode(ids, self._params.skip_special_tokens)

    def _ended_by_token(self) -> bool:
        return self._finish is not None and self._finish.reason == "stop" and self._match is None

    def _by_token(self, token_id: int) -> Finish | None:
        if len(self._token_ids) < self._params.min_tokens:
            return None
        if token_id in self._stop_ids:
            return Finish(reason="stop", stop_reason=token_id)
        if token_id in self._eos and not self._params.ignore_eos:
            return Finish(reason="stop")
        return None

    def _by_text(self, token_id: int) -> Finish | None:
        if self._scanner is None or self._stream is None:
            return None
        match = self._scanner.push(self._stream.push(token_id))
        if match is None or len(self._token_ids) <= self._params.min_tokens:
            return None
        self._match = match
        return Finish(reason="stop", stop_reason=match.stop)

    def _by_length(self) -> Finish | None:
        return Finish(reason="length") if len(self._token_ids) >= self._limit else None


class _StopScanner:
    """Finds stop strings in text that comes in pieces, looking at each character once or twice."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._reach = max(len(stop) for stop in stops) - 1
        self._pieces: list[str] = []
        self._tail = ""  # the last `reach` characters: where a match may have begun
        self._length = 0

    def push(self, piece: str) -> _Match | None:
        """Add text; the match that is complete first among those that end in it.

        The end decides, not the start, so that the outcome does not depend on how the text is cut
        into pieces. Of two that end together the longer wins.
        """
        if not piece:
            return None
        window = self._tail + piece
        matches = [m for stop in self._stops if (m := self._find(stop, window))]
        self._pieces.append(piece)
        self._length += len(piece)
        self._tail = window[max(0, len(window) - self._reach) :]
        return min(matches, key=lambda m: (m.end, m.start), default=None)

    def text(self, end: int) -> str:
        """The first `end` characters."""
        return "".join(self._pieces)[:end]

    def _find(self, stop: str, window: str) -> _Match | None:
        """First match of one stop string that ends beyond the tail."""
        at = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
        if at < 0:
            return None
        start = self._length - len(self._tail) + at
        return _Match(stop=stop, start=start, end=start + len(stop))
