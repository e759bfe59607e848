"""Memory and seconds of the cache regime on the host: experts are read as tokens ask for them.

A pass of few rows touches few experts, and some of those are in memory. What is missing is read while
experts that are there are computed; attention waits for both. All amounts may be numpy arrays.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moebatch.plan import cost
from moebatch.plan.eviction import EvictionName
from moebatch.plan.host_time import HostPass, HostTime, PassLoad
from moebatch.plan.machine import MachineSpec, Numbers
from moebatch.plan.memory import MemoryPlan, attention_page_bytes, host_memory
from moebatch.plan.model_spec import ModelSpec

Amount = Any
# What reading on demand reaches of the disk's rate: a layer's first expert is not read ahead, and its
# last one is packed while nothing is read. Measured with experts of 3 MB: 1.69 to 1.80 of 2.1 GB/s.
_ON_DEMAND = 0.83
STASH_BYTES = 16 << 20  # results of experts that wait for those before them


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePass(HostPass):
    """As HostPass; `last_expert` are the seconds in which a layer's last expert is computed, summed
    over the layers: nothing is read for this layer any more, and nothing for the next one yet."""

    last_expert: Amount

    @property
    def total(self) -> Amount:
        """The pass: reading overlaps the experts alone."""
        beside = self.ffn + self.placing
        return self.compute - beside + np.maximum(beside, self.disk + self.last_expert)


class CacheTime(HostTime):
    """The cost model of the cache regime."""

    def __init__(self, spec: ModelSpec, machine: MachineSpec, *, compute: str, kv_dtype: str,
                 eviction: EvictionName, shares: Numbers | None = None) -> None:  # fmt: skip
        """`shares` [L, E]: of each layer's tokens, how they spread; None: evenly."""
        super().__init__(spec, machine, compute=compute, kv_dtype=kv_dtype)
        self._eviction = eviction
        self._chances: Numbers | None = None  # of each expert, for one token; ascending
        if shares is not None:
            sparse = [i for i in range(spec.num_layers) if i not in spec.dense_layers]
            self._chances = np.sort(np.minimum(1.0, shares[sparse].ravel() * spec.top_k))

    def touched(self, tokens: Amount) -> Amount:
        """Expected experts of all layers that a pass asks for."""
        if self._chances is None:
            layers = self._spec.num_layers - len(self._spec.dense_layers)
            return layers * cost.distinct_experts(self._spec, np.asarray(tokens, dtype=float))
        return self._asked_for(tokens, 0.0)

    def misses(self, tokens: Amount, slots: Amount) -> Amount:
        """Expected experts of a pass that are not among the `slots` that are kept.

        Kept are the likeliest; without shares all are, and any choice is as good. LRU keeps nothing of
        use where a pass asks for more than there are slots: whatever comes round again has just left.
        """
        touched, total = self.touched(tokens), max(1, self._spec.num_expert_pages)
        if self._chances is None:
            missed = touched * (1.0 - np.minimum(1.0, slots / total))
        else:
            missed = self._asked_for(tokens, slots)
        if self._eviction == "lru":
            missed = np.where((touched > slots) & (slots < total), touched, missed)
        return missed

    def _asked_for(self, tokens: Amount, without: Amount) -> Numbers:
        """Expected experts that a pass asks for, `without` so many of the likeliest."""
        assert self._chances is not None
        counts, leave_out = np.broadcast_arrays(np.asarray(tokens, dtype=float), without)
        found = np.zeros(counts.shape)
        for count in np.unique(counts):  # many passes, but few numbers of tokens
            asked = 1.0 - np.power(1.0 - self._chances, count)
            left = np.concatenate(([0.0], np.cumsum(asked)))  # of the least likely ones
            here = counts == count
            found[here] = left[np.maximum(0, asked.size - leave_out[here].astype(int))]
        return found

    def seconds(
        self, load: PassLoad, *, attention_pages: Amount, expert_pages: Amount
    ) -> CachePass:
        """One pass; `expert_pages` are the slots of the cache."""
        spec = self._spec
        # Cached experts are used as they were read, in the form of streamed ones.
        base = super().seconds(load, attention_pages=attention_pages, expert_pages=0)
        missed = self.misses(load.tokens, expert_pages)
        attention = (spec.num_layers - attention_pages) * cost.mean_attention_page_bytes(spec)
        read = attention + missed * spec.stored_expert_bytes
        parts = {name: getattr(base, name) for name in HostPass.__slots__}
        per_layer = np.maximum(1.0, self.touched(load.tokens) / spec.num_layers)
        parts["disk"] = read / (self._disk * _ON_DEMAND)
        parts["placing"] = read * self.rates.per_streamed_byte_s
        return CachePass(**parts, last_expert=base.ffn / per_layer)


def cache_memory(spec: ModelSpec, *, slots: Amount, attention_pages: Amount, page_slots: Amount,
                 **sizes: Any) -> MemoryPlan:  # fmt: skip
    """Peak host memory with `slots` experts kept; the other amounts are those of `host_memory`.

    `page_slots` more experts may be on their way, and as many attention pages that do not stay.
    """
    expert, attention = cost.expert_slot_bytes(spec), attention_page_bytes(spec)
    streamed = np.minimum(page_slots, spec.num_layers - attention_pages)
    plan = host_memory(spec, attention_pages=attention_pages, expert_pages=0,
                       page_slots=page_slots, **sizes)  # fmt: skip
    # host_memory counts page_slots buffers of the larger kind; here each kind has its own
    page = cost.expert_page_bytes(spec)
    widest = np.where(attention_pages < spec.num_layers, max(page, attention), page)
    counted = np.ceil(widest * spec.streamed_share)
    buffers = page_slots * expert + np.ceil(streamed * attention * spec.streamed_share)
    return replace(
        plan,
        resident_weights=plan.resident_weights + np.minimum(slots, spec.num_expert_pages) * expert,
        page_buffer=plan.page_buffer - page_slots * counted + buffers,
        activations=plan.activations + STASH_BYTES,
    )
