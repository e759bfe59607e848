"""The supported architectures: config.json -> ModelSpec, and where each matrix lies in a checkpoint.

A family is a table, not a class tree; adding one is one `Family` and its golden test. No torch here.
"""

from collections.abc import Mapping
from typing import Any

from moebatch.errors import ModelError
from moebatch.model.families.base import Family
from moebatch.model.families.gpt_oss import GPT_OSS
from moebatch.model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from moebatch.model.families.mixtral import MIXTRAL, QWEN3_MOE
from moebatch.model.families.olmoe import OLMOE
from moebatch.model.families.parts import Part
from moebatch.model.families.qwen2_moe import QWEN2_MOE
from moebatch.plan.model_spec import ModelSpec

__all__ = ["FAMILIES", "Family", "ModelSpec", "Part", "family_of"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        MIXTRAL,
        QWEN3_MOE,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        QWEN2_MOE,
        OLMOE,
        GPT_OSS,
        # more
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json belongs to, by its model_type.

    Raises: ModelError when the architecture is not supported; the hint lists what is.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"model_type {model_type!r} in config.json is not a supported architecture",
            hint="supported are: " + ", ".join(sorted(FAMILIES)),
        )
    return family
