"""How rows become prompts, put together from a model and what the user asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebatch.cli.asked import PromptOptions
from moebatch.data.chat import ChatTemplate, load_chat_template
from moebatch.data.columns import ColumnNames
from moebatch.data.params import sampling_defaults
from moebatch.data.parse import RequestBuilder
from moebatch.data.requests import SamplingParams
from moebatch.data.tokenizer import Tokenizer
from moebatch.errors import ModelError, UsageError
from moebatch.model.checkpoint import read_json
from moebatch.model.resolve import LocalModel


def request_builder(
    model: LocalModel,
    prompts: PromptOptions,
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    defaults: SamplingParams,
    columns: ColumnNames,
) -> RequestBuilder:
    """What makes the request of each row.

    Raises: UsageError for options that the model cannot follow.
    """
    return RequestBuilder(
        tokenizer,
        chat_template=template,
        defaults=defaults,
        vocab_size=model.spec.vocab_size,
        max_model_len=max_model_len(model, prompts),
        on_too_long=prompts.on_too_long,
        truncation_side=prompts.truncation_side,
        apply_chat_template=prompts.apply_chat_template,
        system=prompts.system,
        strict=prompts.strict,
        columns=columns,
        model_name=model.name,
    )


def chat_template(model: LocalModel, prompts: PromptOptions) -> ChatTemplate | None:
    """The template that the user names, or the model's own.

    Raises: UsageError, ModelError.
    """
    return load_chat_template(model.path, override=prompts.chat_template)


def row_defaults(model: LocalModel, prompts: PromptOptions) -> SamplingParams:
    """What a row gets that says nothing itself.

    Raises: UsageError, ModelError.
    """
    return sampling_defaults(_generation_config(model, prompts.generation_config), prompts.sampling)


def max_model_len(model: LocalModel, prompts: PromptOptions) -> int:
    """The longest sequence: the model's, or less where the user says so.

    Raises: UsageError for more than the model has.
    """
    wanted, most = prompts.max_model_len, model.spec.max_model_len
    if wanted is not None and not 1 <= wanted <= most:
        raise UsageError(f"--max-model-len {wanted} is not between 1 and the model's {most}")
    return wanted or most


def _generation_config(model: LocalModel, choice: str) -> Mapping[str, Any] | None:
    if choice == "auto":
        return model.generation_config
    try:
        return None if choice == "none" else read_json(Path(choice))
    except ModelError as error:  # a file that the user named
        raise UsageError(f"--generation-config: {error}") from None
