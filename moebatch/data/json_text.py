"""Any row as one line of valid JSON: no NaN, no broken text, no value that stops the writer."""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any) -> str:
    """One line of JSON. Numbers that JSON lacks become null, other objects their text.

    Lone surrogates, which UTF-8 cannot hold, are written as escapes.
    """
    try:
        text = _dump(value, ascii_only=False)
    except (ValueError, TypeError):  # NaN, or a key or value from a table that JSON has no word for
        text = _dump(_plain(value), ascii_only=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return _dump(_plain(value), ascii_only=True)
    return text


def _dump(value: Any, *, ascii_only: bool) -> str:
    return json.dumps(value, ensure_ascii=ascii_only, allow_nan=False)


def _plain(value: Any) -> Any:
    """The value out of JSON's own types."""
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _text(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else _text(key)


def _text(value: Any) -> str:
    """A date as ISO 8601, bytes as base64, anything else as it prints."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    return str(value)
