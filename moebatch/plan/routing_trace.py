"""A run's routing on disk: which experts the tokens of every pass chose, layer by layer.

One line of JSON says what the model's shapes are; then a record follows for each visit of a pass to a
layer, in order. A record: pass u32, layer u16, top_k u16, tokens u32; experts u16 [T, K]; their
weights f16 [T, K]; the mean router scores f16 [E], absent where `has_scores` is false. Little-endian.
A trace that was cut off ends with its last whole record.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moebatch.errors import InputError, UsageError
from moebatch.plan.eviction import Visit
from moebatch.plan.machine import Numbers

_FORMAT, _VERSION = "moebatch-routing", 1
_HEAD = struct.Struct("<IHHI")
_MOST = 1 << 24  # tokens of a record: more is damage


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The shapes that a trace speaks of."""

    model: str
    num_layers: int
    num_experts: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One visit: experts and weights [T, K], mean scores [E]."""

    number: int
    layer: int
    experts: Numbers
    weights: Numbers
    scores: Numbers

    @property
    def visit(self) -> Visit:
        """What an expert cache sees of it."""
        return Visit(layer=self.layer, experts=tuple(np.unique(self.experts).tolist()),
                     scores=self.scores)  # type: ignore[arg-type]  # fmt: skip


class TraceWriter:
    """Appends records to a file."""

    def __init__(self, file: BinaryIO, header: TraceHeader) -> None:
        """Write the header; the file is the caller's to close."""
        self._file = file
        line = {"format": _FORMAT, "version": _VERSION, **asdict(header)}
        file.write(json.dumps(line).encode() + b"\n")

    def add(self, record: Record) -> None:
        """Append one."""
        tokens, top_k = record.experts.shape
        self._file.write(_HEAD.pack(record.number, record.layer, top_k, tokens))
        self._file.write(record.experts.astype("<u2").tobytes())
        self._file.write(record.weights.astype("<f2").tobytes())
        self._file.write(record.scores.astype("<f2").tobytes())


def read_trace(path: Path) -> tuple[TraceHeader, list[Record]]:
    """All records of a trace.

    Raises: InputError when the file cannot be read or is none.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}") from None
    line, newline, rest = data.partition(b"\n")
    header = _header(line) if newline else None
    if header is None:
        raise InputError(f"{path} is no routing trace",
                         hint="moebatch run --routing-trace FILE records one")  # fmt: skip
    return header, list(_records(rest, header, path))


def _header(line: bytes) -> TraceHeader | None:
    try:
        values: Any = json.loads(line)
        if values["format"] != _FORMAT or values["version"] != _VERSION:
            return None
        counts = {name: values[name] for name in ("num_layers", "num_experts", "top_k")}
        if not all(type(n) is int and 0 < n < 1 << 16 for n in counts.values()):
            return None
        return TraceHeader(model=str(values["model"]), **counts)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _records(data: bytes, header: TraceHeader, path: Path) -> Iterator[Record]:
    at, experts = 0, header.num_experts
    while at + _HEAD.size <= len(data):
        number, layer, top_k, tokens = _HEAD.unpack_from(data, at)
        if layer >= header.num_layers or top_k > experts or not 0 < tokens * top_k <= _MOST:
            raise InputError(f"{path} is damaged at byte {at} of its records")
        pairs, start = tokens * top_k, at + _HEAD.size
        at = start + 4 * pairs + 2 * experts
        if at > len(data):
            return
        chosen = np.frombuffer(data, "<u2", pairs, start).reshape(tokens, top_k)
        if int(chosen.max()) >= experts:
            raise InputError(f"{path} is damaged: it names expert {int(chosen.max())} of {experts}")
        weights = np.frombuffer(data, "<f2", pairs, start + 2 * pairs).reshape(tokens, top_k)
        scores = np.frombuffer(data, "<f2", experts, start + 4 * pairs)
        yield Record(number=number, layer=layer, experts=chosen.astype(np.int64),
                     weights=weights.astype(np.float64), scores=scores.astype(np.float64))  # fmt: skip
