"""Seconds of a pass with an accelerator in the cache regime, beside those of the same pass streaming.

Of the experts of a layer that have tokens some are in accelerator memory; the rest is split between
host and link as `hybrid` does it, all with equally many tokens. Nothing else of a layer overlaps:
attention needs the experts before it, and these need their routing.
Source: HybriMoE (arXiv 2504.05897), section IV; MoE-Lightning (arXiv 2411.11217), section 3.3.
"""

from dataclasses import dataclass
from math import comb

import numpy as np

from moebatch.plan import cost
from moebatch.plan.accelerator_time import AcceleratorModel, Resources, Setting
from moebatch.plan.cache_time import CacheTime
from moebatch.plan.hybrid import EqualSplits, ExpertCosts, equal_splits
from moebatch.plan.machine import MachineSpec, Numbers
from moebatch.plan.model_spec import ModelSpec

# Beside an accelerator PyTorch computes the host's experts; where the rates are those of the native
# kernels, it takes so many times as long: measured 2026-11-21, experts of 22 MB in bf16, two cores with
# AVX512-BF16, 1 to 64 tokens (2.3, 2.4, 1.9, 1.2 in bf16; 3.0, 5.3, 3.1, 1.9 in float32).
_BY_PYTORCH = 2.3


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPass:
    """Busy seconds of each resource in one pass, and those of the pass, in which most wait in turn."""

    busy: Resources
    total: float


class HybridTime:
    """The cost model of both regimes on one machine with an accelerator."""

    def __init__(self, spec: ModelSpec, machine: MachineSpec, *, model: AcceleratorModel,
                 experts: CacheTime, emulated: bool = False) -> None:  # fmt: skip
        """`model` knows all but the experts, `experts` how many of them are asked for and missing,
        and what the host takes for one. An `emulated` accelerator computes on the host's cores."""
        self._spec, self._model, self._experts, self._emulated = spec, model, experts, emulated
        self._link, self._link_back = machine.link, machine.link_back
        self._slower = _BY_PYTORCH if machine.native else 1.0
        self._sparse = spec.num_layers - len(spec.dense_layers)

    def streamed_decode(self, at: Setting) -> float:
        """A decode step that streams what is not resident."""
        return self._streamed(self._model.decode(at), self._model.decode_around(at), at.batch)

    def streamed_prefill(self, at: Setting) -> float:
        """A prefill pass that streams what is not resident."""
        tokens = at.prefill_batch * self._model.mean_prompt
        return self._streamed(self._model.prefill(at), self._model.prefill_around(at), tokens)

    def cached_decode(self, at: Setting, slots: int) -> HybridPass:
        """A decode step with so many experts on the accelerator; `at` says what of the rest is."""
        return self._cached(self._model.decode_around(at), at.batch, slots)

    def cached_prefill(self, at: Setting, slots: int) -> HybridPass:
        """A prefill pass with so many experts on the accelerator."""
        tokens = at.prefill_batch * self._model.mean_prompt
        return self._cached(self._model.prefill_around(at), tokens, slots)

    def costs(self, tokens: float, *, rows: float) -> ExpertCosts:
        """Seconds of an expert with so many tokens, of the `rows` of a pass, on each lane."""
        spec, host_s = self._spec, self._host_expert_s(tokens)
        there = cost.hidden_bytes(spec, rows) / self._link_back
        back = cost.hidden_bytes(spec, rows * spec.top_k) / self._link
        return ExpertCosts(
            device_expert_s=host_s if self._emulated else float(self._model.expert_s(tokens)),
            host_expert_s=host_s,
            host_token_s=0.0,
            host_start_s=float(there + back),
            transfer_s=cost.expert_page_bytes(spec) / self._link,
        )

    def _streamed(self, times: Resources, around: Resources, tokens: float) -> float:
        """Everything at once; what an emulated accelerator computes, the host's cores do."""
        if not self._emulated:
            return float(times.total)
        touched, each = self._touched(tokens)
        experts = self._sparse * touched * self._host_expert_s(each)
        computing = float(around.accelerator + around.host) + experts
        return max(computing, float(times.to_accelerator), float(times.to_host), float(times.disk))

    def _host_expert_s(self, tokens: float) -> float:
        return self._slower * float(self._experts.expert_s(tokens))

    def _touched(self, tokens: float) -> tuple[float, float]:
        """Experts of a layer that have tokens, and the tokens of each."""
        touched = float(self._experts.touched(tokens)) / max(1, self._sparse)
        return touched, tokens * self._spec.top_k / max(touched, 1e-9)

    def _cached(self, around: Resources, tokens: float, slots: int) -> HybridPass:
        touched, each = self._touched(tokens)
        missed = float(self._experts.misses(tokens, slots)) / max(1, self._sparse)
        costs = self.costs(each, rows=tokens)
        makespan, host, fetched = self._layer(touched, missed / max(touched, 1e-9), costs, slots)
        experts = Resources(
            accelerator=self._sparse * (touched - host) * costs.device_expert_s,
            host=self._sparse * host * costs.host_expert_s,
            to_accelerator=self._sparse * fetched * costs.transfer_s,
            to_host=0.0,
            disk=0.0,
        )
        total = float(around.in_turn) + self._sparse * makespan
        return HybridPass(busy=around.plus(experts), total=total)

    def _layer(self, touched: float, missing: float, costs: ExpertCosts,
               slots: int) -> tuple[float, float, float]:  # fmt: skip
        """Expected seconds of a layer's experts, those of the host, and those that are fetched.

        Each expert is `missing` with this chance. Their number is mixed from the whole ones around it.
        """
        least = int(touched)
        found = np.zeros(3)
        for count, share in ((least, 1.0 - (touched - least)), (least + 1, touched - least)):
            if count and share > 0.0:
                splits = equal_splits(count, costs, tokens=1, can_fetch=slots,
                                      one_processor=self._emulated)  # fmt: skip
                found += share * _expected(splits, _binomial(count, missing))
        return float(found[0]), float(found[1]), float(found[2])


def _expected(splits: EqualSplits, chances: Numbers) -> Numbers:
    each = np.stack((splits.makespan_s, splits.host, splits.fetched))
    result: Numbers = each @ chances
    return result


def _binomial(count: int, chance: float) -> Numbers:
    """The chances that 0, 1, ... `count` of so many happen."""
    k = np.arange(count + 1)
    ways = np.array([float(comb(count, i)) for i in range(count + 1)])
    chance = min(1.0, max(0.0, chance))
    chances: Numbers = ways * np.power(chance, k) * np.power(1.0 - chance, count - k)
    return chances
