"""Seconds of one pass on a machine whose top tier is host memory and whose lower tier is the disk.

The pass is that of the `zigzag` schedule: all arithmetic on the host, pages from the disk meanwhile.
Rates come from `HostRates`, measured through the real kernels, or from the processor's peaks.
All amounts may be numpy arrays, so that a search is one evaluation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from moebatch.plan import cost
from moebatch.plan.machine import Curve, HostRates, MachineSpec, Processor
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.schedule import Op

Amount = Any  # float or an array of float64


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLoad:
    """What one pass carries: prompt tokens (of `prompts` prompts, `pairs` of query and visible key),
    decode rows with `context` tokens of context in all, in `micro_batches`."""

    prompt_tokens: Amount = 0.0
    prompts: Amount = 0.0
    pairs: Amount = 0.0
    rows: Amount = 0.0
    context: Amount = 0.0
    sampled: Amount = 0.0
    micro_batches: Amount = 1.0

    @property
    def tokens(self) -> Amount:
        """Tokens that go through the layers."""
        return self.prompt_tokens + self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPass:
    """Seconds by part. Layers' parts are sums over the layers; `disk` runs beside all others.

    `placing` is what putting streamed pages in their places takes of the cores that compute.
    """

    pre_attn: Amount
    cpu_attn: Amount
    post_attn: Amount
    ffn: Amount
    head: Amount
    fixed: Amount
    disk: Amount
    placing: Amount = 0.0

    @property
    def compute(self) -> Amount:
        """What the host's processor does, one thing after the other."""
        tasks = self.pre_attn + self.cpu_attn + self.post_attn + self.ffn + self.head
        return tasks + self.fixed + self.placing

    @property
    def total(self) -> Amount:
        """The pass: pages come in while the processor works."""
        return np.maximum(self.compute, self.disk)


def peak_rates(processor: Processor, dtype: str) -> HostRates:
    """Rates of a processor of which only peaks are known: rooflines, and no overhead."""
    peak = Curve(((1.0, processor.peak(dtype)),))
    return HostRates(
        gemm={"packed": peak, "streamed": peak},
        weight_bandwidth={"packed": processor.bandwidth, "streamed": processor.bandwidth},
        decode_attention=Curve(((1.0, processor.bandwidth),)),
        prefill_attention=peak,
        per_call_s=0.0,
        per_row_s=0.0,
        per_task_s={},
        per_value_s={},
        per_pass_s=0.0,
        per_sample_s=0.0,
    )


class HostTime:
    """The cost model of one model on one host, for one data type of computing."""

    def __init__(self, spec: ModelSpec, machine: MachineSpec, *, compute: str,
                 kv_dtype: str) -> None:  # fmt: skip
        """`compute` is the data type of the products, a key of the machine's rates where measured."""
        self._spec, self._kv_dtype = spec, kv_dtype
        self.rates = machine.rates.get(compute) or peak_rates(machine.host, compute)
        self._disk = machine.disk_bandwidth

    def seconds(self, load: PassLoad, *, attention_pages: Amount, expert_pages: Amount) -> HostPass:
        """One pass when so many attention and expert pages of the model stay in memory."""
        spec, layers = self._spec, self._spec.num_layers
        kept_attention = attention_pages / layers
        kept_experts = expert_pages / max(1, spec.num_expert_pages)
        dense = len(spec.dense_layers)
        # In the last layer only tokens whose logits are wanted go through the experts.
        ffn = (layers - dense - 1) * self._ffn(load.tokens, kept_experts, kept_attention)
        ffn = ffn + self._ffn(load.sampled, kept_experts, kept_attention)
        ffn = ffn + dense * self._base_ffn(load.tokens, kept_attention, dense=True)
        streamed = (layers - attention_pages) * cost.mean_attention_page_bytes(spec) + (
            spec.num_expert_pages - expert_pages
        ) * spec.stored_expert_bytes
        return HostPass(
            pre_attn=layers * self._pre_attn(load, kept_attention),
            cpu_attn=self._attention(load),
            post_attn=layers * self._post_attn(load, kept_attention),
            ffn=ffn,
            head=self._head(load.sampled),
            fixed=self.rates.per_pass_s + (load.rows + load.prompts) * self.rates.per_row_s,
            disk=streamed / self._disk,
            placing=streamed * self.rates.per_streamed_byte_s,
        )

    def expert_s(self, tokens: Amount) -> Amount:
        """One expert with so many tokens, used where it was read."""
        return self._product(cost.one_expert(self._spec, tokens), tokens, 0.0)

    def _product(
        self, work: cost.Work, tokens: Amount, kept: Amount, calls: Amount = 1.0
    ) -> Amount:
        """`calls` products of `tokens` tokens each, `work` being one, mixed from both forms."""
        seconds = 0.0
        for form, share in (("packed", kept), ("streamed", 1.0 - kept)):
            rate = self.rates.gemm[form](np.maximum(tokens, 1e-9))
            read = work.weight_bytes / self.rates.weight_bandwidth[form]
            seconds = seconds + share * (np.maximum(work.flops / rate, read))
        return calls * (seconds + self.rates.per_call_s)

    def _around(self, op: str, values: Amount, tasks: Amount) -> Amount:
        """What a task takes besides its products and its attention."""
        return tasks * self.rates.per_task_s.get(op, 0.0) + values * self.rates.per_value_s.get(
            op, 0.0
        )

    def _pre_attn(self, load: PassLoad, kept: Amount) -> Amount:
        tokens = load.tokens / load.micro_batches
        work = cost.qkv_projection(self._spec, tokens)
        values = load.tokens * self._spec.hidden_size
        around = self._around(Op.PRE_ATTN, values, load.micro_batches)
        return self._product(work, tokens, kept, load.micro_batches) + around

    def _post_attn(self, load: PassLoad, kept: Amount) -> Amount:
        tokens = load.tokens / load.micro_batches
        work = cost.output_projection(self._spec, tokens)
        values = load.tokens * self._spec.hidden_size
        around = self._around(Op.POST_ATTN, values, load.micro_batches)
        return self._product(work, tokens, kept, load.micro_batches) + around

    def _attention(self, load: PassLoad) -> Amount:
        spec, rates = self._spec, self.rates
        mean_context = load.context / np.maximum(load.rows, 1e-9)
        seconds = 0.0
        for window in set(spec.layer_windows):
            share = spec.layer_windows.count(window) * spec.num_layers / len(spec.layer_windows)
            context = mean_context if window is None else np.minimum(mean_context, window)
            bytes_read = cost.kv_bytes(spec, load.rows * context, self._kv_dtype)
            seconds = seconds + share * bytes_read / rates.decode_attention(context)
        length = load.prompt_tokens / np.maximum(load.prompts, 1e-9)
        work = cost.prefill_attention(spec, load.prompt_tokens, load.pairs)
        prompt = work.flops / rates.prefill_attention(length)
        tasks = self._around(Op.CPU_ATTN, 0.0, load.micro_batches)
        return seconds + spec.num_layers * (prompt + tasks)

    def _base_ffn(self, tokens: Amount, kept: Amount, *, dense: bool) -> Amount:
        work = cost.base_ffn(self._spec, tokens, dense=dense)
        return self._product(work, tokens, kept) if np.any(work.flops) else 0.0

    def _ffn(self, tokens: Amount, kept: Amount, kept_base: Amount) -> Amount:
        """One layer's experts, each with the tokens of all micro-batches, and its shared FFN."""
        spec = self._spec
        touched = cost.distinct_experts(spec, tokens)
        per_expert = tokens * spec.top_k / np.maximum(touched, 1e-9)
        one = cost.Work(
            flops=2.0 * per_expert * spec.expert_params,
            weight_bytes=cost.expert_page_bytes(spec),
        )
        products = self._product(one, per_expert, kept, touched)
        products = products + self._base_ffn(tokens, kept_base, dense=False)
        group = self._around("group", tokens * spec.hidden_size, 1.0)
        visits = self._around(Op.FFN, tokens * spec.top_k * spec.hidden_size, 0.0)
        return products + group + visits

    def _head(self, rows: Amount) -> Amount:
        spec = self._spec
        sampling = rows * spec.vocab_size * self.rates.per_sample_s
        return self._product(cost.lm_head(spec, rows), rows, 1.0) + sampling
