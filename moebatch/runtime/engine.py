"""The engine: requests in, completions out, one pass over the layers at a time.

Each pass carries every sequence in flight: one token of those that decode, prompt tokens of those
that joined. Finished sequences leave after the pass, waiting ones take their places before the next.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moebatch.data.requests import Completion, Generated, Outcome, Request, RowError
from moebatch.errors import Interrupted, UsageError
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.families import Family
from moebatch.model.linear import ComputeType, Quantization, has_bf16
from moebatch.native.kernels import Kernels
from moebatch.plan.memory import MAX_LOGIT_ROWS
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Policy
from moebatch.plan.schedule import Lane
from moebatch.runtime.admission import Admission
from moebatch.runtime.backend import Backend, PassResult, Progress
from moebatch.runtime.batch import Segment
from moebatch.runtime.cached_backend import Profile
from moebatch.runtime.device import Device, closed_on_error, memory_errors
from moebatch.runtime.device_regime import device_backend, device_regime_facts
from moebatch.runtime.drafts import NO_DRAFT, Draft
from moebatch.runtime.host import return_freed_memory
from moebatch.runtime.regime import RegimeFacts, host_backend, look, regime_facts
from moebatch.runtime.routing_log import RoutingLog
from moebatch.runtime.sequence import Sequence
from moebatch.runtime.speculative import Due, Speculator, choose_tokens, chunks, take_back
from moebatch.runtime.stopping import Decode, OpenStream, StopChecker


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
    return "int4" if asked == "int4" else "int8"


@dataclass(slots=True)
class EngineStats:
    """Counts and seconds of a run so far. A pass that prefills and decodes is split by its tokens."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0
    loaded_bytes: int = 0
    lane_busy_s: dict[Lane, float] = field(default_factory=dict)
    in_flight: int = 0
    phase: str = "load"


class Engine:
    """Runs one model under one policy. Use it in a `with`: it owns threads, files and memory."""

    def __init__(self, checkpoint: Checkpoint, *, spec: ModelSpec, family: Family, policy: Policy,
                 open_stream: OpenStream, decode: Decode, eos_token_ids: tuple[int, ...],
                 max_model_len: int, compute: ComputeType = "float32",
                 kernels: Kernels | None = None, quantization: Quantization = "none",
                 device: Device | None = None, traced_passes: int = 0,
                 stats: "EngineStats | None" = None, speculator: Speculator | None = None,
                 profile: Profile | None = None, log: RoutingLog | None = None,
                 interrupted: Callable[[], bool] = lambda: False) -> None:  # fmt: skip
        """Allocate the page buffer and the KV cache; `load` reads the weights.

        Without native kernels PyTorch computes everything; they are for the host.
        `device`: the accelerator, None where there is none; closed with the engine.
        `speculator`: where drafts come from, None for none; closed with the engine.
        `traced_passes`: of how many passes `traced` keeps tasks and times, the first ones.
        `stats`: those of an earlier engine of the same run, counted on.
        `profile`: tokens that experts computed in earlier runs [L, E]. `log` records the routing.
        `interrupted` is asked between the steps of a run; True ends it with Interrupted.
        """
        self._device, self._traced_passes = device, traced_passes
        self.traced: list[PassResult] = []
        self._policy = policy
        self._open_stream, self._decode = open_stream, decode
        self._eos, self._max_model_len = eos_token_ids, max_model_len
        self._backend: Backend
        if device is None:
            self._backend = host_backend(
                checkpoint, spec=spec, family=family, policy=policy, compute=compute,
                kernels=kernels, quantization=quantization, profile=profile, log=log,
                interrupted=interrupted,
            )  # fmt: skip
        else:
            with memory_errors(), closed_on_error(device):
                self._backend = device_backend(
                    checkpoint, spec=spec, family=family, policy=policy, compute=compute,
                    device=device, profile=profile, interrupted=interrupted,
                )  # fmt: skip
        self._kv = self._backend.kv
        # A ring forgets what later tokens of the same pass would still need.
        self._resumes_one_by_one = self._backend.one_by_one and not self._kv.ring_tokens
        self._speculator = speculator
        self._drafts: dict[Sequence, Draft] = {}
        self._interrupted = interrupted
        self._admission: Admission | None = None
        self._ended: dict[int, list[Sequence]] = {}
        self.stats = stats or EngineStats()

    def load(self, *, threads: int, progress: Progress = lambda done, total: None) -> None:
        """Read what stays in memory and start filling the page buffer.

        Raises: ModelError when a file cannot be read; DeviceMemoryFull.
        """
        start = time.perf_counter()
        return_freed_memory(True)
        with memory_errors():
            self._backend.load(threads=threads, progress=progress)
        return_freed_memory(False)
        self.stats.load_s += time.perf_counter() - start
        self.stats.loaded_bytes += self._backend.bytes_read

    def run(self, requests: Iterable[Request],
            on_pass: Callable[[EngineStats], None] = lambda stats: None, *,
            more_follow: bool = False) -> Iterator[Outcome]:  # fmt: skip
        """Completions in the order in which they end; `on_pass` is called after every pass.

        Requests are taken from the iterable only as the batch has room for them. With `more_follow`
        another call is to come: where these end there is no tail of the job.
        Raises: Interrupted when it was asked to stop; `in_flight` then tells what there is.
        DeviceMemoryFull; `unanswered` then tells what another engine has to do.
        """
        admission = Admission(self._policy, kv=self._kv, requests=requests, start=self._sequences)
        self._admission = admission
        while admission.fill():
            if self._interrupted():
                raise Interrupted
            yield from self._refused(admission)
            if not admission.active:
                continue
            with memory_errors():
                if admission.tail and not more_follow:
                    self.stats.decode_s += look(self._backend, admission.tail)
                broken = self._pass(admission.active)
            for request in {s.request.index: s.request for s in broken}.values():
                self._ended.pop(request.index, None)
                admission.drop(request.index)
                yield _not_finite(request)
            for sequence in [s for s in admission.active if s.finish is not None]:
                admission.leave(sequence)
                yield from self._collect(sequence)
            self.stats.in_flight = len(admission.active)
            on_pass(self.stats)
        yield from self._refused(admission)

    def in_flight(self) -> Iterator[tuple[Request, Generated]]:
        """What there is of the requests that are not answered yet; views that a pass changes."""
        if self._admission is None:
            return
        under_way = [*self._admission.active, *self._admission.waiting]
        for sequence in itertools.chain(under_way, *self._ended.values()):
            if sequence.generated:
                yield sequence.request, sequence.to_generated()

    def unanswered(self) -> list[Request]:
        """The requests that were taken and not answered, each with what there is of it."""
        if self._admission is None:
            return []
        requests: dict[int, Request] = {}
        for sequence in [*self._admission.active, *self._admission.waiting]:
            requests.setdefault(sequence.request.index, sequence.request)
        made: dict[int, list[Generated]] = {}
        for request, generated in self.in_flight():
            kept = Generated(choice=generated.choice, token_ids=tuple(generated.token_ids),
                             logprobs=tuple(generated.logprobs))  # fmt: skip
            made.setdefault(request.index, []).append(kept)
        return [
            replace(request, resumed=tuple(made.get(index, ())))
            for index, request in sorted(requests.items())
        ]

    @property
    def disk_read_bytes(self) -> int:
        """Bytes of weights read from the checkpoint so far, loading included."""
        return self._backend.bytes_read

    @property
    def regime(self) -> RegimeFacts | None:
        """What the regimes did."""
        return device_regime_facts(self._backend) or regime_facts(self._backend, self._policy)

    @property
    def device_facts(self) -> dict[str, Any] | None:
        """The accelerator for a report: what it is, whether it is real, its memory in bytes."""
        if self._device is None:
            return None
        memory = self._device.memory
        return {
            "name": self._device.name,
            "emulated": self._device.emulated,
            "memory_bytes": memory.limit,
            "peak_bytes": memory.peak,
        }

    @property
    def expert_tokens(self) -> list[list[int]]:
        """Tokens that each expert of each layer has computed."""
        counts: list[list[int]] = self._backend.expert_tokens.tolist()
        return counts

    @property
    def speculation(self) -> dict[str, Any] | None:
        """Drafts and what became of them, for a report; None where none were asked for."""
        if self._speculator is None:
            return None
        foresight = self._backend.foresight
        told = None if foresight is None else foresight.describe()
        return {**self._speculator.describe(), **(told or {})}

    def close(self) -> None:
        """Stop the lanes and the device. The checkpoint is the caller's to close."""
        self._backend.close()
        if self._speculator is not None:
            self._speculator.close()
        if self._device is not None:
            self._device.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _sequences(self, request: Request) -> list[Sequence]:
        """The sequences of a request that have something to do, one for each choice.

        Choices that ended in an earlier run wait for the others as if they had ended in this one.
        """
        sequences = [self._sequence(request, choice) for choice in range(request.params.n)]
        for earlier in request.resumed:
            if earlier.choice < len(sequences):
                sequences[earlier.choice].resume(earlier)
        if all(sequence.finish for sequence in sequences):  # then nothing would bring them out
            sequences[-1] = self._sequence(request, len(sequences) - 1)
        if ended := [sequence for sequence in sequences if sequence.finish]:
            self._ended[request.index] = ended
        return [sequence for sequence in sequences if not sequence.finish]

    def _sequence(self, request: Request, choice: int) -> Sequence:
        checker = StopChecker(
            request.params,
            eos_token_ids=self._eos,
            prompt_len=len(request.prompt_token_ids),
            max_model_len=self._max_model_len,
            open_stream=self._open_stream,
            decode=self._decode,
        )
        return Sequence(request, choice, checker)

    def _refused(self, admission: Admission) -> Iterator[RowError]:
        for error in admission.take_refused():
            self._ended.pop(error.index, None)
            yield error

    def _collect(self, sequence: Sequence) -> Iterator[Completion]:
        """Keep a sequence that ended until the other choices of its request are there."""
        request = sequence.request
        ended = self._ended.setdefault(request.index, [])
        ended.append(sequence)
        if len(ended) == request.params.n:
            del self._ended[request.index]
            choices = sorted((s.to_choice() for s in ended), key=lambda choice: choice.index)
            yield Completion(request=request, choices=tuple(choices))

    def _pass(self, active: list[Sequence]) -> list[Sequence]:
        """Compute one pass and sample; the sequences whose logits were not finite."""
        start = time.perf_counter()
        groups = self._segments(active)
        drafted = time.perf_counter()
        done = self._backend.compute([[segment for _, segment in group] for group in groups])
        if len(self.traced) < self._traced_passes:
            self.traced.append(done)
        due: dict[Sequence, list[int]] = {}
        prompt_tokens = 0
        for group, last_tokens in zip(groups, done.last_tokens, strict=True):
            for (sequence, segment), last in zip(group, last_tokens, strict=True):
                before, sequence.computed = sequence.remaining_prompt, segment.end
                prompt_tokens += before - sequence.remaining_prompt
                if sequence.remaining_prompt == 0:
                    due.setdefault(sequence, []).extend(range(last + 1 - segment.wanted, last + 1))
        broken = self._sample(due)
        for lane in done.timeline.lanes:
            busy = self.stats.lane_busy_s.get(lane, 0.0)
            self.stats.lane_busy_s[lane] = busy + done.timeline.busy_s(lane)
        end = time.perf_counter()
        if self._speculator is not None and not prompt_tokens:
            self._speculator.timed(done.num_tokens, end - drafted)
        self._count(end - start, prompt_tokens, done.num_tokens)
        return broken

    def _segments(self, active: list[Sequence]) -> list[list[tuple[Sequence, Segment]]]:
        """Per micro-batch, what each sequence computes; prompts share the pass's prefill budget.

        Who decodes always takes part; who is in the middle of its prompt comes before newcomers.
        """
        groups: dict[int, list[tuple[Sequence, Segment]]] = {}
        budget = self._policy.prefill_tokens
        self._drafts = self._draft(active)
        for sequence in sorted(active, key=lambda s: s.computed == 0):
            allowed = budget if sequence.remaining_prompt else 1
            if allowed == 0:
                continue
            drafts = self._drafts.get(sequence, NO_DRAFT).token_ids
            one_by_one = self._backend.one_by_one if drafts else self._resumes_one_by_one
            segments = sequence.segments(allowed, one_by_one=one_by_one, drafts=drafts)
            if sequence.remaining_prompt:
                budget -= segments[-1].end - sequence.computed
            self._kv.extend(sequence.blocks, segments[-1].end)
            group = groups.setdefault(sequence.micro_batch, [])
            group += [(sequence, segment) for segment in segments]
        return [groups[j] for j in sorted(groups)]

    def _draft(self, active: list[Sequence]) -> dict[Sequence, Draft]:
        """Drafts of the rows that decode in this pass."""
        if self._speculator is None:
            return {}
        decoding = [sequence for sequence in active if not sequence.remaining_prompt]
        waiting = sum(sequence.remaining_prompt for sequence in active)
        tokens = len(decoding) + min(waiting, self._policy.prefill_tokens)
        drafts = self._speculator.drafts(decoding, tokens=tokens,
                                         foresight=self._backend.foresight)  # fmt: skip
        return dict(zip(decoding, drafts, strict=True))

    def _sample(self, due: dict[Sequence, list[int]]) -> list[Sequence]:
        """Choose the next tokens of each sequence; returns those with logits that are not finite."""
        rows = [Due(sequence=sequence, tokens=tokens, before=len(sequence.generated),
                    draft=self._drafts.get(sequence, NO_DRAFT))
                for sequence, tokens in due.items()]  # fmt: skip
        broken = []
        for part in chunks(rows, MAX_LOGIT_ROWS):
            logits = self._backend.logits(torch.tensor([t for one in part for t in one.tokens]))
            broken += choose_tokens(logits, part)
            for one in part:
                self.stats.generated_tokens += len(one.pushed)
                if self._speculator is not None and one.sequence in self._drafts:
                    self._speculator.learn(one.sequence, one.draft, one.pushed)
                    take_back(one, self._kv)
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
