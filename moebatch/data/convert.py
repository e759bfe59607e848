"""Rows from one schema to the other: OpenAI's batch lines, and flat columns.

Values are carried over as they are; whether a model can answer them is not asked here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moebatch.data.columns import ColumnNames, find_prompt
from moebatch.data.params import DIRECT_COLUMNS, read_params, unfit_names
from moebatch.data.problem import RowProblem
from moebatch.data.requests import RawRow
from moebatch.data.rows import from_text, is_chat

_ENVELOPE = ("custom_id", "method", "url", "body")
# What stands in the body of an OpenAI line and in a column of its own in a flat row.
_BESIDE = ("tools", "tool_choice", "response_format", "chat_template_kwargs")

Converter = Callable[[RawRow], tuple[dict[str, Any], list[str]]]


def converter(schema: str, *, columns: ColumnNames, model: str | None = None) -> Converter:
    """What turns a row into `schema`: "flat", "openai", or "auto" for the one that it has.

    It returns the new row and the names that have no place in it; it raises RowProblem.
    """

    def convert(row: RawRow) -> tuple[dict[str, Any], list[str]]:
        if schema in ("auto", row.schema):
            return dict(row.columns), []
        if schema == "openai":
            return _to_openai(row, columns=columns, model=model)
        return _to_flat(row)

    def convert_result(row: RawRow) -> tuple[dict[str, Any], list[str]]:
        if schema == "auto" or not _is_result(row.columns):
            return convert(row)
        if schema == "openai":
            return dict(row.columns), []
        return _result_to_flat(row)

    return convert_result


def _to_openai(
    row: RawRow, *, columns: ColumnNames, model: str | None
) -> tuple[dict[str, Any], list[str]]:
    found = find_prompt(row.columns, names=columns)
    if found is None:
        raise RowProblem("the row has no prompt", code="missing_prompt")
    kind, name = found
    value = from_text(row.columns[name]) if kind != "prompt" else row.columns[name]
    chat = kind == "messages" or _holds_messages(value)
    said = row.columns.get("sampling_params")
    params = from_text(said) if said else {}
    if not isinstance(params, Mapping):
        raise RowProblem("sampling_params must be an object", param="sampling_params")
    unfit = unfit_names(row.columns)
    direct = {key: row.columns[key] for key in DIRECT_COLUMNS
              if row.columns.get(key) is not None and key not in unfit}  # fmt: skip
    beside = {key: row.columns[key] for key in _BESIDE if row.columns.get(key) is not None}
    body = {
        **({"model": model} if model is not None else {}),
        "messages" if chat else "prompt": value,
        **_openai_logprobs(direct | {k: v for k, v in params.items() if v is not None}, chat=chat),
        **{key: from_text(item) for key, item in beside.items()},
    }
    url = "/v1/chat/completions" if chat else "/v1/completions"
    used = {name, "sampling_params", columns.id, "custom_id", "id", *direct, *beside}
    line = {"custom_id": row.id, "method": "POST", "url": url, "body": body}
    left_out = [key for key, item in row.columns.items() if key not in used and item is not None]
    return line, left_out


def _holds_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _openai_logprobs(params: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """Chats write `logprobs: K` as two fields."""
    count = params.get("logprobs")
    if not chat or isinstance(count, bool) or not isinstance(count, int):
        return params
    return params | {"logprobs": True, "top_logprobs": count}


def _to_flat(row: RawRow) -> tuple[dict[str, Any], list[str]]:
    body = from_text(row.columns["body"])
    if not isinstance(body, Mapping):
        raise RowProblem("body must be an object", param="body")
    chat = is_chat(row.columns.get("url"), body=body)
    kind = "messages" if chat else "prompt"
    if body.get(kind) is None:
        raise RowProblem(f"the row has no {kind}", code="missing_prompt", param=kind)
    ids = not chat and isinstance(body[kind], list) and all(isinstance(x, int) for x in body[kind])
    own = (kind, "model", "stream", "stream_options", *_BESIDE)
    params = {key: value for key, value in body.items() if key not in own and value is not None}
    flat = {
        "id": row.id,
        **{key: value for key, value in row.columns.items() if key not in (*_ENVELOPE, "id")},
        "prompt_token_ids" if ids else kind: body[kind],
        **{key: body[key] for key in _BESIDE if body.get(key) is not None},
    }
    if params:
        flat["sampling_params"] = _flat_logprobs(params, chat=chat)
    left_out = [key for key in ("model", "stream", "stream_options") if body.get(key) is not None]
    return flat, left_out


def _flat_logprobs(params: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    if not chat:
        return params
    count = read_params({name: params.get(name) for name in ("logprobs", "top_logprobs")})
    others = {k: v for k, v in params.items() if k not in ("logprobs", "top_logprobs")}
    return others | count


# --- results --------------------------------------------------------------------------------------


def _is_result(columns: Mapping[str, Any]) -> bool:
    """Whether a row is an answer in OpenAI's schema."""
    return "custom_id" in columns and "response" in columns and "body" not in columns


def _result_to_flat(row: RawRow) -> tuple[dict[str, Any], list[str]]:
    response, error = (from_text(row.columns.get(name)) for name in ("response", "error"))
    body = from_text(response.get("body")) if isinstance(response, Mapping) else None
    flat: dict[str, Any] = {"id": row.columns["custom_id"]}
    if error is not None or not isinstance(body, Mapping) or "choices" not in body:
        return flat | {
            "generated_text": None,
            "finish_reason": "error",
            "error": error or {"message": "the response holds no choices"},
        }, []
    choices, usage = body["choices"], body.get("usage") or {}
    if not isinstance(usage, Mapping) or not _all_objects(choices):
        raise RowProblem("the response is no answer in OpenAI's form", param="response")
    texts = [_text_of(choice) for choice in choices]
    return flat | {
        "generated_text": _one_or_all(texts),
        "finish_reason": _one_or_all([choice.get("finish_reason") for choice in choices]),
        "stop_reason": _one_or_all([choice.get("stop_reason") for choice in choices]),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "error": None,
    }, []


def _all_objects(choices: Any) -> bool:
    return isinstance(choices, list) and all(isinstance(choice, Mapping) for choice in choices)


def _text_of(choice: Mapping[str, Any]) -> Any:
    message = choice.get("message")
    return message.get("content") if isinstance(message, Mapping) else choice.get("text")


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
