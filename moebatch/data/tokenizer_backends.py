"""The libraries behind a tokenizer: tokenizers (tokenizer.json), sentencepiece (tokenizer.model).

Both give the same ids for the same vocabulary; neither is seen outside of `tokenizer`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moebatch.data.token_text import ByteTable, byte_level_bytes, sentencepiece_bytes
from moebatch.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

# Holds the tables of all vocabularies in use; larger than any of them.
_CACHED_TOKENS = 2**19


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that stands beside the learned vocabulary, matched in the text before all else.

    `lstrip` and `rstrip`: it swallows white space on that side. `id` None: the vocabulary knows.
    """

    content: str
    id: int | None = None
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class Backend(Protocol):
    """What a tokenizer needs from its library."""

    table: ByteTable
    vocab_size: int

    def encode(self, text: str, *, with_template: bool) -> list[int]:
        """Ids of a text; the template adds what the file says belongs around every text."""

    def id_of(self, token: str) -> int | None:
        """The id of a token given by its text."""


class JsonBackend:
    """tokenizer.json, read by `tokenizers`."""

    def __init__(self, path: Path, *, added: Iterable[AddedToken]) -> None:
        """Raises: ModelError when the file cannot be read."""
        self._tokenizer = _load_json(path)
        # A file may carry the padding and the truncation of whoever saved it.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        for token in added:
            self._add(token)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.table = _json_table(self._tokenizer)

    def encode(self, text: str, *, with_template: bool) -> list[int]:
        """See Backend."""
        return self._tokenizer.encode(text, add_special_tokens=with_template).ids

    def id_of(self, token: str) -> int | None:
        """See Backend."""
        return self._tokenizer.token_to_id(token)

    def _add(self, token: AddedToken) -> None:
        """Make a token of the vocabulary an added one, or append it where its id comes next.

        Any other id would lie outside of the model's embedding or belong to another token.
        """
        known = self._tokenizer.get_added_tokens_decoder()
        token_id = self._tokenizer.token_to_id(token.content)
        is_next = token_id is None and token.id == self._tokenizer.get_vocab_size()
        if token_id in known or (token_id is None and not is_next):
            return
        self._tokenizer.add_tokens([_library_token(token)])


def _library_token(token: AddedToken) -> "tokenizers.AddedToken":
    import tokenizers

    return tokenizers.AddedToken(
        token.content,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _load_json(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        reason = " ".join(str(error).split())
        raise ModelError(f"{path} is not a readable tokenizer: {reason}") from error


def _json_table(tokenizer: "tokenizers.Tokenizer") -> ByteTable:
    added = tokenizer.get_added_tokens_decoder()
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    steps = _decoder_steps(tokenizer)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        piece_bytes = byte_level_bytes
    elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        piece_bytes = sentencepiece_bytes
    else:
        return _measured_table(tokenizer, special_ids)

    @lru_cache(_CACHED_TOKENS)
    def bytes_of(token_id: int) -> bytes:
        piece = tokenizer.id_to_token(token_id)
        return b"" if piece is None else piece_bytes(piece)

    strips = any(map(_strips_first_space, steps))
    return ByteTable(bytes_of=bytes_of, special_ids=special_ids, strips_first_space=strips)


def _decoder_steps(tokenizer: "tokenizers.Tokenizer") -> list[dict[str, Any]]:
    """The decoder as data: one object per step."""
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"])
    return step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"


def _measured_table(tokenizer: "tokenizers.Tokenizer", special_ids: frozenset[int]) -> ByteTable:
    """The table of an unusual decoder: a token's bytes are what it adds behind another token."""
    ids = sorted(tokenizer.get_vocab().values())
    anchor = next((token_id for token_id in ids if token_id not in special_ids), ids[0])
    before = tokenizer.decode([anchor], skip_special_tokens=False)

    @lru_cache(_CACHED_TOKENS)
    def bytes_of(token_id: int) -> bytes:
        both = tokenizer.decode([anchor, token_id], skip_special_tokens=False)
        return both.removeprefix(before).encode()

    # Words are joined by spaces; the first one has none in front.
    return ByteTable(bytes_of=bytes_of, special_ids=special_ids, strips_first_space=True)


class SentencePieceBackend:
    """tokenizer.model, read by `sentencepiece`, which takes "<s>" in a text for letters."""

    def __init__(self, path: Path, *, added: Iterable[AddedToken]) -> None:
        """Raises: ModelError when the file cannot be read."""
        self._model = _load_sentencepiece(path)
        tokens = {token.content: token for token in [*_control_tokens(self._model), *added]}
        self._ids = _resolve_ids(self._model, tokens.values())
        known = [token for token in tokens.values() if token.content in self._ids]
        self._splitter = _splitter(known)
        self.vocab_size = max([self._model.get_piece_size(), *(i + 1 for i in self._ids.values())])
        special_ids = frozenset(self._ids[token.content] for token in known if token.special)
        self.table = _sentencepiece_table(self._model, self._ids, special_ids)

    def encode(self, text: str, *, with_template: bool) -> list[int]:
        """See Backend; the file knows no template.

        Each stretch between added tokens is a text of its own, with its own leading space:
        so do the ids equal those of the tokenizer.json made from the same model.
        """
        ids: list[int] = []
        for number, stretch in enumerate(self._splitter.split(text)):
            if number % 2:  # the splitter's group: an added token, perhaps with white space around
                ids.append(self._ids[stretch if stretch in self._ids else stretch.strip()])
            elif stretch:
                ids.extend(self._model.encode(stretch))
        return ids

    def id_of(self, token: str) -> int | None:
        """See Backend."""
        return self._ids.get(token, _piece_id(self._model, token))


def _load_sentencepiece(path: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} is not a readable SentencePiece model") from error


def _control_tokens(model: Any) -> list[AddedToken]:
    """The pieces that no text is ever cut into: <s>, </s>, <unk> and the like."""
    ids = range(model.get_piece_size())
    return [
        AddedToken(content=model.id_to_piece(i), id=i)
        for i in ids
        if model.is_control(i) or model.is_unknown(i)
    ]


def _resolve_ids(model: Any, tokens: Iterable[AddedToken]) -> dict[str, int]:
    """The ids of added tokens: their own, or those of the pieces they name; others are dropped."""
    resolved = {
        token.content: token.id if token.id is not None else _piece_id(model, token.content)
        for token in tokens
    }
    return {content: token_id for content, token_id in resolved.items() if token_id is not None}


def _piece_id(model: Any, piece: str) -> int | None:
    """The id of a piece; the library answers with the unknown piece's where there is none."""
    token_id: int = model.piece_to_id(piece)
    return token_id if model.id_to_piece(token_id) == piece else None


def _splitter(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """A pattern whose one group is an added token; the longest of several that fit."""
    longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    patterns = [
        (r"\s*" if token.lstrip else "")
        + re.escape(token.content)
        + (r"\s*" if token.rstrip else "")
        for token in longest_first
    ]
    return re.compile(f"({'|'.join(patterns) or '(?!)'})")


def _sentencepiece_table(
    model: Any, ids: Mapping[str, int], special_ids: frozenset[int]
) -> ByteTable:
    added = {token_id: content for content, token_id in ids.items()}
    size = model.get_piece_size()

    @lru_cache(_CACHED_TOKENS)
    def bytes_of(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id].encode()
        return sentencepiece_bytes(model.id_to_piece(token_id)) if token_id < size else b""

    # The model puts a space before every text, unless it was trained without.
    prefixed = "".join(model.encode("a", out_type=str)).startswith("\u2581")
    return ByteTable(bytes_of=bytes_of, special_ids=special_ids, strips_first_space=prefixed)
