"""Seconds of a whole job on the host: every pass that the engine will make, in numbers.

Follows the engine: longest prompts join first, who decodes always takes part, prompts share a pass's
prefill budget, places and KV blocks are free as soon as a sequence ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from moebatch.plan.host_time import HostTime, PassLoad
from moebatch.plan.policy import KV_BLOCK_TOKENS, Policy
from moebatch.plan.workload import WorkloadSpec

# Batches, and at least rows, that are followed one by one.
_FOLLOWED, _LEAST_ROWS = 4, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """Predicted passes and seconds; `parts` are those of HostPass, summed over passes."""

    passes: int
    prefill_s: float
    decode_s: float
    generated_tokens: float
    parts: dict[str, float]

    @property
    def total_s(self) -> float:
        """Prefill and decode, without loading."""
        return self.prefill_s + self.decode_s

    @property
    def throughput(self) -> float:
        """Generated tokens per second of prefill and decode."""
        return self.generated_tokens / self.total_s if self.total_s else 0.0


_PARTS = ("pre_attn", "cpu_attn", "post_attn", "ffn", "head", "fixed", "disk", "compute", "total")


def predict(time: HostTime, workload: WorkloadSpec, policy: Policy, *, attention_pages: int,
            expert_pages: int, tail: HostTime | None = None) -> JobTime:  # fmt: skip
    """The job's passes, each at the cost model's seconds; `tail` is that of the policy's tail.

    A long job is followed for a few batches; what lies between its start and its tail goes on at the
    rate of those in the middle. Rows whose number is not known are taken to be ten batches.
    """
    wanted = workload.num_sequences
    wanted = 10 * policy.batch_size if wanted is None else wanted

    def follow(rows: int) -> JobTime:
        lengths = _rows(workload, rows)
        return _follow(time, lengths, policy, (attention_pages, expert_pages), tail)

    followed = max(_FOLLOWED * policy.batch_size, _LEAST_ROWS)
    if wanted <= followed:
        return follow(wanted)
    long, short = follow(followed), follow(followed // 2)
    return _extended(long, short, (wanted - followed) / (followed - followed // 2))


def _follow(time: HostTime, lengths: np.ndarray, policy: Policy, pages: tuple[int, int],
            tail: HostTime | None) -> JobTime:  # fmt: skip
    loads = list(passes(lengths, policy))
    if not loads:
        return JobTime(passes=0, prefill_s=0, decode_s=0, generated_tokens=0, parts={})
    change = len(loads) if tail is None else _tail_begins(loads, policy.tail_rows)
    parts = _seconds(time, loads[:change], attention_pages=pages[0], expert_pages=pages[1])
    if tail is not None:
        late = _seconds(tail, loads[change:], attention_pages=pages[0],
                        expert_pages=policy.expert_slots)  # fmt: skip
        parts = {name: np.concatenate((parts[name], late[name])) for name in _PARTS}
    together = _stacked(loads)
    share = together.prompt_tokens / together.tokens
    return JobTime(
        passes=len(loads),
        prefill_s=float((parts["total"] * share).sum()),
        decode_s=float((parts["total"] * (1 - share)).sum()),
        generated_tokens=float(lengths[:, 1].sum()),
        parts={name: float(each.sum()) for name, each in parts.items()},
    )


def _tail_begins(loads: list[PassLoad], tail_rows: int) -> int:
    """The first pass of those at the end that only decode, no more than `tail_rows` rows."""
    change = len(loads)
    while change and not loads[change - 1].prompt_tokens and loads[change - 1].rows <= tail_rows:
        change -= 1
    return change


def _seconds(time: HostTime, loads: list[PassLoad], *, attention_pages: int,
             expert_pages: int) -> dict[str, np.ndarray]:  # fmt: skip
    """Each part's seconds, pass by pass."""
    if not loads:
        return {name: np.zeros(0) for name in _PARTS}
    costs = time.seconds(_stacked(loads), attention_pages=attention_pages,
                         expert_pages=expert_pages)  # fmt: skip
    return {name: np.broadcast_to(getattr(costs, name), len(loads)) for name in _PARTS}


def _extended(long: JobTime, short: JobTime, times: float) -> JobTime:
    """A long job and `times` more of what it has beyond a short one."""

    def more(a: float, b: float) -> float:
        return a + times * max(0.0, a - b)

    return JobTime(
        passes=round(more(long.passes, short.passes)),
        prefill_s=more(long.prefill_s, short.prefill_s),
        decode_s=more(long.decode_s, short.decode_s),
        generated_tokens=more(long.generated_tokens, short.generated_tokens),
        parts={name: more(value, short.parts[name]) for name, value in long.parts.items()},
    )


def _rows(workload: WorkloadSpec, wanted: int) -> np.ndarray:
    """(prompt, generated) of the rows that are followed."""
    known = workload.lengths or ((round(workload.mean_prompt), round(workload.mean_gen)),)
    return np.resize(np.array(known, dtype=np.int64), (wanted, 2))


def passes(lengths: np.ndarray, policy: Policy) -> Iterator[PassLoad]:
    """The passes of sequences [rows, (prompt, generated)] in the order of the file."""
    window = min(max(2 * policy.batch_size, 64), 4096)
    blocks = -(-lengths.sum(axis=1) // KV_BLOCK_TOKENS)
    waiting: list[int] = []
    next_row, free = 0, policy.kv_blocks
    left, done = lengths[:, 0].copy(), np.zeros(len(lengths), dtype=np.int64)
    active = np.zeros(0, dtype=np.int64)
    while True:
        joining: list[int] = []
        while len(active) + len(joining) < policy.batch_size:
            if not waiting:
                waiting = list(range(next_row, min(next_row + window, len(lengths))))
                waiting.sort(key=lambda row: int(lengths[row, 0]))  # the longest is the last
                next_row += len(waiting)
            at = len(waiting) - 1
            while at >= 0 and blocks[waiting[at]] > free:
                at -= 1
            if at < 0:
                break
            free -= int(blocks[waiting[at]])
            joining.append(waiting.pop(at))
        if joining:
            active = np.concatenate((active, np.array(joining, dtype=np.int64)))
        if not len(active):
            return
        load, ends = _one_pass(active, lengths, left, done, policy)
        yield load
        if len(ends):
            free += int(blocks[ends].sum())
            active = active[~np.isin(active, ends)]


def _one_pass(active: np.ndarray, lengths: np.ndarray, left: np.ndarray, done: np.ndarray,
              policy: Policy) -> tuple[PassLoad, np.ndarray]:  # fmt: skip
    """One pass of the active rows: what it carries, and who ends with it."""
    decoding = active[left[active] == 0]
    prompting = active[left[active] > 0]
    before = np.concatenate(([0], np.cumsum(left[prompting])[:-1]))
    taken = np.clip(policy.prefill_tokens - before, 0, left[prompting])
    prompting, taken = prompting[taken > 0], taken[taken > 0]
    context = lengths[decoding, 0] + done[decoding]
    seen = lengths[prompting, 0] - left[prompting] + taken
    left[prompting] -= taken
    sampled = np.concatenate((decoding, prompting[left[prompting] == 0]))
    done[sampled] += 1
    load = PassLoad(
        prompt_tokens=float(taken.sum()),
        prompts=float(len(prompting)),
        pairs=float((taken * seen - taken * (taken - 1) / 2).sum()),
        rows=float(len(decoding)),
        context=float(context.sum()),
        sampled=float(len(sampled)),
        micro_batches=float(min(policy.num_micro_batches, len(decoding) + len(prompting))),
    )
    return load, sampled[done[sampled] >= np.maximum(lengths[sampled, 1], 1)]


def _stacked(loads: list[PassLoad]) -> PassLoad:
    names = ("prompt_tokens", "prompts", "pairs", "rows", "context", "sampled", "micro_batches")
    return replace(
        loads[0], **{name: np.array([getattr(load, name) for load in loads]) for name in names}
    )
