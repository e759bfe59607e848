"""Text to token ids and back, the way the model's own files say it; no other model code is run.

Knows neither rows nor chats.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebatch.data.model_files import read_model_json, special_tokens, token_content
from moebatch.data.token_text import TextStream, decode_all
from moebatch.data.tokenizer_backends import (
    AddedToken,
    Backend,
    JsonBackend,
    SentencePieceBackend,
)
from moebatch.errors import ModelError

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Affixes:
    """The ids that belong before and after every text."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class Tokenizer:
    """The tokenizer of one model.

    `bos_token_id`, `eos_token_id`: None where the model's files name none. `special_ids`: left out
    of decoded text. `fingerprint`: equal for equal files, whatever their folder.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        affixes: Affixes | None,
        bos_token_id: int | None,
        eos_token_id: int | None,
        fingerprint: str,
    ) -> None:
        self._backend = backend
        self._affixes = affixes
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.fingerprint = fingerprint
        self.special_ids = backend.table.special_ids
        self.vocab_size = backend.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text; special tokens that are added are BOS and the like, around it.

        Special tokens written out in the text become their ids either way. The text holds no
        lone surrogates.
        """
        if not add_special_tokens or self._affixes is None:
            return self._backend.encode(text, with_template=add_special_tokens)
        ids = self._backend.encode(text, with_template=False)
        return [*self._affixes.before, *ids, *self._affixes.after]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return decode_all(self._backend.table, ids, skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for tokens that come one by one."""
        return TextStream(self._backend.table, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for inside a text; perhaps a part of a character."""
        return self._backend.table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """A token for people, as log-probabilities list it; a part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer in a model's folder.

    Raises: ModelError when there is none or its files are broken.
    """
    config = read_model_json(model_dir / "tokenizer_config.json")
    added = _added_tokens(model_dir, config=config)
    backend = _backend(model_dir, added=added)
    names = special_tokens(model_dir)
    bos_token_id, eos_token_id = (
        backend.id_of(names[name]) if name in names else None for name in ("bos_token", "eos_token")
    )
    return Tokenizer(
        backend,
        affixes=_affixes(config, backend, bos=bos_token_id, eos=eos_token_id),
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        fingerprint=_fingerprint(model_dir),
    )


def _backend(model_dir: Path, *, added: list[AddedToken]) -> Backend:
    if (model_dir / "tokenizer.json").exists():
        return JsonBackend(model_dir / "tokenizer.json", added=added)
    if (model_dir / "tokenizer.model").exists():
        return SentencePieceBackend(model_dir / "tokenizer.model", added=added)
    raise ModelError(
        f"{model_dir} holds no tokenizer",
        hint="expected tokenizer.json or tokenizer.model beside config.json",
    )


def _affixes(
    config: Mapping[str, Any], backend: Backend, *, bos: int | None, eos: int | None
) -> Affixes | None:
    """What belongs around a text; None where tokenizer.json says it.

    The flags in the configuration count for a SentencePiece model alone, as in transformers; there
    silence means BOS and no EOS.
    """
    if isinstance(backend, JsonBackend):
        return None
    add_bos, add_eos = config.get("add_bos_token", True), config.get("add_eos_token", False)
    return Affixes(
        before=(bos,) if add_bos and bos is not None else (),
        after=(eos,) if add_eos and eos is not None else (),
    )


def _added_tokens(model_dir: Path, *, config: Mapping[str, Any]) -> list[AddedToken]:
    """Tokens that the configuration adds to the vocabulary, by id, then the named special ones."""
    listed = read_model_json(model_dir / "added_tokens.json")
    tokens = {
        content: AddedToken(content=content, id=token_id, special=False)
        for content, token_id in sorted(listed.items(), key=lambda item: str(item[1]).zfill(9))
        if isinstance(token_id, int)
    }
    declared = config.get("added_tokens_decoder")
    for token in _declared(declared if isinstance(declared, Mapping) else {}):
        tokens[token.content] = token
    for content in special_tokens(model_dir).values():
        tokens.setdefault(content, AddedToken(content=content))
    return list(tokens.values())


def _declared(table: Mapping[str, Any]) -> list[AddedToken]:
    """The entries of `added_tokens_decoder`, by id."""
    numbered = sorted(
        ((int(key), value) for key, value in table.items() if key.isdecimal()),
        key=lambda item: item[0],
    )
    return [
        AddedToken(
            content=content,
            id=token_id,
            special=bool(value.get("special", False)),
            lstrip=bool(value.get("lstrip", False)),
            rstrip=bool(value.get("rstrip", False)),
            normalized=bool(value.get("normalized", False)),
        )
        for token_id, value in numbered
        if isinstance(value, Mapping) and (content := token_content(value)) is not None
    ]


def _fingerprint(model_dir: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in (model_dir / name for name in _FILES):
        if path.exists():
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()
