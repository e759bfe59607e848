"""What each op of a schedule computes, on the pass that is under way.

Holds the hidden states of the pass between tasks; knows neither requests nor sampling.
Shapes: T tokens of the pass, Q tokens of a micro-batch, D hidden_size, H query heads,
G key/value heads, d head_dim.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.model.attention import attend_decode, attend_prompt
from moebatch.model.experts import Expert, add_experts
from moebatch.model.layers import apply_rope, rms_norm
from moebatch.model.router import ExpertRows, everything, group_by_expert, route
from moebatch.native.kernels import Kernels
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.schedule import Op, Task
from moebatch.runtime.batch import Pass
from moebatch.runtime.executor import Handler
from moebatch.runtime.kv_cache import KVCache
from moebatch.runtime.weight_store import WeightStore


class Forward:
    """Handlers of the ops. `begin` a pass, let the executor run a schedule, then take `logits`."""

    def __init__(self, *, spec: ModelSpec, store: WeightStore, kv: KVCache,
                 kernels: Kernels | None = None) -> None:  # fmt: skip
        """The weights and the cache that the handlers work on."""
        self._spec, self._store, self._kv, self._kernels = spec, store, kv, kernels
        self.expert_tokens = torch.zeros(spec.num_layers, spec.num_experts, dtype=torch.int64)

    @property
    def handlers(self) -> Mapping[Op, Handler]:
        """For the executor."""
        return {
            Op.LOAD_PAGE: lambda task: self._store.load_page(task.layer, task.page),
            Op.FREE_PAGE: lambda task: self._store.free_page(task.layer, task.page),
            Op.PRE_ATTN: self._pre_attn,
            Op.CPU_ATTN: self._cpu_attn,
            Op.POST_ATTN: self._post_attn,
            Op.FFN: self._ffn,
        }

    def begin(self, one: Pass, *, wanted: Tensor | None = None) -> None:
        """Embed the tokens of a pass.

        `wanted` [S] are the tokens whose logits will be asked for, None for all: in the last layer
        the others need no FFN, since nothing comes after it but the logits.
        """
        self._pass, self._wanted = one, wanted
        self._hidden = self._store.vocabulary.embedding[one.token_ids].float()
        self._normed = torch.empty_like(self._hidden, dtype=self._store.dtype)
        self._routed: list[tuple[Tensor, Tensor]] = []
        self._rows: ExpertRows | None = None
        self._experts: list[Expert] = []

    def logits(self, tokens: Tensor) -> Tensor:
        """float32 logits [S, V] of the given tokens of the pass [S]."""
        vocabulary = self._store.vocabulary
        hidden = self._hidden.index_select(0, tokens)
        normed = rms_norm(hidden, vocabulary.final_norm, self._spec.rms_norm_eps)
        return vocabulary.head(normed).float()

    def _pre_attn(self, task: Task) -> None:
        """Norm, projections, rotation; keys and values go to the cache."""
        spec, part = self._spec, self._pass.micro_batches[task.micro_batch]
        weights = self._store.attention(task.layer)
        x = rms_norm(self._hidden[part.first : part.last], weights.input_norm, spec.rms_norm_eps)
        qkv = weights.qkv(x).float()
        if weights.qkv_bias is not None:
            qkv += weights.qkv_bias
        q, k, v = (
            t.view(t.shape[0], -1, spec.head_dim)
            for t in torch.split(qkv, [spec.q_size, spec.kv_size, spec.kv_size], dim=1)
        )
        if weights.q_norm is not None and weights.k_norm is not None:
            q = rms_norm(q, weights.q_norm, spec.rms_norm_eps)
            k = rms_norm(k, weights.k_norm, spec.rms_norm_eps)
        k = apply_rope(k, part.rope)
        self._kv.write(task.layer, part.slots, k, v)
        self._qkv = (apply_rope(q, part.rope), k, v)

    def _cpu_attn(self, task: Task) -> None:
        """Softmax attention of a micro-batch: decode rows in groups, prompts one by one."""
        part = self._pass.micro_batches[task.micro_batch]
        window = self._spec.layer_windows[task.layer]
        q, k, v = self._qkv
        if part.context is not None:
            assert self._kernels is not None
            pools = self._kv.pools(task.layer)
            self._attended = self._kernels.attend(q, *pools, part.context, window=window)
            return
        self._attended = torch.empty_like(q)
        for group in part.decode:
            rows = slice(group.first, group.last)
            keys, values = self._kv.gather(task.layer, group.block_rows)
            self._attended[rows] = attend_decode(q[rows], keys, values, group.masks[window])
        for run in part.prompts:
            rows = slice(run.first, run.last)
            if run.block_rows is None:
                keys, values = self._kv.rounded(k[rows]), self._kv.rounded(v[rows])
            else:
                gathered = self._kv.gather(task.layer, run.block_rows)
                keys, values = (x[0, :, : run.context].transpose(0, 1) for x in gathered)
            self._attended[rows] = attend_prompt(q[rows], keys, values, window)

    def _post_attn(self, task: Task) -> None:
        """Output projection, residual, norm and router."""
        spec, part = self._spec, self._pass.micro_batches[task.micro_batch]
        weights = self._store.attention(task.layer)
        hidden = self._hidden[part.first : part.last]
        hidden += weights.output(self._attended.flatten(1))
        if weights.output_bias is not None:
            hidden += weights.output_bias
        normed = rms_norm(hidden, weights.post_norm, spec.rms_norm_eps)
        self._normed[part.first : part.last] = normed
        if weights.router is not None:
            routed = route(normed, weights.router, top_k=spec.top_k, norm_top_k=spec.norm_top_k)
            self._routed.append(routed)

    def _ffn(self, task: Task) -> None:
        """One expert over its tokens of all micro-batches, added to the residual stream.

        Experts that stay in memory wait for the next that does not, or the layer's last: one call
        for many experts keeps all cores busy where some have few tokens.
        """
        if task.page == 1:
            self._rows = self._group(task.layer)
        assert self._rows is not None
        self._experts.append(self._store.expert(task.layer, task.page))
        last = task.page == self._spec.num_experts
        if last or not self._store.is_resident(task.layer, task.page):
            add_experts(self._hidden, self._normed, self._rows, self._experts)
            self._experts.clear()

    def _group(self, layer: int) -> ExpertRows:
        last = layer == self._spec.num_layers - 1
        tokens = self._wanted if last else None
        if not self._spec.has_router:
            return everything(self._hidden.shape[0], tokens)
        weights, experts = (torch.cat(x) for x in zip(*self._routed, strict=True))
        self._routed.clear()
        if tokens is not None:
            weights, experts = weights[tokens], experts[tokens]
        self.expert_tokens[layer] += torch.bincount(
            experts.flatten(), minlength=self._spec.num_experts
        )
        return group_by_expert(weights, experts, self._spec.num_experts, tokens)
