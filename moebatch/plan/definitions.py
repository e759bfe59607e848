"""The named workloads: one JSON file each in `workloads/`, lengths stored as numbers.

A definition holds no prompt. It says how long prompts are, how much is generated, and what the paper
measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moebatch.errors import UsageError

NAMES = ("mtbench", "helm-synthetic", "helm-summarization")

Prompts = Literal["questions", "pattern-match", "lengths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperResult:
    """What the paper measured for one setting, in generated tokens per second of prefill and decode.

    `padded`: all prompts padded to the longest. `where` is a table or figure of arXiv 2411.11217.
    """

    model: str
    device: str
    padded: bool
    gen_len: int
    tok_s: float
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One workload. `lengths` are prompt lengths in tokens, in order, that stand for all.

    `paper_mean` and `paper_max` are those of table 3; `gen_lens` what the paper generates, `gen_len`
    what a plan assumes. `prompts` says where real prompts come from, where there are any.
    """

    name: str
    what: str
    source: str
    paper_mean: int
    paper_max: int
    gen_len: int
    gen_lens: tuple[int, ...]
    prompts: Prompts
    lengths: tuple[int, ...]
    paper: tuple[PaperResult, ...]

    def draw(self, count: int) -> list[int]:
        """Prompt lengths of so many requests: equal steps through the distribution, shortest first."""
        steps = len(self.lengths)
        return [self.lengths[int((k + 0.5) * steps / count)] for k in range(count)]

    def published(self, *, model: str, device: str, padded: bool,
                  gen_len: int) -> PaperResult | None:  # fmt: skip
        """The paper's figure for a setting, None where it has none."""
        wanted = (model, device, padded, gen_len)
        for one in self.paper:
            if (one.model, one.device, one.padded, one.gen_len) == wanted:
                return one
        return None


def definition(name: str) -> Definition:
    """The workload of a name.

    Raises: UsageError for an unknown name.
    """
    if name not in NAMES:
        raise UsageError(f"no workload is called {name}", hint="known: " + ", ".join(NAMES))
    values = json.loads((directory() / f"{name}.json").read_text(encoding="utf-8"))
    return _from_values(values)


def directory() -> Path:
    """Where the definitions lie: in a checkout beside the package, once installed within it."""
    package = Path(__file__).parents[1]
    beside = package.parent / "workloads"
    return beside if (beside / f"{NAMES[0]}.json").is_file() else package / "workloads"


def _from_values(values: dict[str, Any]) -> Definition:
    paper = values["paper_prompt_tokens"]
    return Definition(
        name=values["name"],
        what=values["what"],
        source=values["source"],
        paper_mean=paper["mean"],
        paper_max=paper["max"],
        gen_len=values["gen_len"],
        gen_lens=tuple(values["gen_lens"]),
        prompts=values["prompts"],
        lengths=tuple(values["lengths"]),
        paper=tuple(PaperResult(**one) for one in values["paper"]),
    )
