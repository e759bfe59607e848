"""The store of experts alone: who is read when, and that every pin is given back."""

import threading

import pytest

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.linear import in_place
from moebatch.model.resolve import resolve_model
from moebatch.model.weights import MATRICES
from moebatch.plan.eviction import Visit, eviction
from moebatch.runtime.expert_store import ExpertStore
from moebatch.runtime.page_reader import PageReader


@pytest.fixture
def gate(monkeypatch):
    """Reading waits until the event is set."""
    steps, event = PageReader.steps, threading.Event()

    def gated(reader, plan, buffer, **how):
        assert event.wait(10)
        yield from steps(reader, plan, buffer, **how)

    monkeypatch.setattr(PageReader, "steps", gated)
    yield event
    event.set()


@pytest.fixture
def store(tiny_models, gate):
    """Room for two experts, and one on its way; the disk is shut until the gate opens."""
    path = tiny_models("mixtral")[1]
    model = resolve_model(str(path))
    spec = model.spec
    with Checkpoint(path) as checkpoint:
        made = ExpertStore(
            checkpoint, spec=spec, family=model.family, capacity=2, spare=1, copies=False,
            view=lambda name, part: in_place(part) if name in MATRICES else part.float(),
            eviction=eviction("lfu", num_layers=spec.num_layers, num_experts=spec.num_experts),
        )  # fmt: skip
        yield made
        gate.set()
        made.close()


def use(store, layer, experts):
    """Take and release every needed expert in ascending order."""
    for expert in experts:
        store.wait([(layer, expert)])
        assert store.ready((layer, expert)).index == expert
        store.release((layer, expert))


def test_wishes_for_a_layer_end_with_its_visit(store, gate) -> None:
    """An old wish for a needed expert that waits for a buffer was read twice, and unpinned twice."""
    gate.set()
    for _ in range(3):  # worth more than what is needed once
        store.visit(Visit(layer=1, experts=(0, 1)))
        use(store, 1, (0, 1))
    gate.clear()
    store.visit(Visit(layer=1, experts=(2,)))  # keeps the reader busy
    store.wish([(0, 3)])
    store.visit(Visit(layer=0, experts=(0, 1, 2, 3)))
    gate.set()
    use(store, 1, [2])
    store.wait([(0, 0)])
    while store._wishes:  # the reader has nothing else to do
        pass
    use(store, 0, range(4))
    for _ in range(2):
        store.visit(Visit(layer=0, experts=(0, 1, 2, 3)))
        use(store, 0, range(4))
    assert not store.cache._pins.any()


def test_what_is_needed_is_read_before_what_is_wished_for(store, gate) -> None:
    store.wish([(1, 2)])
    store.visit(Visit(layer=0, experts=(1,)))
    gate.set()
    use(store, 0, [1])
    store.visit(Visit(layer=1, experts=(2,)))
    use(store, 1, [2])
    spans = [(span.task.layer, span.task.page - 1) for span in store.take_spans()]
    assert spans[-1] == (1, 2) and (0, 1) in spans
    assert not store.cache._pins.any()


def test_a_prefetch_is_stopped_for_what_is_needed(store, gate) -> None:
    """It was under way when its bytes were in nobody's interest yet: it gives its place back."""
    store.wish([(1, 2)])
    while store._reading is None:
        pass
    store.visit(Visit(layer=0, experts=(1,)))
    gate.set()
    use(store, 0, [1])
    assert (1, 2) not in store.cache
    assert [span.task.layer for span in store.take_spans()] == [0]
    assert not store.cache._pins.any()
