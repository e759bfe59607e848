"""Runs the engine on token ids, for tests: no files of rows, no tokenizer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from moebatch.data.requests import Completion, Request, RowError, SamplingParams
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import resolve_model
from moebatch.native.kernels import load_kernels
from moebatch.plan.policy import Policy
from moebatch.runtime.engine import Engine

POLICY = Policy(batch_size=8, micro_batch_size=3, kv_blocks=256, page_slots=2, prefill_tokens=64)


class NoText:
    """Stands in for a tokenizer: the text of a token is a letter."""

    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)


def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def request(index: int, prompt: Sequence[int], **params: Any) -> Request:
    defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return Request(
        index=index,
        id=f"row-{index}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{**defaults, **params}),
    )


@contextmanager
def open_engine(
    path: Path,
    policy: Policy,
    *,
    compute: Any = "float32",
    device: Any = None,
    speculator: Any = None,
    interrupted: Callable[[], bool] = lambda: False,
    profile: Any = None,
    log: Any = None,
    native: bool = True,
    quantization: Any = "none",
    **changes: Any,
) -> Iterator[Engine]:
    """A loaded engine under a policy, with some of its fields changed; with native kernels if asked
    for and there are any."""
    model = resolve_model(str(path))
    with (
        Checkpoint(path) as checkpoint,
        Engine(
            checkpoint,
            spec=model.spec,
            family=model.family,
            policy=replace(policy, **changes),
            open_stream=lambda skip: NoText(),
            decode=decode,
            eos_token_ids=model.eos_token_ids,
            max_model_len=model.spec.max_model_len,
            compute=compute,
            interrupted=interrupted,
            device=device,
            speculator=speculator,
            profile=profile,
            log=log,
            kernels=load_kernels(2) if native else None,
            quantization=quantization,
        ) as engine,
    ):
        engine.load(threads=2)
        yield engine


def run(
    path: Path, requests: Sequence[Request], policy: Policy = POLICY, **changes: Any
) -> list[Any]:
    """Outcomes in the order of the rows."""
    with open_engine(path, policy, **changes) as engine:
        return sorted(engine.run(requests), key=_index)


def plain(path: Path, requests: Sequence[Request], **changes: Any) -> list[Any]:
    """What others are compared with: as `run`, but once for all who ask the same of a model."""
    return list(_plain(path, tuple(requests), **changes))


@cache
def _plain(path: Path, requests: tuple[Request, ...], **changes: Any) -> list[Any]:
    return run(path, requests, **changes)


def cached_numbers(path: Path) -> int:
    """Numbers that one token has in the KV cache of a model."""
    with open_engine(path, POLICY, kv_blocks=8, batch_size=8) as engine:
        kv = engine._kv
        pools = [pool.numel() for layer in kv._layers for pool in layer]
        return sum(pools) // (kv.num_blocks * kv.block_tokens)


def _index(outcome: Completion | RowError) -> int:
    return outcome.request.index if isinstance(outcome, Completion) else outcome.index


def tokens(outcomes: Sequence[Any]) -> list[list[int]]:
    """Token ids of the first choice of each row."""
    return [list(outcome.choices[0].token_ids) for outcome in outcomes]
