"""Fixtures shared by the tests: tiny models made once a session, and an engine around one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch

# No test measures the machine it runs on, unless it is about measuring.
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
