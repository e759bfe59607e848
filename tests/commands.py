"""The command line inside the test's own process: what it prints where, and its exit code."""

import io
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from moebatch.cli.app import _guarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One command that has ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error:")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        return lines[0]


def moebatch(*args: object, stdin: bytes = b"") -> Result:
    """Run a command; what it writes to its standard streams is kept."""
    streams = {
        "stdin": io.TextIOWrapper(io.BytesIO(stdin)),
        "stdout": io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True),
        "stderr": io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True),
        "argv": ["moebatch", *map(str, args)],
    }
    with mock.patch.multiple(sys, **streams), mock.patch.dict("os.environ", HF_HUB_OFFLINE="1"):
        code = _guarded(sys.argv[1:])
        streams["stdout"].flush()
        out, err = (streams[name].buffer.getvalue().decode() for name in ("stdout", "stderr"))
    return Result(code=code, out=out, err=err)


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """A file of JSON lines; bytes are lines as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_rows(path: Path) -> list[dict]:
    """The rows of a file of JSON lines. Only \\n ends a line: a text may hold U+2028."""
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    return [json.loads(line, parse_constant=refuse_constant) for line in lines]


def refuse_constant(name: str) -> None:
    """For json.loads: NaN and its like are no JSON."""
    raise AssertionError(f"{name} is no JSON")
