"""Prompt and answer in one context: what is cut, what is clamped, what does not fit."""

from dataclasses import dataclass, replace
from typing import Literal

from moebatch.data.problem import RowProblem
from moebatch.data.requests import SamplingParams

OnTooLong = Literal["error", "truncate", "skip"]
TruncationSide = Literal["left", "right", "middle"]

# What a row gets that does not say how much it wants (cli.md: never a silent 16).
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPolicy:
    """What happens to prompts that fill the context of `max_model_len` tokens alone.

    `bos_token_id`: a prompt that begins with it keeps it when it is cut.
    """

    max_model_len: int
    on_too_long: OnTooLong = "error"
    truncation_side: TruncationSide = "left"
    bos_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A prompt and its parameters that fit; see Request for the fields."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    truncated_tokens: int
    clamped_from: int | None


def fit(
    token_ids: tuple[int, ...], *, params: SamplingParams, policy: LengthPolicy, param: str
) -> Fitted:
    """Make prompt and answer fit the context, by the policy.

    Raises: RowProblem when the prompt alone fills the context and may not be cut.
    """
    kept = token_ids
    if len(token_ids) >= policy.max_model_len:
        kept = _too_long(token_ids, params=params, policy=policy, param=param)
    room = policy.max_model_len - len(kept)
    wanted = params.max_tokens or max(DEFAULT_MAX_TOKENS, params.min_tokens)
    max_tokens = min(wanted, room)
    clamped = params.max_tokens is not None and max_tokens < wanted
    return Fitted(
        token_ids=kept,
        params=replace(
            params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens)
        ),
        truncated_tokens=len(token_ids) - len(kept),
        clamped_from=params.max_tokens if clamped else None,
    )


def _too_long(
    token_ids: tuple[int, ...], *, params: SamplingParams, policy: LengthPolicy, param: str
) -> tuple[int, ...]:
    if policy.on_too_long == "truncate":
        return _truncate(token_ids, keep=_kept_len(params, policy), policy=policy)
    message = f"the prompt has {len(token_ids)} tokens, the context holds {policy.max_model_len}"
    raise too_long(message, policy=policy, param=param)


def too_long(message: str, *, policy: LengthPolicy, param: str) -> RowProblem:
    """The problem of a prompt that may not be cut."""
    skipped = policy.on_too_long == "skip"
    return RowProblem(
        f"skipped: {message}" if skipped else message,
        code="context_length_exceeded",
        param=param,
        skipped=skipped,
    )


def _kept_len(params: SamplingParams, policy: LengthPolicy) -> int:
    """Leave room for the answer; where the answer alone would fill the context, half of it."""
    keep = policy.max_model_len - (params.max_tokens or DEFAULT_MAX_TOKENS)
    return keep if keep > 0 else max(1, policy.max_model_len // 2)


def _truncate(token_ids: tuple[int, ...], *, keep: int, policy: LengthPolicy) -> tuple[int, ...]:
    """Cut to `keep` tokens. A BOS in front stays: models write nonsense without it."""
    has_bos = token_ids[0] == policy.bos_token_id and keep > 1
    head, body = (token_ids[:1], token_ids[1:]) if has_bos else ((), token_ids)
    keep -= len(head)
    if policy.truncation_side == "left":
        return head + body[-keep:]
    if policy.truncation_side == "right":
        return head + body[:keep]
    front = keep // 2
    return head + body[:front] + body[len(body) - (keep - front) :]
