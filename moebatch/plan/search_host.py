"""Exhaustive search for machines without an accelerator: batch size, resident pages, prefill size.

Every combination of the grid is evaluated at once, as arrays; what memory a policy leaves becomes
KV blocks. Source of the objective: MoE-Lightning (arXiv 2411.11217), section 3.3, on two tiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from moebatch.errors import NoFeasiblePolicy
from moebatch.plan.host_time import HostTime, PassLoad
from moebatch.plan.machine import MachineSpec, Numbers
from moebatch.plan.memory import (
    Amount,
    MemoryPlan,
    gather_block_bytes,
    host_memory,
    in_bytes,
    kv_block_bytes,
)
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import KV_BLOCK_TOKENS, Overrides, Policy
from moebatch.plan.search_accelerator import batch_sizes, settings_of
from moebatch.plan.workload import WorkloadSpec
from moebatch.units import format_bytes

_PREFILL_CHOICES = (16384, 8192, 4096, 2048, 1024, 512)  # of equals the first: larger products
_MAX_BATCH = 4096
_MICRO_BATCH = 64
_PAGE_LEVELS = 64
_UNEVEN = 1.15  # the fullest micro-batch over the mean


@dataclass(frozen=True, slots=True)
class Candidates:
    """The grid as flat arrays of equal length."""

    batch: Numbers
    prefill_tokens: Numbers
    attention_pages: Numbers
    expert_pages: Numbers


class HostModel:
    """Memory and throughput of one model and one workload on one host."""

    def __init__(self, spec: ModelSpec, workload: WorkloadSpec, machine: MachineSpec, *,
                 compute: str, kv_dtype: str, base_bytes: int,
                 draft_tokens: int = 0) -> None:  # fmt: skip
        """`compute` is the data type of the products, `draft_tokens` the most drafts per row."""
        self.spec, self._workload, self._kv_dtype = spec, workload, kv_dtype
        self._base, self._native = base_bytes, machine.native
        self._draft_tokens = draft_tokens
        self.time = HostTime(spec, machine, compute=compute, kv_dtype=kv_dtype)

    def kv_blocks(self, batch: Amount) -> Amount:
        """Enough for the batch at its average full length, and for the longest sequence alone."""
        longest = ceil((self._workload.max_prompt + self._workload.max_gen) / KV_BLOCK_TOKENS)
        return np.maximum(np.ceil(batch * _mean_blocks(self._workload)), longest)

    def page_slots(self, attention_pages: Amount, expert_pages: Amount) -> Amount:
        """Slots of the page buffer: at least four, or half of a layer's streamed pages."""
        streamed = (
            self.spec.num_layers + self.spec.num_expert_pages - attention_pages - expert_pages
        )
        half = np.ceil(streamed / self.spec.num_layers / 2)
        return np.maximum(1, np.minimum(streamed, np.maximum(4, half)))

    def memory(self, at: Candidates, *, kv_blocks: Amount | None = None) -> MemoryPlan:
        """Peak bytes; None: with the fewest KV blocks that do."""
        return host_memory(
            self.spec,
            batch_size=at.batch,
            **pass_sizes(self._workload, at.batch, at.prefill_tokens),
            kv_blocks=self.kv_blocks(at.batch) if kv_blocks is None else kv_blocks,
            attention_pages=at.attention_pages,
            expert_pages=at.expert_pages,
            page_slots=self.page_slots(at.attention_pages, at.expert_pages),
            kv_dtype=self._kv_dtype,
            base_bytes=self._base,
            draft_tokens=self._draft_tokens,
            native=self._native,
        )

    def throughput(self, at: Candidates) -> Amount:
        """Generated tokens per second of the whole job.

        The first batch is prefilled; from then on every pass carries a full batch of decode rows and
        the prompts that replace who has finished.
        """
        work = self._workload
        rows = work.num_sequences
        batch = at.batch if rows is None else np.minimum(at.batch, max(1, rows))
        waves = np.inf if rows is None else max(1, rows) / batch
        gen, prompt = max(1.0, work.mean_gen), max(1.0, work.mean_prompt)
        joining = (
            batch / gen * (1.0 - 1.0 / waves)
        )  # rows that join in one pass of the steady state
        steady = self._pass(at, batch, np.minimum(joining * prompt, at.prefill_tokens))
        stretch = np.maximum(1.0, joining * prompt / at.prefill_tokens)
        passes = np.maximum(1.0, batch * prompt / at.prefill_tokens)
        first = self._pass(at, 0.0 * batch, batch * prompt / passes)
        # Per batch: its decode passes, and its share of the first prefill.
        return batch * gen / (passes * first / waves + gen * stretch * steady)

    def _pass(self, at: Candidates, rows: Amount, prompt_tokens: Amount) -> Amount:
        work = self._workload
        prompts = prompt_tokens / max(1.0, work.mean_prompt)
        micro = np.maximum(1.0, np.ceil(np.maximum(rows, prompts) / _MICRO_BATCH))
        load = PassLoad(
            prompt_tokens=prompt_tokens,
            prompts=prompts,
            pairs=prompts * work.pairs_per_prompt,
            rows=rows,
            context=rows * work.mean_context,
            sampled=rows + prompts,
            micro_batches=micro,
        )
        costs = self.time.seconds(
            load, attention_pages=at.attention_pages, expert_pages=at.expert_pages
        )
        return costs.total

    def policy(
        self, at: Candidates, k: int, *, spare_bytes: float, micro_batch: int | None
    ) -> Policy:
        """Candidate k as a policy; spare memory becomes KV blocks, as far as rows could need them."""
        work, spec = self._workload, self.spec
        batch = int(at.batch[k])
        blocks = int(self.kv_blocks(batch))
        # A block may also add to what one attention call brings together.
        each = kv_block_bytes(spec, self._kv_dtype) + gather_block_bytes(spec)
        extra = int(max(0.0, spare_bytes) // each)
        kept = at.attention_pages[k] + at.expert_pages[k]
        return Policy(
            batch_size=batch,
            micro_batch_size=min(micro_batch or _MICRO_BATCH, batch),
            weights_resident=float(kept / (spec.num_layers + spec.num_expert_pages)),
            prefill_tokens=int(at.prefill_tokens[k]),
            page_slots=int(self.page_slots(at.attention_pages[k], at.expert_pages[k])),
            kv_blocks=max(blocks, min(blocks + extra, most_blocks(work, batch))),
            kv_dtype=self._kv_dtype,
            draft_tokens=self._draft_tokens,
        )


def candidates(spec: ModelSpec, workload: WorkloadSpec, fixed: Overrides) -> Candidates:
    """The grid: all combinations, most resident weights and largest prefill first."""
    total = spec.num_layers + spec.num_expert_pages
    levels = min(total, _PAGE_LEVELS)
    pages = sorted({round(total * k / levels) for k in range(levels + 1)}, reverse=True)
    if fixed.weights_resident is not None:
        pages = [round(fixed.weights_resident * total)]
    rows = _MAX_BATCH if workload.num_sequences is None else max(1, workload.num_sequences)
    batches = batch_sizes(min(rows, _MAX_BATCH))
    if fixed.batch_size is not None:
        batches = (min(fixed.batch_size, rows),)
    kept, prefill, batch = (
        axis.ravel().astype(float)
        for axis in np.meshgrid(pages, _prefill_choices(workload, fixed), batches, indexing="ij")
    )
    attention, experts = settings_of(spec, kept)
    return Candidates(batch, prefill, attention, experts)


def search_host(model: HostModel, at: Candidates, *, memory_bytes: int,
                micro_batch: int | None = None) -> list[tuple[Policy, MemoryPlan, float]]:  # fmt: skip
    """The best policy for each number of resident pages that fits, best first, with its throughput.

    Raises: NoFeasiblePolicy, with the smallest budget that would do.
    """
    total = model.memory(at).total
    fits = total <= memory_bytes
    if not fits.any():
        raise infeasible(float(total.min()), memory_bytes)
    rate = np.where(fits, model.throughput(at), -np.inf)
    best = []
    for pages in np.unique(at.attention_pages + at.expert_pages):
        mine = np.where(at.attention_pages + at.expert_pages == pages, rate, -np.inf)
        k = int(np.argmax(mine))
        if np.isfinite(mine[k]):
            best.append((float(mine[k]), k))
    found = []
    # Of equals the one with most weights in memory, which is the last.
    for speed, k in sorted(best, key=lambda one: (-one[0], -one[1]))[:6]:
        spare = memory_bytes - float(total[k])
        policy = model.policy(at, k, spare_bytes=spare, micro_batch=micro_batch)
        one = Candidates(
            *(
                np.array([x[k]])
                for x in (at.batch, at.prefill_tokens, at.attention_pages, at.expert_pages)
            )
        )
        plan = model.memory(one, kv_blocks=float(policy.kv_blocks))
        found.append((policy, _plain(plan), speed))
    return found


def _plain(plan: MemoryPlan) -> MemoryPlan:
    """The plan of a single candidate, its arrays of one as whole numbers."""
    first = {name: np.ravel(getattr(plan, name))[0] for name in MemoryPlan.__slots__}
    return in_bytes(MemoryPlan(**first))


def infeasible(least_bytes: float, budget: int) -> NoFeasiblePolicy:
    """The refusal, with the smallest change that would make it fit."""
    return NoFeasiblePolicy(
        f"the smallest policy for this model needs {format_bytes(ceil(least_bytes))} of memory, "
        f"the budget is {format_bytes(budget)}",
        hint=f"raise --memory to at least {ceil(least_bytes / 2**20)}MiB, or use a smaller model",
    )


def _prefill_choices(workload: WorkloadSpec, fixed: Overrides) -> Sequence[int]:
    """Prompt tokens of a pass: no more than the power of two above all prompts together."""
    if fixed.prefill_tokens is not None:
        return [fixed.prefill_tokens]
    if workload.num_sequences is None:
        return _PREFILL_CHOICES
    total = workload.num_sequences * workload.mean_prompt
    return [n for n in _PREFILL_CHOICES if n < 2 * total] or _PREFILL_CHOICES[-1:]


def most_blocks(workload: WorkloadSpec, batch: int) -> int:
    """Blocks that a batch can come to need: of its longest rows, or of a batch drawn from the lengths
    that were seen, with four standard deviations to spare."""
    longest = ceil((workload.max_prompt + workload.max_gen) / KV_BLOCK_TOKENS)
    if not workload.lengths:
        return batch * longest
    blocks = np.ceil(np.array(workload.lengths).sum(axis=1) / KV_BLOCK_TOKENS)
    if workload.num_sequences == len(blocks):
        return int(np.sort(blocks)[::-1][:batch].sum())
    drawn = batch * float(blocks.mean()) + 4 * float(blocks.std()) * batch**0.5
    return int(min(batch * longest, ceil(drawn) + longest))


def pass_sizes(workload: WorkloadSpec, batch: Amount, prefill_tokens: Amount,
               micro_batch: int = _MICRO_BATCH) -> dict[str, Amount]:  # fmt: skip
    """Tokens of the largest pass and of its largest micro-batch, for `host_memory`.

    Micro-batches are filled evenly (Algorithm 2), to within the longest prompt.
    """
    prompts = np.minimum(prefill_tokens, most_prompt_tokens(workload, batch))
    calls = np.ceil(batch / micro_batch)
    even = prompts / calls * _UNEVEN + workload.max_prompt
    micro = np.minimum(prompts, even) + np.minimum(batch, micro_batch)
    return {"pass_tokens": prompts + batch, "micro_tokens": micro}


def most_prompt_tokens(workload: WorkloadSpec, batch: Amount) -> Amount:
    """Prompt tokens that a batch can come to hold, as `most_blocks` counts blocks."""
    if not workload.lengths:
        return batch * workload.max_prompt
    prompts = np.array([prompt for prompt, _ in workload.lengths], dtype=float)
    drawn = batch * prompts.mean() + 4 * prompts.std() * np.sqrt(batch) + workload.max_prompt
    if workload.num_sequences == len(prompts):
        drawn = np.minimum(drawn, prompts.sum())
    return np.minimum(batch * workload.max_prompt, drawn)


def _mean_blocks(workload: WorkloadSpec) -> float:
    """Blocks of an average sequence; half a block is lost at its end."""
    return (workload.mean_prompt + workload.mean_gen) / KV_BLOCK_TOKENS + 0.5
