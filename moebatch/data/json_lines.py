"""Lines of JSON as users have them: BOM, CRLF, blank lines, bad bytes.

A bad line is a value, never the end.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# Values nested deeper would overflow the stack of whoever walks or prints them later.
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A place in the input that holds no row, and why."""

    message: str


Row = dict[str, Any] | BadRow


def iter_json_lines(stream: Iterable[bytes]) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, object or BadRow) for each line that is not blank."""
    for number, line in enumerate(stream, start=1):
        content = line.removeprefix(_BOM) if number == 1 else line
        if content.strip():
            yield number, parse_line(content)


def parse_line(line: bytes) -> Row:
    """The JSON object on a line, or what is wrong with the line."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        guess = "; it looks like UTF-16" if line.startswith(_UTF16) or b"\x00" in line else ""
        return BadRow(message=f"not UTF-8 at byte {error.start + 1}{guess}")
    except json.JSONDecodeError as error:
        return BadRow(message=f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:  # a constant such as NaN, or an integer with thousands of digits
        return BadRow(message=f"not JSON: {error}".partition(";")[0])
    except RecursionError:
        return BadRow(message=f"nested deeper than {_MAX_DEPTH} levels")
    return _checked(value, brackets=line.count(b"[") + line.count(b"{"))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _checked(value: Any, *, brackets: int) -> Row:
    """The value if it is an object of bounded depth; few brackets spare the walk."""
    if not isinstance(value, dict):
        return BadRow(message=f"a JSON {_kind(value)}, not an object")
    if brackets > _MAX_DEPTH and _too_deep(value):
        return BadRow(message=f"nested deeper than {_MAX_DEPTH} levels")
    return value


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _too_deep(value: Any) -> bool:
    """Whether containers nest deeper than the limit; walks level by level, without recursion."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(item: Any) -> list[Any]:
    values = item.values() if isinstance(item, dict) else item
    return [value for value in values if isinstance(value, dict | list)]
