"""Seconds and bytes of one pass on a machine with an accelerator, by resource.

Every resource works at once (CGOPipe), so a pass takes as long as its busiest one; the other
schedules are played by the simulator. All amounts may be numpy arrays: a search is one evaluation.
Source: MoE-Lightning (arXiv 2411.11217), section 3.3, equations 12 to 14.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from moebatch.plan import cost
from moebatch.plan.cost import Amount, Work
from moebatch.plan.machine import MachineSpec, Processor
from moebatch.plan.model_spec import DTYPE_BYTES, ModelSpec

# Kernels, library handles and the allocator's unused remainder on an accelerator.
RESERVE_BYTES = 600 << 20
_FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A policy as numbers or arrays of them; the fields of `Policy` in the units of the formulas.

    `gpu_attention` and `gpu_ffn` are A_g and F_g (0 or 1). `prefill_batch` requests are prefilled in
    one pass over the layers, in micro-batches of `prefill_micro_batch`. `group` micro-batches share
    one visit to an expert in decode. `attention_pages` and `expert_pages` of the model stay on the
    accelerator, `disk_pages` expert pages lie on the disk.
    """

    batch: Amount
    micro_batch: Amount
    prefill_batch: Amount
    prefill_micro_batch: Amount
    gpu_attention: Amount
    gpu_ffn: Amount
    attention_pages: Amount
    expert_pages: Amount
    kv_resident: Amount
    group: Amount = 1.0
    disk_pages: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Busy seconds of each resource in one pass over all layers."""

    accelerator: Amount
    host: Amount
    to_accelerator: Amount
    to_host: Amount
    disk: Amount

    @property
    def total(self) -> Amount:
        """The pass, when nothing waits for anything but the busiest resource."""
        longest: Any = 0.0
        for field in fields(self):
            longest = np.maximum(longest, getattr(self, field.name))
        return longest

    @property
    def in_turn(self) -> Amount:
        """The pass, when nothing is done beside anything else."""
        return sum(getattr(self, field.name) for field in fields(self))

    def plus(self, other: "Resources") -> "Resources":
        """Both, resource by resource."""
        names = [field.name for field in fields(self)]
        return Resources(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorMemory:
    """Bytes of accelerator memory by use; `prefill` and `decode` are needed one at a time.

    Each of the two depends on its own micro-batch size alone, so they can be chosen apart.
    """

    reserve: Amount
    vocabulary: Amount
    resident_weights: Amount
    weight_buffer: Amount
    kv_cache: Amount
    prefill: Amount
    decode: Amount

    @property
    def total(self) -> Amount:
        """The peak."""
        always = self.reserve + self.vocabulary + self.resident_weights + self.weight_buffer
        return always + self.kv_cache + np.maximum(self.prefill, self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of host memory by use."""

    base: Amount
    weights: Amount
    staging: Amount
    kv_cache: Amount
    buffers: Amount

    @property
    def total(self) -> Amount:
        """The peak."""
        return self.base + self.weights + self.staging + self.kv_cache + self.buffers


class AcceleratorModel:
    """Time and memory of one model and one workload on one machine."""

    def __init__(self, spec: ModelSpec, machine: MachineSpec, *, mean_prompt: float,
                 mean_gen: float, pairs_per_prompt: float, kv_dtype: str,
                 base_bytes: int = 400 << 20,
                 reserve_bytes: int = RESERVE_BYTES) -> None:  # fmt: skip
        """`base_bytes` is what the process holds on the host before any weights."""
        assert machine.accelerator is not None
        self._spec, self._machine, self._kv_dtype = spec, machine, kv_dtype
        self._gpu, self._host = machine.accelerator, machine.host
        self.mean_prompt, self._gen, self._pairs = mean_prompt, mean_gen, pairs_per_prompt
        self._base, self._reserve = base_bytes, reserve_bytes

    def decode(self, at: Setting) -> Resources:
        """One decode step of the whole batch, its rows at their mean context."""
        spec, layers, rows = self._spec, self._spec.num_layers, at.batch
        gpu, host, in_bytes, out_bytes = self._decode_layer(at)
        ffn_calls = np.maximum(1.0, np.maximum(1.0, rows / at.micro_batch) / at.group)
        sparse = layers - len(spec.dense_layers)
        ffn_gpu = ffn_calls * _roof(
            cost.experts(spec, rows / ffn_calls), self._gpu, spec.weight_dtype
        )
        ffn_host = _roof(cost.experts(spec, rows), self._host, spec.weight_dtype)
        moved = (1 - at.gpu_ffn) * cost.hidden_bytes(spec, rows)
        weights, disk = self._streamed(at)
        return Resources(
            accelerator=layers * gpu + sparse * at.gpu_ffn * ffn_gpu + self._ends(rows, rows),
            host=layers * host + sparse * (1 - at.gpu_ffn) * ffn_host,
            to_accelerator=(weights + layers * in_bytes + sparse * moved) / self._machine.link,
            to_host=(layers * out_bytes + sparse * moved) / self._machine.link_back,
            disk=disk / self._machine.disk_bandwidth,
        )

    def decode_around(self, at: Setting) -> Resources:
        """The same without the layers' experts, and as if all other weights were resident."""
        layers = self._spec.num_layers
        gpu, host, in_bytes, out_bytes = self._decode_layer(at)
        return Resources(
            accelerator=layers * gpu + self._ends(at.batch, at.batch),
            host=layers * host,
            to_accelerator=layers * in_bytes / self._machine.link,
            to_host=layers * out_bytes / self._machine.link_back,
            disk=0.0,
        )

    def prefill(self, at: Setting) -> Resources:
        """One prefill pass; everything is computed on the accelerator but experts where F_g = 0."""
        spec, layers = self._spec, self._spec.num_layers
        tokens = at.prefill_batch * self.mean_prompt
        gpu, kv_out = self._prefill_layer(at)
        calls = np.maximum(1.0, at.prefill_batch / at.prefill_micro_batch)
        sparse = layers - len(spec.dense_layers)
        ffn_gpu = calls * _roof(cost.experts(spec, tokens / calls), self._gpu, spec.weight_dtype)
        ffn_host = _roof(cost.experts(spec, tokens), self._host, spec.weight_dtype)
        moved = (1 - at.gpu_ffn) * cost.hidden_bytes(spec, tokens)
        weights, disk = self._streamed(at)
        return Resources(
            accelerator=layers * gpu + sparse * at.gpu_ffn * ffn_gpu
            + self._ends(tokens, at.prefill_batch),
            host=sparse * (1 - at.gpu_ffn) * ffn_host,
            to_accelerator=(weights + sparse * moved) / self._machine.link,
            to_host=(layers * kv_out + sparse * moved) / self._machine.link_back,
            disk=disk / self._machine.disk_bandwidth,
        )  # fmt: skip

    def prefill_around(self, at: Setting) -> Resources:
        """The same without the layers' experts, and as if all other weights were resident."""
        layers, tokens = self._spec.num_layers, at.prefill_batch * self.mean_prompt
        gpu, kv_out = self._prefill_layer(at)
        return Resources(
            accelerator=layers * gpu + self._ends(tokens, at.prefill_batch),
            host=0.0,
            to_accelerator=0.0,
            to_host=layers * kv_out / self._machine.link_back,
            disk=0.0,
        )

    def expert_s(self, tokens: Amount) -> Amount:
        """One expert with so many tokens on the accelerator."""
        return _roof(cost.one_expert(self._spec, tokens), self._gpu, self._spec.weight_dtype)

    def _decode_layer(self, at: Setting) -> tuple[Amount, Amount, Amount, Amount]:
        """One layer of a decode step without experts: seconds of accelerator and host, bytes to the
        accelerator and back."""
        spec, rows, context = self._spec, at.batch, self.mean_prompt + self._gen / 2
        calls = np.maximum(1.0, rows / at.micro_batch)
        attention = cost.decode_attention(spec, rows, rows * context, self._kv_dtype)
        gpu = calls * self._around(rows / calls, self._gpu) + at.gpu_attention * _roof(
            attention, self._gpu, spec.weight_dtype
        )
        host = (1 - at.gpu_attention) * _roof(attention, self._host, "float32")
        kv_moved = at.gpu_attention * (1 - at.kv_resident)
        context_in = kv_moved * cost.kv_bytes(spec, rows * context, self._kv_dtype)
        in_bytes = (1 - at.gpu_attention) * cost.attended_bytes(spec, rows) + context_in
        out_bytes = (1 - at.gpu_attention) * cost.qkv_bytes(spec, rows)
        out_bytes = out_bytes + kv_moved * cost.kv_bytes(spec, rows, self._kv_dtype)
        return gpu, host, in_bytes, out_bytes

    def _prefill_layer(self, at: Setting) -> tuple[Amount, Amount]:
        """One layer of a prefill pass without experts: seconds, bytes of the cache to the host."""
        spec, tokens = self._spec, at.prefill_batch * self.mean_prompt
        calls = np.maximum(1.0, at.prefill_batch / at.prefill_micro_batch)
        attention = cost.prefill_attention(spec, tokens, at.prefill_batch * self._pairs)
        gpu = calls * self._around(tokens / calls, self._gpu)
        gpu = gpu + _roof(attention, self._gpu, spec.weight_dtype)
        on_host = 1 - at.gpu_attention * at.kv_resident
        return gpu, on_host * cost.kv_bytes(spec, tokens, self._kv_dtype)

    def throughput(self, at: Setting, *, prefill_s: Amount, decode_s: Amount) -> Amount:
        """Generated tokens per second of a batch: N n / (T_prefill + n T_decode), section 3.3.

        `prefill_s` is one prefill pass, `decode_s` one decode step. Prefill passes are not rounded
        up: the next batch's prompts fill the last one.
        """
        passes = np.maximum(1.0, at.batch / at.prefill_batch)
        return at.batch * self._gen / (passes * prefill_s + self._gen * decode_s)

    def accelerator_memory(self, at: Setting) -> AcceleratorMemory:
        """Peak bytes of accelerator memory, term by term."""
        spec, item = self._spec, DTYPE_BYTES[self._spec.weight_dtype]
        layers = spec.num_layers
        attention, expert = cost.mean_attention_page_bytes(spec), cost.expert_page_bytes(spec)
        streamed = (layers - at.attention_pages) * attention + at.gpu_ffn * (
            spec.num_expert_pages - at.expert_pages
        ) * expert
        context = self.mean_prompt + self._gen
        kv_layer = cost.kv_bytes(spec, context, self._kv_dtype)
        # A_g = 1: the context of two micro-batches is on its way or in use in each of two layers.
        kv_buffer = at.gpu_attention * (1 - at.kv_resident) * 2 * at.micro_batch * kv_layer
        kv_home = at.gpu_attention * at.kv_resident * at.batch * kv_layer * layers
        rows, prompts = at.micro_batch, at.prefill_micro_batch * self.mean_prompt
        return AcceleratorMemory(
            reserve=float(self._reserve),
            vocabulary=float(spec.vocabulary_params * item),
            resident_weights=at.attention_pages * attention + at.expert_pages * expert,
            weight_buffer=2 * streamed / layers,
            kv_cache=kv_home,
            prefill=self._activations(at.prefill_batch * self.mean_prompt, prompts, at.gpu_ffn)
            + self._logits(at.prefill_micro_batch),
            decode=self._activations(at.batch, rows * at.group, at.gpu_ffn)
            + self._logits(rows)
            + kv_buffer,
        )

    def host_memory(self, at: Setting) -> HostMemory:
        """Peak bytes of host memory, term by term; KV at its rows' full length."""
        spec = self._spec
        attention, expert = cost.mean_attention_page_bytes(spec), cost.expert_page_bytes(spec)
        away = (spec.num_layers - at.attention_pages) * attention
        away = away + (spec.num_expert_pages - at.expert_pages - at.disk_pages) * expert
        context = (
            self.mean_prompt + self._gen + 8
        ) * at.batch  # half a block is lost at a row's end
        kv = (1 - at.gpu_attention * at.kv_resident) * cost.kv_bytes(spec, context, self._kv_dtype)
        rows = np.maximum(at.batch, (1 - at.gpu_ffn) * at.prefill_batch * self.mean_prompt)
        return HostMemory(
            base=float(self._base),
            weights=away,
            staging=np.minimum(2.0 * expert, np.maximum(0.0, away + at.disk_pages * expert)),
            kv_cache=kv * spec.num_layers,
            buffers=rows * (spec.qkv_rows + spec.attended_size + 2 * spec.hidden_size) * _FLOAT,
        )

    def _streamed(self, at: Setting) -> tuple[Amount, Amount]:
        """Bytes of weights that one pass brings to the accelerator, and those read from the disk."""
        spec = self._spec
        attention, expert = cost.mean_attention_page_bytes(spec), cost.expert_page_bytes(spec)
        pages = spec.num_expert_pages - at.expert_pages
        bytes_in = (spec.num_layers - at.attention_pages) * attention + at.gpu_ffn * pages * expert
        return bytes_in, at.disk_pages * expert

    def _around(self, tokens: Amount, gpu: Processor) -> Amount:
        """One micro-batch through a layer, without attention and experts."""
        spec = self._spec
        works = (
            cost.norm(spec, tokens), cost.qkv_projection(spec, tokens),
            cost.output_projection(spec, tokens), cost.norm(spec, tokens),
            cost.router(spec, tokens), cost.base_ffn(spec, tokens, dense=False),
        )  # fmt: skip
        return sum(_roof(work, gpu, spec.weight_dtype) for work in works)

    def _ends(self, tokens: Amount, rows: Amount) -> Amount:
        """Embedding and LM head of a pass."""
        spec, gpu = self._spec, self._gpu
        head = _roof(cost.lm_head(spec, rows), gpu, spec.weight_dtype)
        return _roof(cost.embedding(spec, tokens), gpu, spec.weight_dtype) + head

    def _activations(self, tokens: Amount, called: Amount, gpu_ffn: Amount) -> Amount:
        """Hidden states of all tokens of a pass, and what one call of `called` tokens works with."""
        spec = self._spec
        per_call = spec.hidden_size * 2 + spec.qkv_rows + 2 * spec.attended_size
        ffn = spec.top_k * (2 * spec.hidden_size + 3 * spec.expert_size)
        ffn = ffn + 3 * max(spec.shared_size, spec.dense_size)
        each = cost.ACTIVATION_BYTES * called * (per_call + gpu_ffn * ffn)
        return 2 * tokens * spec.hidden_size * cost.ACTIVATION_BYTES + each

    def _logits(self, rows: Amount) -> Amount:
        return 2.0 * rows * self._spec.vocab_size * _FLOAT


def _roof(work: Work, processor: Processor, dtype: str) -> Amount:
    """Seconds of an operation on data at its own level: the slower of compute and memory roof."""
    return np.maximum(work.flops / processor.peak(dtype), work.bytes / processor.bandwidth)
