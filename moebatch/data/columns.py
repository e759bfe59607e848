"""Which column of a row is which: names found by themselves or given by the user.

Knows the names only; what a prompt or an id may look like stands in `rows`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moebatch.data.requests import Schema
from moebatch.errors import InputError

PromptKind = Literal["prompt_token_ids", "messages", "prompt"]

# The most exact form first: a row that carries its token ids means those, whatever else it keeps.
_AUTOMATIC: tuple[tuple[PromptKind, tuple[str, ...]], ...] = (
    ("prompt_token_ids", ("prompt_token_ids",)),
    ("messages", ("messages",)),
    ("prompt", ("prompt", "text", "input")),
)
_ID_COLUMNS = ("custom_id", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNames:
    """The columns that the user named; None means "find it"."""

    prompt: str | None = None
    messages: str | None = None
    prompt_token_ids: str | None = None
    id: str | None = None

    def named(self) -> tuple[str, ...]:
        """The names given, without the Nones."""
        given = (self.prompt, self.messages, self.prompt_token_ids, self.id)
        return tuple(name for name in given if name is not None)


def schema_of(columns: Mapping[str, Any]) -> Schema:
    """The schema of a row: OpenAI's batch line has a body and a custom_id or url."""
    openai = "body" in columns and ("custom_id" in columns or "url" in columns)
    return "openai" if openai else "flat"


def row_id(columns: Mapping[str, Any], *, names: ColumnNames, position: int) -> str:
    """The row's own id, or its position in the data set where it has none."""
    for name in (names.id,) if names.id else _ID_COLUMNS:
        value = columns.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return str(position)


def find_prompt(columns: Mapping[str, Any], *, names: ColumnNames) -> tuple[PromptKind, str] | None:
    """What kind of prompt a flat row holds and in which column; None when it holds none."""
    for kind, candidates in _candidates(names):
        for name in candidates:
            if columns.get(name) is not None:
                return kind, name
    return None


def _candidates(names: ColumnNames) -> tuple[tuple[PromptKind, tuple[str, ...]], ...]:
    """The columns to look at: only those named, once one is named."""
    given = {
        "prompt_token_ids": names.prompt_token_ids,
        "messages": names.messages,
        "prompt": names.prompt,
    }
    if not any(given.values()):
        return _AUTOMATIC
    return tuple((kind, (name,)) for kind, _ in _AUTOMATIC if (name := given[kind]) is not None)


def check_named(columns: Mapping[str, Any], *, names: ColumnNames) -> None:
    """Check on the first row that the columns the user named exist.

    Raises: InputError that lists the columns there are.
    """
    for name in names.named():
        if name not in columns:
            existing = ", ".join(map(str, columns)) or "none"
            raise InputError(
                f"the data set has no column {name!r}", hint=f"its columns are: {existing}"
            )
