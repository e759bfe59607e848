"""Measures this machine through the code that will run on it: rates of the kernels, memory, disk.

Products and attention are timed as the engine calls them; what a task takes besides its products is
timed by running the engine's own handlers with weights that cost nothing. Of repeated timings the lower
quartile counts: a neighbour on a shared machine only ever adds.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moebatch.data.requests import SamplingParams
from moebatch.model.experts import Expert, add_experts, fused
from moebatch.model.layers import Rope
from moebatch.model.linear import (
    ComputeType,
    Linear,
    NativeLinear,
    has_bf16,
    in_place,
    pack,
)
from moebatch.model.panels import PanelWriter
from moebatch.model.router import ExpertRows, group_by_expert
from moebatch.model.weights import AttentionWeights, Vocabulary, attention_weights, norm_of
from moebatch.native.kernels import Kernels, load_kernels
from moebatch.plan.machine import Curve, HostRates, MachineSpec, Processor
from moebatch.plan.model_spec import ModelSpec, RopeSpec
from moebatch.plan.schedule import Lane, Op, Task
from moebatch.runtime import host
from moebatch.runtime.batch import Segment, build_pass
from moebatch.runtime.disk_probe import disk_bandwidth
from moebatch.runtime.forward import Forward
from moebatch.runtime.kv_cache import BlockTable, KVCache, blocks_for
from moebatch.runtime.native_attention import attends_natively
from moebatch.runtime.sampling import SamplingState, sample

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 384)
_CONTEXTS = (32, 64, 128, 256, 512, 1024)
_LENGTHS = (16, 64, 128, 256, 512)
_MOST_TOKENS, _FEW_ROWS = 1024, 16
_HIDDEN, _EXPERT, _EXPERTS = 1024, 2048, 12  # 151 MB: no cache holds them all
_SMALL_EXPERT, _SMALL_EXPERTS = 512, 48
_FEW_TOKENS, _MANY_TOKENS = 8, 128
_PLACED, _PLACED_PAGES = 4 << 20, 16  # bytes of a piece, and pages that take turns
_PRE, _ATTN, _POST = (Task(op, Lane.CPU, 0) for op in (Op.PRE_ATTN, Op.CPU_ATTN, Op.POST_ATTN))
Step = Callable[[str], None]


def measure(*, directory: Path, threads: int, step: Step = lambda name: None) -> MachineSpec:
    """This machine's figures, in well under a minute; the disk is the one that `directory` is on.

    `step` is told what is being measured. Raises: OSError when the directory cannot be written.
    """
    torch.set_num_threads(threads)
    step("memory bandwidth")
    bandwidth = read_bandwidth()
    step("disk")
    disk = disk_bandwidth(directory)
    kernels = load_kernels(threads)
    torch.set_num_threads(1 if kernels is not None else threads)  # as in a run
    rates: dict[str, HostRates] = {}
    peaks: dict[str, float] = {}
    computes: list[ComputeType] = ["float32", *(["bfloat16"] if has_bf16() else [])]  # type: ignore[list-item]
    for compute in computes:
        step(f"matrix products, {compute}")
        rates[compute] = host_rates(compute, kernels, step=step)
        peaks[compute] = rates[compute].gemm["packed"].peak
    about = host.describe()
    return MachineSpec(
        name="this machine",
        host=Processor(
            name=str(about["cpu"]),
            memory_bytes=float(host.available_bytes()),
            bandwidth=bandwidth,
            flops=peaks,
        ),
        disk_bandwidth=disk,
        rates=rates,
        kernels="pytorch" if kernels is None else kernels.variant,
        source=f"measured, {threads} threads, "
        + (
            f"torch {torch.__version__}" if kernels is None else f"native kernels {kernels.variant}"
        ),
    )


def timed(call: Callable[[], object], *, seconds: float = 0.12, least: int = 3) -> float:
    """Seconds of a call, after one that does not count."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return _typical(taken)


def _typical(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory."""
    data = torch.ones(64 << 20, dtype=torch.float32)
    return data.numel() * 4 / timed(data.sum, seconds=0.4)


def host_rates(compute: ComputeType, kernels: Kernels | None = None, *,
               step: Step = lambda name: None) -> HostRates:  # fmt: skip
    """All rates of the host for one data type of computing, by native kernels or PyTorch."""
    gemm = {
        "packed": _expert_curve(lambda weight: pack(weight, compute, kernels)),
        "streamed": _expert_curve(lambda weight: in_place(weight, compute, kernels), at_once=1),
    }
    for form, curve in gemm.items():  # a neighbour only ever slows down
        gemm[form] = curve.rising()
    gemm["packed"] = gemm["packed"].at_least(gemm["streamed"])  # what is packed could be left as is
    step("attention")
    engine = _Hollow(compute, kernels)
    threads = torch.get_num_threads() if kernels is None else kernels.threads
    per_task, per_value = engine.around()
    per_call, visit = _small_experts(lambda weight: pack(weight, compute, kernels), gemm["packed"])
    return HostRates(
        gemm=gemm,
        # The curves hold reading the weights, too: at one token nothing else counts.
        weight_bandwidth={form: curve(1.0) for form, curve in gemm.items()},
        decode_attention=engine.decode_curve(),
        prefill_attention=engine.prefill_curve(),
        per_call_s=per_call,
        per_task_s=per_task,
        per_value_s={**per_value, Op.FFN.value: visit},
        per_pass_s=engine.pass_s(1),
        per_row_s=max(0.0, (engine.pass_s(128) - engine.pass_s(1)) / 127),
        per_sample_s=_per_sample_s(),
        per_streamed_byte_s=_placing_s(kernels) / threads,
    )


def _experts(form: Callable[[Tensor], Linear], count: int, size: int) -> list[Expert]:
    """Experts with weights of their own, together larger than any cache: they come from memory."""
    base = torch.randn(2 * size, _HIDDEN).bfloat16()
    return [
        _expert(k, size, form(base.clone()), form(base[:size].t().contiguous()))
        for k in range(count)
    ]


def _expert(index: int, size: int, gate_up: Linear, down: Linear) -> Expert:
    native = fused(gate_up, down, size=size, gate_up_bias=None, down_bias=None)
    return Expert(index=index, size=size, gate_up=gate_up, down=down, native=native)


def _layer_s(experts: Sequence[Expert], tokens: int, at_once: int) -> float:
    """Seconds of all experts, each with so many tokens, all that belongs to it included.

    `at_once` go into one call: those that stay in memory all do, a streamed one is alone.
    """
    output, hidden, rows = _even_rows(tokens, len(experts), experts[0].gate_up.dtype)

    def layer() -> None:
        for first in range(0, len(experts), at_once):
            add_experts(output, hidden, rows, experts[first : first + at_once])

    return timed(layer)


def _expert_curve(form: Callable[[Tensor], Linear], at_once: int = _EXPERTS) -> Curve:
    """FLOP/s of an expert's FFN against its tokens."""
    experts = _experts(form, _EXPERTS, _EXPERT)
    flops = 2.0 * _EXPERTS * 3 * _HIDDEN * _EXPERT
    points = (
        (float(tokens), tokens * flops / _layer_s(experts, tokens, at_once)) for tokens in _TOKENS
    )
    return Curve(tuple(points))


def _even_rows(
    tokens: int, num_experts: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, ExpertRows]:
    """Output, hidden states and routing where every expert gets so many of as many tokens."""
    chosen = torch.arange(num_experts).repeat(tokens)[:, None]
    weights = torch.full((len(chosen), 1), 0.5)
    hidden = torch.randn(len(chosen), _HIDDEN).to(dtype)
    rows = group_by_expert(weights, chosen, num_experts)
    return torch.zeros(len(chosen), _HIDDEN), hidden, rows


def _small_experts(form: Callable[[Tensor], Linear], curve: Curve) -> tuple[float, float]:
    """What small experts take beyond their FLOPs at the rate of large ones: (a visit, a hidden value).

    Rows are gathered and scattered whatever the expert's size, and each call has its own cost.
    """
    experts = _experts(form, _SMALL_EXPERTS, _SMALL_EXPERT)

    def beyond(tokens: int) -> float:
        flops = 2.0 * tokens * 3 * _HIDDEN * _SMALL_EXPERT
        taken = _layer_s(experts, tokens, _SMALL_EXPERTS) / _SMALL_EXPERTS
        return max(0.0, taken - flops / float(curve(tokens)))

    few, many = beyond(_FEW_TOKENS), beyond(_MANY_TOKENS)
    per_value = max(0.0, many - few) / ((_MANY_TOKENS - _FEW_TOKENS) * _HIDDEN)
    return max(0.0, few - per_value * _FEW_TOKENS * _HIDDEN), per_value


def _placing_s(kernels: Kernels | None) -> float:
    """Seconds of one core for each byte of a page that is put in its place as it comes."""
    come = np.ones(_PLACED + 8, dtype=np.uint8)[8:]  # files say nothing of alignment
    pages = [
        np.ones(_PLACED, dtype=np.uint8) for _ in range(_PLACED_PAGES)
    ]  # more than caches hold
    writer, following = None if kernels is None else PanelWriter(kernels), itertools.cycle(pages)

    def put() -> None:
        page = next(following)
        if writer is None:
            np.copyto(page, come)
        else:
            writer.put(page, come, 0, inputs=_HIDDEN, dtype=torch.bfloat16)

    return timed(put) / _PLACED


def _per_sample_s() -> float:
    """Greedy choice of a token, per vocabulary entry."""
    logits = torch.randn(32, 32000)
    states = [SamplingState(params=SamplingParams(temperature=0.0), row_key=k) for k in range(32)]
    return timed(lambda: sample(logits, states)) / logits.numel()


class _Costless:
    """A weight whose product is there at once."""

    def __init__(self, outputs: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._result = torch.randn(_MOST_TOKENS, outputs).to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._result[: x.shape[0]]


class _Hollow:
    """The engine's handlers on a one-layer model whose matrices cost nothing."""

    def __init__(self, compute: ComputeType, kernels: Kernels | None) -> None:
        rounded = compute == "bfloat16" and kernels is None
        self.dtype = torch.bfloat16 if rounded else torch.float32
        self.rounds_x = compute == "bfloat16" and kernels is not None
        self._spec = spec = ModelSpec(
            family="probe", num_layers=1, hidden_size=1024, num_q_heads=16, num_kv_heads=4,
            head_dim=64, num_experts=8, top_k=2, expert_size=1024, vocab_size=1024,
            max_model_len=4096, rms_norm_eps=1e-5, rope=RopeSpec(theta=1e4),
            layer_windows=(None,),
        )  # fmt: skip
        width, norm = spec.qkv_rows, torch.ones(spec.hidden_size)
        router: Tensor | Linear = torch.randn(spec.num_experts, spec.hidden_size)
        if kernels is not None and isinstance(router, Tensor):
            router = NativeLinear(router, kernels, round_x=False)
        self._native = attends_natively(spec, kernels)
        parts: dict[str, Linear | Tensor] = {
            "input_norm": norm, "post_norm": norm, "qkv": _Costless(width, self.dtype),
            "output": _Costless(spec.hidden_size, self.dtype), "router": router,
        }  # fmt: skip
        self._attention = attention_weights(parts, spec)
        self.vocabulary = Vocabulary(
            embedding=torch.randn(spec.vocab_size, spec.hidden_size).bfloat16(),
            final_norm=norm_of(parts, "input_norm", spec),
            head=_Costless(spec.vocab_size, self.dtype),
            head_bias=None,
        )
        self._kv = KVCache(
            num_layers=1, num_blocks=64 * blocks_for(max(_CONTEXTS)), head_dim=spec.head_dim,
            num_kv_heads=spec.num_kv_heads, dtype="bfloat16",
        )  # fmt: skip
        self._rope = Rope(spec.rope, spec.head_dim)
        self._forward = Forward(
            spec=spec, store=self, kv=self._kv, kernels=kernels  # type: ignore[arg-type]
        )  # fmt: skip

    def attention(self, layer: int) -> AttentionWeights:
        """As WeightStore's."""
        return self._attention

    def is_resident(self, layer: int, page: int) -> bool:
        """As WeightStore's; False has every expert computed by its own task."""
        return False

    def expert(self, layer: int, page: int) -> Expert:
        """An expert whose products cost nothing."""
        size = self._spec.expert_size
        gate_up, down = (
            _Costless(2 * size, self.dtype),
            _Costless(self._spec.hidden_size, self.dtype),
        )
        return Expert(index=page - 1, size=size, gate_up=gate_up, down=down)

    @contextmanager
    def _begun(self, rows: int, start: int, length: int) -> Iterator[None]:
        """A pass of `rows` sequences that compute `length` tokens from `start` on is under way."""
        tables = [BlockTable() for _ in range(rows)]
        for table in tables:
            self._kv.extend(table, start + length)
        ids = torch.randint(self._spec.vocab_size, (rows, length)).tolist()
        segments = [
            Segment(token_ids=tuple(row), start=start, blocks=table)
            for row, table in zip(ids, tables, strict=True)
        ]
        one = build_pass([segments], kv=self._kv, rope=self._rope, windows=(None,),
                         native=self._native)  # fmt: skip
        self._forward.begin(one)
        yield
        for table in tables:
            self._kv.release(table)

    def _seconds(self, *tasks: Task) -> list[float]:
        """Seconds of the tasks' handlers, run one after the other several times."""
        handlers = self._forward.handlers
        taken: list[list[float]] = [[] for _ in tasks]
        for _ in range(7):
            for task, seconds in zip(tasks, taken, strict=True):
                start = time.perf_counter()
                handlers[task.op](task)
                seconds.append(time.perf_counter() - start)
        return [_typical(seconds) for seconds in taken]

    def around(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Seconds per task, and per value, of what tasks do besides products and attention.

        "group" is what a layer's first expert does for all: sorting the tokens by expert. What else
        an expert's task does is part of its curve.
        """
        with self._begun(_FEW_ROWS, 8, 1):
            few = self._layer()
        with self._begun(1, 0, _MOST_TOKENS):
            many = self._layer()
        values = (_MOST_TOKENS - _FEW_ROWS) * self._spec.hidden_size
        per_value = {name: max(0.0, many[name] - few[name]) / values for name in few}
        return few, {name: s for name, s in per_value.items() if name != Op.CPU_ATTN}

    def _layer(self) -> dict[str, float]:
        """Seconds of the tasks of one layer."""
        tasks = (_PRE, _ATTN, _POST, *(Task(Op.FFN, Lane.CPU, 0, page=page) for page in (1, 2)))
        pre, attention, post, first, second = self._seconds(*tasks)
        return {Op.PRE_ATTN.value: pre, Op.CPU_ATTN.value: attention, Op.POST_ATTN.value: post,
                "group": max(0.0, first - second)}  # fmt: skip

    def decode_curve(self) -> Curve:
        """Bytes of KV cache per second that decode attention reads, against context length."""
        points = []
        for context in _CONTEXTS:
            rows = 64 if context <= 512 else 32
            with self._begun(rows, context - 1, 1):
                seconds = self._seconds(_PRE, _ATTN)[1]
            num_bytes = rows * context * 2 * self._spec.kv_size * 2
            points.append((float(context), num_bytes / seconds))
        return Curve(tuple(points))

    def prefill_curve(self) -> Curve:
        """FLOP/s of prompt attention on visible pairs, against prompt length."""
        points = []
        for length in _LENGTHS:
            rows = max(1, 1024 // length)
            with self._begun(rows, 0, length):
                seconds = self._seconds(_PRE, _ATTN)[1]
            pairs = rows * length * (length + 1) / 2
            points.append((float(length), 4.0 * pairs * self._spec.q_size / seconds))
        return Curve(tuple(points))

    def pass_s(self, rows: int) -> float:
        """Laying out a pass of decode rows."""

        def once() -> None:
            with self._begun(rows, 99, 1):
                pass

        return timed(once, seconds=0.05)
