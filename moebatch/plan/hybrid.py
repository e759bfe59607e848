"""Which experts of a layer the host computes, which cross the link, which the accelerator computes.

Before a layer runs, its three timelines are simulated: the host's processor, the accelerator, and
the link that brings experts to it. `by_rules` acts by HybriMoE's three priorities; `balanced` takes
the best of all splits in which the link brings the largest experts and the host takes the smallest,
and then tries single moves and exchanges, or all splits where they are few.
Source: HybriMoE (arXiv 2504.05897), section IV.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

# Who takes care of experts that are not in the cache: all are fetched, all are computed by the host,
# or the layer is simulated, by HybriMoE's rules or for the better split.
Misses = Literal["fetch", "host", "rules", "balanced"]
MISSES: tuple[Misses, ...] = ("fetch", "host", "rules", "balanced")

_TRIALS = 100  # changes that the search looks at; a few microseconds each
_FEW = 10  # so many experts, and all their splits take no longer than the search


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Seconds of one expert on each lane, by its tokens.

    `host_start_s` is what the host's first expert takes on top: its inputs come from the accelerator
    and its results go back.
    """

    device_expert_s: float
    device_token_s: float = 0.0
    host_expert_s: float
    host_token_s: float
    host_start_s: float = 0.0
    transfer_s: float

    def device_s(self, tokens: int) -> float:
        """Seconds on the accelerator."""
        return self.device_expert_s + self.device_token_s * tokens

    def host_s(self, tokens: int) -> float:
        """Seconds on the host, the start not counted."""
        return self.host_expert_s + self.host_token_s * tokens


def fitted_line(samples: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """(seconds of an expert, seconds of each token) by least squares; neither is negative.

    `samples`: pairs of tokens and seconds, of at least two different numbers of tokens.
    """
    tokens, seconds = (np.array(x, dtype=np.float64) for x in zip(*samples, strict=True))
    centred = tokens - tokens.mean()
    slope = max(0.0, float(centred @ seconds) / float(centred @ centred))
    constant = float(seconds.mean()) - slope * float(tokens.mean())
    if constant < 0.0:
        return 0.0, float(tokens @ seconds) / float(tokens @ tokens)
    return constant, slope


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """What one layer has to compute: `tokens` of each expert that has any.

    `cached` lie in accelerator memory; `arriving` are under way and will lie there in so many
    seconds; the link is free for others after `link_free_s`. `can_fetch`: how many it may bring.
    """

    tokens: Mapping[int, int]
    cached: frozenset[int] = frozenset()
    arriving: Mapping[int, float]
    link_free_s: float = 0.0
    can_fetch: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where each expert of a layer runs, in the order of each lane; `device` includes `fetch`."""

    host: tuple[int, ...]
    fetch: tuple[int, ...]
    device: tuple[int, ...]
    makespan_s: float


def layer_load(tokens: Mapping[int, int], cached: Iterable[int] = (), *,
               arriving: Mapping[int, float] | None = None, link_free_s: float = 0.0,
               can_fetch: int = 1 << 30) -> LayerLoad:  # fmt: skip
    """A LayerLoad of the experts that have tokens; others are left out."""
    active = {expert: count for expert, count in tokens.items() if count}
    coming = {e: s for e, s in (arriving or {}).items() if e in active}
    return LayerLoad(tokens=active, cached=frozenset(cached) & active.keys(), arriving=coming,
                     link_free_s=link_free_s, can_fetch=can_fetch)  # fmt: skip


def split_of(load: LayerLoad, host: Iterable[int], costs: ExpertCosts) -> Split:
    """The schedule in which the host computes just these experts.

    The link brings the largest first, the accelerator takes what is there in the order of arrival:
    for a given split no other order ends sooner (Johnson's rule for two machines in a row).
    """
    chosen = frozenset(host)
    largest = sorted(load.tokens, key=lambda e: (-load.tokens[e], e))
    ready = {e: 0.0 for e in largest if e in load.cached and e not in chosen}
    coming = {e: s for e, s in load.arriving.items() if e not in chosen}
    ready |= dict(sorted(coming.items(), key=lambda item: item[1]))
    free, fetch = load.link_free_s, []
    for expert in largest:
        if expert not in ready and expert not in chosen:
            free += costs.transfer_s
            ready[expert] = free
            fetch.append(expert)
    end = 0.0
    for expert, at in ready.items():
        end = max(end, at) + costs.device_s(load.tokens[expert])
    on_host = sorted(chosen, key=lambda e: (load.tokens[e], e))
    work = sum(costs.host_s(load.tokens[e]) for e in on_host)
    start = costs.host_start_s if on_host else 0.0
    return Split(host=tuple(on_host), fetch=tuple(fetch), device=tuple(ready),
                 makespan_s=max(end, start + work))  # fmt: skip


def by_rules(load: LayerLoad, costs: ExpertCosts) -> Split:
    """HybriMoE's rules: of the three lanes' next steps the one that would end first is taken.

    Accelerator: the cached expert with the most tokens. Host: the uncached expert with the fewest,
    or once there is none the cached one with the fewest. Link: the uncached expert with the most
    tokens, which then queues for the accelerator by its tokens.
    """
    by_tokens = sorted(load.tokens, key=lambda e: (load.tokens[e], e))
    here = [(load.tokens[e], e) for e in by_tokens if e in load.cached or e in load.arriving]
    away = [e for e in by_tokens if e not in load.cached and e not in load.arriving]
    ready = dict(load.arriving)
    host: list[int] = []
    device_t, host_t, link_t = 0.0, costs.host_start_s, load.link_free_s
    fetches = load.can_fetch
    while here or away:
        steps = []
        if here:
            count, expert = here[-1]
            begin = max(device_t, ready.get(expert, 0.0))
            steps.append((begin + costs.device_s(count), 0))
        candidate = away[0] if away else here[0][1]
        steps.append((host_t + costs.host_s(load.tokens[candidate]), 1))
        if away and fetches:
            steps.append((link_t + costs.transfer_s, 2))
        end, lane = min(steps)
        if lane == 0:
            device_t = end
            here.pop()
        elif lane == 1:
            host_t = end
            host.append(candidate)
            away, here = (away[1:], here) if away else (away, here[1:])
        else:
            link_t, fetches = end, fetches - 1
            ready[away[-1]] = end
            insort(here, (load.tokens[away[-1]], away.pop()))
    return split_of(load, host, costs)


def balanced(load: LayerLoad, costs: ExpertCosts) -> Split:
    """The best split by thresholds, improved by single changes; of all splits where they are few.

    By thresholds: the host takes the smallest of the uncached experts and the smallest of those that
    are there. With a constant time per expert on the accelerator that is the optimum.
    """
    constant = costs.device_token_s == 0.0 and not load.arriving
    if len(load.tokens) <= _FEW and not constant:
        return split_of(load, _best_of_all(load, costs), costs)
    # Where a token costs the host less than the accelerator, the host takes the largest instead.
    sign = 1 if costs.host_token_s >= costs.device_token_s else -1
    here = sorted(load.tokens, key=lambda e: (sign * load.tokens[e], e))
    away = [e for e in reversed(here) if e not in load.cached and e not in load.arriving]
    here = [e for e in here if e in load.cached or e in load.arriving]
    fetched, stolen = _thresholds(load, away, here, costs)
    best = split_of(load, [*away[fetched:], *here[:stolen]], costs)
    return best if constant else _improved(load, best, costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSplits:
    """The best splits of `count` experts with equally many tokens when none, one, ... all are missing.

    Arrays [count + 1]: seconds, experts that the host computes, experts that the link brings.
    """

    makespan_s: np.ndarray
    host: np.ndarray
    fetched: np.ndarray


def equal_splits(count: int, costs: ExpertCosts, *, tokens: float, can_fetch: int,
                 one_processor: bool = False) -> EqualSplits:  # fmt: skip
    """What `balanced` finds for experts of so many tokens each, in closed form.

    `one_processor`: accelerator and host are the same cores, and compute one after the other.
    """
    missing = np.arange(count + 1)[:, None]
    on_host = np.arange(count + 1)[None, :]
    fetched = np.maximum(0, missing - on_host)
    device_s = costs.device_expert_s + costs.device_token_s * tokens
    host_s = costs.host_expert_s + costs.host_token_s * tokens
    host = on_host * host_s + costs.host_start_s * (on_host > 0)
    device = (count - on_host) * device_s
    # The accelerator waits for the first that comes, if nothing is there, or for the last.
    first = costs.transfer_s + fetched * device_s
    arrived = np.maximum(first, fetched * costs.transfer_s + device_s) * (fetched > 0)
    end = host + device if one_processor else np.maximum(host, device)
    end = np.where(fetched > can_fetch, np.inf, np.maximum(end, arrived))
    best = end.argmin(axis=1)
    rows = np.arange(count + 1)
    return EqualSplits(makespan_s=end[rows, best], host=best, fetched=fetched[rows, best])


def _thresholds(load: LayerLoad, away: Sequence[int], here: Sequence[int],
                costs: ExpertCosts) -> tuple[int, int]:  # fmt: skip
    """(experts fetched, the largest; experts taken by the host of those that are there, the smallest).

    What arrives counts as if it came when the last of it does.
    """
    fetchable = min(len(away), load.can_fetch)
    host_away = np.array([costs.host_s(load.tokens[e]) for e in away])
    device_away = np.array([costs.device_s(load.tokens[e]) for e in away[:fetchable]])
    host_here = np.array([costs.host_s(load.tokens[e]) for e in here])
    device_here = np.array([costs.device_s(load.tokens[e]) for e in here])
    left = np.append(0.0, np.cumsum(host_away[::-1]))[::-1][: fetchable + 1]
    taken = np.append(0.0, np.cumsum(host_here))
    host = left[:, None] + taken
    host[host > 0] += costs.host_start_s
    kept = np.append(0.0, np.cumsum(device_here[::-1]))[::-1]
    fetched = np.append(0.0, np.cumsum(device_away))
    # After f fetches the accelerator ends no sooner than any arrival and what comes from it on.
    arrival = load.link_free_s + costs.transfer_s * np.arange(1, fetchable + 1)
    waits = np.maximum.accumulate(arrival - fetched[:-1])
    ends = np.append(0.0, waits + fetched[1:])
    device = np.maximum(fetched[:, None] + kept, ends[:, None])
    best = np.unravel_index(int(np.argmin(np.maximum(host, device))), host.shape)
    return int(best[0]), int(best[1])


def _improved(load: LayerLoad, split: Split, costs: ExpertCosts) -> Split:
    """Local search: an expert to the other side, or two exchanged, as long as it helps."""
    makespan_of = _evaluator(load, costs)
    host, best = frozenset(split.host), split.makespan_s
    trials = _TRIALS
    while trials > 0:
        for moved in _changes(load, host):
            trials -= 1
            if (found := makespan_of(host ^ moved)) < best:
                host, best = host ^ moved, found
                break
            if trials == 0:
                break
        else:
            break
    return split_of(load, host, costs)


def _changes(load: LayerLoad, host: frozenset[int]) -> Iterator[frozenset[int]]:
    """Sets of experts that change sides; the smallest first, they change least."""
    by_tokens = sorted(load.tokens, key=lambda e: (load.tokens[e], e))
    yield from (frozenset((e,)) for e in by_tokens)
    here = [e for e in by_tokens if e in host]
    there = [e for e in by_tokens if e not in host]
    yield from (frozenset(pair) for pair in product(reversed(here), reversed(there)))


def _best_of_all(load: LayerLoad, costs: ExpertCosts) -> frozenset[int]:
    """The host's experts in the best of all splits: `_evaluator` on every one of them at once."""
    items = _in_order(load, costs)
    number = np.arange(1 << len(items))
    work, end = np.zeros(len(number)), np.zeros(len(number))
    link, fetches = np.full(len(number), load.link_free_s), np.zeros(len(number))
    for k, (_, ready, device_s, host_s) in enumerate(items):
        on_host = (number >> k & 1).astype(bool)
        at: float | np.ndarray = 0.0 if ready is None else ready
        if ready is None:
            link = link + costs.transfer_s * ~on_host
            fetches = fetches + ~on_host
            at = link
        end = np.where(on_host, end, np.maximum(end, at) + device_s)
        work = work + on_host * host_s
    work[1:] += costs.host_start_s
    makespan = np.where(fetches > load.can_fetch, np.inf, np.maximum(work, end))
    best = int(np.argmin(makespan))
    return frozenset(item[0] for k, item in enumerate(items) if best >> k & 1)


_Item = tuple[int, float | None, float, float]  # expert, ready, seconds on device and host


def _in_order(load: LayerLoad, costs: ExpertCosts) -> list[_Item]:
    """The experts in the order of the accelerator's lane; ready None: they would be fetched."""
    items: list[_Item] = []
    for e in sorted(load.tokens, key=lambda e: (-load.tokens[e], e)):
        ready = 0.0 if e in load.cached else load.arriving.get(e)
        items.append((e, ready, costs.device_s(load.tokens[e]), costs.host_s(load.tokens[e])))
    items.sort(key=lambda item: float("inf") if item[1] is None else item[1])
    return items


def _evaluator(load: LayerLoad, costs: ExpertCosts) -> Callable[[frozenset[int]], float]:
    """The makespan of `split_of` by the host's set, infinity where the link may not bring so many."""
    items = _in_order(load, costs)

    def makespan(host: frozenset[int]) -> float:
        work, end, link, fetches = 0.0, 0.0, load.link_free_s, 0
        for expert, ready, device_s, host_s in items:
            if expert in host:
                work += host_s
                continue
            at = ready
            if at is None:
                link += costs.transfer_s
                at, fetches = link, fetches + 1
            end = (end if end > at else at) + device_s
        if fetches > load.can_fetch:
            return float("inf")
        return max(end, work + costs.host_start_s if host else 0.0)

    return makespan
