"""Sampling parameters as users write them: names, aliases, types and ranges, and who wins.

One table says what is accepted. Knows neither rows nor files.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moebatch.data.problem import RowProblem, unsupported
from moebatch.data.requests import SamplingParams
from moebatch.errors import ModelError, UsageError

_MAX_CHOICES = 128  # OpenAI's limit for n
_MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
_INT64 = 2**63
_MAX_NUMBER_CHARS = 30  # a text that is longer is no number that somebody wrote in a table

Check = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """Which field of SamplingParams a name sets; `check` returns the value or raises ValueError."""

    field: str
    check: Check


def _integer(low: int, high: int | None = None) -> Check:
    wanted = f"an integer of at least {low}" if high is None else f"an integer in {low}..{high}"

    def check(value: Any) -> int:
        number = _as_integer(value)
        if number is None or number < low or (high is not None and number > high):
            raise ValueError(f"must be {wanted}")
        return number

    return check


def _as_integer(value: Any) -> int | None:
    """The integer, also when a table stored it as 64.0; a boolean is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(wanted: str, accepts: Callable[[float], bool]) -> Check:
    def check(value: Any) -> float:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not _is_finite(value) or not accepts(value):
            raise ValueError(f"must be {wanted}")
        return float(value)

    return check


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _top_k(value: Any) -> int:
    """Both -1 and 0 switch top_k off."""
    number: int = _integer(-1)(value)
    return max(0, number)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(x, str) and x for x in texts):
        raise ValueError("must be a text or a list of texts, none of them empty")
    return tuple(texts)


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = [_as_integer(item) for item in value] if isinstance(value, list | tuple) else [None]
    if any(token_id is None or token_id < 0 for token_id in ids):
        raise ValueError("must be a list of token ids")
    return tuple(token_id for token_id in ids if token_id is not None)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    bias = _number("a number in -100..100", lambda x: -100 <= x <= 100)
    if not isinstance(value, Mapping):
        raise ValueError("must be an object from token ids to numbers")
    if not all(str(key).isdecimal() for key in value):
        raise ValueError("must have token ids as its keys")
    # A struct column of a table holds null for the keys that a row does not use.
    return tuple(sorted((int(key), bias(x)) for key, x in value.items() if x is not None))


_MAX_TOKENS = _Rule(field="max_tokens", check=_integer(1))
_PENALTY = _number("a number in -2..2", lambda x: -2 <= x <= 2)
_CHECKS: dict[str, Check] = {
    "min_tokens": _integer(0),
    "temperature": _number("a number of at least 0", lambda x: x >= 0),
    "top_p": _number("a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "top_k": _top_k,
    "min_p": _number("a number in 0..1", lambda x: 0 <= x <= 1),
    "repetition_penalty": _number("a number above 0", lambda x: x > 0),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": _logit_bias,
    "n": _integer(1, _MAX_CHOICES),
    "seed": _integer(-_INT64, _INT64 - 1),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "include_stop_str_in_output": _boolean,
    "skip_special_tokens": _boolean,
}
_RULES: dict[str, _Rule] = {
    "max_tokens": _MAX_TOKENS,
    "max_completion_tokens": _MAX_TOKENS,
    "max_new_tokens": _MAX_TOKENS,
} | {name: _Rule(field=name, check=check) for name, check in _CHECKS.items()}

# Fields that would change the output, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (False,),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "json_schema": (), "regex": (), "grammar": (), "choice": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}  # fmt: skip
# Fields that never change the output: bookkeeping of the service that the format comes from.
_HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier",
    "prompt_cache_key", "parallel_tool_calls", "request_id", "priority",
})  # fmt: skip
_LOGPROBS = ("logprobs", "top_logprobs")

# What a flat row may say in columns of its own. Not `n` or `logprobs`: users have such columns.
DIRECT_COLUMNS = (
    "max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "seed", "stop", "ignore_eos", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip


def unknown_names(values: Mapping[str, Any]) -> list[str]:
    """The names that are no parameter, in the order given; nulls do not count."""
    known = _RULES.keys() | _UNSUPPORTED.keys() | _HARMLESS | set(_LOGPROBS)
    return [name for name, value in values.items() if value is not None and name not in known]


def read_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that the values set, checked; null means "not said".

    Raises: RowProblem that names the parameter.
    """
    said: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in _UNSUPPORTED and not any(value == neutral for neutral in _UNSUPPORTED[name]):
            raise unsupported(name)
        if name in _RULES:
            _say(said, name, _checked(name, value))
    return said | _read_logprobs(values)


def _checked(name: str, value: Any) -> Any:
    try:
        return _RULES[name].check(value)
    except ValueError as error:
        raise RowProblem(f"{name} {error}, not {_shown(value)}", param=name) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _say(said: dict[str, Any], name: str, value: Any) -> None:
    """Set a field; two aliases may both be there as long as they agree."""
    field = _RULES[name].field
    if said.setdefault(field, value) != value:
        raise RowProblem(f"{name} contradicts another name of {field}", param=name)


def _read_logprobs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Chat says logprobs: true and top_logprobs: K; completions say logprobs: K."""
    asked, top = values.get("logprobs"), values.get("top_logprobs")
    count = _integer(0, _MAX_LOGPROBS)
    try:
        if top is not None and asked is not True:
            raise RowProblem("top_logprobs needs logprobs: true", param="top_logprobs")
        if asked is None or asked is False:
            return {}
        return {"logprobs": count(top or 0) if asked is True else count(asked)}
    except ValueError as error:
        name = "top_logprobs" if top is not None else "logprobs"
        raise RowProblem(f"{name} {error}", param=name) from error


def read_direct(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that a flat row keeps in columns of its own.

    A column of another type is the user's data and no parameter; a value out of range is a mistake.
    Tables of text (CSV) write numbers as text.
    Raises: RowProblem.
    """
    values = {name: _plain(name, columns.get(name)) for name in DIRECT_COLUMNS}
    return read_params({name: x for name, x in values.items() if _fits(name, x)})


def unfit_names(columns: Mapping[str, Any]) -> list[str]:
    """Columns that are called like a parameter and hold something that none can be."""
    said = [name for name in DIRECT_COLUMNS if not _is_nothing(columns.get(name))]
    return [name for name in said if not _fits(name, _plain(name, columns[name]))]


def _plain(name: str, value: Any) -> Any:
    """A number or truth value that is written as text; any other value as it is."""
    if not isinstance(value, str) or name == "stop" or len(value) > _MAX_NUMBER_CHARS:
        return value
    if name == "ignore_eos":
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(value)
    return value


def _is_nothing(value: Any) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)  # how tables store "nothing"
    return value is None or is_nan or value in ("", [])


def _fits(name: str, value: Any) -> bool:
    if name == "stop":
        return bool(value) and isinstance(value, str | list)
    if name == "ignore_eos":
        return isinstance(value, bool)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and not _is_nothing(value)


def check_together(params: SamplingParams) -> None:
    """Check what no single value can show.

    Raises: RowProblem.
    """
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RowProblem(
            f"min_tokens {params.min_tokens} is more than max_tokens {params.max_tokens}",
            param="min_tokens",
        )


def sampling_defaults(
    generation_config: Mapping[str, Any] | None, cli_overrides: Mapping[str, Any]
) -> SamplingParams:
    """What a row gets that says nothing: built-in, then generation_config.json, then the flags.

    Only an explicit `do_sample: false` means greedy. Names that are no sampling parameter (the
    EOS ids among them) are left alone.
    Raises: ModelError for a bad generation_config.json, UsageError for a bad flag.
    """
    try:
        said = _from_generation_config(generation_config or {})
    except RowProblem as problem:
        raise ModelError(f"generation_config.json: {problem}") from problem
    try:
        params = replace(SamplingParams(), **(said | _from_flags(cli_overrides)))
        check_together(params)
    except RowProblem as problem:
        raise UsageError(str(problem)) from problem
    return params


_FROM_GENERATION_CONFIG = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens",
)  # fmt: skip


def _from_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    said = read_params({name: config.get(name) for name in _FROM_GENERATION_CONFIG})
    return said | ({"temperature": 0.0} if config.get("do_sample") is False else {})


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    unknown = unknown_names(flags)
    if unknown:
        known = ", ".join(field.name for field in fields(SamplingParams))
        raise UsageError(f"{unknown[0]} is not a sampling parameter", hint=f"known: {known}")
    return read_params(flags)
