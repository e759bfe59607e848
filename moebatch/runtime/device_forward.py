"""What each op of an accelerator's schedule computes or copies, on the pass that is under way.

Hidden states stay on the device; queries, keys and values go to the host for its attention, or the
context comes to the device. Rows have their place in buffers that live as long as the pass, so tasks
of different micro-batches never meet; within one the schedule's deps keep them apart.
Shapes: T tokens of the pass, Q tokens of a micro-batch, R rows, D hidden_size, H query heads,
G key/value heads, d head_dim.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from moebatch.model.attention import absorb_queries, attend_decode, release_values
from moebatch.model.experts import add_expert
from moebatch.model.grouped import add_results, grouped_swiglu
from moebatch.model.router import ExpertRows, everything, group_by_expert, route
from moebatch.model.weights import AttentionWeights, gate_values, project
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.pipeline import Phase, Step
from moebatch.plan.schedule import Op, Task
from moebatch.runtime.batch import MicroBatch, Pass
from moebatch.runtime.device import Device, Scratch
from moebatch.runtime.device_attention import attend
from moebatch.runtime.device_batch import (
    DeviceBatch,
    device_batch,
    rows_on_device,
    rows_pinned,
)
from moebatch.runtime.device_store import DeviceStore
from moebatch.runtime.executor import Handler
from moebatch.runtime.kv_cache import KVCache

Routed = tuple[Tensor, Tensor]  # weights and experts of a micro-batch's tokens


class Experts(Protocol):
    """Computes the experts of a layer, wherever they are."""

    def run(self, layer: int, hidden: Tensor, normed: Tensor, rows: ExpertRows) -> None:
        """Add their weighted results for the routed rows of normed [T, D] to hidden [T, D]."""
        ...


class Routers(Protocol):
    """Where the routers of the layers are."""

    def attention(self, layer: int) -> AttentionWeights:
        """All of a layer but its experts, on the device."""
        ...


class DeviceForward:
    """Handlers of the ops. `begin` a pass, let the executor run its schedule, then take `logits`."""

    def __init__(self, *, spec: ModelSpec, store: DeviceStore, kv: KVCache, device: Device,
                 device_kv: KVCache | None, kv_slots: int,
                 experts: Experts | None = None) -> None:  # fmt: skip
        """`kv` lies in host memory, `device_kv` holds the layers that stay on the device.

        `kv_slots`: contexts of micro-batches that are on the device at once. `experts` computes them
        where they are not pages of the store.
        """
        self._experts = experts
        self._spec, self._store, self._device = spec, store, device
        self._kv, self._device_kv, self._num_kv_slots = kv, device_kv, kv_slots
        self._scratch = Scratch(device)
        self.expert_tokens = torch.zeros(spec.num_layers, spec.num_experts, dtype=torch.int64)

    @property
    def handlers(self) -> Mapping[Op, Handler]:
        """For the executor."""
        return {
            Op.STAGE_PAGE: lambda task: self._store.stage_page(task.layer, task.page),
            Op.LOAD_PAGE: lambda task: self._store.load_page(task.layer, task.page),
            Op.FREE_LAYER: lambda task: self._store.free_layer(task.layer),
            Op.PRE_ATTN: self._pre_attn,
            Op.OFFLOAD_QKV: self._offload_qkv,
            Op.CPU_ATTN: self._cpu_attn,
            Op.LOAD_HIDDEN: self._load_hidden,
            Op.STAGE_KV: self._stage_kv,
            Op.LOAD_KV: self._load_kv,
            Op.GPU_ATTN: self._gpu_attn,
            Op.OFFLOAD_KV: self._offload_kv,
            Op.STORE_KV: self._store_kv,
            Op.POST_ATTN: self._post_attn,
            Op.OFFLOAD_NORMED: self._offload_normed,
            Op.FFN: self._ffn,
            Op.LOAD_FFN: self._load_ffn,
            Op.ADD_FFN: self._add_ffn,
        }

    def begin(self, one: Pass, step: Step, *, wanted: Tensor | None = None) -> None:
        """Embed the tokens of a pass and make room for it; `wanted` as in `Forward.begin`."""
        self._pass, self._step = one, step
        count, spec = one.token_ids.numel(), self._spec
        embedded = self._store.vocabulary.embedding[one.token_ids].float()
        if spec.embedding_multiplier != 1.0:
            embedded *= spec.embedding_multiplier
        self._wanted = wanted
        self._buffers(count, spec)
        self._hidden.between(0, count).copy_(embedded)
        self._batches: list[DeviceBatch] = [
            device_batch(part, kv=self._kv, device=self._device, attended=not self._on_host(j))
            for j, part in enumerate(one.micro_batches)
        ]
        self._routed: dict[int, Routed] = {}
        crossing = [] if all(step.kv_on_gpu) else [b.context_bytes for b in self._batches]
        self._context_slots(max(crossing, default=0))

    def _buffers(self, count: int, spec: ModelSpec) -> None:
        """Places for every token: on the device, and pinned for what goes to and fro."""
        scratch, wire, kv = self._scratch, self._store.dtype, self._kv.dtype
        q, k, attended = _query_width(spec), _key_width(spec), _attended_width(spec)
        self._hidden = rows_on_device(scratch, "hidden", count, spec.hidden_size, torch.float32)
        self._normed = rows_on_device(scratch, "normed", count, spec.hidden_size, wire)
        self._qkv = [rows_on_device(scratch, "q", count, q, torch.float32)]
        self._host_qkv = [rows_pinned(scratch, "q", count, q, torch.float32)]
        for name in ("k",) if spec.latent else ("k", "v"):
            self._qkv.append(rows_on_device(scratch, name, count, k, kv))
            self._host_qkv.append(rows_pinned(scratch, name, count, k, kv))
        self._attended = rows_on_device(scratch, "attended", count, attended, torch.float32)
        self._host_attended = rows_pinned(scratch, "attended", count, attended, torch.float32)
        if self._step.ffn == "cpu":
            hidden = spec.hidden_size
            self._host_normed = rows_pinned(scratch, "normed", count, hidden, wire)
            self._host_ffn = rows_pinned(scratch, "ffn", count, hidden, torch.float32)
            self._ffn_out = rows_on_device(scratch, "ffn", count, hidden, torch.float32)

    def _context_slots(self, num_bytes: int) -> None:
        count = self._num_kv_slots if num_bytes else 0
        self._kv_staging = deque(
            self._scratch.pinned(f"context {n}", (num_bytes,), torch.uint8) for n in range(count)
        )
        self._kv_free = deque(
            self._scratch.on_device(f"context {n}", (num_bytes,), torch.uint8) for n in range(count)
        )
        self._staged: dict[tuple[int, int], Tensor] = {}
        self._contexts: dict[tuple[int, int], Tensor] = {}

    def free(self) -> None:
        """Give the memory of passes back; there will be none any more."""
        self._scratch.free()

    def logits(self, tokens: Tensor) -> Tensor:
        """float32 logits [S, V] in host memory of the given tokens of the pass [S]."""
        vocabulary, device = self._store.vocabulary, self._device
        hidden = self._hidden.between(0, self._pass.token_ids.numel())
        chosen = hidden.index_select(0, device.upload(tokens))
        logits = vocabulary.head(vocabulary.final_norm(chosen)).float()
        if vocabulary.head_bias is not None:
            logits += vocabulary.head_bias
        return (logits / self._spec.logits_divisor).cpu()

    def _on_host(self, j: int) -> bool:
        """Whether the host attends a micro-batch."""
        return self._step.attention == "cpu" and self._step.micro_batches[j] is Phase.DECODE

    def _part(self, task: Task) -> MicroBatch:
        return self._pass.micro_batches[task.micro_batch]

    def _pre_attn(self, task: Task) -> None:
        """Norm, projections, rotation; queries for latents are made ready for the host."""
        spec, part, j = self._spec, self._part(task), task.micro_batch
        weights = self._store.attention(task.layer)
        x = weights.input_norm(self._hidden.of(part))
        q, k, v = project(x, weights, spec, self._batches[j].rope)
        if self._on_host(j) and spec.latent is not None:
            assert weights.kv_b is not None
            q = absorb_queries(q, weights.kv_b, spec.latent)
        q_rows, *kv_rows = self._qkv
        q_rows.of(part, q.shape[1] * q.shape[2]).copy_(q.flatten(1))
        for rows, new in zip(kv_rows, (k, v), strict=False):
            rows.of(part).copy_(new.flatten(1))

    def _offload_qkv(self, task: Task) -> None:
        """Queries, keys and values of a micro-batch to the host; the device needs them no more."""
        part = self._part(task)
        width = self._spec.num_q_heads * self._spec.cache_head_dim
        for rows, host, wide in zip(self._qkv, self._host_qkv, (width, None, None), strict=False):
            self._device.copy_out(host.of(part, wide), rows.of(part, wide))
            self._device.spoil(rows.of(part, wide))

    def _cpu_attn(self, task: Task) -> None:
        """Store the new keys and values, then attend the cache."""
        spec, part = self._spec, self._part(task)
        heads, head_dim = spec.num_q_heads, spec.cache_head_dim
        self._store_kv(task)
        queries = self._host_qkv[0].of(part, heads * head_dim)
        q = queries.view(-1, heads, head_dim)
        out = self._host_attended.of(part, heads * (spec.cache_value_dim or head_dim))
        for group in part.decode:
            rows = slice(group.first, group.last)
            keys, values = self._kv.gather(task.layer, group.block_rows)
            mask = group.masks[spec.layer_windows[task.layer]]
            sinks = self._store.sinks.get(task.layer)
            attended = attend_decode(q[rows], keys, values, mask, scale=spec.scale, sinks=sinks)
            out[rows] = attended.flatten(1)
        self._device.spoil(queries)

    def _load_hidden(self, task: Task) -> None:
        """What the host attended, to the device."""
        spec, part = self._spec, self._part(task)
        width = spec.num_q_heads * (spec.cache_value_dim or spec.cache_head_dim)
        host = self._host_attended.of(part, width)
        self._device.copy_in(self._attended.of(part, width), host)
        self._device.spoil(host)

    def _stage_kv(self, task: Task) -> None:
        """Gather the context of a micro-batch from the host's cache."""
        slot = self._kv_staging.popleft()
        for context in self._batches[task.micro_batch].contexts:
            target = slot[context.offset : context.offset + context.num_bytes]
            self._kv.gather_into(task.layer, context.block_rows, target)
        self._staged[(task.layer, task.micro_batch)] = slot

    def _load_kv(self, task: Task) -> None:
        """The gathered context of a micro-batch to the device."""
        where = (task.layer, task.micro_batch)
        size = self._batches[task.micro_batch].context_bytes
        slot, target = self._staged.pop(where), self._kv_free.popleft()
        self._device.copy_in(target[:size], slot[:size])
        self._device.spoil(slot)
        self._kv_staging.append(slot)
        self._contexts[where] = target

    def _gpu_attn(self, task: Task) -> None:
        """Attention of decode rows and prompts where their queries are."""
        part, j = self._part(task), task.micro_batch
        loaded = self._contexts.pop((task.layer, j), None)
        on_device = self._device_kv if self._step.kv_on_gpu[task.layer] else None
        spec = self._spec
        q = self._qkv[0].of(part, spec.q_size)
        kv_rows = [rows.of(part) for rows in self._qkv[1:]]
        k = kv_rows[0].view(-1, spec.cache_heads, spec.cache_head_dim)
        v = kv_rows[-1].view(-1, spec.cache_heads, spec.cache_head_dim)
        if on_device is not None:
            on_device.write(task.layer, self._batches[j].slots, k, v)
        attend(
            self._batches[j],
            layer=task.layer,
            spec=spec,
            weights=self._store.attention(task.layer),
            qkv=(q.view(-1, spec.num_q_heads, spec.head_dim), k, v),
            out=self._attended.of(part, spec.attended_size),
            host_kv=self._kv,
            device_kv=on_device,
            loaded=loaded,
        )
        if loaded is not None:
            self._device.spoil(loaded)
            self._kv_free.append(loaded)

    def _offload_kv(self, task: Task) -> None:
        """New keys and values to the host."""
        part = self._part(task)
        for rows, host in zip(self._qkv[1:], self._host_qkv[1:], strict=True):
            self._device.copy_out(host.of(part), rows.of(part))

    def _store_kv(self, task: Task) -> None:
        """New keys and values into the host's cache."""
        spec, part = self._spec, self._part(task)
        shape = (-1, spec.cache_heads, spec.cache_head_dim)
        held = [rows.of(part) for rows in self._host_qkv[1:]]
        k, v = held[0].view(shape), held[-1].view(shape)
        self._kv.write(task.layer, part.slots, k, v)
        for rows in held:
            self._device.spoil(rows)

    def _post_attn(self, task: Task) -> None:
        """Output projection, residual, norm, router, and the FFN of every token."""
        spec, part, j = self._spec, self._part(task), task.micro_batch
        weights = self._store.attention(task.layer)
        if self._on_host(j) and spec.latent is not None:
            assert weights.kv_b is not None
            taken = self._attended.of(part, spec.num_q_heads * spec.latent.kv_rank)
            latents = taken.view(-1, spec.num_q_heads, spec.latent.kv_rank)
            attended = release_values(latents, weights.kv_b, spec.latent).flatten(1)
        else:
            attended = taken = self._attended.of(part, spec.attended_size)
        update = weights.output(attended)
        if weights.output_bias is not None:
            update = update + weights.output_bias
        hidden = self._hidden.of(part)
        hidden += update * spec.residual_multiplier
        normed = weights.post_norm(hidden)
        self._normed.of(part).copy_(normed)
        if weights.router is not None:
            self._routed[j] = route(normed, weights.router, spec.router, top_k=spec.top_k)
        if spec.base_ffn_size(task.layer):
            self._base_ffn(task.layer, part)
        self._device.spoil(taken)

    def _base_ffn(self, layer: int, part: MicroBatch) -> None:
        """The FFN that every token of a layer goes through."""
        ffn, normed = self._store.base_ffn(layer), self._normed.of(part)
        names = torch.arange(part.last - part.first, device=self._device.torch_device)
        rows = everything(names.numel(), names)
        weights = rows.weights
        if ffn.gate is not None:
            weights = gate_values(normed.float(), ffn.gate)
        rows = replace(rows, weights=weights * self._spec.residual_multiplier)
        add_expert(self._hidden.of(part), normed, rows, ffn.expert)

    def _ffn(self, task: Task) -> None:
        """The experts over the tokens of a group of micro-batches, where the policy has them run."""
        first, last = self._group_bounds(task.micro_batch)
        if self._step.ffn == "gpu":
            output, normed = self._hidden.between(first, last), self._normed.between(first, last)
        else:
            output = self._host_ffn.between(first, last).zero_()
            normed = self._host_normed.between(first, last)
        if not self._spec.experts_in(task.layer):
            return
        rows = self._rows(task.layer, task.micro_batch, first, last)
        if self._experts is not None:
            self._experts.run(task.layer, output, normed, rows)
        else:
            self._all_experts(task.layer, output, normed, rows)
        self._device.spoil(normed)

    def _all_experts(self, layer: int, output: Tensor, normed: Tensor, rows: ExpertRows) -> None:
        """One after the other, or those that are streamed as one where the device can."""
        stack = self._store.stack(layer)
        grouped = grouped_swiglu(normed, rows, stack) if stack is not None else {}
        for page in self._store.expert_pages(layer):
            if page - 1 in grouped:
                add_results(output, rows, page - 1, grouped[page - 1])
            else:
                add_expert(output, normed, rows, self._store.expert(layer, page))

    def _rows(self, layer: int, j: int, first: int, last: int) -> ExpertRows:
        """The grouping of tokens [first, last) by expert, on the processor that runs the experts."""
        spec = self._spec
        where = self._device.torch_device if self._step.ffn == "gpu" else torch.device("cpu")
        names = torch.arange(last - first)
        if layer == spec.num_layers - 1 and self._wanted is not None:
            inside = (self._wanted >= first) & (self._wanted < last)
            names = self._wanted[inside] - first
        names = names.to(where)
        if not spec.has_router:
            return everything(last - first, names)
        routed = [self._routed.pop(k) for k in range(j, j + self._group_size(j))]
        weights, experts = (torch.cat(x).to(where)[names] for x in zip(*routed, strict=True))
        if spec.residual_multiplier != 1.0:
            weights = weights * spec.residual_multiplier
        counts = torch.bincount(experts.flatten(), minlength=spec.num_experts)
        self.expert_tokens[layer] += counts.cpu()
        return group_by_expert(weights, experts, spec.num_experts, names)

    def _group_size(self, j: int) -> int:
        return min(self._step.group, len(self._pass.micro_batches) - j)

    def _group_bounds(self, j: int) -> tuple[int, int]:
        """Tokens [first, last) of the group that begins with micro-batch j."""
        parts = self._pass.micro_batches[j : j + self._group_size(j)]
        return parts[0].first, parts[-1].last

    def _offload_normed(self, task: Task) -> None:
        """What the host's experts read."""
        bounds = self._group_bounds(task.micro_batch)
        self._device.copy_out(self._host_normed.between(*bounds), self._normed.between(*bounds))

    def _load_ffn(self, task: Task) -> None:
        """What the host's experts made."""
        bounds = self._group_bounds(task.micro_batch)
        self._device.copy_in(self._ffn_out.between(*bounds), self._host_ffn.between(*bounds))
        self._device.spoil(self._host_ffn.between(*bounds))

    def _add_ffn(self, task: Task) -> None:
        bounds = self._group_bounds(task.micro_batch)
        self._hidden.between(*bounds).add_(self._ffn_out.between(*bounds))
        self._device.spoil(self._ffn_out.between(*bounds))


def _query_width(spec: ModelSpec) -> int:
    """Numbers of a token's queries, plain or ready for latents."""
    return spec.num_q_heads * max(spec.head_dim, spec.cache_head_dim)


def _key_width(spec: ModelSpec) -> int:
    return spec.cache_heads * spec.cache_head_dim


def _attended_width(spec: ModelSpec) -> int:
    return spec.num_q_heads * max(spec.cache_head_dim, spec.head_dim)
