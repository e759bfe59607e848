"""The values that cross the borders of the engine.

A request goes in, a completion or a row error comes out.
Plain Python only; knows neither files nor tokenizers nor tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Schema = Literal["flat", "openai"]
FinishReason = Literal["stop", "length"]
ErrorCode = Literal[
    "invalid_json",
    "invalid_request",
    "duplicate_id",
    "missing_prompt",
    "chat_template_error",
    "context_length_exceeded",
    "unsupported_parameter",
    "non_finite_logits",
    "oom_row",
    "cancelled",
    "internal_error",
]
RETRYABLE: frozenset[str] = frozenset(
    {"non_finite_logits", "oom_row", "cancelled", "internal_error"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    `temperature` 0 is greedy and makes top_p, top_k and min_p irrelevant. `top_k` 0 is off.
    `max_tokens` None means "not said": the border fills in min(256, room) before the engine.
    `logprobs` None: none; K: the chosen token's and the K most likely ones' log-probabilities.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """One row as it was read: `index` counts rows from 0, `line` counts lines of its file from 1.

    `columns` is the row's own content; for an OpenAI row the whole batch line.
    """

    index: int
    line: int
    id: str
    schema: Schema
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probabilities at one position: of the token chosen, and of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What is there of one choice of a request; `logprobs` is empty where none were asked for."""

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One row, ready for the engine. `params.max_tokens` is set and fits the context.

    `truncated_tokens` counts prompt tokens cut off by --on-too-long truncate; `clamped_from` is the
    max_tokens that the row asked for where the context left less room. `resumed` is what an earlier
    run has generated of its choices: the engine goes on from there.
    """

    index: int
    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    truncated_tokens: int = 0
    clamped_from: int | None = None
    resumed: tuple[Generated, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One generated text. `token_ids` holds everything that was generated, a final EOS included.

    `stop_reason` is the stop string or stop token id that ended it, None for EOS and for length.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What came of one request: `params.n` choices."""

    request: Request
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """What came of a row that could not be answered; written in its place, never raised.

    `skipped` marks a row that the user's own length policy leaves out (--on-too-long skip).
    """

    index: int
    id: str
    code: ErrorCode
    message: str
    param: str | None = None
    line: int | None = None
    skipped: bool = False
    raw: RawRow | None = field(default=None, compare=False)

    @property
    def retryable(self) -> bool:
        """Whether the same row may succeed when it is run again."""
        return self.code in RETRYABLE


Outcome = Completion | RowError
