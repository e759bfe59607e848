"""What was asked about the small-batch regime, which experts a model is known to use, and its trace."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebatch.cli.options import check_choices
from moebatch.cli.this_machine import cache_directory
from moebatch.data import durable
from moebatch.errors import ModelError, UsageError
from moebatch.model.identity import weights_hash
from moebatch.model.resolve import LocalModel
from moebatch.plan.cost import expert_page_bytes
from moebatch.plan.eviction import EVICTIONS, EvictionName, shares_of
from moebatch.plan.machine import Numbers
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.policy import Overrides, Regime
from moebatch.units import parse_bytes

if TYPE_CHECKING:
    from moebatch.runtime.routing_log import RoutingLog

_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeOptions:
    """None: the planner chooses. `expert_cache` is a number of experts, or a size in bytes."""

    regime: Regime | None = None
    expert_cache: tuple[int, bool] | None = None  # (number, whether it counts bytes)
    eviction: EvictionName | None = None
    prefetch_layers: int | None = None
    routing_trace: Path | None = None

    def overrides(self, spec: ModelSpec, fixed: Overrides) -> Overrides:
        """What else the user fixed, with this."""
        slots = None
        if self.expert_cache is not None:
            number, is_bytes = self.expert_cache
            slots = number // expert_page_bytes(spec) if is_bytes else number
        return replace(fixed, regime=self.regime, expert_slots=slots, eviction=self.eviction,
                       prefetch_layers=self.prefetch_layers)  # fmt: skip

    @property
    def given(self) -> str | None:
        """The first option that is about the cache, for who cannot take it."""
        options = {"--regime cache": self.regime == "cache", "--expert-cache": self.expert_cache,
                   "--eviction": self.eviction, "--prefetch-layers": self.prefetch_layers,
                   "--routing-trace": self.routing_trace}  # fmt: skip
        return next((name for name, value in options.items() if value not in (None, False)), None)


def regime_options(*, regime: str, expert_cache: str, eviction: str,
                   prefetch_layers: int | None, weights_resident: str,
                   routing_trace: Path | None = None) -> RegimeOptions:  # fmt: skip
    """The options, checked.

    Raises: UsageError for values out of range, and for those that contradict each other.
    """
    check_choices(regime=regime, eviction=eviction)
    if prefetch_layers is not None and not 0 <= prefetch_layers <= _MOST_LAYERS:
        raise UsageError(f"--prefetch-layers must be from 0 to {_MOST_LAYERS}")
    known: dict[str, EvictionName] = {name: name for name in EVICTIONS}
    asked = RegimeOptions(
        regime=None if regime == "auto" else "cache" if regime == "cache" else "stream",
        expert_cache=_cache_size(expert_cache),
        eviction=known.get(eviction),
        prefetch_layers=prefetch_layers,
        routing_trace=routing_trace,
    )
    about_cache = replace(asked, routing_trace=None).given
    if asked.regime == "stream" and about_cache:
        raise UsageError(f"{about_cache} has no meaning with --regime stream",
                         hint="leave one of them away")  # fmt: skip
    if asked.expert_cache is not None and weights_resident != "auto":
        raise UsageError("--expert-cache and --weights-resident contradict each other",
                         hint="give one of them")  # fmt: skip
    return asked


def _cache_size(text: str) -> tuple[int, bool] | None:
    """The number of --expert-cache: experts, or bytes where it has a unit."""
    if text == "auto":
        return None
    if text.isascii() and text.isdecimal():
        return int(text[:18]), False
    try:
        return parse_bytes(text), True
    except UsageError:
        raise UsageError(f"--expert-cache {text} is neither auto, a number of experts nor a size",
                         hint="write it like 96 or 2GiB") from None  # fmt: skip


def refuse_on_device(asked: RegimeOptions) -> None:
    """Raises: UsageError for options that have no effect where an accelerator computes."""
    if asked.routing_trace is not None:
        raise UsageError("--routing-trace is for machines without an accelerator",
                         hint="add --device cpu, or leave it away")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What a run knows of its model's routing, and where it records its own."""

    path: Path | None
    profile: list[list[int]] | None
    log: "RoutingLog | None"

    def learn(self, expert_tokens: Sequence[Sequence[int]]) -> None:
        """Remember which experts were used; what was known before weighs half. Never fails."""
        if self.path is None or not any(map(sum, expert_tokens)):
            return
        old = self.profile or [[0] * len(layer) for layer in expert_tokens]
        tokens = [
            [before // 2 + now for before, now in zip(*layers, strict=True)]
            for layers in zip(old, expert_tokens, strict=True)
        ]
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_whole(self.path, [json.dumps({"expert_tokens": tokens}).encode()])


@contextmanager
def routing_of(model: LocalModel, asked: RegimeOptions) -> Iterator[Routing]:
    """The model's profile, and the trace file that was asked for.

    Raises: UsageError when the trace cannot be written.
    """
    from moebatch.runtime.routing_log import RoutingLog

    path = profile_path(model) if model.spec.has_router else None
    log = None
    if asked.routing_trace is not None:
        if not model.spec.has_router:
            raise UsageError("--routing-trace: this model has no experts to route to")
        log = RoutingLog(asked.routing_trace, model.spec, model.name)
    try:
        yield Routing(path=path, profile=read_profile(path, model.spec), log=log)
    finally:
        if log is not None:
            log.close()


def profile_path(model: LocalModel) -> Path | None:
    """Where a model's profile is kept; None for a model without weights."""
    try:
        return cache_directory() / f"experts-{weights_hash(model.path)}.json"
    except ModelError:
        return None


def read_profile(path: Path | None, spec: ModelSpec) -> list[list[int]] | None:
    """Tokens [L, E] that a model's experts computed in earlier runs; None where nothing is known."""
    if path is None:
        return None
    try:
        tokens: Any = json.loads(path.read_text(encoding="utf-8"))["expert_tokens"]
        counts = [[int(n) for n in layer] for layer in tokens]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    fits = len(counts) == spec.num_layers and all(len(c) == spec.num_experts for c in counts)
    good = fits and all(0 <= n < 1 << 60 for layer in counts for n in layer)
    return counts if good else None


def known_shares(model: LocalModel) -> Numbers | None:
    """How a model's tokens spread over its experts [L, E], from earlier runs; None: not known."""
    profile = read_profile(profile_path(model), model.spec) if model.spec.has_router else None
    return None if profile is None else shares_of(profile)
