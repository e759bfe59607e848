"""Fixtures shared by the tests: tiny models made once a session, and an engine around one."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

# No test measures the machine it runs on, unless it is about measuring.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="moebatch-tests-")  # nobody's own profiles
os.environ.setdefault("MOEBATCH_MACHINE", str(Path(__file__).parent / "machine.json"))
# Tiny tensors gain nothing from more, and stalls on a busy machine cost much.
torch.set_num_threads(1)

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Test data that does not belong to the project; tests skip where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the data in ../shared, which is not here")
    return SHARED


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """(reference model, directory) of a family, made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            model = models.reference_model(kind)
            made[kind] = (model, models.save(model, tmp_path_factory.mktemp(kind)))
        return made[kind]

    return make


@pytest.fixture(scope="session")
def model(
    tiny_models: Callable[[str], tuple[Any, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny Mixtral with a tokenizer whose tokens are the letters."""
    source, path = tiny_models("mixtral")[1], tmp_path_factory.mktemp("lettered")
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(i + 29): i for i in range(3, 97)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    return path
