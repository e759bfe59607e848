"""The data type that a checkpoint's weights really have: config.json is often wrong about it."""

from dataclasses import replace

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import LocalModel
from moebatch.model.stored import locate


def with_actual_dtype(model: LocalModel, checkpoint: Checkpoint) -> LocalModel:
    """The model with the data type of its experts; what is quantised is decoded to the embedding's."""
    layer = model.spec.last_sparse
    part = model.family.expert_parts(model.spec, layer, 0)[0]
    stored = locate(checkpoint, part.sources[0])
    if stored.kind != "plain":
        stored = locate(checkpoint, model.family.vocabulary_parts(model.spec)[0].sources[0])
    dtype = stored.entries[0].dtype
    return replace(model, spec=replace(model.spec, weight_dtype=dtype))
