"""Machines as numbers: the catalogue, JSON and back, changed figures, curves."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import UsageError
from moebatch.plan.catalogue import MACHINES, catalogued
from moebatch.plan.machine import WHAT_IF_KEYS, Curve, MachineSpec, changed, loads


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_every_machine_has_sane_figures_and_a_source(name) -> None:
    machine = catalogued(name)
    gpu = machine.accelerator
    assert machine.source and gpu is not None
    # the levels are ordered: accelerator memory over host memory over link over disk
    assert gpu.bandwidth > machine.host.bandwidth
    assert machine.host.bandwidth > machine.disk_bandwidth
    assert gpu.peak("float16") > 10 * machine.host.peak("float32")


def test_counted_machines_scale_the_accelerator_alone() -> None:
    one, four = catalogued("t4"), catalogued("4xT4")
    assert four.accelerator is not None and one.accelerator is not None
    assert four.accelerator.memory_bytes == 4 * one.accelerator.memory_bytes
    assert four.accelerator.peak("float16") == 4 * one.accelerator.peak("float16")
    assert (four.link, four.host, four.num_accelerators) == (4 * one.link, one.host, 4)
    for wrong in ("t5", "0xt4", "2x", "99xt4", ""):
        with pytest.raises(UsageError):
            catalogued(wrong)


@pytest.mark.parametrize("name", [*sorted(MACHINES), None])
def test_json_and_back(name, request) -> None:
    path = request.path.parent / "machine.json"
    machine = loads(path.read_text()) if name is None else catalogued(name)
    assert loads(json.dumps(machine.to_dict())).to_dict() == machine.to_dict()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"name": 1}', "nonsense", '{"name":"x","host":{},"disk_bandwidth":1}',
             '{"name":"x","disk_bandwidth":-1,"host":{"name":"h","memory_bytes":1,"bandwidth":1,'
             '"flops":{"any":1}}}']
)  # fmt: skip
def test_what_is_no_machine_is_refused(text) -> None:
    with pytest.raises(UsageError):
        loads(text)


@pytest.mark.parametrize("key", WHAT_IF_KEYS)
def test_what_if_changes_one_figure(key) -> None:
    before = catalogued("l4")
    after = changed(before, key, 3.0)
    assert after != before
    assert changed(after, key, 3.0) == after or key == "host-scale"
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError):
            changed(before, key, wrong)


def test_what_if_of_what_is_not_there(request) -> None:
    host = loads((request.path.parent / "machine.json").read_text())
    for key in ("gpu-memory", "pcie", "colour"):
        with pytest.raises(UsageError):
            changed(host, key, 1.0)
    # measured rates say nothing about another processor
    assert changed(host, "cpu-flops", 1.0).rates == {}
    assert changed(host, "disk", 1.0).rates == host.rates


@given(points=st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e9)), min_size=1, max_size=6,
                       unique_by=lambda p: p[0]))  # fmt: skip
def test_a_curve_goes_through_its_points(points) -> None:
    curve = Curve(tuple(sorted(points)))
    for x, rate in points:
        assert curve(x) == pytest.approx(rate)
    assert curve(1e-12) == sorted(points)[0][1]
    assert curve(1e12) == sorted(points)[-1][1]
    assert np.all(curve(np.array([p[0] for p in points])) <= curve.peak * (1 + 1e-12))
    assert curve.scaled(2.0).peak == 2 * curve.peak


def test_from_dict_needs_a_link_for_an_accelerator() -> None:
    values = {**catalogued("t4").to_dict(), "link": 0}
    with pytest.raises(UsageError):
        MachineSpec.from_dict(values)
