"""The requests of a benchmark: the same token ids for every arm, and others for the warm-up."""

import json
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from moebatch.cli.bench.pattern_match import make_prompts
from moebatch.errors import InputError, InputNotFound, ModelError, UsageError
from moebatch.model.resolve import LocalModel
from moebatch.plan.definitions import NAMES, Definition, definition

if TYPE_CHECKING:
    from moebatch.data.tokenizer import Tokenizer

_HUB_QUESTIONS = ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")
_HUB_PATIENCE_S = 3
_FIRST_PLAIN_ID = 10  # ids below are often control tokens
_WARMUP_PROMPT = 64  # tokens at most: enough to touch every kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts as token ids. `source` says where they come from; reports repeat it.

    `gen_lens` is what a FILE's own rows ask for, empty where the workload does not say.
    """

    workload: str
    source: str
    token_ids: tuple[tuple[int, ...], ...]
    gen_lens: tuple[int, ...] = ()
    padded: bool = False

    def describe(self) -> dict[str, Any]:
        """For the record: counts and lengths, no token."""
        lengths = [len(ids) for ids in self.token_ids]
        return {
            "source": self.source,
            "count": len(lengths),
            "mean": sum(lengths) / len(lengths),
            "max": max(lengths),
            "total": sum(lengths),
            "padded": self.padded,
            "lengths": sorted(lengths),
        }

    def pad(self) -> "Prompts":
        """All prompts as long as the longest, filled at the front: what peers do to a batch."""
        longest = max(len(ids) for ids in self.token_ids)
        filled = tuple((ids[0],) * (longest - len(ids)) + ids for ids in self.token_ids)
        return Prompts(workload=self.workload, source=self.source, token_ids=filled,
                       gen_lens=self.gen_lens, padded=True)  # fmt: skip


def make(workload: str, model: LocalModel, *, count: int, input_len: int | None = None,
         dataset: Path | None = None, seed: int = 0,
         has_tokenizer: bool = True) -> Prompts:  # fmt: skip
    """The prompts of a workload for a model; of a FILE its first rows.

    Raises: UsageError for a workload that does not exist or does not go with the other options;
    InputError and InputNotFound for files.
    """
    if dataset is not None and workload != "mtbench":
        raise UsageError(f"--dataset-path is for mtbench, not for {workload}")
    if input_len is not None and workload != "random":
        raise UsageError(f"--input-len is for random, not for {workload}")
    if workload == "random":
        return _random(model, count=count, length=input_len or 512, seed=seed)
    if workload in NAMES:
        known = definition(workload)
        texts, source = _texts(known, dataset, count=count, seed=seed)
        if texts and has_tokenizer:
            return _encoded(workload, model, texts, source)
        return _drawn(known, model, count=count, seed=seed)
    return _of_file(workload, model, count)


def warm_up(prompts: Prompts, model: LocalModel, *, count: int, seed: int) -> list[list[int]]:
    """Prompts that no measured request has: random ids, short, as many as an arm warms up with."""
    rng = random.Random(seed + 1_000_003)
    length = min(_WARMUP_PROMPT, max(len(ids) for ids in prompts.token_ids))
    return [_ids(rng, model, length) for _ in range(count)]


def _ids(rng: random.Random, model: LocalModel, length: int) -> list[int]:
    vocabulary = model.spec.vocab_size
    return [rng.randrange(min(_FIRST_PLAIN_ID, vocabulary - 1), vocabulary) for _ in range(length)]


def _random(model: LocalModel, *, count: int, length: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    ids = tuple(tuple(_ids(rng, model, length)) for _ in range(count))
    return Prompts(workload="random", source=f"random token ids, {length} each", token_ids=ids)


def _drawn(known: Definition, model: LocalModel, *, count: int, seed: int) -> Prompts:
    """Random ids in prompts of the stored lengths, in random order."""
    rng = random.Random(seed)
    lengths = known.draw(count)
    rng.shuffle(lengths)
    return Prompts(
        workload=known.name,
        source=f"random token ids with the stored lengths of {known.name}; not its texts",
        token_ids=tuple(tuple(_ids(rng, model, length)) for length in lengths),
    )


def _texts(known: Definition, dataset: Path | None, *, count: int,
           seed: int) -> tuple[list[str], str]:  # fmt: skip
    """Real prompts of a workload and their source; none where there are no texts to be had."""
    if known.prompts == "pattern-match":
        return make_prompts(count, seed=seed), "made by moebatch after HELM's pattern_match"
    if known.prompts != "questions":
        return [], ""
    if dataset is not None:
        return _replicated(read_questions(dataset), count), f"questions of {dataset.name}"
    if (path := _from_hub()) is not None:
        source = f"questions of {_HUB_QUESTIONS[0]} on the hub"
        return _replicated(read_questions(path), count), source
    return [], ""


def read_questions(path: Path) -> list[str]:
    """The first turns of an MT-Bench question file: rows with `turns`, or with `prompt`.

    Raises: InputNotFound, InputError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputNotFound(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no text in UTF-8") from None
    questions = [_first_turn(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise InputError(f"{path} holds no question")
    return questions


def _first_turn(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
        turns = row.get("turns") or row.get("prompt")
        text = turns if isinstance(turns, str) else turns[0]
    except (ValueError, AttributeError, TypeError, IndexError, KeyError):
        text = None
    if not isinstance(text, str) or not text:
        raise InputError(f"{path}, line {number}: no question",
                         hint='a row is like {"turns": ["first question", "second"]}')  # fmt: skip
    return text


@cache
def _from_hub() -> Path | None:
    """The hub's question file; None where the hub is off or cannot be reached. Asked once."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return None
    from huggingface_hub import constants, hf_hub_download

    try:
        host = urlparse(constants.ENDPOINT).hostname
        socket.create_connection((host, 443), timeout=_HUB_PATIENCE_S).close()
        return Path(hf_hub_download(*_HUB_QUESTIONS, repo_type="dataset"))
    except Exception:  # whatever it is, the report says that these are not the questions
        return None


def _replicated(texts: Sequence[str], count: int) -> list[str]:
    """So many of the texts: spread over all by length where fewer are wanted, else over and over."""
    if count >= len(texts):
        return [texts[k % len(texts)] for k in range(count)]
    ordered = sorted(texts, key=len)
    return [ordered[int((k + 0.5) * len(texts) / count)] for k in range(count)]


def _encoded(workload: str, model: LocalModel, texts: Sequence[str], source: str) -> Prompts:
    tokenizer = _tokenizer(model)
    ids = tuple(tuple(tokenizer.encode(text, add_special_tokens=True)) for text in texts)
    return Prompts(workload=workload, source=source, token_ids=ids)


def _tokenizer(model: LocalModel) -> "Tokenizer":
    from moebatch.data.tokenizer import load_tokenizer

    return load_tokenizer(model.path)


def _of_file(name: str, model: LocalModel, count: int | None) -> Prompts:
    """The rows of any file that `moebatch run` reads."""
    from moebatch.cli import asked, prompts
    from moebatch.data.columns import ColumnNames
    from moebatch.data.requests import RowError

    if not Path(name).exists():
        raise UsageError(f"{name} is neither a workload nor a file",
                         hint="workloads: " + ", ".join(NAMES) + ", random")  # fmt: skip
    rows = asked.InputOptions(sources=[name], input_format="auto", columns=ColumnNames(),
                              limit=count, offset=0, subset=None, split=None)  # fmt: skip
    wanted = asked.PromptOptions(
        sampling={}, strict=False, generation_config="none", chat_template=None,
        apply_chat_template="auto", system=None, on_too_long="error", truncation_side="left",
        max_model_len=None,
    )  # fmt: skip
    builder = prompts.request_builder(
        model, wanted, tokenizer=_tokenizer(model), columns=rows.columns,
        template=prompts.chat_template(model, wanted), defaults=prompts.row_defaults(model, wanted),
    )  # fmt: skip
    ids, gen_lens = [], []
    with rows.open() as data:
        for row in data.rows(data.survey(on_duplicate="row-error")):
            built = row if isinstance(row, RowError) else builder.build(row)
            if isinstance(built, RowError):
                raise InputError(f"row {built.id}: {built.message}",
                                 hint="moebatch validate lists all bad rows")  # fmt: skip
            ids.append(built.prompt_token_ids)
            gen_lens.append(built.params.max_tokens or 1)
    if not ids:
        raise InputError(f"{name} has no rows")
    return Prompts(workload=Path(name).stem, source=f"rows of {Path(name).name}",
                   token_ids=tuple(ids), gen_lens=tuple(gen_lens))  # fmt: skip


def check_lengths(prompts: Prompts, model: LocalModel, gen_len: int) -> None:
    """Refuse prompts that the model has no room for.

    Raises: ModelError.
    """
    longest, limit = max(len(ids) for ids in prompts.token_ids), model.spec.max_model_len
    if longest + gen_len > limit:
        raise ModelError(
            f"{model.name} takes {limit} tokens: {longest} of a prompt and {gen_len} new are too many",
            hint="use another workload, or a smaller --output-len",
        )
