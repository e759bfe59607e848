"""The supported architectures: config.json -> ModelSpec, and where each matrix lies in a checkpoint.

A family is a table, not a class tree; adding one is one `Family` and its golden test. No torch here.
"""

from collections.abc import Mapping
from typing import Any

from moebatch.errors import ModelError
from moebatch.model.families.base import Family
from moebatch.model.families.dbrx import DBRX
from moebatch.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from moebatch.model.families.ernie import ERNIE_MOE
from moebatch.model.families.glm4_moe import GLM4_MOE
from moebatch.model.families.gpt_oss import GPT_OSS
from moebatch.model.families.granite import GRANITE_MOE, GRANITE_MOE_SHARED
from moebatch.model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from moebatch.model.families.minimax_m2 import MINIMAX_M2
from moebatch.model.families.mixtral import MIXTRAL, QWEN3_MOE
from moebatch.model.families.olmoe import OLMOE
from moebatch.model.families.parts import Part
from moebatch.model.families.phimoe import PHIMOE
from moebatch.model.families.qwen2_moe import QWEN2_MOE
from moebatch.plan.model_spec import ModelSpec

__all__ = ["FAMILIES", "REFUSED", "Family", "ModelSpec", "Part", "family_of"]

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
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM4_MOE,
        PHIMOE,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        ERNIE_MOE,
        DBRX,
        MINIMAX_M2,
    )
}

# Architectures that are asked for and that the engine's plan of a layer does not fit.
REFUSED: dict[str, str] = {
    "jetmoe": "its attention heads are experts too: query and output projections are routed per token,"
    " which needs pages and tasks for attention experts",
    "switch_transformers": "it is an encoder-decoder with relative position biases: every layer would"
    " need cross-attention and a second kind of cache",
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json belongs to, by its model_type.

    Raises: ModelError when the architecture is not supported; the hint lists what is.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        reason = REFUSED.get(model_type) if isinstance(model_type, str) else None
        raise ModelError(
            f"model_type {model_type!r} in config.json is not a supported architecture"
            + (f": {reason}" if reason else ""),
            hint="supported are: " + ", ".join(sorted(FAMILIES)),
        )
    return family
