"""Which model a directory holds: hashes of its configuration and its weights, cheap for any size."""

import hashlib
import os
from pathlib import Path

from moebatch.errors import ModelError

# Of each weight file: its size, its head (names, shapes and places of the tensors) and evenly spaced
# samples. Two trainings of one model differ in almost every weight, so in the samples.
_HEAD_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 256


def config_hash(directory: Path) -> str:
    """Hash of config.json and generation_config.json.

    Raises: ModelError when a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        for name in ("config.json", "generation_config.json"):
            path = directory / name
            digest.update(path.read_bytes() if path.exists() else b"")
            digest.update(b"\0")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def weights_hash(directory: Path) -> str:
    """Hash of the weight files: sizes, headers, and samples of their content.

    Raises: ModelError when a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        try:
            digest.update(_file_facts(path))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _file_facts(path: Path) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        facts = [path.name.encode(), size.to_bytes(8, "little"), file.read(_HEAD_BYTES)]
        for k in range(1, _SAMPLES + 1):
            file.seek(max(0, size * k // _SAMPLES - _SAMPLE_BYTES))
            facts.append(file.read(_SAMPLE_BYTES))
    return hashlib.blake2b(b"".join(facts)).digest()
