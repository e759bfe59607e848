"""Opens what a run keeps beside its output, and decides whether this run goes on with it."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from moebatch.data.chat import ChatTemplate
from moebatch.data.manifest import Manifest, Session, differences
from moebatch.data.record import Record
from moebatch.data.requests import SamplingParams
from moebatch.data.rows_file import RowsFile
from moebatch.data.side import SideDirectory
from moebatch.data.tokenizer import Tokenizer
from moebatch.errors import MoebatchError, OutputError
from moebatch.model.identity import config_hash, weights_hash
from moebatch.model.resolve import LocalModel
from moebatch.plan.schedule import Processor


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """How a run treats the work of an earlier one, and how often it saves its own.

    `numeric`: go on though the arithmetic is of another kind. `checkpoint_steps` None: by time.
    """

    overwrite: bool = False
    resume: bool = True
    numeric: bool = False
    keep_errors: bool = False
    checkpoint_steps: int | None = None


@dataclass(slots=True)
class Work:
    """What is kept beside the output; `record` and `side` are None where the output is a pipe."""

    manifest: Manifest
    options: KeepOptions
    side: SideDirectory | None = None
    record: Record | None = None
    finished: bool = False

    def finish(self) -> None:
        """The output is there.

        Raises: OutputWriteError.
        """
        if self.record is not None:
            self.record.finish()
        self.finished = True

    def note_rows(self, made: RowsFile) -> None:
        """Write down which rows the output holds.

        Raises: OutputWriteError.
        """
        if self.side is not None:
            made.write(self.side.path)

    def greeting(self) -> list[str]:
        """What to tell the user about earlier work, before anything is computed."""
        if self.record is None or not self.record.has_work:
            return []
        return [self.record.found()]

    def metadata(self) -> dict[str, str]:
        """What a table says about its run."""
        facts = {"run_id": self.manifest.run_id, "fingerprint": self.manifest.fingerprint}
        return {"moebatch.manifest": json.dumps(facts)}

    def use_numeric(self, numeric: Mapping[str, str]) -> None:
        """Say how this run computes; known only once the engine is needed.

        Raises: OutputError when rows have been computed in another way, unless that is allowed.
        """
        if self.side is None or self.record is None:
            return
        before = self.manifest.numeric()
        different = differences(before, numeric) if before is not None else []
        if different and self.record.has_work and not self.options.numeric:
            raise OutputError(
                f"{self.side.output} was computed with other arithmetic: {'; '.join(different)}",
                hint="--resume numeric goes on all the same, --overwrite starts afresh; "
                "or choose a new -o",
            )
        self.manifest = self.manifest.with_numeric(numeric)
        self.manifest.write(self.side.manifest_path)

    def attention_before(self) -> Processor | None:
        """Where an earlier session of this work attended; the planner must not choose anew."""
        before = self.manifest.numeric()
        if self.record is None or before is None or not self.record.has_work:
            return None
        return "gpu" if before.get("attention") == "gpu" else "cpu"

    def log(self, text: str) -> None:
        """Add a line to the log, if there is one."""
        if self.side is not None:
            self.side.log(text)

    def describe(self) -> dict[str, Any]:
        """For the report: what earlier sessions did, and what keeping the work has cost."""
        if self.record is None:
            return {}
        kept, cost = self.record.kept, self.record.cost
        sessions = self.manifest.sessions[:-1]
        return {
            "resumed_from": [
                {
                    "started_at": session.started_at,
                    "rows": kept.rows_by_session[number],
                    "numeric": session.numeric,
                }
                for number, session in enumerate(sessions)
            ],
            "resumed": {
                "rows": kept.rows,
                "rows_in_flight": kept.rows_in_flight,
                "rows_retried": kept.rows_retried,
                "tokens": kept.tokens,
                "tokens_in_flight": kept.tokens_in_flight,
                "tokens_lost": kept.tokens_lost,
                "damaged_lines": self.record.num_damaged,
            },
            "journal": {
                "checkpoints": cost.checkpoints,
                "checkpoint_s": cost.checkpoint_s,
                "journal_s": cost.journal_s,
            },
        }


@contextmanager
def open_work(output: Path | Literal["-"], fingerprint: Mapping[str, Any],
              options: KeepOptions) -> Iterator[Work]:  # fmt: skip
    """Lock the output's folder and take up the work in it, or start anew.

    Raises: UsageError, OutputLocked, OutputError (another run's output), OutputWriteError.
    """
    now = datetime.now(UTC)
    fresh = Manifest(run_id=uuid4().hex[:12], created=int(now.timestamp()), fingerprint=fingerprint)
    if output == "-":
        yield Work(manifest=fresh, options=options)
        return
    with SideDirectory(output) as side:
        there = side.begin(fresh, overwrite=options.overwrite, resume=options.resume)
        session = Session(
            started_at=now.isoformat(timespec="seconds"), argv=tuple(sys.argv), cwd=os.getcwd()
        )
        manifest = there.with_session(session)
        manifest.write(side.manifest_path)
        record = Record(
            side,
            session=len(there.sessions),
            keep_errors=options.keep_errors,
            checkpoint_steps=options.checkpoint_steps,
        )
        try:
            yield Work(manifest=manifest, options=options, side=side, record=record)
        except MoebatchError as error:
            side.log(f"error: {error}")
            raise
        finally:
            record.close()


def fingerprint(model: LocalModel, *, tokenizer: Tokenizer, template: ChatTemplate | None,
                defaults: SamplingParams, schema: str,
                prompts: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """All that must be equal for a run to go on with the work of another.

    `prompts` holds the options that shape every prompt. A row's own content is not in here: rows are
    compared one by one.
    """
    return {
        "model": model.name,
        "revision": model.revision,
        "config": config_hash(model.path),
        "weights": weights_hash(model.path),
        "tokenizer": tokenizer.fingerprint,
        "chat_template": template.fingerprint if template is not None else None,
        "generation_defaults": changed(defaults),
        "seed": defaults.seed,
        "output_schema": schema,
        "prompts": dict(prompts),
    }


def changed(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from their built-in defaults, the seed apart."""
    return {
        f.name: getattr(params, f.name)
        for f in fields(params)
        if f.name != "seed" and f.default is not MISSING and getattr(params, f.name) != f.default
    }
