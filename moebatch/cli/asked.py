"""What a run was asked for, as values: the command line hands them to the job."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moebatch.cli.limits import Tolerance
from moebatch.cli.regime import RegimeOptions
from moebatch.data.columns import ColumnNames
from moebatch.data.dataset import Dataset, Survey
from moebatch.data.reader import RowRange
from moebatch.data.rows_file import RowsFile, read_rows_file
from moebatch.data.side import side_path
from moebatch.errors import UsageError
from moebatch.plan.policy import Overrides, Policy


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
    shard: tuple[int, int] = (0, 1)
    on_duplicate: Any = "refuse"

    def open(self) -> Dataset:
        """The data set, ready to be read twice.

        Raises: InputNotFound, InputError, UsageError.
        """
        return Dataset(
            self.sources,
            input_format=self.input_format,
            columns=self.columns,
            chosen=RowRange(limit=self.limit, offset=self.offset, shard=self.shard),
            subset=self.subset,
            split=self.split,
        )


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
    error_file: Path | None = None
    report_file: Path | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)

    def rows_file(self, survey: Survey, shard: tuple[int, int]) -> RowsFile:
        """What stands beside the output about its rows."""
        return RowsFile(
            shard=shard,
            num_rows=survey.num_rows,
            in_range=survey.in_range,
            ids=survey.ids,
            order=self.order,
            error_file=None if self.error_file is None else str(self.error_file.resolve()),
        )

    def wrote_error_file(self) -> bool:
        """Whether the error file is one that an earlier start of this run wrote."""
        if self.error_file is None or self.path == "-":
            return False
        before = read_rows_file(side_path(self.path))
        return before is not None and before.error_file == str(self.error_file.resolve())


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
    """What the run may use. `memory_bytes` None: what the machine leaves free.

    `policy` None: the planner chooses.
    """

    memory_bytes: int | None
    cpu_threads: int | None
    dtype: str
    quantization: str
    overrides: Overrides
    policy: Policy | None = None
    regime: RegimeOptions = field(default_factory=RegimeOptions)


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
