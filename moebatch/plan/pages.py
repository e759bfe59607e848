"""Weight pages: how a layer's weights are cut, and which of them stay in memory.

Page 0 of a layer holds all but its experts (norms, projections, router); page e + 1 is expert e.
So attention can start as soon as its page is there, and residence is counted in whole experts.
"""

from dataclasses import dataclass

ATTENTION_PAGE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Which pages of a model are streamed, in the order in which a pass needs them."""

    num_layers: int
    num_experts: int
    streamed: tuple[tuple[int, int], ...]

    @property
    def num_pages(self) -> int:
        """Pages of one layer."""
        return self.num_experts + 1

    @property
    def resident(self) -> tuple[tuple[int, int], ...]:
        """The pages that stay in memory, as (layer, page)."""
        streamed = set(self.streamed)
        return tuple(
            (layer, page)
            for layer in range(self.num_layers)
            for page in range(self.num_pages)
            if (layer, page) not in streamed
        )


def page_table(num_layers: int, num_experts: int, *, resident_experts: int,
               resident_attention: int) -> PageTable:  # fmt: skip
    """Keep `resident_experts` expert pages and `resident_attention` attention pages of the model.

    They are spread evenly over the layers, so that no layer streams more than one page above another.
    """
    assert 0 <= resident_experts <= num_layers * num_experts, resident_experts
    assert 0 <= resident_attention <= num_layers, resident_attention
    streamed: list[tuple[int, int]] = []
    for layer in range(num_layers):
        if _share(layer, resident_attention, num_layers) == 0:
            streamed.append((layer, ATTENTION_PAGE))
        kept = _share(layer, resident_experts, num_layers)
        streamed += [(layer, expert + 1) for expert in range(kept, num_experts)]
    return PageTable(num_layers=num_layers, num_experts=num_experts, streamed=tuple(streamed))


def _share(layer: int, total: int, num_layers: int) -> int:
    """How many of `total` things fall to this layer when they are spread evenly."""
    return (layer + 1) * total // num_layers - layer * total // num_layers
