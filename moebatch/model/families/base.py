"""What a family is: two functions from a config and three tables of tensor names.

Shapes are (rows, columns) as in the checkpoint: a projection's rows are its outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Any

from moebatch.errors import ModelError
from moebatch.plan.model_spec import ModelSpec, RopeSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One matrix or vector that the engine uses: the rows of `sources`, stacked in this order."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. `attention_parts` covers all of a layer but its experts."""

    model_type: str
    spec: Callable[[Config], ModelSpec]
    attention_parts: Callable[[ModelSpec, int], tuple[Part, ...]]
    expert_parts: Callable[[ModelSpec, int, int], tuple[Part, ...]]
    vocabulary_parts: Callable[[ModelSpec], tuple[Part, ...]]


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


def dtype_of(config: Config) -> str:
    """The data type that the config names for the weights; float32 where it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(
            f"config.json: weights of type {name!r} are not supported",
            hint="supported are bfloat16, float16 and float32",
        )
    return str(name)


def rope_of(config: Config, max_position: int) -> RopeSpec:
    """Rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`.

    Raises: ModelError for a kind of scaling that is not implemented.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise ModelError(
            "config.json: rotary settings per kind of layer are not supported",
            hint="supported is one set of rope_parameters for all layers",
        )
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(
            f"config.json: rope scaling {kind!r} is not supported",
            hint="supported are default, linear, llama3 and yarn",
        )
    for source in (config, scaling):
        need_choice(source, "partial_rotary_factor", (1.0, None))
    original = int(number(scaling, "original_max_position_embeddings", max_position))
    if kind in ("linear", "llama3") and scaling.get("factor") is None:
        raise ModelError(f"config.json: rope scaling {kind!r} has no factor",
                         hint="the checkpoint's config.json is incomplete")  # fmt: skip
    factor = number(scaling, "factor", max_position / original if kind == "yarn" else 1.0)
    return RopeSpec(
        theta=number(scaling, "rope_theta", number(config, "rope_theta", 10000.0)),
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=number(scaling, "low_freq_factor", 1.0),
        high_freq_factor=number(scaling, "high_freq_factor", 4.0),
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        attention_factor=yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def yarn_attention_factor(scaling: Config, factor: float) -> float:
    """The factor that yarn puts on cos and sin: given, or from mscale, or 0.1 ln(factor) + 1."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        given = mscale(number(scaling, "mscale", 1.0))
        inferred = given / mscale(number(scaling, "mscale_all_dim", 1.0))
    else:
        inferred = mscale(1.0)
    return number(scaling, "attention_factor", inferred)
