"""What an output row looks like: OpenAI's batch shape, or the input's columns with ours beside.

Plain values only; knows no file. The shapes stand in cli.md, section 4.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

from moebatch.data.requests import (
    Choice,
    Completion,
    Outcome,
    RawRow,
    RowError,
    Schema,
    TokenLogprob,
)

OutputSchema = Literal["auto", "openai", "flat"]
Extra = Literal["token_ids", "prompt_token_ids"]
EXTRAS: tuple[str, ...] = get_args(Extra)

_PREFIX = "moebatch_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """All that output rows say about the run, and what the user wants in them.

    `created` is the start of the run in seconds since 1970: constant, so that a resumed run writes
    the same bytes. `token_bytes` gives a token's bytes for log-probabilities, which else list ids.
    """

    schema: OutputSchema = "auto"
    model_name: str
    run_id: str
    created: int = 0
    include: tuple[Extra, ...] = ()
    token_bytes: Callable[[int], bytes] | None = None

    def schema_for(self, row: RawRow | None, *, previous: Schema) -> Schema:
        """The shape of one output row; a line that was no row follows the row before it."""
        if self.schema != "auto":
            return self.schema
        return row.schema if row is not None else previous


def output_row(
    row: RawRow | None, outcome: Outcome, *, schema: Schema, format: RowFormat
) -> dict[str, Any]:
    """The output row of one input row. `row` is None where the input line could not be read."""
    if schema == "flat":
        return _flat_row(row, outcome, format=format)
    if isinstance(outcome, RowError):
        return _openai_error(outcome, format=format)
    return _openai_row(row, outcome, format=format)


def index_of(outcome: Outcome) -> int:
    """The row's place in the input."""
    return outcome.index if isinstance(outcome, RowError) else outcome.request.index


# --- OpenAI ---------------------------------------------------------------------------------------


def _openai_row(row: RawRow | None, done: Completion, *, format: RowFormat) -> dict[str, Any]:
    chat = _is_chat(row)
    index = done.request.index
    shown = [_openai_choice(choice, chat=chat, format=format) for choice in done.choices]
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{format.run_id}-{index}",
        "object": "chat.completion" if chat else "text_completion",
        "created": format.created,
        "model": format.model_name,
        "choices": shown,
        "usage": _usage(done),
    } | _clamped(done)
    response = {"status_code": 200, "request_id": f"{format.run_id}-{index}", "body": body}
    return _envelope(index, done.request.id, format=format) | {"response": response, "error": None}


def _openai_error(error: RowError, *, format: RowFormat) -> dict[str, Any]:
    """A failed row: what the service would have answered, and the same once more beside it."""
    shown = {
        "message": error.message,
        "type": _error_type(error),
        "param": error.param,
        "code": error.code,
    }
    response = {
        "status_code": 500 if error.retryable else 400,
        "request_id": f"{format.run_id}-{error.index}",
        "body": {"error": shown},
    }
    beside = {
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "line": error.line,
    }
    return _envelope(error.index, error.id, format=format) | {"response": response, "error": beside}


def _envelope(index: int, custom_id: str, *, format: RowFormat) -> dict[str, Any]:
    return {"id": f"moebatch-{format.run_id}-{index:08d}", "custom_id": custom_id}


def _error_type(error: RowError) -> str:
    return "server_error" if error.retryable else "invalid_request_error"


def _is_chat(row: RawRow | None) -> bool:
    """Whether a row asked for a chat; a flat row did when it brought messages."""
    if row is None:
        return False
    url = row.columns.get("url")
    if row.schema == "openai" and isinstance(url, str):
        return url.endswith("/chat/completions")
    asked = row.columns.get("body") if row.schema == "openai" else row.columns
    return isinstance(asked, Mapping) and asked.get("messages") is not None


def _openai_choice(choice: Choice, *, chat: bool, format: RowFormat) -> dict[str, Any]:
    said = (
        {"message": {"role": "assistant", "content": choice.text}}
        if chat
        else {"text": choice.text}
    )
    show = _chat_logprobs if chat else _text_logprobs
    logprobs = choice.logprobs
    return {
        "index": choice.index,
        **said,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": None if logprobs is None else show(logprobs, format=format),
    } | ({"token_ids": list(choice.token_ids)} if "token_ids" in format.include else {})


def _usage(done: Completion) -> dict[str, Any]:
    prompt, generated = len(done.request.prompt_token_ids), _completion_tokens(done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _completion_tokens(done: Completion) -> int:
    """Tokens generated, counted from the ids and not from the text."""
    return sum(len(choice.token_ids) for choice in done.choices)


def _clamped(done: Completion) -> dict[str, Any]:
    """The max_tokens that was used, said only where the row asked for more."""
    if done.request.clamped_from is None:
        return {}
    return {"max_tokens_clamped": done.request.params.max_tokens}


# --- log-probabilities ----------------------------------------------------------------------------


def _chat_logprobs(logprobs: Iterable[TokenLogprob], *, format: RowFormat) -> dict[str, Any]:
    return {"content": [_position(item, format=format) for item in logprobs]}


def _position(item: TokenLogprob, *, format: RowFormat) -> dict[str, Any]:
    top = [_token(token_id, logprob, format=format) for token_id, logprob in item.top]
    return _token(item.token_id, item.logprob, format=format) | {"top_logprobs": top}


def _token(token_id: int, logprob: float, *, format: RowFormat) -> dict[str, Any]:
    content = format.token_bytes(token_id) if format.token_bytes is not None else None
    return {
        "token": _token_text(token_id, format=format),
        "logprob": logprob,
        "bytes": None if content is None else list(content),
    }


def _token_text(token_id: int, *, format: RowFormat) -> str:
    if format.token_bytes is None:
        return f"token_id:{token_id}"
    return format.token_bytes(token_id).decode("utf-8", "replace")


def _text_logprobs(logprobs: Iterable[TokenLogprob], *, format: RowFormat) -> dict[str, Any]:
    """The older form of the completions endpoint: parallel lists."""
    items = list(logprobs)
    tokens = [_token_text(item.token_id, format=format) for item in items]
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [
            {_token_text(token_id, format=format): logprob for token_id, logprob in item.top}
            for item in items
        ],
        "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
    }


# --- flat -----------------------------------------------------------------------------------------


def _flat_row(row: RawRow | None, outcome: Outcome, *, format: RowFormat) -> dict[str, Any]:
    columns = dict(row.columns) if row is not None else {}
    ours = (
        _flat_error(outcome)
        if isinstance(outcome, RowError)
        else _flat_columns(outcome, format=format)
    )
    for name, value in ours.items():
        columns[_free_name(name, columns)] = value
    return columns


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """The user's columns keep their names and values; ours step aside."""
    while name in taken:
        name = _PREFIX + name
    return name


def _flat_columns(done: Completion, *, format: RowFormat) -> dict[str, Any]:
    """Our columns of an answered row; lists where the row asked for several answers."""
    said: dict[str, Any] = {
        "generated_text": _each(done, lambda choice: choice.text),
        "finish_reason": _each(done, lambda choice: choice.finish_reason),
        "stop_reason": _each(done, lambda choice: choice.stop_reason),
        "prompt_tokens": len(done.request.prompt_token_ids),
        "completion_tokens": _completion_tokens(done),
    }
    if done.request.params.logprobs is not None:
        said["logprobs"] = _each(done, lambda choice: _flat_logprobs(choice, format=format))
    if "token_ids" in format.include:
        said["token_ids"] = _each(done, lambda choice: list(choice.token_ids))
    if "prompt_token_ids" in format.include:
        said["prompt_token_ids"] = list(done.request.prompt_token_ids)
    truncated = {"truncated_tokens": done.request.truncated_tokens}
    return said | truncated | _clamped(done) | {"error": None}


def _each(done: Completion, value: Callable[[Choice], Any]) -> Any:
    values = [value(choice) for choice in done.choices]
    return values if done.request.params.n > 1 else values[0]


def _flat_logprobs(choice: Choice, *, format: RowFormat) -> list[dict[str, Any]]:
    return [
        {"token_id": item.token_id} | _position(item, format=format)
        for item in choice.logprobs or ()
    ]


def _flat_error(error: RowError) -> dict[str, Any]:
    """Our columns of a failed row: the same names, so that a table keeps its columns."""
    return {
        "generated_text": None,
        "finish_reason": "skipped" if error.skipped else "error",
        "stop_reason": None,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "truncated_tokens": 0,
        "error": {
            "code": error.code,
            "message": error.message,
            "type": _error_type(error),
            "param": error.param,
            "line": error.line,
            "retryable": error.retryable,
        },
    }
