"""The state of one choice of one request while it is in flight."""

from moebatch.data.requests import Choice, Request, TokenLogprob
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
        self.prompt = list(request.prompt_token_ids)
        self.generated: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.computed = 0
        self.blocks = BlockTable()
        self.micro_batch = -1
        self.finish: Finish | None = None

    @property
    def max_len(self) -> int:
        """Tokens that it may hold in the KV cache: the last token generated never enters it."""
        assert self.request.params.max_tokens is not None
        return len(self.prompt) + self.request.params.max_tokens - 1

    @property
    def remaining_prompt(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(0, len(self.prompt) - self.computed)

    @property
    def prompt_len(self) -> int:
        """For the batcher: tokens of the prompt."""
        return len(self.prompt)

    @property
    def gen_len(self) -> int:
        """For the batcher: tokens that may still enter the KV cache, in whole blocks."""
        return blocks_for(self.max_len) * KV_BLOCK_TOKENS - len(self.prompt)

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

    def segment(self, max_tokens: int) -> Segment:
        """What this sequence computes next, at most `max_tokens` tokens."""
        if self.computed >= len(self.prompt):
            ids = self.generated[-1:]
        else:
            ids = self.prompt[self.computed : self.computed + max_tokens]
        return Segment(
            token_ids=tuple(ids), start=self.computed, blocks=self.blocks, max_len=self.max_len
        )

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
