"""What a row asks for: its prompt in one of three forms, and the parameters that it sets itself.

Knows nothing of tokenizers; one parser per run, because it says each warning once.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moebatch.data.columns import ColumnNames, PromptKind, find_prompt
from moebatch.data.messages import Message, is_messages, read_messages
from moebatch.data.params import read_direct, read_params, unfit_names, unknown_names
from moebatch.data.problem import RowProblem, unsupported
from moebatch.data.requests import RawRow

_CHAT_URL = "/v1/chat/completions"
_TEXT_URL = "/v1/completions"
# Body fields that are no sampling parameters.
_OWN_FIELDS = frozenset({"messages", "prompt", "model", "stream", "chat_template_kwargs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """One row, understood. Exactly one of `messages`, `text` and `token_ids` is set.

    `overrides` holds the fields of SamplingParams that the row sets; `param` names the column or
    field that the prompt came from.
    """

    param: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    overrides: Mapping[str, Any]
    template_kwargs: Mapping[str, Any]


class RowParser:
    """Turns raw rows into parsed ones; `warnings` collects what to tell the user once."""

    def __init__(
        self,
        columns: ColumnNames | None = None,
        *,
        strict: bool = False,
        model_name: str | None = None,
    ) -> None:
        self.warnings: list[str] = []
        self._columns = columns or ColumnNames()
        self._strict = strict
        self._model_name = model_name
        self._said: set[str] = set()

    def parse(self, row: RawRow) -> ParsedRow:
        """Understand one row.

        Raises: RowProblem.
        """
        if row.schema == "openai":
            return self._parse_openai(row.columns)
        return self._parse_flat(row.columns)

    def warn_once(self, key: str, message: str) -> None:
        """Keep a warning unless one with the same key was kept before."""
        if key not in self._said:
            self._said.add(key)
            self.warnings.append(message)

    def _parse_openai(self, columns: Mapping[str, Any]) -> ParsedRow:
        body = _object(columns["body"], name="body")
        chat = is_chat(columns.get("url"), body=body)
        self._check_envelope(body)
        values = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
        self._check_names(values)
        _check_logprobs_form(values, chat=chat)
        kind: PromptKind = "messages" if chat else "prompt"
        return _parsed(
            kind,
            value=body.get(kind),
            kind=kind,
            overrides=read_params(values),
            template_kwargs=body.get("chat_template_kwargs"),
        )

    def _parse_flat(self, columns: Mapping[str, Any]) -> ParsedRow:
        found = find_prompt(columns, names=self._columns)
        if found is None:
            raise RowProblem(_nothing_found(columns, self._columns), code="missing_prompt")
        for name in ("tools", "response_format"):
            read_params({name: columns.get(name) or None})
        values = _object(columns.get("sampling_params") or {}, name="sampling_params")
        self._check_names(values)
        for name in unfit_names(columns):
            text = f"the column {name!r} holds values that {name} cannot have; they are not used"
            self.warn_once(f"column {name}", text)
        kind, name = found
        return _parsed(
            name,
            value=columns[name],
            kind=kind,
            overrides=read_direct(columns) | read_params(values),
            template_kwargs=columns.get("chat_template_kwargs"),
        )

    def _check_envelope(self, body: Mapping[str, Any]) -> None:
        """Warn of fields that are not honoured although they leave the text as it is."""
        if body.get("stream"):
            self.warn_once("stream", "stream: true has no meaning in a batch and is ignored")
        model = body.get("model")
        if model is not None and self._model_name is not None and model != self._model_name:
            self.warn_once("model", f"rows ask for model {model!r}; {self._model_name} answers")

    def _check_names(self, values: Mapping[str, Any]) -> None:
        for name in unknown_names(values):
            if self._strict:
                raise unsupported(name, message=f"{name} is not a known parameter")
            self.warn_once(f"field {name}", f"the unknown parameter {name!r} is ignored")


def is_chat(url: Any, *, body: Mapping[str, Any]) -> bool:
    """Whether an OpenAI line asks for a chat, by its url or else by its body.

    Raises: RowProblem for an endpoint that is neither.
    """
    if url is None:
        return "messages" in body
    if not isinstance(url, str) or not url.endswith((_CHAT_URL, _TEXT_URL)):
        raise unsupported("url", message=f"url must be {_CHAT_URL} or {_TEXT_URL}, not {url!r}")
    return url.endswith(_CHAT_URL)


def _check_logprobs_form(values: Mapping[str, Any], *, chat: bool) -> None:
    """OpenAI's two endpoints write logprobs differently; the other one's form is a mistake."""
    asked = values.get("logprobs")
    if asked is not None and isinstance(asked, bool) is not chat:
        wanted = "true or false, with top_logprobs beside it" if chat else "a number"
        raise RowProblem(f"logprobs must be {wanted}", param="logprobs")


def _nothing_found(columns: Mapping[str, Any], names: ColumnNames) -> str:
    wanted = ", ".join(filter(None, (names.prompt, names.messages, names.prompt_token_ids)))
    wanted = wanted or "prompt, text, input, messages, prompt_token_ids"
    return f"the row has none of {wanted}; its columns are: {', '.join(map(str, columns))}"


def _object(value: Any, *, name: str) -> Mapping[str, Any]:
    """An object, also when a table stored it as JSON text."""
    plain = from_text(value)
    if not isinstance(plain, Mapping):
        raise RowProblem(f"{name} must be an object", param=name)
    return plain


def from_text(value: Any) -> Any:
    """What a text of JSON holds; every other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _parsed(
    param: str,
    *,
    value: Any,
    overrides: Mapping[str, Any],
    template_kwargs: Any,
    kind: PromptKind,
) -> ParsedRow:
    """Put the prompt into the form that its value has, whatever the column is called."""
    if value is None:
        raise RowProblem(f"the row has no {param}", code="missing_prompt", param=param)
    form = _form(param, value=value, kind=kind)
    return ParsedRow(
        param=param,
        overrides=overrides,
        template_kwargs=_object(template_kwargs or {}, name="chat_template_kwargs"),
        **form,
    )


def _form(param: str, *, value: Any, kind: PromptKind) -> dict[str, Any]:
    if kind == "messages":
        return {"messages": read_messages(from_text(value), param=param)}
    if kind == "prompt_token_ids":
        return {"token_ids": _ids(from_text(value), param=param)}
    if is_messages(value):
        return {"messages": read_messages(value, param=param)}
    return _prompt(value, param=param)


def _prompt(value: Any, *, param: str) -> dict[str, Any]:
    """A text, token ids, or a list that holds exactly one of these."""
    if isinstance(value, str):
        if not value:
            raise RowProblem(f"{param} is empty", param=param)
        return {"text": value}
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise unsupported(param, message=f"{param} holds several prompts; write a row for each")
        return _prompt(value[0], param=param)
    return {"token_ids": _ids(value, param=param)}


def _ids(value: Any, *, param: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RowProblem(f"{param} must be a text or a list of token ids", param=param)
    if not value:
        raise RowProblem(f"{param} is empty", param=param)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise RowProblem(f"{param} must hold integers only", param=param)
    return tuple(value)
