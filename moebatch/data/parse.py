"""From a raw row to a request with token ids that fits the model; a bad row becomes a RowError."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from moebatch.data.chat import ChatTemplate, ChatTemplateError
from moebatch.data.columns import ColumnNames
from moebatch.data.lengths import (
    DEFAULT_MAX_TOKENS,
    LengthPolicy,
    OnTooLong,
    TruncationSide,
    fit,
    too_long,
)
from moebatch.data.messages import Message
from moebatch.data.params import check_together
from moebatch.data.problem import RowProblem
from moebatch.data.requests import RawRow, Request, RowError, SamplingParams
from moebatch.data.rows import ParsedRow, RowParser
from moebatch.data.tokenizer import Tokenizer
from moebatch.errors import Interrupted, MoebatchError, UsageError

_MAX_MESSAGE_CHARS = 200
_HOPELESS_CHARS = 32  # characters for each token of the context: no language needs that many

ApplyChatTemplate = Literal["auto", "always", "never"]


class RequestBuilder:
    """Builds the request of each row; a row wins over the defaults.

    `apply_chat_template`: "auto" renders messages and leaves raw prompts alone, "always" takes a
    raw prompt for a user's message, "never" refuses messages. `system` goes before chats that have
    no system message. `strict` makes unknown parameters errors. `warnings` grows while rows are
    built: one text for each thing the user should know, once for the run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None,
        defaults: SamplingParams,
        vocab_size: int,
        max_model_len: int,
        on_too_long: OnTooLong = "error",
        truncation_side: TruncationSide = "left",
        apply_chat_template: ApplyChatTemplate = "auto",
        system: str | None = None,
        strict: bool = False,
        columns: ColumnNames | None = None,
        model_name: str | None = None,
    ) -> None:
        """Raises: UsageError for defaults that fit no row of this model."""
        self._tokenizer = tokenizer
        self._template = chat_template
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._apply: ApplyChatTemplate = apply_chat_template
        self._system = system
        self._parser = RowParser(columns, strict=strict, model_name=model_name)
        _check_flags(defaults, vocab_size=vocab_size)
        self._policy = LengthPolicy(
            max_model_len=max_model_len,
            on_too_long=on_too_long,
            truncation_side=truncation_side,
            bos_token_id=tokenizer.bos_token_id,
        )

    @property
    def warnings(self) -> list[str]:
        """What to tell the user, in the order found."""
        return self._parser.warnings

    def build(self, row: RawRow) -> Request | RowError:
        """The request of a row, or what is wrong with the row."""
        try:
            return self._build(row)
        except RowProblem as problem:
            return RowError(
                index=row.index,
                id=row.id,
                code=problem.code,
                message=str(problem),
                param=problem.param,
                line=row.line,
                skipped=problem.skipped,
                raw=row,
            )
        except (MoebatchError, Interrupted):
            raise
        except Exception as error:  # the row's border: a fault of ours takes no other row down
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return RowError(
                index=row.index,
                id=row.id,
                code="internal_error",
                message=f"the row could not be read: {text[:_MAX_MESSAGE_CHARS]}",
                line=row.line,
                raw=row,
            )

    def _build(self, row: RawRow) -> Request:
        parsed = self._parser.parse(row)
        params = replace(self._defaults, **parsed.overrides)
        check_together(params)
        self._check_ids(params.stop_token_ids, param="stop_token_ids")
        self._check_ids((token_id for token_id, _ in params.logit_bias), param="logit_bias")
        token_ids = self._encode(parsed)
        self._check_ids(token_ids, param=parsed.param)
        fitted = fit(token_ids, params=params, policy=self._policy, param=parsed.param)
        self._note_default(params)
        return Request(
            index=row.index,
            id=row.id,
            prompt_token_ids=fitted.token_ids,
            params=fitted.params,
            truncated_tokens=fitted.truncated_tokens,
            clamped_from=fitted.clamped_from,
        )

    def _note_default(self, params: SamplingParams) -> None:
        if params.max_tokens is None:
            text = f"rows without max_tokens get {DEFAULT_MAX_TOKENS}, or what the context leaves"
            self._parser.warn_once("max_tokens", text)

    def _encode(self, parsed: ParsedRow) -> tuple[int, ...]:
        if parsed.token_ids is not None:
            return parsed.token_ids
        if parsed.messages is not None:
            return self._encode_chat(parsed, parsed.messages)
        if self._apply == "always":
            return self._encode_chat(parsed, ({"role": "user", "content": parsed.text},))
        if self._system is not None:
            self._parser.warn_once("system", "raw prompts take no system message; it is left out")
        return self._encode_text(parsed.text or "", parsed=parsed, add_special_tokens=True)

    def _encode_chat(self, parsed: ParsedRow, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """The ids of a rendered chat: the template has written the special tokens itself."""
        text = self._render(self._with_system(messages), parsed=parsed)
        return self._encode_text(text, parsed=parsed, add_special_tokens=False)

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if self._system is None or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self._system}, *messages)

    def _render(self, messages: tuple[Message, ...], *, parsed: ParsedRow) -> str:
        if self._apply == "never" or self._template is None:
            reason = "is switched off" if self._apply == "never" else "is missing from the model"
            raise RowProblem(
                f"the chat template {reason}, so messages cannot become a prompt",
                code="chat_template_error",
                param=parsed.param,
            )
        try:
            return self._template.render(messages, kwargs=parsed.template_kwargs)
        except ChatTemplateError as error:
            message = f"the chat template refused the messages: {error}"
            raise RowProblem(message, code="chat_template_error", param=parsed.param) from error

    def _encode_text(
        self, text: str, *, parsed: ParsedRow, add_special_tokens: bool
    ) -> tuple[int, ...]:
        _check_utf8(text, param=parsed.param)
        self._check_hopeless(text, param=parsed.param)
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise RowProblem(f"{parsed.param} is empty", param=parsed.param)
        bos = self._tokenizer.bos_token_id
        # A text that starts with a written-out BOS has been given a second one by the tokenizer.
        return tuple(ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids)

    def _check_hopeless(self, text: str, *, param: str) -> None:
        """Refuse a text that is far too long without encoding all of it, which takes seconds.

        Its first part alone has twice the tokens that the context holds. What follows can change
        tokens near the end of that part, but not half of them.
        """
        most = self._policy.max_model_len
        if self._policy.on_too_long == "truncate" or len(text) < _HOPELESS_CHARS * most:
            return
        part = text[: _HOPELESS_CHARS * most // 2]
        if len(self._tokenizer.encode(part, add_special_tokens=False)) >= 2 * most:
            message = (
                f"the prompt has {len(text):,} characters, more than the context of {most} tokens"
            )
            raise too_long(message, policy=self._policy, param=param)

    def _check_ids(self, ids: Iterable[int], *, param: str) -> None:
        outside = next((i for i in ids if not 0 <= i < self._vocab_size), None)
        if outside is not None:
            raise RowProblem(
                f"{param} holds token id {outside}, the vocabulary has {self._vocab_size}",
                param=param,
            )


def _check_flags(defaults: SamplingParams, *, vocab_size: int) -> None:
    for token_id in defaults.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise UsageError(f"--stop-token-id {token_id}: the vocabulary has {vocab_size} tokens")


def _check_utf8(text: str, *, param: str) -> None:
    """Refuse lone surrogates: escapes in JSON can write them, no tokenizer can read them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowProblem(f"{param} holds text that is no valid Unicode", param=param) from error
