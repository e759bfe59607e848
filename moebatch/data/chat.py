"""Chat templates: messages become the text that the model was trained on, as transformers does it.

Templates come with models, so they run in a sandbox and see plain data only.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebatch.data.model_files import read_model_json, special_tokens
from moebatch.errors import ModelError, UsageError

if TYPE_CHECKING:
    import jinja2
    import jinja2.sandbox


class ChatTemplateError(Exception):
    """A template refused the messages; the text is the template's own, in one line."""


class ChatTemplate:
    """One compiled template. `fingerprint` is equal for equal sources."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], name: str) -> None:
        """`name` stands in error messages: where the source came from.

        Raises: ModelError when the source is no template.
        """
        self._template = _compile(source, name=name)
        self._special_tokens = dict(special_tokens)
        self.fingerprint = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt that asks for the next message. `kwargs` are variables of this template.

        Raises: ChatTemplateError.
        """
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **(kwargs or {}),
            "messages": [dict(message) for message in messages],
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is code: it may fail in any way
            raise ChatTemplateError(_one_line(error)) from error


def load_chat_template(model_dir: Path, *, override: str | None = None) -> ChatTemplate | None:
    """The template of a model, or the one that `override` names: a file, or one of the model's own.

    None when the model has no template.
    Raises: ModelError for a broken template, UsageError for an override that does not exist.
    """
    tokens = special_tokens(model_dir)
    if override is not None and Path(override).is_file():
        return ChatTemplate(_read(Path(override)), special_tokens=tokens, name=override)
    templates = _templates_of(model_dir)
    if override is not None and override not in templates:
        raise UsageError(
            f"{override} is neither a file nor a chat template of the model",
            hint=f"the model's own: {', '.join(templates) or 'none'}",
        )
    source = templates.get(override or "default")
    if source is None:
        return None
    return ChatTemplate(source, special_tokens=tokens, name=f"the chat template of {model_dir}")


def _templates_of(model_dir: Path) -> dict[str, str]:
    """All templates by name. Files of their own win over tokenizer_config.json."""
    said = read_model_json(model_dir / "tokenizer_config.json").get("chat_template")
    templates = {"default": said} if isinstance(said, str) else _named(said)
    folder = model_dir / "additional_chat_templates"
    templates |= {path.stem: _read(path) for path in sorted(folder.glob("*.jinja"))}
    alone = model_dir / "chat_template.jinja"
    return templates | ({"default": _read(alone)} if alone.exists() else {})


def _named(entries: Any) -> dict[str, str]:
    """The list form: [{"name": "default", "template": "..."}, ...]."""
    listed = [entry for entry in entries or () if isinstance(entry, Mapping)]
    return {
        entry["name"]: entry["template"]
        for entry in listed
        if isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _compile(source: str, *, name: str) -> "jinja2.Template":
    import jinja2

    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"{name} is not a valid template: {_one_line(error)}") from error


@cache
def _environment() -> "jinja2.sandbox.ImmutableSandboxedEnvironment":
    """The sandbox with the filters and functions that templates expect of `transformers`."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_extension()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _generation_extension() -> type[Any]:
    """{% generation %} marks what an assistant said, for training; here it is a plain block."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - the library's own attribute

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`; unlike the library's own it leaves < and > as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
