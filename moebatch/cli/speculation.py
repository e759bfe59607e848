"""`--speculate`: where drafts come from, how many there may be, and what memory they take."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from moebatch.cli.asked import ResourceOptions
from moebatch.cli.planning import with_actual_dtype
from moebatch.cli.this_machine import this_machine
from moebatch.data.tokenizer import Tokenizer, load_tokenizer
from moebatch.errors import UsageError
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import LocalModel, resolve_model
from moebatch.plan.device_fit import DevicePlan
from moebatch.plan.draft_time import pass_seconds, unknown_seconds
from moebatch.plan.memory import LOADERS
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.optimizer import Plan, memory_of
from moebatch.plan.policy import KV_BLOCK_TOKENS, Policy
from moebatch.plan.speculation import MAX_DRAFT_TOKENS, PassSeconds
from moebatch.plan.workload import WorkloadSpec

if TYPE_CHECKING:
    from moebatch.runtime.arithmetic import Arithmetic
    from moebatch.runtime.drafts import DraftSource
    from moebatch.runtime.speculative import Speculator

_AUTO_TOKENS = 8  # at most, where the number follows from what pays
_DRAFT_ROWS = 32  # rows that a draft model has room for: with more, drafts hardly ever pay
_DRAFT_PREFILL = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What was asked for: `source` off, ngram or draft; `tokens` None: as many as pay."""

    source: str = "off"
    model: LocalModel | None = None
    tokens: int | None = None

    @property
    def most(self) -> int:
        """Drafts that a row may bring into a pass."""
        return 0 if self.source == "off" else self.tokens or _AUTO_TOKENS

    def reserved(self, resources: ResourceOptions) -> ResourceOptions:
        """The resources, with room for drafts in the policy."""
        overrides = replace(resources.overrides, draft_tokens=self.most)
        return replace(resources, overrides=overrides)

    def check(self, target: LocalModel) -> None:
        """Raises: UsageError when the draft model's tokens are others than the target's."""
        if self.model is not None:
            check_vocabulary(target, self.model)

    def prepared(self, workload: WorkloadSpec) -> "Drafting":
        """What drafting takes, before the target is planned.

        Raises: ModelError when the draft model's weights are not all there.
        """
        if self.model is None:
            return Drafting(asked=self, model=None, policy=None)
        with Checkpoint(self.model.path) as checkpoint:
            checkpoint.check(self.model.parts())
            model = with_actual_dtype(self.model, checkpoint)
        longest = workload.max_prompt + workload.max_gen
        rows = min(_DRAFT_ROWS, workload.num_sequences or _DRAFT_ROWS)
        policy = Policy(
            batch_size=rows,
            micro_batch_size=rows,
            prefill_tokens=_DRAFT_PREFILL,
            kv_blocks=rows * ceil(longest / KV_BLOCK_TOKENS),
            page_slots=1,
            kv_dtype=model.spec.weight_dtype,
            draft_tokens=self.most,  # for rings, from which drafts are taken back
        )
        return Drafting(asked=self, model=model, policy=policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A draft model, if there is one, and the policy that it runs under."""

    asked: Speculation
    model: LocalModel | None
    policy: Policy | None

    @property
    def memory_bytes(self) -> int:
        """Host memory of the draft model: weights, cache and what a pass of it takes."""
        if self.model is None or self.policy is None:
            return 0
        total: int = memory_of(self.model.spec, self.policy, base_bytes=0).total
        return int(total)

    def open(self, stack: ExitStack, target: ModelSpec, workload: WorkloadSpec,
             plan: Plan | DevicePlan, how: "Arithmetic") -> "Speculator | None":  # fmt: skip
        """The speculator, its draft model loaded; `stack` closes the model's files."""
        from moebatch.runtime.drafts import NgramSource
        from moebatch.runtime.speculative import Speculator

        if self.asked.source == "off":
            return None
        source: DraftSource = NgramSource()
        if self.model is not None and self.policy is not None:
            source = _load(stack, self.model, self.policy, target.vocab_size, how)
        if self.asked.tokens is not None:
            return Speculator(source, most=self.asked.most)
        seconds: PassSeconds = unknown_seconds
        if isinstance(plan, Plan):
            seconds = pass_seconds(target, workload, plan.policy, compute=how.compute, job=plan.job,
                                   machine=this_machine(threads=how.threads))  # fmt: skip
        return Speculator(source, most=self.asked.most, seconds=seconds)


def _load(stack: ExitStack, model: LocalModel, policy: Policy, vocab_size: int,
          how: "Arithmetic") -> "DraftSource":  # fmt: skip
    from moebatch.runtime.draft_model import ModelSource
    from moebatch.runtime.engine import compute_type

    source = ModelSource(
        stack.enter_context(Checkpoint(model.path)),
        spec=model.spec,
        family=model.family,
        policy=policy,
        compute=compute_type("auto", model.spec.weight_dtype),
        kernels=how.kernels,
        vocab_size=vocab_size,
    )
    source.load(threads=min(how.threads, LOADERS))
    return source


def asked_for(source: str | None, *, draft_model: str | None, draft_tokens: str,
              cache_dir: Path | None, offline: bool) -> Speculation:  # fmt: skip
    """The options, checked; a draft model alone means that it drafts.

    Raises: UsageError for options that contradict each other; ModelError for a model that is none.
    """
    source = source or ("off" if draft_model is None else "draft")
    if source not in ("off", "ngram", "draft"):
        raise UsageError(f"--speculate {source} does not exist", hint="one of: off, ngram, draft")
    if source == "draft" and draft_model is None:
        raise UsageError("--speculate draft needs a model", hint="name it: --draft-model MODEL")
    if source != "draft" and draft_model is not None:
        raise UsageError(f"--speculate {source} and --draft-model contradict each other",
                         hint="leave one of them away")  # fmt: skip
    if source == "off" and draft_tokens != "auto":
        raise UsageError("--draft-tokens needs drafts", hint="add --speculate ngram")
    model = None
    if draft_model is not None:
        model = resolve_model(draft_model, cache_dir=cache_dir, offline=offline)
    return Speculation(source=source, model=model, tokens=_count(draft_tokens))


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    if text.isdecimal() and 1 <= int(text) <= MAX_DRAFT_TOKENS:
        return int(text)
    raise UsageError(f"--draft-tokens {text} is neither auto nor 1 to {MAX_DRAFT_TOKENS}")


def check_vocabulary(target: LocalModel, draft: LocalModel) -> None:
    """Raises: UsageError when a token of the draft model means something else to the target."""
    ours, others = load_tokenizer(target.path), load_tokenizer(draft.path)
    if ours.fingerprint == others.fingerprint or _tokens(ours) == _tokens(others):
        return
    raise UsageError(
        f"{draft.name} has other tokens than {target.name}: it cannot draft for it",
        hint="name a draft model of the same family and tokenizer, or use --speculate ngram",
    )


def _tokens(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
