"""What a run was asked for, as values: the command line hands them to the job."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moebatch.data.columns import ColumnNames
from moebatch.errors import UsageError
from moebatch.plan.optimizer import Overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Which rows."""

    sources: Sequence[str]
    input_format: Any
    columns: ColumnNames
    limit: int | None
    offset: int
    subset: str | None
    split: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where the answers go, and in which shape."""

    path: Path | Literal["-"]
    output_format: Any
    schema: Any
    include: tuple[Any, ...]
    order: Any
    overwrite: bool
    allow_row_errors: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How rows become prompts, and what they get that they do not say themselves."""

    sampling: Mapping[str, Any]
    generation_config: str
    chat_template: str | None
    apply_chat_template: Any
    system: str | None
    strict: bool
    on_too_long: Any
    truncation_side: Any
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceOptions:
    """What the run may use. `memory_bytes` None: what the machine leaves free."""

    memory_bytes: int | None
    cpu_threads: int | None
    dtype: str
    quantization: str
    overrides: Overrides


def text_or_file(value: str | None) -> str | None:
    """An option's text, or the content of the file after an @.

    Raises: UsageError when the file cannot be read.
    """
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {value[1:]}: {error}") from None


def command_line() -> str:
    """The command as it was typed, for the report."""
    return " ".join(["moebatch", *(json.dumps(a) if " " in a else a for a in sys.argv[1:])])
