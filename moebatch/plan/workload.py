"""What the planner needs to know of a data set: prompt lengths and how much is generated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moebatch.plan.definitions import definition

Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Lengths in tokens. `num_sequences` None: more than were looked at.

    `lengths` are (prompt, generated) of sequences that stand for the whole; empty: only means are
    known. `pairs_per_prompt` is the mean of s (s + 1) / 2, what prompt attention costs.
    """

    mean_prompt: float
    max_prompt: int
    mean_gen: float
    max_gen: int
    num_sequences: int | None
    lengths: Lengths = ()

    @classmethod
    def measure(cls, lengths: Sequence[tuple[int, int]], *, complete: bool) -> "WorkloadSpec":
        """From (prompt, generation) lengths of some sequences; `complete` if there are no others."""
        prompts, gens = [p for p, _ in lengths] or [1], [g for _, g in lengths] or [1]
        return cls(
            mean_prompt=sum(prompts) / len(prompts),
            max_prompt=max(prompts),
            mean_gen=sum(gens) / len(gens),
            max_gen=max(gens),
            num_sequences=len(lengths) if complete else None,
            lengths=tuple(lengths),
        )

    def of_size(self, num_sequences: int) -> "WorkloadSpec":
        """The same lengths, in a job of so many sequences."""
        return replace(self, num_sequences=num_sequences)

    @property
    def pairs_per_prompt(self) -> float:
        """Mean number of (query, visible key) pairs of a prompt."""
        if not self.lengths:
            return self.mean_prompt * (self.mean_prompt + 1) / 2
        return sum(p * (p + 1) / 2 for p, _ in self.lengths) / len(self.lengths)

    @property
    def mean_context(self) -> float:
        """Mean context of a decoding row: its prompt and half of what it generates."""
        return self.mean_prompt + self.mean_gen / 2


def named_workload(name: str, *, gen_len: int | None = None) -> WorkloadSpec:
    """A workload of MoE-Lightning's table 3, as long as one likes: the paper's mean and maximum.

    Raises: UsageError for an unknown name.
    """
    known = definition(name)
    return WorkloadSpec(
        mean_prompt=float(known.paper_mean),
        max_prompt=known.paper_max,
        mean_gen=float(gen_len or known.gen_len),
        max_gen=gen_len or known.gen_len,
        num_sequences=None,
    )
