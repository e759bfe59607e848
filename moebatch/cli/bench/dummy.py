"""A checkpoint of random weights made from a config.json alone: speed without a download.

The matrices are cut from one block of random numbers, so that 90 GB take minutes and not hours. They
lie on disk like real ones: what streams, streams.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebatch.errors import MoebatchError
from moebatch.model.families.known import KNOWN
from moebatch.model.families.parts import Part
from moebatch.model.resolve import LocalModel, resolve_model
from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec
from moebatch.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

_SHARD_BYTES = 1 << 30
_RANDOM_NUMBERS = 1 << 24
_COPIED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json",
           "special_tokens_map.json")  # fmt: skip
Say = Callable[[str], None]


def dummy_model(name: str, folder: Path, *, say: Say) -> LocalModel:
    """Write random weights for a model's config into `folder`, unless they are there.

    Raises: ModelError for a model that is not known; MoebatchError when the disk has no room.
    """
    config, source = _config(name)
    target = folder / f"dummy-{name.rstrip('/').rpartition('/')[2]}"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    for file in _COPIED:
        if source is not None and (source / file).exists():
            shutil.copyfile(source / file, target / file)
    model = resolve_model(str(target))
    if not (target / "model.safetensors.index.json").exists():
        size = model.spec.total_params * DTYPE_BYTES[model.spec.weight_dtype]
        free = shutil.disk_usage(folder).free
        if size > free:
            raise MoebatchError(
                f"random weights of {name} take {format_bytes(size)}, {format_bytes(free)} are free",
                hint="name a larger disk with --work-folder",
            )
        say(f"writing {format_bytes(size)} of random weights")
        _write(model, target)
    return model


def _config(name: str) -> tuple[dict[str, Any], Path | None]:
    """The config.json of a folder or of a short name, without any quantisation."""
    if name in KNOWN and not Path(name).is_dir():
        return dict(KNOWN[name].config), None
    model = resolve_model(name, weights=False)
    config = {key: value for key, value in model.config.items() if key != "quantization_config"}
    return config, model.path


def _write(model: LocalModel, target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, model.spec.weight_dtype)
    pool = torch.randn(_RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0)).to(dtype)
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    held = number = 0

    def flush() -> None:
        nonlocal held, number
        if not shard:
            return
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()
        held = 0

    for name, shape in _tensors(model):
        tensor = _random(name, shape, pool, offset=len(places) * 7919 + held)
        shard[name] = tensor
        held += tensor.numel() * tensor.element_size()
        if held > _SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _tensors(model: LocalModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor as it lies in a checkpoint, each once."""
    seen: set[str] = set()
    for part in model.parts():
        rows = _rows(part, model.spec)
        for source, count in zip(part.sources, rows, strict=True):
            if source.name in seen:
                continue
            seen.add(source.name)
            shape = (count, *part.shape[1:])
            if part.layout.startswith("column"):
                shape = shape[::-1]
            yield source.name, shape if source.of == 1 else (source.of, *shape)


def _rows(part: Part, spec: ModelSpec) -> list[int]:
    """How many rows of a part each of its sources holds."""
    total, count = part.shape[0], len(part.sources)
    if part.name.startswith("qkv") and count == 3:
        return [spec.q_size, spec.kv_size, spec.kv_size]
    if part.name.startswith("qkv") and count == 2 and spec.latent is not None:
        second = spec.latent.kv_rank + spec.latent.rope_dim
        return [total - second, second]
    return [total // count] * count


def _random(name: str, shape: tuple[int, ...], pool: "Tensor", *, offset: int) -> "Tensor":
    """Norms are one, biases nothing, matrices as large as keeps activations of size one."""
    import torch

    if len(shape) == 1 or name.endswith(("bias", "sinks")):
        value = 1.0 if "norm" in name and not name.endswith("bias") else 0.0
        return torch.full(shape, value, dtype=pool.dtype)
    wanted = torch.Size(shape).numel()
    first = offset % pool.numel()
    times = -(-(first + wanted) // pool.numel())
    drawn = (
        pool.repeat(times)[first : first + wanted] if times > 1 else pool[first : first + wanted]
    )
    scaled: Tensor = drawn / shape[-1] ** 0.5
    return scaled.reshape(shape).contiguous()
