"""The Hierarchical Roofline Model by hand, and its laws on random machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.plan.catalogue import catalogued
from moebatch.plan.roofline import Hierarchy, Level, hierarchy

rates = st.floats(1e8, 1e15)
intensities = st.floats(1e-3, 1e6)


@st.composite
def machines(draw):
    upper, lower = (Level(name=n, peak=draw(rates), bandwidth=draw(rates)) for n in "ij")
    return Hierarchy(upper=upper, lower=lower, link=draw(rates))


def test_by_hand() -> None:
    """Peaks 100 and 10, memories 50 and 5, link 2: eq. 4 to 11 in small numbers."""
    upper, lower = (
        Level(name="i", peak=100.0, bandwidth=50.0),
        Level(name="j", peak=10.0, bandwidth=5.0),
    )
    hrm = Hierarchy(upper=upper, lower=lower, link=2.0)
    assert hrm.upper.local(1.0) == 50.0 and hrm.upper.local(4.0) == 100.0
    assert hrm.attainable(4.0, 3.0) == 6.0  # the link
    assert hrm.attainable(1.0, 40.0) == 50.0  # the memory
    assert hrm.attainable(4.0, 400.0) == 100.0  # the processor
    assert hrm.turning_point_1(1.0) == 2.5
    assert hrm.turning_point_1(9.0) == 5.0
    assert hrm.turning_point_2(1.0) == 25.0
    assert hrm.balance_point(1.0) == 25.0
    assert hrm.best_place(4.0, 1.0) == "j" and hrm.best_place(4.0, 40.0) == "i"


@given(hrm=machines(), upper=intensities, lower=intensities)
def test_attainable_is_the_least_of_the_roofs(hrm, upper, lower) -> None:
    got = hrm.attainable(upper, lower)
    assert got == min(hrm.upper.peak, hrm.upper.bandwidth * upper, hrm.link * lower)


@given(hrm=machines(), upper=intensities, lower=intensities)
def test_below_p1_the_lower_level_wins(hrm, upper, lower) -> None:
    """Eq. 9: moving the data cannot be faster than link times intensity, which is less than local."""
    if lower < hrm.turning_point_1(lower) * (1 - 1e-9):
        assert hrm.best_place(upper, lower) == "j"


@given(hrm=machines(), upper=intensities, lower=intensities)
def test_p2_divides_link_bound_from_local(hrm, upper, lower) -> None:
    p2 = hrm.turning_point_2(upper)
    got = hrm.attainable(upper, lower)
    if lower < p2 * (1 - 1e-9):
        assert got == pytest.approx(hrm.link * lower)
    elif lower > p2 * (1 + 1e-9):
        assert got == pytest.approx(hrm.upper.local(upper))


@given(hrm=machines(), upper=intensities)
def test_at_the_balance_point_memory_and_link_meet(hrm, upper) -> None:
    balance = hrm.balance_point(upper)
    assert hrm.link * balance == pytest.approx(hrm.upper.bandwidth * upper)


def test_a_machine_without_an_accelerator_has_the_disk_below() -> None:
    machine = catalogued("t4")
    hrm = hierarchy(machine, "float16")
    assert (hrm.upper.peak, hrm.lower.bandwidth, hrm.link) == (65e12, 76e9, 12e9)
    from dataclasses import replace

    alone = hierarchy(replace(machine, accelerator=None, link=0.0), "float16")
    assert (alone.upper.name, alone.lower.peak, alone.link) == ("host", 0.0, 2e9)
