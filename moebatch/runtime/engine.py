"""The engine: requests in, completions out, one pass over the layers at a time.

Each pass carries every sequence in flight: one token of those that decode, prompt tokens of those
that joined. Finished sequences leave after the pass, waiting ones take their places before the next.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from moebatch.data.requests import Choice, Completion, Outcome, Request, RowError
from moebatch.errors import UsageError
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.layers import Rope
from moebatch.model.linear import ComputeType, Quantization, has_bf16
from moebatch.native.kernels import Kernels
from moebatch.plan.memory import MAX_LOGIT_ROWS
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import table_of
from moebatch.plan.policy import Policy
from moebatch.plan.schedule import Lane, Task, prologue, zigzag
from moebatch.runtime.admission import Admission
from moebatch.runtime.batch import Segment, build_pass
from moebatch.runtime.executor import Executor
from moebatch.runtime.forward import Forward
from moebatch.runtime.host import return_freed_memory
from moebatch.runtime.kv_cache import KVCache
from moebatch.runtime.sampling import sample
from moebatch.runtime.sequence import Sequence
from moebatch.runtime.stopping import Decode, OpenStream, StopChecker
from moebatch.runtime.weight_store import WeightStore

Progress = Callable[[int, int], None]


def use_threads(count: int, *, native: bool) -> None:
    """Let PyTorch compute with this many threads from now on.

    Beside native kernels it gets one: its idle threads spin, and would take their cores away.
    """
    torch.set_num_threads(1 if native else count)


def compute_type(dtype: str, weight_dtype: str) -> ComputeType:
    """What --dtype means for a checkpoint on this machine; "auto" is bf16 where it is native.

    Raises: UsageError for bfloat16 where weights or processor are not.
    """
    native = weight_dtype == "bfloat16" and has_bf16()
    if dtype == "bfloat16" and not native:
        raise UsageError(
            f"--dtype bfloat16 needs bf16 weights (these are {weight_dtype}) and a processor with "
            "AVX512-BF16 or AMX",
            hint="leave --dtype away, or use --dtype float32",
        )
    return "bfloat16" if native and dtype != "float32" else "float32"


def quantization_type(asked: str, kernels: Kernels | None) -> Quantization:
    """What --quantization means on this machine.

    Raises: UsageError where there are no kernels for it.
    """
    if asked == "none":
        return "none"
    if kernels is None:
        raise UsageError(
            f"--quantization {asked} needs the native kernels, which are not there",
            hint="install a C++ compiler and moebatch once more, and unset MOEBATCH_SIMD",
        )
    return "int8"


@dataclass(slots=True)
class EngineStats:
    """Counts and seconds of a run so far. A pass that prefills and decodes is split by its tokens."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0
    lane_busy_s: dict[Lane, float] = field(default_factory=dict)
    in_flight: int = 0
    phase: str = "load"


class Engine:
    """Runs one model under one policy. Use it in a `with`: it owns threads, files and memory."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 open_stream: OpenStream, decode: Decode, eos_token_ids: tuple[int, ...],
                 max_model_len: int, compute: ComputeType = "float32",
                 kernels: Kernels | None = None,
                 quantization: Quantization = "none") -> None:  # fmt: skip
        """Allocate the page buffer and the KV cache; `load` reads the weights.

        Without native kernels PyTorch computes everything.
        """
        self._spec, self._policy = spec, policy
        self._open_stream, self._decode = open_stream, decode
        self._eos, self._max_model_len = eos_token_ids, max_model_len
        self._table = table_of(spec, policy)
        self._page_slots = max(1, min(policy.page_slots, len(self._table.streamed)))
        self._store = WeightStore(
            checkpoint,
            spec=spec,
            family=family,
            table=self._table,
            page_slots=self._page_slots,
            compute=compute,
            kernels=kernels,
            quantization=quantization,
        )
        self._kv = KVCache(
            num_layers=spec.num_layers,
            num_blocks=policy.kv_blocks,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=policy.kv_dtype,
        )
        self._rope = Rope(spec.rope, spec.head_dim)
        self._forward = Forward(spec=spec, store=self._store, kv=self._kv, kernels=kernels)
        self._native = kernels is not None
        self._executor = Executor(self._forward.handlers, background=[Lane.DISK])
        self._schedules: dict[int, list[Task]] = {}
        self.stats = EngineStats()

    def load(self, *, threads: int, progress: Progress = lambda done, total: None) -> None:
        """Read what stays in memory and start filling the page buffer.

        Raises: ModelError when a file cannot be read.
        """
        start = time.perf_counter()
        return_freed_memory(True)
        self._store.load_resident(threads=threads, progress=progress)
        return_freed_memory(False)
        self._executor.run(prologue(self._table, page_slots=self._page_slots))
        self.stats.load_s = time.perf_counter() - start

    def run(self, requests: Iterable[Request],
            on_pass: Callable[[EngineStats], None] = lambda stats: None,
            ) -> Iterator[Outcome]:  # fmt: skip
        """Completions in the order in which they end; `on_pass` is called after every pass.

        Requests are taken from the iterable only as the batch has room for them.
        """
        admission = Admission(self._policy, kv=self._kv, requests=requests, start=self._sequences)
        finished: dict[int, list[Choice]] = {}
        while admission.fill():
            yield from admission.take_refused()
            if not admission.active:
                continue
            broken = self._pass(admission.active)
            for request in {s.request.index: s.request for s in broken}.values():
                finished.pop(request.index, None)
                admission.drop(request.index)
                yield _not_finite(request)
            for sequence in [s for s in admission.active if s.finish is not None]:
                admission.leave(sequence)
                yield from _collect(finished, sequence)
            self.stats.in_flight = len(admission.active)
            on_pass(self.stats)
        yield from admission.take_refused()

    @property
    def disk_read_bytes(self) -> int:
        """Bytes of weights read from the checkpoint so far, loading included."""
        return self._store.bytes_read

    @property
    def expert_tokens(self) -> list[list[int]]:
        """Tokens that each expert of each layer has computed."""
        counts: list[list[int]] = self._forward.expert_tokens.tolist()
        return counts

    def close(self) -> None:
        """Stop the lanes. The checkpoint is the caller's to close."""
        self._executor.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _sequences(self, request: Request) -> list[Sequence]:
        """The sequences of a request, one for each choice."""
        return [
            Sequence(
                request,
                choice,
                StopChecker(
                    request.params,
                    eos_token_ids=self._eos,
                    prompt_len=len(request.prompt_token_ids),
                    max_model_len=self._max_model_len,
                    open_stream=self._open_stream,
                    decode=self._decode,
                ),
            )
            for choice in range(request.params.n)
        ]

    def _pass(self, active: list[Sequence]) -> list[Sequence]:
        """Compute one pass and sample; the sequences whose logits were not finite."""
        start = time.perf_counter()
        groups = self._segments(active)
        one = build_pass(
            [[segment for _, segment in group] for group in groups],
            kv=self._kv,
            rope=self._rope,
            windows=self._spec.layer_windows,
            native=self._native,
        )
        # A prompt that is not finished in this pass gives no logits, but asking for its last token
        # costs nothing and keeps this independent of what is sampled.
        ends = [token for group in one.last_tokens for token in group]
        self._forward.begin(one, wanted=torch.tensor(ends))
        timeline = self._executor.run(self._schedule(len(groups)))
        due: list[tuple[Sequence, int]] = []
        prompt_tokens = 0
        for group, last_tokens in zip(groups, one.last_tokens, strict=True):
            for (sequence, segment), last in zip(group, last_tokens, strict=True):
                before, sequence.computed = sequence.remaining_prompt, segment.end
                prompt_tokens += before - sequence.remaining_prompt
                if sequence.remaining_prompt == 0:
                    due.append((sequence, last))
        broken = self._sample(due)
        for lane in Lane:
            busy = self.stats.lane_busy_s.get(lane, 0.0)
            self.stats.lane_busy_s[lane] = busy + timeline.busy_s(lane)
        self._count(time.perf_counter() - start, prompt_tokens, one.token_ids.numel())
        return broken

    def _segments(self, active: list[Sequence]) -> list[list[tuple[Sequence, Segment]]]:
        """Per micro-batch, what each sequence computes; prompts share the pass's prefill budget.

        Who decodes always takes part; who is in the middle of its prompt comes before newcomers.
        """
        groups: dict[int, list[tuple[Sequence, Segment]]] = {}
        budget = self._policy.prefill_tokens
        for sequence in sorted(active, key=lambda s: s.computed == 0):
            allowed = budget if sequence.remaining_prompt else 1
            if allowed == 0:
                continue
            segment = sequence.segment(allowed)
            if sequence.remaining_prompt:
                budget -= len(segment.token_ids)
            self._kv.extend(sequence.blocks, segment.end)
            groups.setdefault(sequence.micro_batch, []).append((sequence, segment))
        return [groups[j] for j in sorted(groups)]

    def _schedule(self, num_micro_batches: int) -> list[Task]:
        """The pass's schedule; built once for each number of micro-batches."""
        if num_micro_batches not in self._schedules:
            self._schedules[num_micro_batches] = zigzag(
                self._table, num_micro_batches=num_micro_batches, page_slots=self._page_slots
            )
        return self._schedules[num_micro_batches]

    def _sample(self, due: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Choose the next token of each sequence; returns those with logits that are not finite."""
        broken = []
        for first in range(0, len(due), MAX_LOGIT_ROWS):
            part = due[first : first + MAX_LOGIT_ROWS]
            logits = self._forward.logits(torch.tensor([token for _, token in part]))
            sampled = sample(logits, [sequence.sampling_state() for sequence, _ in part])
            for (sequence, _), token in zip(part, sampled, strict=True):
                if token.finite:
                    self.stats.generated_tokens += 1
                    sequence.push(token.token_id, token.logprob)
                else:
                    broken.append(sequence)
        return broken

    def _count(self, seconds: float, prompt_tokens: int, tokens: int) -> None:
        stats, share = self.stats, prompt_tokens / tokens
        stats.passes += 1
        stats.prompt_tokens += prompt_tokens
        stats.prefill_s += seconds * share
        stats.decode_s += seconds * (1 - share)
        stats.phase = "prefill" if share > 0.5 else "decode"


def _not_finite(request: Request) -> RowError:
    return RowError(
        index=request.index,
        id=request.id,
        code="non_finite_logits",
        message="the model produced logits that are not finite (NaN or infinity)",
    )


def _collect(finished: dict[int, list[Choice]], sequence: Sequence) -> Iterator[Completion]:
    """Keep a choice until the other choices of its request are there."""
    request = sequence.request
    choices = finished.setdefault(request.index, [])
    choices.append(sequence.to_choice())
    if len(choices) == request.params.n:
        ordered = sorted(finished.pop(request.index), key=lambda choice: choice.index)
        yield Completion(request=request, choices=tuple(ordered))
