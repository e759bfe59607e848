"""The small JSON files beside a model that speak of its text: tokenizer_config.json and its kin."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebatch.errors import ModelError

_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# What the Llama family means where a SentencePiece model comes alone.
_SENTENCEPIECE_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def read_model_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file of a model holds; empty when there is no such file.

    Raises: ModelError when the file is broken.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def special_tokens(model_dir: Path) -> dict[str, str]:
    """The named special tokens ("bos_token" and so on) and their texts.

    Raises: ModelError when a file is broken.
    """
    config = read_model_json(model_dir / "tokenizer_config.json")
    mapping = read_model_json(model_dir / "special_tokens_map.json")
    alone = not (model_dir / "tokenizer.json").exists()
    named = (_SENTENCEPIECE_TOKENS if alone else {}) | _texts(mapping) | _texts(config)
    return {name: named[name] for name in _NAMED_TOKENS if name in named}


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: token_content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text}


def token_content(value: Any) -> str | None:
    """The text of a token that is written as a text or as an object with a content."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
