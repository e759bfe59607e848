"""What the planner needs to know of a data set: prompt lengths and how much is generated."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Lengths in tokens. `num_sequences` None: more than were looked at."""

    mean_prompt: float
    max_prompt: int
    mean_gen: float
    max_gen: int
    num_sequences: int | None

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
        )
