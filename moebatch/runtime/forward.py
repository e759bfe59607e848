"""What each op of a schedule computes, on the pass that is under way.

Holds the hidden states of the pass between tasks; knows neither requests nor sampling.
Shapes: T tokens of the pass, Q tokens of a micro-batch, D hidden_size, H query heads,
G key/value heads, d head_dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moebatch.model.attention import (
    absorb_queries,
    attend_decode,
    attend_prompt,
    expand_latents,
    release_values,
)
from moebatch.model.experts import Expert, add_experts
from moebatch.model.router import ExpertRows, all_scores, everything, group_by_expert, route
from moebatch.model.weights import gate_values, project
from moebatch.native.kernels import Kernels
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.pages import ATTENTION_PAGE
from moebatch.plan.schedule import Op, Task
from moebatch.runtime.batch import DecodeGroup, Pass, PromptRun
from moebatch.runtime.executor import Handler
from moebatch.runtime.kv_cache import KVCache
from moebatch.runtime.native_attention import attend
from moebatch.runtime.weight_store import WeightStore

# Told layer by layer what the tokens chose: weights [T, K], expert ids [T, K], mean scores [E].
Routed = Callable[[int, Tensor, Tensor, Sequence[float]], None]
# Told layer by layer what a micro-batch's tokens have after attention: hidden states [Q, D].
Attended = Callable[[int, Tensor], None]


class Forward:
    """Handlers of the ops. `begin` a pass, let the executor run a schedule, then take `logits`."""

    def __init__(self, *, spec: ModelSpec, store: WeightStore, kv: KVCache,
                 kernels: Kernels | None = None, routed: Routed | None = None,
                 attended: Attended | None = None) -> None:  # fmt: skip
        """The weights and the cache that the handlers work on; `kernels` attend where they can.

        `routed` is told what each layer's tokens chose, `attended` their states after attention.
        """
        self._tell_attended = attended
        self._spec, self._store, self._kv, self._kernels = spec, store, kv, kernels
        self._told, self._wants_scores = routed, routed is not None
        self._mean_scores: Sequence[float] = ()
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
        if self._spec.embedding_multiplier != 1.0:
            self._hidden *= self._spec.embedding_multiplier
        self._normed = torch.empty_like(self._hidden, dtype=self._store.dtype)
        self._routed: list[tuple[Tensor, Tensor]] = []
        self._scored: list[Tensor] = []
        self._rows: ExpertRows | None = None
        self._experts: list[Expert] = []

    def logits(self, tokens: Tensor) -> Tensor:
        """float32 logits [S, V] of the given tokens of the pass [S]."""
        vocabulary = self._store.vocabulary
        logits = vocabulary.head(
            vocabulary.final_norm(self._hidden.index_select(0, tokens))
        ).float()
        if vocabulary.head_bias is not None:
            logits += vocabulary.head_bias
        return logits / self._spec.logits_divisor

    def _pre_attn(self, task: Task) -> None:
        """Norm, projections, rotation; keys and values go to the cache."""
        part = self._pass.micro_batches[task.micro_batch]
        weights = self._store.attention(task.layer)
        x = weights.input_norm(self._hidden[part.first : part.last])
        self._qkv = project(x, weights, self._spec, part.rope)
        k, v = self._qkv[1:]
        if self._spec.layer_windows[task.layer] is None:
            self._kv.write(task.layer, part.slots, k, v)
        else:  # prompts are written once they have been attended: a ring forgets
            assert part.ring_slots is not None
            decoding = part.ring_slots.shape[0]
            self._kv.write(task.layer, part.ring_slots, k[:decoding], v[:decoding])

    def _cpu_attn(self, task: Task) -> None:
        """Softmax attention of a micro-batch: decode rows in groups, prompts one by one."""
        part, layer = self._pass.micro_batches[task.micro_batch], task.layer
        windowed = self._spec.layer_windows[layer] is not None
        q, k, v = self._qkv
        if part.native is not None:
            assert self._kernels is not None
            self._attended = attend(
                self._qkv, part.native, layer=layer, kv=self._kv, kernels=self._kernels,
                window=self._spec.layer_windows[layer], scale=self._spec.scale,
                sinks=self._store.attention(layer).sinks, round_x=self._store.rounds_x,
            ).flatten(1)  # fmt: skip
            return
        self._attended = torch.empty(q.shape[0], self._spec.attended_size)
        for group in part.decode:
            rows = slice(group.first, group.last)
            where = group.ring_rows if windowed else group.block_rows
            assert where is not None
            keys, values = self._kv.gather(layer, where)
            self._attended[rows] = self._decode(layer, q[rows], keys, values, group).flatten(1)
        for run in part.prompts:
            rows = slice(run.first, run.last)
            context = self._ring_context if windowed else self._context
            keys, values = context(layer, run, k[rows], v[rows])
            self._attended[rows] = self._prompt(layer, q[rows], keys, values).flatten(1)

    def _context(self, layer: int, run: PromptRun, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [C, G, d] of a prompt's run and of all before it."""
        if run.block_rows is None:
            return self._kv.rounded(k), self._kv.rounded(v)
        keys, values = self._kv.gather(layer, run.block_rows)
        return keys[0, :, : run.context].transpose(0, 1), values[0, :, : run.context].transpose(
            0, 1
        )

    def _ring_context(self, layer: int, run: PromptRun, k: Tensor, v: Tensor,
                      ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same in a layer with a window: of what the run can see. Then it goes into the ring."""
        assert run.ring is not None
        keys, values = self._kv.rounded(k), self._kv.rounded(v)
        past = run.ring.past
        if past.shape[0]:
            before = self._kv.gather_tokens(layer, past)
            keys, values = torch.cat((before[0], keys)), torch.cat((before[1], values))
        kept = run.ring.kept
        self._kv.write(layer, kept, k[-kept.shape[0] :], v[-kept.shape[0] :])
        return keys, values

    def _decode(self, layer: int, q: Tensor, keys: Tensor, values: Tensor,
                group: DecodeGroup) -> Tensor:  # fmt: skip
        """Attention of rows [R, H, d] to their cached keys and values; latents are attended as such."""
        spec, weights = self._spec, self._store.attention(layer)
        mask = group.masks[spec.layer_windows[layer]]
        if spec.latent is None:
            return attend_decode(q, keys, values, mask, scale=spec.scale, sinks=weights.sinks)
        assert weights.kv_b is not None
        q = absorb_queries(q, weights.kv_b, spec.latent)
        attended = attend_decode(q, keys, values, mask, scale=spec.scale)
        return release_values(attended, weights.kv_b, spec.latent)

    def _prompt(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one row's tokens [Q, H, d] to its context [C, G, d]; latents are expanded."""
        spec, weights = self._spec, self._store.attention(layer)
        if spec.latent is not None:
            assert weights.kv_b is not None
            keys, values = expand_latents(keys[:, 0], weights.kv_b, spec.latent)
        window = spec.layer_windows[layer]
        return attend_prompt(q, keys, values, window, scale=spec.scale, sinks=weights.sinks)

    def _post_attn(self, task: Task) -> None:
        """Output projection, residual, norm and router."""
        spec, part = self._spec, self._pass.micro_batches[task.micro_batch]
        weights = self._store.attention(task.layer)
        hidden = self._hidden[part.first : part.last]
        attended = weights.output(self._attended)
        if weights.output_bias is not None:
            attended = attended + weights.output_bias
        if spec.residual_multiplier != 1.0:
            attended = attended * spec.residual_multiplier
        hidden += attended
        if self._tell_attended is not None:
            self._tell_attended(task.layer, hidden)
        normed = weights.post_norm(hidden)
        self._normed[part.first : part.last] = normed
        if weights.router is not None:
            routed = route(normed, weights.router, spec.router, top_k=spec.top_k)
            self._routed.append(routed)
            if self._wants_scores:
                self._scored.append(all_scores(normed.float(), weights.router, spec.router))

    def _ffn(self, task: Task) -> None:
        """One expert over its tokens of all micro-batches, added to the residual stream.

        Experts that stay in memory wait for the next that does not, or the layer's last: one call
        for many experts keeps all cores busy where some have few tokens.
        """
        if task.page == ATTENTION_PAGE:
            self._base_ffn(task.layer)
            return
        if task.page == 1:
            self._rows = self._group(task.layer)
        assert self._rows is not None
        self._experts.append(self._store.expert(task.layer, task.page))
        last = task.page == self._spec.num_experts
        if last or not self._store.is_resident(task.layer, task.page):
            add_experts(self._hidden, self._normed, self._rows, self._experts)
            self._experts.clear()

    def _base_ffn(self, layer: int) -> None:
        """The FFN that every token of a layer goes through."""
        ffn, tokens = self._store.base_ffn(layer), self._tokens(layer)
        rows = everything(self._hidden.shape[0], tokens)
        weights = rows.weights
        if ffn.gate is not None:
            normed = self._normed if tokens is None else self._normed[tokens]
            weights = gate_values(normed.float(), ffn.gate)
        rows = replace(rows, weights=weights * self._spec.residual_multiplier)
        add_experts(self._hidden, self._normed, rows, [ffn.expert])

    def _tokens(self, layer: int) -> Tensor | None:
        """The tokens that a layer's FFN is computed for; None for all."""
        return self._wanted if layer == self._spec.num_layers - 1 else None

    def _group(self, layer: int) -> ExpertRows:
        tokens = self._tokens(layer)
        if not self._spec.has_router:
            return everything(self._hidden.shape[0], tokens)
        weights, experts = (torch.cat(x) for x in zip(*self._routed, strict=True))
        self._routed.clear()
        if tokens is not None:
            weights, experts = weights[tokens], experts[tokens]
        if self._wants_scores:
            self._mean_scores = self._scores(layer)
        if self._told is not None:
            self._told(layer, weights, experts, self._mean_scores)
        if self._spec.residual_multiplier != 1.0:
            weights = weights * self._spec.residual_multiplier
        self.expert_tokens[layer] += torch.bincount(
            experts.flatten(), minlength=self._spec.num_experts
        )
        return group_by_expert(weights, experts, self._spec.num_experts, tokens)

    def _scores(self, layer: int) -> list[float]:
        """The layer's router scores [E], averaged over the tokens that its FFN is computed for."""
        scores, tokens = torch.cat(self._scored), self._tokens(layer)
        self._scored.clear()
        mean: list[float] = (scores if tokens is None else scores[tokens]).mean(dim=0).tolist()
        return mean
