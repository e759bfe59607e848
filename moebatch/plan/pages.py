"""Weight pages: how a layer's weights are cut, and which of them stay in memory.

Page 0 of a layer holds all but its experts (norms, projections, router, the FFN that every token goes
through if there is one); page e + 1 is expert e. So attention can start as soon as its page is there,
and residence is counted in whole experts. A dense layer of a model with experts is page 0 alone.
"""

from collections.abc import Collection
from dataclasses import dataclass

ATTENTION_PAGE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Which pages of a model are streamed, in the order in which a pass needs them.

    `dense` are the layers without experts, `base_ffn` those whose page 0 holds an FFN.
    """

    num_layers: int
    num_experts: int
    streamed: tuple[tuple[int, int], ...]
    dense: frozenset[int] = frozenset()
    base_ffn: frozenset[int] = frozenset()

    @property
    def num_pages(self) -> int:
        """Pages of one layer with experts."""
        return self.num_experts + 1

    def expert_pages(self, layer: int) -> range:
        """The pages of a layer's experts."""
        return range(1, 1 if layer in self.dense else self.num_pages)

    @property
    def resident(self) -> tuple[tuple[int, int], ...]:
        """The pages that stay in memory, as (layer, page)."""
        streamed = set(self.streamed)
        return tuple(
            (layer, page)
            for layer in range(self.num_layers)
            for page in (ATTENTION_PAGE, *self.expert_pages(layer))
            if (layer, page) not in streamed
        )


def page_table(num_layers: int, num_experts: int, *, resident_experts: int, resident_attention: int,
               dense: Collection[int] = (), base_ffn: Collection[int] = ()) -> PageTable:  # fmt: skip
    """Keep `resident_experts` expert pages and `resident_attention` attention pages of the model.

    They are spread evenly over the layers, so that no layer streams more than one page above another.
    """
    sparse = [layer for layer in range(num_layers) if layer not in dense]
    assert 0 <= resident_experts <= len(sparse) * num_experts, resident_experts
    assert 0 <= resident_attention <= num_layers, resident_attention
    kept = {layer: share(k, resident_experts, len(sparse)) for k, layer in enumerate(sparse)}
    streamed: list[tuple[int, int]] = []
    for layer in range(num_layers):
        if share(layer, resident_attention, num_layers) == 0:
            streamed.append((layer, ATTENTION_PAGE))
        if layer in kept:
            streamed += [(layer, expert + 1) for expert in range(kept[layer], num_experts)]
    return PageTable(num_layers=num_layers, num_experts=num_experts, streamed=tuple(streamed),
                     dense=frozenset(dense), base_ffn=frozenset(base_ffn))  # fmt: skip


def share(layer: int, total: int, num_layers: int) -> int:
    """How many of `total` things fall to this layer when they are spread evenly."""
    return (layer + 1) * total // num_layers - layer * total // num_layers
