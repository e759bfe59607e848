"""rows.json beside an output: which rows of which data it holds, so that shards can be joined."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from moebatch.data import durable

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFile:
    """The rows of one output.

    `num_rows` counts those of the shard, `in_range` those of all shards; `ids` is a digest of all
    their ids in order. `error_file` is where failed rows went instead, `diverted` which ones, by
    their place in the shard; None until the output is whole.
    """

    shard: tuple[int, int]
    num_rows: int
    in_range: int
    ids: str
    order: str
    error_file: str | None = None
    diverted: tuple[int, ...] | None = None

    def finished(self, diverted: Sequence[int]) -> Self:
        """The same, for an output that is whole."""
        return replace(self, diverted=tuple(diverted))

    def write(self, folder: Path) -> None:
        """Write it into the folder beside the output, in one step.

        Raises: OutputWriteError.
        """
        path = folder / "rows.json"
        text = json.dumps({"schema_version": _VERSION, **asdict(self)}) + "\n"
        try:
            durable.write_whole(path, [text.encode()])
        except OSError as error:
            raise durable.write_error(path, error) from error


def read_rows_file(folder: Path) -> RowsFile | None:
    """What the file says; None where there is none that can be understood."""
    try:
        said = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        if said.pop("schema_version") != _VERSION:
            return None
        part, parts = map(int, said.pop("shard"))
        diverted = said.pop("diverted")
        known = None if diverted is None else tuple(map(int, diverted))
        said["num_rows"], said["in_range"] = int(said["num_rows"]), int(said["in_range"])
        return RowsFile(**said, shard=(part, parts), diverted=known)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
