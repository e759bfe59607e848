"""Rotary settings of a config.json -> RopeSpec."""

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from moebatch.errors import ModelError
from moebatch.model.families.base import Config, need_choice, number
from moebatch.plan.model_spec import RopeSpec

_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


def rope_of(config: Config, max_position: int, *, rotary_share: float | None = None,
            head_dim: int = 0, interleaved: bool = False) -> RopeSpec:  # fmt: skip
    """Rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`.

    `rotary_share` is the default of `partial_rotary_factor` for a family that knows it (then with
    `head_dim`); for the others a share other than 1 is refused.
    Raises: ModelError for a kind of scaling that is not implemented.
    """
    scaling = _scaling(config)
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in _KINDS:
        raise ModelError(
            f"config.json: rope scaling {kind!r} is not supported",
            hint="supported are " + ", ".join(_KINDS),
        )
    known = config.get("original_max_position_embeddings")
    fallback = (
        max_position if known is None else number(config, "original_max_position_embeddings", 1)
    )
    original = int(number(scaling, "original_max_position_embeddings", fallback))
    if kind in ("linear", "llama3") and scaling.get("factor") is None:
        raise ModelError(f"config.json: rope scaling {kind!r} has no factor",
                         hint="the checkpoint's config.json is incomplete")  # fmt: skip
    stretched = max_position / original if kind in ("yarn", "longrope") else 1.0
    factor = number(scaling, "factor", stretched)
    rotary_dim = _rotary_dim(config, scaling, rotary_share, head_dim)
    short, long = _long_factors(scaling, kind, (rotary_dim or head_dim) // 2)
    attention, long_attention = _attention_factors(scaling, kind, factor, original)
    return RopeSpec(
        theta=number(scaling, "rope_theta", number(config, "rope_theta", 10000.0)),
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=number(scaling, "low_freq_factor", 1.0),
        high_freq_factor=number(scaling, "high_freq_factor", 4.0),
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        attention_factor=attention,
        truncate=bool(scaling.get("truncate", True)),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        short_factors=short,
        long_factors=long,
        long_attention_factor=long_attention,
    )


def mscale_of(config: Config) -> float:
    """What DeepSeek multiplies the scale of the scores with: (0.1 mscale_all_dim ln(factor) + 1)^2."""
    scaling = _scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return _mscale(number(scaling, "factor", 1.0), number(scaling, "mscale_all_dim", 1.0)) ** 2


def _scaling(config: Config) -> Config:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise ModelError(
            "config.json: rotary settings per kind of layer are not supported",
            hint="supported is one set of rope_parameters for all layers",
        )
    return scaling


def _rotary_dim(config: Config, scaling: Config, share: float | None, head_dim: int) -> int | None:
    if share is None:
        for source in (config, scaling):
            need_choice(source, "partial_rotary_factor", (1.0, None))
        return None
    share = number(scaling, "partial_rotary_factor", number(config, "partial_rotary_factor", share))
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"config.json: partial_rotary_factor {share} of heads of size {head_dim} "
                         "is not possible")  # fmt: skip
    return rotary_dim


def _long_factors(scaling: Config, kind: str, pairs: int,
                  ) -> tuple[tuple[float, ...], tuple[float, ...]]:  # fmt: skip
    """short_factor and long_factor: one for each pair of dimensions."""
    if kind != "longrope":
        return (), ()
    found = []
    for key in ("short_factor", "long_factor"):
        values = scaling.get(key)
        if not isinstance(values, list) or (pairs and len(values) != pairs):
            raise ModelError(f"config.json: {key} does not hold one number for each of {pairs} pairs",
                             hint="the checkpoint's config.json is incomplete or damaged")  # fmt: skip
        found.append(tuple(number({key: value}, key, 1.0) for value in values))
    return found[0], found[1]


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


def _attention_factors(scaling: Config, kind: str, factor: float, original: int,
                       ) -> tuple[float, float]:  # fmt: skip
    """What cos and sin are multiplied by, in short and in long rows: given or inferred."""
    if kind == "yarn":
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            inferred = _mscale(factor, number(scaling, "mscale", 1.0))
            inferred /= _mscale(factor, number(scaling, "mscale_all_dim", 1.0))
        else:
            inferred = _mscale(factor)
    elif kind == "longrope" and factor > 1 and original > 1:
        inferred = sqrt(1 + log(factor) / log(original))
    else:
        inferred = 1.0
    if kind not in ("yarn", "longrope"):
        return 1.0, 1.0
    both = number(scaling, "attention_factor", inferred)
    return number(scaling, "short_mscale", both), number(scaling, "long_mscale", both)
