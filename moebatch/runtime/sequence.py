"""The state of one choice of one request while it is in flight."""

from dataclasses import replace

from moebatch.data.requests import Choice, Generated, Request, TokenLogprob
from moebatch.plan.policy import KV_BLOCK_TOKENS
from moebatch.runtime.batch import Segment
from moebatch.runtime.kv_cache import BlockTable, blocks_for
from moebatch.runtime.sampling import SamplingState, row_key
from moebatch.runtime.stopping import Finish, StopChecker


class Sequence:
    """Tokens so far, how many of them the KV cache holds, and when it is over.

    Invariant: computed < len(tokens) while it is in flight; equal only between sampling and finish.
    """

    def __init__(self, request: Request, choice: int, checker: StopChecker) -> None:
        """A sequence that has not been prefilled; `choice` counts the request's answers."""
        self.request, self.choice, self._checker = request, choice, checker
        self._row_key = row_key(request.id)
        params = request.params
        self._guessing = replace(params, logprobs=None)
        self._penalised = params.repetition_penalty != 1 or bool(
            params.presence_penalty or params.frequency_penalty
        )
        self.prompt = list(request.prompt_token_ids)
        self._prefill = self.prompt
        self.generated: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.computed = 0
        self.blocks = BlockTable()
        self.micro_batch = -1
        self.finish: Finish | None = None
        self.trusts_drafts = True  # until one may have made logits that are not finite

    @property
    def max_len(self) -> int:
        """Tokens that it may hold in the KV cache: the last token generated never enters it."""
        assert self.request.params.max_tokens is not None
        return len(self.prompt) + self.request.params.max_tokens - 1

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still generate."""
        assert self.request.params.max_tokens is not None
        return self.request.params.max_tokens - len(self.generated)

    @property
    def remaining_prompt(self) -> int:
        """Tokens to prefill that are not computed yet: the prompt, and what `resume` brought."""
        return max(0, len(self._prefill) - self.computed)

    @property
    def prompt_len(self) -> int:
        """For the batcher: tokens to prefill."""
        return len(self._prefill)

    @property
    def held_len(self) -> int:
        """For the batcher: tokens so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def gen_len(self) -> int:
        """For the batcher: tokens that may still enter the KV cache, in whole blocks."""
        return blocks_for(self.max_len) * KV_BLOCK_TOKENS - len(self._prefill)

    def resume(self, earlier: Generated) -> None:
        """Take the tokens of an earlier run, before anything is computed.

        They pass by the same checks as new ones, so everything that depends on them is as it was;
        the prefill then covers them too.
        """
        assert not self.generated and not self.computed
        for k, token_id in enumerate(earlier.token_ids):
            if self.finish is None:
                self.push(token_id, earlier.logprobs[k] if earlier.logprobs else None)
        self._prefill = self.prompt + self.generated

    def to_generated(self) -> Generated:
        """What is there so far; a view that the next token changes."""
        return Generated(choice=self.choice, token_ids=self.generated, logprobs=self.logprobs)

    def sampling_state(self) -> SamplingState:
        """What the choice of the next token depends on besides the logits."""
        return SamplingState(
            params=self.request.params,
            row_key=self._row_key,
            choice=self.choice,
            position=len(self.generated),
            prompt_token_ids=self.prompt,
            generated_token_ids=self._checker.token_ids,
            forbidden_token_ids=self._checker.forbidden_token_ids,
        )

    def guessing_state(self, guesses: list[int]) -> SamplingState:
        """The same for a draft, were its `guesses` right; no log-probabilities are wanted of it."""
        length = len(self.generated) + len(guesses)
        return replace(
            self.sampling_state(),
            params=self._guessing,
            position=length,
            generated_token_ids=[*self.generated, *guesses] if self._penalised else (),
            forbidden_token_ids=self._checker.forbidden_after(length),
        )

    def tokens_from(self, start: int) -> list[int]:
        """Prompt and answer so far, from position `start` on."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.generated[start - prompt :]
        return self.prompt[start:] + self.generated

    def segments(self, max_tokens: int, *, one_by_one: bool = True,
                 drafts: tuple[int, ...] = ()) -> list[Segment]:  # fmt: skip
        """What this sequence computes next, at most `max_tokens` tokens and the drafts, in order.

        Tokens that `resume` brought come one by one, though in one pass: they go through the
        arithmetic of decoding as they did when they were generated, so what follows is the same to
        the last bit wherever the kernels do not depend on the batch; and so do `drafts` behind the
        token that decodes. Not `one_by_one`: as one segment, like a prompt, for a backend that takes
        no more than one of a sequence.
        """
        start, end = self.computed, min(self.computed + max_tokens, len(self._prefill))
        if start >= len(self._prefill):
            ids = [self.generated[-1], *drafts]
            if not one_by_one:
                return [self._segment(ids, start, wanted=len(ids))]
            return [self._segment([token], start + k) for k, token in enumerate(ids)]
        if not one_by_one:
            return [self._segment(self._prefill[start:end], start)]
        split = min(end, max(start, len(self.prompt)))
        prompt = [self._segment(self.prompt[start:split], start)] if split > start else []
        return prompt + [self._segment(self._prefill[k : k + 1], k) for k in range(split, end)]

    def _segment(self, ids: list[int], start: int, wanted: int = 1) -> Segment:
        return Segment(token_ids=tuple(ids), start=start, blocks=self.blocks, max_len=self.max_len,
                       wanted=wanted)  # fmt: skip

    def push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Take a sampled token; `finish` is set when it was the last."""
        self.generated.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.finish = self._checker.push(token_id)

    def to_choice(self) -> Choice:
        """The answer; only once `finish` is set."""
        assert self.finish is not None
        return Choice(
            index=self.choice,
            token_ids=tuple(self.generated),
            text=self._checker.text(),
            finish_reason=self.finish.reason,
            stop_reason=self.finish.stop_reason,
            logprobs=tuple(self.logprobs) if self.request.params.logprobs is not None else None,
        )
