"""Logits at every position of some prompts, by the engine's own parts under any policy."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.layers import Rope
from moebatch.model.resolve import resolve_model
from moebatch.native.kernels import load_kernels
from moebatch.plan.optimizer import table_of
from moebatch.plan.policy import Policy
from moebatch.plan.schedule import Lane, prologue, zigzag
from moebatch.runtime.batch import Segment, build_pass
from moebatch.runtime.executor import Executor
from moebatch.runtime.forward import Forward
from moebatch.runtime.kv_cache import BlockTable, KVCache
from moebatch.runtime.native_attention import attends_natively
from moebatch.runtime.weight_store import WeightStore


def logits_everywhere(path: Path, prompts: Sequence[Sequence[int]], policy: Policy, *,
                      chunk: int, compute: str = "float32", native: bool = True,
                      quantization: str = "none") -> list[Tensor]:  # fmt: skip
    """[len, V] for each prompt; prompts go through in passes of `chunk` tokens each.

    With the native kernels, if asked for and there are any.
    """
    kernels = load_kernels(2) if native else None
    model = resolve_model(str(path))
    spec, table = model.spec, table_of(model.spec, policy)
    slots = max(1, min(policy.page_slots, len(table.streamed)))
    kv = KVCache(
        num_layers=spec.num_layers,
        num_blocks=sum(len(p) // 16 + 1 for p in prompts),
        num_kv_heads=spec.cache_heads,
        head_dim=spec.cache_head_dim,
        value_dim=spec.cache_value_dim,
        dtype=policy.kv_dtype,
        windows=spec.layer_windows,
        max_sequences=len(prompts),
    )
    tables = [BlockTable() for _ in prompts]
    found: list[list[Tensor]] = [[] for _ in prompts]
    with Checkpoint(path) as checkpoint:
        store = WeightStore(
            checkpoint,
            spec=spec,
            family=model.family,
            table=table,
            page_slots=slots,
            compute=compute,
            kernels=kernels,
            quantization=quantization,
        )
        forward = Forward(spec=spec, store=store, kv=kv, kernels=kernels)
        executor = Executor(forward.handlers, background=[Lane.DISK])
        store.load_resident(threads=1, progress=lambda done, total: None)
        executor.run(prologue(table, page_slots=slots))
        for start in range(0, max(len(p) for p in prompts), chunk):
            rows = [r for r, p in enumerate(prompts) if len(p) > start]
            for r in rows:
                kv.extend(tables[r], min(len(prompts[r]), start + chunk))
            segments = [
                Segment(
                    token_ids=tuple(prompts[r][start : start + chunk]),
                    start=start,
                    blocks=tables[r],
                    max_len=len(prompts[r]),
                )
                for r in rows
            ]
            size = policy.micro_batch_size
            groups = [segments[k : k + size] for k in range(0, len(rows), size)]
            one = build_pass(
                groups,
                kv=kv,
                rope=Rope(spec.rope, spec.head_dim),
                windows=spec.layer_windows,
                native=attends_natively(spec, kernels),
            )
            forward.begin(one)
            executor.run(zigzag(table, num_micro_batches=len(groups), page_slots=slots))
            logits = forward.logits(torch.arange(one.token_ids.numel()))
            lasts = [last for group in one.last_tokens for last in group]
            for r, segment, last in zip(rows, segments, lasts, strict=True):
                found[r].append(logits[last + 1 - len(segment.token_ids) : last + 1])
        executor.close()
    return [torch.cat(parts) for parts in found]
