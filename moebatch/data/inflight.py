"""The tokens of unfinished rows on disk, so that a killed run goes on in the middle of its rows.

inflight.bin is one snapshot: a header, a record for each choice that has tokens, and a checksum over
all of it. A new snapshot replaces the old one in one step. All numbers are little-endian.
"""

import hashlib
import itertools
import struct
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moebatch.data import durable
from moebatch.data.requests import Generated, TokenLogprob

_MAGIC = b"moebatch inflight 1\n"
_SUM_BYTES = 16
# Key, choice, tokens, bytes of the log-probabilities that follow the tokens.
_RECORD = struct.Struct("<16sIIQ")
_LOGPROB = struct.Struct("<IdI")  # token, log-probability, alternatives that follow
_TOP = struct.Struct("<Id")

InFlight = Mapping[bytes, tuple[Generated, ...]]
"""What there is of each unfinished row, by its key."""


def write_inflight(path: Path, rows: Iterable[tuple[bytes, Generated]]) -> None:
    """Replace the snapshot; `rows` are (key of the row, one of its choices).

    Raises: OSError; the old snapshot is then still there.
    """
    digest = hashlib.blake2b(digest_size=_SUM_BYTES)

    def pieces() -> Iterator[bytes]:
        for piece in itertools.chain([_MAGIC], itertools.starmap(_packed, rows)):
            digest.update(piece)
            yield piece
        yield digest.digest()

    durable.write_whole(path, pieces())


def read_inflight(path: Path) -> dict[bytes, tuple[Generated, ...]]:
    """The last snapshot; empty where there is none or it is damaged: then tokens are lost, no more."""
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    body, checksum = content[:-_SUM_BYTES], content[-_SUM_BYTES:]
    if hashlib.blake2b(body, digest_size=_SUM_BYTES).digest() != checksum:
        return {}
    if not body.startswith(_MAGIC):
        return {}
    rows: dict[bytes, tuple[Generated, ...]] = {}
    for key, generated in _records(memoryview(body)[len(_MAGIC) :]):
        rows[key] = (*rows.get(key, ()), generated)
    return rows


def _packed(key: bytes, generated: Generated) -> bytes:
    ids = _little_endian(array("I", generated.token_ids)).tobytes()
    logprobs = b"".join(map(_packed_logprob, generated.logprobs))
    head = _RECORD.pack(key, generated.choice, len(generated.token_ids), len(logprobs))
    return head + ids + logprobs


def _packed_logprob(item: TokenLogprob) -> bytes:
    head = _LOGPROB.pack(item.token_id, item.logprob, len(item.top))
    return head + b"".join(_TOP.pack(*pair) for pair in item.top)


def _records(view: memoryview) -> Iterator[tuple[bytes, Generated]]:
    at = 0
    while at < len(view):
        key, choice, num_tokens, num_bytes = _RECORD.unpack_from(view, at)
        at += _RECORD.size
        ids = array("I")
        ids.frombytes(view[at : at + 4 * num_tokens])
        at += 4 * num_tokens
        logprobs = tuple(_logprobs(view[at : at + num_bytes]))
        at += num_bytes
        token_ids = tuple(_little_endian(ids))
        yield key, Generated(choice=choice, token_ids=token_ids, logprobs=logprobs)


def _logprobs(view: memoryview) -> Iterator[TokenLogprob]:
    at = 0
    while at < len(view):
        token_id, logprob, count = _LOGPROB.unpack_from(view, at)
        at += _LOGPROB.size
        end = at + count * _TOP.size
        yield TokenLogprob(
            token_id=token_id, logprob=logprob, top=tuple(_TOP.iter_unpack(view[at:end]))
        )
        at = end


def _little_endian(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


class Pace:
    """When the next snapshot is due: every so many steps, or so that it costs little time."""

    _SHARE = 0.005  # of the time may go into snapshots
    _LEAST_S = 5.0

    def __init__(self, every_steps: int | None) -> None:
        """None: by time."""
        self._every_steps = every_steps
        self._steps = 0
        self._last_end_s = time.monotonic()
        self._rest_s = self._LEAST_S

    def step(self) -> bool:
        """Count one step; whether a snapshot is due."""
        self._steps += 1
        if self._every_steps is not None:
            return self._steps >= self._every_steps
        return time.monotonic() - self._last_end_s >= self._rest_s

    def taken(self, seconds: float) -> None:
        """A snapshot was written and took so long."""
        self._steps = 0
        self._last_end_s = time.monotonic()
        self._rest_s = max(self._LEAST_S, seconds / self._SHARE)
