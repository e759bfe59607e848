"""Attention on the device: decode rows against their context, prompts against themselves and theirs.

The context comes from a cache on the device, or was gathered from the host's and copied over; then
it lacks the tokens of this pass, which are put in their places here.
"""

from torch import Tensor

from moebatch.model.attention import (
    absorb_queries,
    attend_decode,
    attend_prompt,
    expand_latents,
    release_values,
)
from moebatch.model.weights import AttentionWeights
from moebatch.plan.model_spec import ModelSpec
from moebatch.runtime.device_batch import Context, DeviceBatch, DeviceGroup, DeviceRun
from moebatch.runtime.kv_cache import KVCache


def attend(batch: DeviceBatch, *, layer: int, spec: ModelSpec, weights: AttentionWeights,
           qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, host_kv: KVCache,
           device_kv: KVCache | None, loaded: Tensor | None) -> None:  # fmt: skip
    """Attend a micro-batch's queries [Q, H, d] into out [Q, H e]; k and v as the cache holds them."""
    q, k, v = qkv

    def context(where: Context) -> tuple[Tensor, Tensor]:
        if device_kv is not None:
            return device_kv.gather(layer, where.on_device)
        assert loaded is not None
        gathered = loaded[where.offset : where.offset + where.num_bytes]
        return host_kv.context_of(gathered, tuple(where.block_rows.shape))

    for group in batch.groups:
        rows = slice(group.first, group.last)
        keys, values = context(group.context)
        if device_kv is None:
            _put_last(keys, values, group, k[rows], v[rows])
        out[rows] = _decode(q[rows], keys, values, group, layer, spec, weights).flatten(1)
    for run in batch.runs:
        rows = slice(run.first, run.last)
        if run.context is None:
            keys, values = k[rows].float(), v[rows].float()
        else:
            keys, values = (x[0].transpose(0, 1) for x in context(run.context))
            if device_kv is None:
                _put_run(keys, values, run, k[rows], v[rows])
            keys, values = keys[: run.length], values[: run.length]
        out[rows] = _prompt(q[rows], keys, values, layer, spec, weights).flatten(1)


def _put_last(keys: Tensor, values: Tensor, group: DeviceGroup, k: Tensor, v: Tensor) -> None:
    """Each row's newest token into its context [R, G, C, d]."""
    at = group.last_token[:, None, None, None].expand(-1, keys.shape[1], 1, 1)
    for whole, new in ((keys, k), (values, v)):
        index = at.expand(-1, -1, 1, whole.shape[3])
        whole.scatter_(2, index, new[..., : whole.shape[3]].float()[:, :, None])


def _put_run(keys: Tensor, values: Tensor, run: DeviceRun, k: Tensor, v: Tensor) -> None:
    """A run's tokens into its context [C, G, d]."""
    start = run.length - (run.last - run.first)
    for whole, new in ((keys, k), (values, v)):
        whole[start : run.length] = new[..., : whole.shape[2]].float()


def _decode(q: Tensor, keys: Tensor, values: Tensor, group: DeviceGroup, layer: int,  # noqa: PLR0917
            spec: ModelSpec, weights: AttentionWeights) -> Tensor:  # fmt: skip
    mask = group.masks[spec.layer_windows[layer]]
    if spec.latent is None:
        return attend_decode(q, keys, values, mask, scale=spec.scale, sinks=weights.sinks)
    assert weights.kv_b is not None
    q = absorb_queries(q, weights.kv_b, spec.latent)
    attended = attend_decode(q, keys, values, mask, scale=spec.scale)
    return release_values(attended, weights.kv_b, spec.latent)


def _prompt(q: Tensor, keys: Tensor, values: Tensor, layer: int, spec: ModelSpec,  # noqa: PLR0917
            weights: AttentionWeights) -> Tensor:  # fmt: skip
    if spec.latent is not None:
        assert weights.kv_b is not None
        keys, values = expand_latents(keys[:, 0], weights.kv_b, spec.latent)
    window = spec.layer_windows[layer]
    return attend_prompt(q, keys, values, window, scale=spec.scale, sinks=weights.sinks)
