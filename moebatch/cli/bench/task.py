"""What an arm is given: a JSON file, the same for moebatch and for every rival."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of one arm.

    `rows` and `warm_up` are files of {"prompt_token_ids", "max_new_tokens"}. `memory_bytes` None: no
    limit was asked for. `options` are those of the arm alone. `work` is a folder that arms share.
    """

    model: str
    rows: str
    warm_up: str | None
    work: str
    threads: int
    memory_bytes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Into a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> "Task":
        """Out of one."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def write_rows(path: Path, prompts: Any, gen_lens: Any) -> Path:
    """Token ids and forced lengths, a JSON line each."""
    with path.open("w", encoding="utf-8") as file:
        for ids, gen_len in zip(prompts, gen_lens, strict=True):
            row = {"prompt_token_ids": list(ids), "max_new_tokens": gen_len}
            file.write(json.dumps(row) + "\n")
    return path


def read_rows(path: str) -> list[tuple[list[int], int]]:
    """(token ids, forced length) of each row."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.append((row["prompt_token_ids"], row["max_new_tokens"]))
    return rows
