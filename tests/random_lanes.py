"""Runs passes on in-order lanes in an order that a random generator chooses, and watches them."""

from collections import deque

from moebatch.plan.schedule import PAGE_OPS, Lane


class RandomLanes:
    """A lane begins its next task when all that the task needs has ended; which lane moves is random.

    So every delay of every lane is possible. A pass is launched when all but the page traffic of the
    one before has ended, as in the executor. Subclasses watch `start` and `end`.
    """

    def __init__(self, passes, rng):
        self.rng, self.passes = rng, passes
        self.done = [set() for _ in passes]
        self.queues = {lane: deque() for lane in Lane}
        self.running = dict.fromkeys(Lane)
        self.launched = 0
        # some lanes are far slower than others, so that long delays are likely
        self.pace = {lane: rng.choice([1.0, 0.3, 0.01]) for lane in Lane}

    def run(self):
        """Until all is done; AssertionError at a deadlock."""
        while True:
            while self.launched < len(self.passes) and self._may_launch():
                for task in self.passes[self.launched]:
                    self.queues[task.lane].append((self.launched, task))
                self.launched += 1
            movable = [lane for lane in Lane if self.running[lane] or self._can_start(lane)]
            if not movable:
                break
            lane = self.rng.choices(movable, [self.pace[lane] for lane in movable])[0]
            if self.running[lane]:
                k, task = self.running[lane]
                self.running[lane] = None
                self.done[k].add(task.key)
                self.end(task)
            else:
                self.running[lane] = self.queues[lane].popleft()
                self.start(self.running[lane][1])
        assert self.launched == len(self.passes), "deadlock"
        assert not any(self.queues.values()), "deadlock"

    def _may_launch(self):
        if not self.launched:
            return True
        done = self.done[self.launched - 1]
        return all(t.key in done for t in self.passes[self.launched - 1] if t.op not in PAGE_OPS)

    def _can_start(self, lane):
        if not self.queues[lane]:
            return False
        k, task = self.queues[lane][0]
        before = self.done[k - 1] if k else set()
        return self.done[k].issuperset(task.deps) and before.issuperset(task.carried)

    def start(self, task):
        """A task begins."""

    def end(self, task):
        """A task ended."""
