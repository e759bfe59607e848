"""The journal: what came of each row, one checksummed line each, so that no row is computed twice.

A line says what the model answered, not what the output looks like: the output is made from the
input's row and the answer, whenever it is written.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebatch.data.durable import AppendFile, write_error
from moebatch.data.requests import (
    Choice,
    Completion,
    Outcome,
    Request,
    RowError,
    SamplingParams,
    TokenLogprob,
)

# A line is {"sum":"<16 hex digits>","row":<object>}: valid JSON, and a checksum over known bytes.
_HEAD, _MIDDLE, _TAIL = b'{"sum":"', b'","row":', b"}\n"
_SUM_BYTES = 8
_BODY_AT = len(_HEAD) + 2 * _SUM_BYTES + len(_MIDDLE)

_SYNC_ROWS = 256
_SYNC_S = 1.0
_SYNC_SHARE = 0.005  # of the time goes into waiting for the disk, at most
_PART_BYTES = 1 << 28

Words = NDArray[np.uint64]

_DEFAULTS = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}


def request_key(request: Request) -> bytes:
    """16 bytes that say which answer a request gets: its id, prompt and sampling parameters.

    Parameters count only where they differ from their defaults, so that a parameter which comes new
    to a later version changes no key.
    """
    params = {
        name: value
        for name, default in _DEFAULTS.items()
        if (value := getattr(request.params, name)) != default
    }
    facts = [request.id, request.prompt_token_ids, params]
    text = json.dumps(facts, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a journal. `session` counts the runs of a job from 0; `body` is the rest."""

    key: bytes
    id: str
    session: int
    body: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the row could not be answered."""
        return "error" in self.body

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(choice["token_ids"]) for choice in self.body.get("choices", ()))

    def outcome(self, request: Request) -> Outcome:
        """The outcome that was written, for the request that it belongs to."""
        if self.failed:
            return RowError(index=request.index, id=request.id, **self.body["error"])
        choices = tuple(_choice(said) for said in self.body["choices"])
        return Completion(request=request, choices=choices)


def read_entries(folder: Path) -> Iterator[Entry]:
    """All lines that are whole, oldest first; of a row that came twice the later one counts.

    Raises: OutputWriteError when a file cannot be read.
    """
    for path in parts(folder):
        for _, line in _lines(path):
            if (entry := _parse(line)) is not None:
                yield entry


def parts(folder: Path) -> list[Path]:
    """The journal's files, oldest first."""
    return sorted(folder.glob("journal-[0-9][0-9][0-9][0-9][0-9].jsonl"))


class Journal:
    """The journal of one output, open for this run. The caller holds the lock."""

    def __init__(self, folder: Path, *, session: int) -> None:
        """Read what is there, cut off a torn last line, and open for writing.

        Raises: OutputWriteError.
        """
        self._folder, self._session = folder, session
        self._parts = parts(folder) or [_part_path(folder, 0)]
        self.num_tokens = 0
        self.num_damaged = 0
        self._index = _Index()
        try:
            self._file = AppendFile(self._parts[-1], keep_bytes=self._scan())
        except OSError as error:
            raise write_error(self._parts[-1], error) from error
        self._unsynced = 0
        self._synced_at_s = time.monotonic()
        self._sync_s = 0.0

    @property
    def num_rows(self) -> int:
        """Rows of earlier runs."""
        return len(self._index)

    def find(self, key: bytes) -> Entry | None:
        """What an earlier run wrote for this key, its last word."""
        for part, offset in reversed(self._index.find(key)):
            with open(self._parts[part], "rb") as file:
                file.seek(offset)
                entry = _parse(file.readline())
            if entry is not None and entry.key == key:
                return entry
        return None

    def put(self, key: bytes, outcome: Outcome) -> None:
        """Add what came of a row.

        Raises: OutputWriteError.
        """
        try:
            self._file.write(_line(key, outcome, session=self._session))
            self._unsynced += 1
            if self._unsynced >= _SYNC_ROWS:
                self.sync_if_due()
        except OSError as error:
            raise write_error(self._file.path, error) from error

    def flush(self) -> None:
        """Keep the rows so far through the end of this process; now and then, of the machine.

        Raises: OutputWriteError.
        """
        try:
            self._file.flush()
            if self._unsynced:
                self.sync_if_due()
        except OSError as error:
            raise write_error(self._file.path, error) from error

    def sync_if_due(self) -> None:
        """Force rows to the disk every second or 256 rows, less often where that takes long.

        Raises: OutputWriteError.
        """
        least = self._sync_s / _SYNC_SHARE
        rest = least if self._unsynced >= _SYNC_ROWS else max(least, _SYNC_S)
        if time.monotonic() - self._synced_at_s >= rest:
            self.sync()

    def sync(self) -> None:
        """Force all rows to the disk.

        Raises: OutputWriteError.
        """
        start = time.monotonic()
        try:
            self._file.sync()
            if self._file.num_bytes >= _PART_BYTES:
                self._next_part()
        except OSError as error:
            raise write_error(self._file.path, error) from error
        self._synced_at_s, self._unsynced = time.monotonic(), 0
        self._sync_s = self._synced_at_s - start

    def close(self) -> None:
        """Close the file; `sync` before it, or what was put since the last flush is lost."""
        self._file.close()

    def _next_part(self) -> None:
        self._parts.append(_part_path(self._folder, len(self._parts)))
        self._file.close()
        self._file = AppendFile(self._parts[-1])

    def _scan(self) -> int:
        """Index all parts; the length of the last one up to its last whole line."""
        end = 0
        for part, path in enumerate(self._parts):
            end = 0
            for offset, line in _lines(path):
                entry = _parse(line)
                if line.endswith(b"\n"):
                    end = offset + len(line)
                if entry is None:
                    self.num_damaged += line.endswith(b"\n")
                    continue
                self.num_tokens += entry.num_tokens
                self._index.add(entry.key, part, offset)
        self._index.sort()
        return end


class _Index:
    """Where the lines of each key stand: 24 bytes a row, whatever the rows hold."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []
        self._chunks: list[Words] = []
        self._table: Words = np.empty((0, 3), dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._table)

    def add(self, key: bytes, part: int, offset: int) -> None:
        self._rows.append((_short(key), part, offset))
        if len(self._rows) >= 1 << 16:
            self._gather()

    def sort(self) -> None:
        """To be called once all is added; lines of one key stay in their order."""
        self._gather()
        table = np.concatenate([self._table, *self._chunks])
        self._chunks = []
        self._table = table[np.argsort(table[:, 0], kind="stable")]

    def find(self, key: bytes) -> list[tuple[int, int]]:
        column, short = self._table[:, 0], np.uint64(_short(key))
        first = int(np.searchsorted(column, short, side="left"))
        last = int(np.searchsorted(column, short, side="right"))
        return [(int(part), int(offset)) for _, part, offset in self._table[first:last]]

    def _gather(self) -> None:
        if self._rows:
            self._chunks.append(np.array(self._rows, dtype=np.uint64))
            self._rows = []


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"journal-{number:05d}.jsonl"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of a file, which may not exist."""
    offset = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                yield offset, line
                offset += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(path, error) from error


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_SUM_BYTES).hexdigest().encode()


def _line(key: bytes, outcome: Outcome, *, session: int) -> bytes:
    said: dict[str, Any] = {"key": key.hex(), "id": _id(outcome), "session": session}
    if isinstance(outcome, RowError):
        names = ("code", "message", "param", "line", "skipped")
        said["error"] = {name: getattr(outcome, name) for name in names}
    else:
        said["choices"] = [_choice_said(choice) for choice in outcome.choices]
    body = json.dumps(said, separators=(",", ":")).encode()
    return b"".join((_HEAD, _checksum(body), _MIDDLE, body, _TAIL))


def _parse(line: bytes) -> Entry | None:
    """The entry of a line; None for one that is torn or damaged."""
    body = line[_BODY_AT : -len(_TAIL)]
    if line[:_BODY_AT] != _HEAD + _checksum(body) + _MIDDLE or not line.endswith(_TAIL):
        return None
    said = json.loads(body)
    key, row_id, session = bytes.fromhex(said.pop("key")), said.pop("id"), said.pop("session")
    return Entry(key=key, id=row_id, session=session, body=said)


def _id(outcome: Outcome) -> str:
    return outcome.id if isinstance(outcome, RowError) else outcome.request.id


def _choice_said(choice: Choice) -> dict[str, Any]:
    said: dict[str, Any] = {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        said["logprobs"] = [[item.token_id, item.logprob, item.top] for item in choice.logprobs]
    return said


def _choice(said: Mapping[str, Any]) -> Choice:
    logprobs = said.get("logprobs")
    return Choice(
        index=said["index"],
        token_ids=tuple(said["token_ids"]),
        text=said["text"],
        finish_reason=said["finish_reason"],
        stop_reason=said["stop_reason"],
        logprobs=None if logprobs is None else tuple(map(_logprob, logprobs)),
    )


def _logprob(said: list[Any]) -> TokenLogprob:
    token_id, logprob, top = said
    return TokenLogprob(token_id=token_id, logprob=logprob, top=tuple(map(tuple, top)))
