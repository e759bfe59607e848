"""The block pool against a plain dict: what was written comes back, whatever came and went."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.plan.policy import KV_BLOCK_TOKENS
from moebatch.runtime.kv_cache import BlockTable, KVCache, blocks_for

LAYERS, HEADS, HEAD_DIM = 2, 3, 4
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def cache_of(num_blocks=12, dtype="float32"):
    return KVCache(
        num_layers=LAYERS,
        num_blocks=num_blocks,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )


def random_tokens(count, seed):
    return torch.randn(2, count, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


class Model:
    """The same cache as lists: per sequence and layer, the tokens' keys and values."""

    def __init__(self, cache):
        self.cache = cache
        self.tables = {}
        self.written = {}

    def append(self, name, count, seed):
        """Extend a sequence by tokens and write them, or nothing where the pool is too small."""
        table = self.tables.setdefault(name, BlockTable())
        layers = self.written.setdefault(name, [[] for _ in range(LAYERS)])
        start = len(layers[0])
        missing = blocks_for(start + count) - len(table)
        if missing > self.cache.num_free:
            return
        self.cache.extend(table, start + count)
        slots = self.cache.slots(table, start, start + count)
        assert slots.shape == (count, HEADS)
        for layer in range(LAYERS):
            k, v = random_tokens(count, seed * LAYERS + layer)
            self.cache.write(layer, slots, k, v)
            layers[layer] += list(zip(k, v, strict=True))

    def release(self, name):
        self.cache.release(self.tables[name])
        assert self.tables.pop(name) == BlockTable()
        del self.written[name]

    def check(self):
        """Blocks belong to one sequence each; a gather of all sequences gives what was written."""
        held = [block for table in self.tables.values() for block in table.full]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(self.cache.num_blocks))
        assert self.cache.num_blocks == len(held) + self.cache.num_free
        names = [name for name, table in self.tables.items() if table]
        if not names:
            return
        rows = self.cache.block_rows([self.tables[name] for name in names])
        for layer in range(LAYERS):
            gathered = self.cache.gather(layer, rows)
            for r, name in enumerate(names):
                for part in range(2):
                    wanted = [pair[part].to(self.cache.dtype).float()
                              for pair in self.written[name][layer]]  # fmt: skip
                    found = gathered[part][r, :, : len(wanted)].transpose(0, 1)
                    assert torch.equal(torch.stack(wanted), found)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(TORCH)),
    num_blocks=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 15, 16, 17, 40, None])),
        max_size=25,
    ),
)
def test_random_histories_against_a_dict(dtype, num_blocks, seed, steps) -> None:
    """(sequence, tokens to append or None to release), in any order."""
    model = Model(cache_of(num_blocks, dtype))
    for k, (name, count) in enumerate(steps):
        if count is not None:
            model.append(name, count, seed + k)
        elif name in model.tables:
            model.release(name)
        model.check()


def test_extend_takes_whole_blocks_and_only_what_is_missing() -> None:
    cache, table = cache_of(8), BlockTable()
    cache.extend(table, 1)
    assert len(table) == 1
    cache.extend(table, KV_BLOCK_TOKENS)
    assert len(table) == 1
    cache.extend(table, KV_BLOCK_TOKENS + 1)
    assert len(table) == 2
    cache.extend(table, 3)
    assert len(table) == 2
    assert cache.num_free == 6
    with pytest.raises(AssertionError):
        cache.extend(table, 100 * KV_BLOCK_TOKENS)
    assert (len(table), cache.num_free) == (2, 6)


def test_released_blocks_are_given_out_again() -> None:
    cache, tables = cache_of(6), [BlockTable() for _ in range(3)]
    for table in tables:
        cache.extend(table, 2 * KV_BLOCK_TOKENS)
    freed = list(tables[1].full)
    cache.release(tables[1])
    assert (tables[1], cache.num_free) == (BlockTable(), 2)
    again = BlockTable()
    cache.extend(again, 2 * KV_BLOCK_TOKENS)
    assert sorted(freed) == sorted(again.full)
    assert cache.num_free == 0


@given(st.integers(0, 1000))
def test_blocks_for(num_tokens) -> None:
    blocks = blocks_for(num_tokens)
    assert blocks * KV_BLOCK_TOKENS >= num_tokens > (blocks - 1) * KV_BLOCK_TOKENS


def test_scrub_zeroes_a_sequence_and_nothing_else() -> None:
    """Not-a-number in a block would reach the next sequence through masked positions."""
    model = Model(cache_of(6))
    model.append("good", 20, 1)
    model.append("bad", 20, 2)
    cache, bad = model.cache, model.tables["bad"]
    broken = torch.full((20, HEADS, HEAD_DIM), float("nan"))
    for layer in range(LAYERS):
        cache.write(layer, cache.slots(bad, 0, 20), broken, broken)
    cache.scrub(bad)
    for layer in range(LAYERS):
        for found in cache.gather(layer, cache.block_rows([bad])):
            assert torch.equal(torch.zeros_like(found), found)
    model.release("bad")
    model.check()


def test_scrub_of_an_empty_sequence() -> None:
    cache_of().scrub(BlockTable())


@pytest.mark.parametrize("dtype", sorted(TORCH))
def test_rounded_is_what_comes_back(dtype) -> None:
    cache, table = cache_of(2, dtype), BlockTable()
    cache.extend(table, 9)
    k, v = random_tokens(9, 3)
    cache.write(1, cache.slots(table, 0, 9), k, v)
    for written, found in zip((k, v), cache.gather(1, cache.block_rows([table])), strict=True):
        assert torch.equal(cache.rounded(written), found[0, :, :9].transpose(0, 1))
        assert torch.equal(written.to(TORCH[dtype]).float(), cache.rounded(written))


def test_a_new_pool_is_finite() -> None:
    """Masked positions are multiplied before they are masked."""
    cache = cache_of()
    for part in cache.gather(0, cache.block_rows([BlockTable(full=[0, 1]), BlockTable(full=[2])])):
        assert part.shape == (2, HEADS, 2 * KV_BLOCK_TOKENS, HEAD_DIM)
        assert part.isfinite().all()


def test_tables_of_unequal_length_are_padded() -> None:
    model = Model(cache_of(12))
    order = [("a", 50), ("b", 1), ("c", 17)]
    random.Random(0).shuffle(order)
    for seed, (name, count) in enumerate(order):
        model.append(name, count, seed)
    rows = model.cache.block_rows([model.tables[name] for name in "abc"])
    assert rows.shape == (3, HEADS, 4)
    assert int(rows.max()) < 12 * HEADS
    model.check()


def test_gather_bytes_per_block_is_the_size_of_a_gathered_block() -> None:
    for dtype in TORCH:
        cache = cache_of(3, dtype)
        k, v = cache.gather(0, cache.block_rows([BlockTable(full=[1])]))
        assert k.nbytes + v.nbytes == cache.gather_bytes_per_block


def ringed(num_blocks=40, max_sequences=3, windows=(20, None)):
    return KVCache(num_layers=LAYERS, num_blocks=num_blocks, num_kv_heads=HEADS, head_dim=HEAD_DIM,
                   dtype="float32", windows=windows, max_sequences=max_sequences)  # fmt: skip


def test_layers_with_a_window_hold_no_more_than_it() -> None:
    cache = ringed()
    assert cache.ring_tokens == 32
    tables = [BlockTable() for _ in range(3)]
    for table in tables:
        cache.extend(table, 200)
    assert [(len(t.full), len(t.ring)) for t in tables] == [(13, 2)] * 3
    sizes = [layer.shape[1] // HEADS for layer in cache._layers]
    assert sizes == [6, 40]
    for table in tables:
        cache.release(table)
    assert (len(cache._free), len(cache._free_ring)) == (40, 6)


def test_short_sequences_take_no_whole_ring() -> None:
    cache, table = ringed(windows=(100, 40)), BlockTable()
    cache.extend(table, 17)
    assert (len(table.full), len(table.ring)) == (2, 2)
    cache.extend(table, 1000 // 2)
    assert (len(table.full), len(table.ring)) == (32, 7)


@given(st.integers(1, 60), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_ring_gives_back_the_last_tokens_written(window, steps) -> None:
    cache, table, written = ringed(windows=(window, None)), BlockTable(), []
    for seed, count in enumerate(steps):
        start, end = len(written), len(written) + count
        cache.extend(table, end)
        k, v = random_tokens(count, seed)
        written += list(zip(k, v, strict=True))
        kept = max(start, end - cache.ring_tokens)
        cache.write(0, cache.ring_slots(table, kept, end), k[kept - start :], v[kept - start :])
        first = max(0, end - window)
        found = cache.gather_tokens(0, cache.ring_slots(table, first, end))
        for i, expected in enumerate(zip(*written[first:], strict=True)):
            assert torch.equal(torch.stack(expected), found[i])


def test_scrub_reaches_rings() -> None:
    cache, table = ringed(), BlockTable()
    cache.extend(table, 30)
    broken = torch.full((30, HEADS, HEAD_DIM), float("nan"))
    cache.write(0, cache.ring_slots(table, 0, 30), broken, broken)
    cache.scrub(table)
    assert cache._layers[0].isfinite().all()


@pytest.mark.parametrize("windows", [(), (None, 20, None)])
def test_memory_of_free_blocks_can_be_given_back(windows) -> None:
    """Who is in the cache keeps what it has; what is free gives its whole pages to the system."""
    kv = KVCache(num_layers=3, num_blocks=64, num_kv_heads=4, head_dim=64, dtype="float32",
                 windows=windows, max_sequences=4)  # fmt: skip
    tables = [BlockTable() for _ in range(4)]
    for table in tables:
        kv.extend(table, 150)
    for table in tables:
        for layer in range(3):
            if not windows or windows[layer] is None:
                slots = kv.slots(table, 0, 150)
                kv.write(layer, slots, torch.ones(150, 4, 64), torch.full((150, 4, 64), 2.0))
    kv.release(tables[1])
    kv.release(tables[2])
    given = kv.give_back(kv.num_free - 3)
    layers = 2 if windows else 3
    block = 4 * KV_BLOCK_TOKENS * 64 * 4
    free = (64 - 20 - 3) * layers * 2 * block
    assert 0.9 * free < given <= free  # whole pages only
    assert kv.num_free == 3
    for table in (tables[0], tables[3]):
        keys, values = kv.gather(0, kv.block_rows([table]))
        assert bool((keys[:, :, :150] == 1).all()) and bool((values[:, :, :150] == 2).all())
    kv.extend(tables[1], 48)
    assert len(set(tables[0].full + tables[1].full + tables[3].full)) == 23
