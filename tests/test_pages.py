"""Pages partition a model, and residence is spread evenly over its layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.plan.pages import ATTENTION_PAGE, page_table


@st.composite
def tables(draw):
    layers, experts = draw(st.integers(1, 20)), draw(st.integers(1, 16))
    return page_table(
        layers,
        experts,
        resident_experts=draw(st.integers(0, layers * experts)),
        resident_attention=draw(st.integers(0, layers)),
    )


@given(table=tables())
def test_streamed_and_resident_partition_the_model(table) -> None:
    pages = [(layer, page) for layer in range(table.num_layers) for page in range(table.num_pages)]
    assert table.num_pages == table.num_experts + 1
    assert len(table.streamed) == len(set(table.streamed))
    assert not set(table.streamed) & set(table.resident)
    assert pages == sorted(table.streamed + table.resident)


@given(table=tables())
def test_streamed_pages_stand_in_the_order_of_use(table) -> None:
    assert sorted(table.streamed) == list(table.streamed)
    assert sorted(table.resident) == list(table.resident)


@given(layers=st.integers(1, 30), experts=st.integers(1, 16), data=st.data())
def test_residence_is_exact_and_even(layers, experts, data) -> None:
    kept_experts = data.draw(st.integers(0, layers * experts))
    kept_attention = data.draw(st.integers(0, layers))
    table = page_table(
        layers, experts, resident_experts=kept_experts, resident_attention=kept_attention
    )
    resident = table.resident
    assert kept_attention == sum(page == ATTENTION_PAGE for _, page in resident)
    assert kept_experts == sum(page != ATTENTION_PAGE for _, page in resident)
    for is_attention in (True, False):
        counts = [0] * layers
        for layer, page in resident:
            counts[layer] += (page == ATTENTION_PAGE) == is_attention
        assert max(counts) - min(counts) <= 1
        # Any run of layers holds its share: no stretch of the model streams more than its part.
        total = sum(counts)
        for first in range(layers):
            for last in range(first, layers):
                share = total * (last + 1 - first) / layers
                assert abs(sum(counts[first : last + 1]) - share) < 1


def test_four_of_eight_experts_by_hand() -> None:
    table = page_table(2, 4, resident_experts=4, resident_attention=2)
    assert table.streamed == ((0, 3), (0, 4), (1, 3), (1, 4))
    assert table.resident == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))


def test_nothing_and_everything_resident() -> None:
    nothing = page_table(3, 2, resident_experts=0, resident_attention=0)
    assert (len(nothing.streamed), nothing.resident) == (9, ())
    everything = page_table(3, 2, resident_experts=6, resident_attention=3)
    assert (everything.streamed, len(everything.resident)) == ((), 9)


@pytest.mark.parametrize(("experts", "attention"), [(7, 0), (-1, 0), (0, 4), (0, -1)])
def test_more_than_there_is(experts, attention) -> None:
    with pytest.raises(AssertionError):
        page_table(3, 2, resident_experts=experts, resident_attention=attention)
