"""The messages of a chat: checked, and brought to one form (role, and content as text)."""

from collections.abc import Mapping
from typing import Any

from moebatch.data.problem import RowProblem, unsupported

Message = Mapping[str, Any]
_TOOL_FIELDS = ("tool_calls", "function_call", "tool_call_id")


def is_messages(value: Any) -> bool:
    """Whether a value looks like a list of messages (some data sets call the column `prompt`)."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def read_messages(value: Any, *, param: str) -> tuple[Message, ...]:
    """The messages with their contents as text.

    Raises: RowProblem for another shape, and for what the model cannot be shown: tools, images.
    """
    if not isinstance(value, list | tuple):
        raise RowProblem(f"{param} must be a list of messages", param=param)
    if not value:
        raise RowProblem(f"{param} is empty", param=param)
    return tuple(_message(item, param=f"{param}[{i}]") for i, item in enumerate(value))


def _message(value: Any, *, param: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise RowProblem(f"{param} must be an object with a role", param=param)
    if value["role"] in ("tool", "function") or any(value.get(name) for name in _TOOL_FIELDS):
        raise unsupported(param, message=f"{param} belongs to a tool call; tools are not supported")
    # A struct column of a table holds null for the fields that a message does not use.
    said = {name: item for name, item in value.items() if item is not None}
    return said | {"content": _content(value.get("content"), param=f"{param}.content")}


def _content(value: Any, *, param: str) -> str:
    """The text of a content; parts are joined with nothing in between."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise RowProblem(f"{param} must be a text or a list of parts", param=param)
    return "".join(_part(part, param=param) for part in value)


def _part(part: Any, *, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise unsupported(
            param, message=f"{param} holds a part of type {kind!r}; only text is read"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RowProblem(f"{param} holds a text part without text", param=param)
    return text
