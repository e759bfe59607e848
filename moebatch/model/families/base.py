"""What a family is: a function from a config to a spec, and a table of tensor names.

Here too: how settings are read from a config.json, each checked, with one line where it is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from moebatch.errors import ModelError
from moebatch.model.families import parts
from moebatch.model.families.parts import Names, Part
from moebatch.plan.model_spec import ModelSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. `names` tells where each part lies; which there are follows from the spec."""

    model_type: str
    spec: Callable[[Config], ModelSpec]
    names: Names

    def attention_parts(self, spec: ModelSpec, layer: int) -> tuple[Part, ...]:
        """All of a layer but its experts."""
        return parts.attention_parts(spec, self.names, layer)

    def expert_parts(self, spec: ModelSpec, layer: int, expert: int) -> tuple[Part, ...]:
        """One expert of a layer."""
        return parts.expert_parts(spec, self.names, layer, expert)

    def vocabulary_parts(self, spec: ModelSpec) -> tuple[Part, ...]:
        """Embedding, final norm and LM head."""
        return parts.vocabulary_parts(spec, self.names)


def need_int(config: Config, key: str) -> int:
    """A positive whole number of the config.

    Raises: ModelError when it is absent or no positive whole number.
    """
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(
            f"config.json: {key} is {value!r}, expected a positive whole number",
            hint="the checkpoint's config.json is incomplete or damaged",
        )
    return value


def optional_int(config: Config, key: str, default: int) -> int:
    """The same for a setting that may be absent or null."""
    return default if config.get(key) is None else need_int(config, key)


def count(config: Config, key: str, default: int) -> int:
    """A whole number from 0 on, or the default where it is absent or null.

    Raises: ModelError when it is anything else.
    """
    value = config.get(key)
    if type(value) is int and value == 0:
        return 0
    return default if value is None else need_int(config, key)


def number(config: Config, key: str, default: float) -> float:
    """A positive number of the config, or the default where it is absent or null.

    Raises: ModelError when it is anything else.
    """
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise ModelError(
            f"config.json: {key} is {value!r}, expected a positive number",
            hint="the checkpoint's config.json is incomplete or damaged",
        )
    return float(value)


def need_choice(config: Config, key: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a setting whose value changes the mathematics in a way that is not implemented."""
    if key in config and config[key] not in allowed:
        raise ModelError(
            f"config.json: {key} = {config[key]!r} is not supported for this architecture",
            hint="supported here: " + ", ".join(repr(value) for value in allowed),
        )


def stored_bits_of(config: Config) -> float | None:
    """Bits that a number takes in a quantised checkpoint, scales included; None where it is not."""
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or method is None:
        return None
    group = found.get("group_size")
    group = group if type(group) is int and group > 0 else 128
    if method == "mxfp4":
        return 4 + 8 / 32
    if method in ("gptq", "awq"):
        return 4 + (16 + 4) / group
    if method == "compressed-tensors" and found.get("format") == "pack-quantized":
        return 4 + 16 / group
    return 8.0


def dtype_of(config: Config) -> str:
    """The data type that the config names for the weights; float32 where it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(
            f"config.json: weights of type {name!r} are not supported",
            hint="supported are bfloat16, float16 and float32",
        )
    return str(name)
