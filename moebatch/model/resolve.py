"""MODEL as users write it -> a local directory: a path, `demo`, a short name or a hub id.

No torch here; the hub library is imported only when a hub id has to be looked up.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebatch.errors import ModelError, UsageError
from moebatch.model.checkpoint import read_json
from moebatch.model.families import Family, family_of
from moebatch.model.families.known import KNOWN
from moebatch.model.families.parts import Part
from moebatch.model.stored import quantization_of
from moebatch.plan.model_spec import ModelSpec

SHORT_NAMES: dict[str, str] = {name: known.repo for name, known in KNOWN.items()}
_WANTED_FILES = ["*.json", "tokenizer.model", "*.jinja"]
_WEIGHTS = "*.safetensors"
_DEMO = Path(__file__).parent.parent / "demo" / "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on disk: where it lies, what the user called it, what it is.

    `revision` is the hub commit where one is known. `eos_token_ids` come from generation_config.json,
    else from config.json.
    """

    path: Path
    name: str
    revision: str | None
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    family: Family
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]

    def parts(self) -> Iterator[Part]:
        """Every part of the model, for checking a checkpoint against it."""
        spec, family = self.spec, self.family
        yield from family.vocabulary_parts(spec)
        for layer in range(spec.num_layers):
            yield from family.attention_parts(spec, layer)
            for expert in range(spec.experts_in(layer)):
                yield from family.expert_parts(spec, layer, expert)


def resolve_model(name: str, *, revision: str | None = None, cache_dir: Path | None = None,
                  offline: bool = False, weights: bool = True) -> LocalModel:  # fmt: skip
    """Find a model and read its configuration; without `weights` a hub model's are not fetched.

    Raises: UsageError for a revision of a directory.
    Raises: ModelError when it cannot be had, is incomplete, or is of an unsupported architecture.
    """
    path = Path(name).expanduser()
    if revision is not None and (name == "demo" or path.is_dir()):
        raise UsageError(f"--revision {revision} has no meaning for the local model {name}")
    if name == "demo":
        return _read(_DEMO, name=name, revision=None)
    if path.is_dir():
        return _read(path, name=name, revision=None)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"{name} is not a model directory", hint="give a directory in the Hugging Face layout"
        )
    repo = SHORT_NAMES.get(name, name)
    if "/" not in repo:
        raise ModelError(
            f"there is no directory and no short name {name!r}",
            hint="short names: demo, "
            + ", ".join(SHORT_NAMES)
            + "; or give a hub id like org/name",
        )
    found = _download(repo, revision=revision, cache_dir=cache_dir, offline=offline,
                      weights=weights)  # fmt: skip
    return _read(found, name=repo, revision=found.name)


def _read(path: Path, *, name: str, revision: str | None) -> LocalModel:
    if not (path / "config.json").exists():
        raise ModelError(
            f"{path} has no config.json", hint="give a directory in the Hugging Face layout"
        )
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.exists() else None
    family = family_of(config)
    quantization_of(config)  # refuses what cannot be read, before any weights are looked for
    return LocalModel(
        path=path,
        name=name,
        revision=revision,
        config=config,
        generation_config=generation_config,
        family=family,
        spec=family.spec(config),
        eos_token_ids=_eos_ids(generation_config or {}, config),
    )


def _eos_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(int(token) for token in value)
    return ()


def _download(repo: str, *, revision: str | None, cache_dir: Path | None,
              offline: bool, weights: bool) -> Path:  # fmt: skip
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    local_only = offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in (
        "1",
        "TRUE",
        "YES",
        "ON",
    )
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=local_only,
                allow_patterns=_WANTED_FILES + ([_WEIGHTS] if weights else []),
            )
        )
    except GatedRepoError:
        raise ModelError(
            f"{repo} is gated", hint="ask for access on its page, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"the hub has no model {repo}",
            hint="check the spelling, or log in with `hf auth login`",
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {revision}") from None
    except HFValidationError:
        raise ModelError(f"{repo!r} is no valid model name", hint="write it as org/name") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{repo} is not in the cache"
            + (" and offline mode is on" if local_only else ", and the hub cannot be reached"),
            hint="go online and run the command again, or give a local directory",
        ) from None
    except OSError as error:
        raise ModelError(
            f"{repo} could not be downloaded: {str(error).splitlines()[0]}",
            hint="check the network and the free space of the cache",
        ) from None
