"""What happened when: one type for measured time now and for predicted time later."""

from dataclasses import dataclass

from moebatch.plan.schedule import Lane, Task


@dataclass(frozen=True, slots=True)
class Span:
    """One task's run on its lane, in seconds of one clock."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of one pass, in the order in which they ended."""

    spans: tuple[Span, ...]
    start_s: float
    end_s: float

    @property
    def makespan_s(self) -> float:
        """From the launch of the pass until its last task on the caller's lane ended."""
        return self.end_s - self.start_s

    def busy_s(self, lane: Lane) -> float:
        """Seconds in which the lane worked."""
        return sum(span.end_s - span.start_s for span in self.spans if span.task.lane is lane)
