"""Attention over the paged cache against float64, in every SIMD variant that this processor has."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.native.extension import variants
from moebatch.native.kernels import Context, load_kernels

BLOCK = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
EXAMPLES = int(os.environ.get("MOEBATCH_FUZZ_EXAMPLES", "25"))

pytestmark = pytest.mark.skipif(not variants(), reason="installed without native kernels")
every_variant = pytest.mark.parametrize("variant", variants())
_loaded = {}


def kernels_of(variant, threads=2):
    if (variant, threads) not in _loaded:
        _loaded[variant, threads] = load_kernels(threads, variant)
    return _loaded[variant, threads]


class Cache:
    """Sequences of given lengths in shuffled blocks; what no token has written is enormous."""

    def __init__(self, lengths, *, groups, head_dim, dtype, seed=0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.groups, self.lengths, self.scales = groups, lengths, None
        counts = [-(-n // BLOCK) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        shape = (len(order) * groups, BLOCK, head_dim)
        whole = dtype == torch.int8
        self.pools = [torch.full(shape, 127 if whole else 1e4).to(dtype) for _ in range(2)]
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        self.rows = []  # per sequence: keys and values [C, G, d] in float64
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            self.tables[s, :count] = torch.tensor(blocks)
            both = []
            for pool in self.pools:
                values = torch.randn(length, groups, head_dim, generator=generator)
                values = (values * 40).clamp(-127, 127).round() if whole else values
                values = values.to(dtype)
                for t in range(length):
                    first = blocks[t // BLOCK] * groups
                    pool[first : first + groups, t % BLOCK] = values[t]
                both.append(values.double())
            self.rows.append(both)
        if dtype == torch.int8:
            self._scale(generator)

    def _scale(self, generator) -> None:
        """Scales of each token and head; those that no token has written are not numbers."""
        self.scales = tuple(torch.full(pool.shape[:2], float("nan")) for pool in self.pools)
        for s, length in enumerate(self.lengths):
            for k, scales in enumerate(self.scales):
                values = torch.rand(length, self.groups, generator=generator) * 0.02 + 1e-3
                for t in range(length):
                    first = int(self.tables[s, t // BLOCK]) * self.groups
                    scales[first : first + self.groups, t % BLOCK] = values[t]
                self.rows[s][k] = self.rows[s][k] * values[:, :, None].double()

    def context(self, pairs) -> Context:
        """Of rows given as (sequence, tokens seen)."""
        return Context(
            sequences=torch.tensor([s for s, _ in pairs]),
            lengths=torch.tensor([n for _, n in pairs]),
            tables=self.tables,
            num_kv_heads=self.groups,
        )

    def expected(self, q, pairs, *, window=None, sinks=None):
        """Row by row in float64."""
        out = torch.empty(q.shape, dtype=torch.float64)
        share = q.shape[1] // self.groups
        for r, (s, length) in enumerate(pairs):
            first = 0 if window is None else max(0, length - window)
            k, v = (x[first:length].repeat_interleave(share, dim=1) for x in self.rows[s])
            scores = torch.einsum("hd,chd->hc", q[r].double(), k) * q.shape[2] ** -0.5
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            weights = scores.softmax(dim=1)[:, : length - first]
            out[r] = torch.einsum("hc,chd->hd", weights, v)
        return out


def queries(rows, heads, head_dim, *, seed=0):
    return torch.randn(rows, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def assert_close(actual, expected, *, tolerance=1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance


@every_variant
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=5),
    groups=st.integers(1, 3),
    share=st.integers(1, 9),
    head_dim=st.sampled_from([32, 48, 64, 72, 80, 96, 120, 128, 33, 1, 16]),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 700),
    sinks=st.booleans(),
    round_x=st.booleans(),
    data=st.data(),
)
def test_attention_equals_float64(
    variant, *, lengths, groups, share, head_dim, dtype, window, sinks, round_x, data
) -> None:
    """Decode rows and runs of prompt rows in one call, whole and from the middle.

    Where queries and weights are rounded to bf16, a score of some 4 is off by 2^-9 of itself, and so
    is a weight; values are some 4 at most.
    """
    cache = Cache(lengths, groups=groups, head_dim=head_dim, dtype=dtype)
    pairs = []
    for s, length in enumerate(lengths):
        count = data.draw(st.integers(1, min(length, 40)))
        pairs += [(s, n) for n in range(length - count + 1, length + 1)]
    q = queries(len(pairs), groups * share, head_dim, seed=1)
    sink = queries(1, groups * share, 1, seed=2).flatten() if sinks else None
    actual = kernels_of(variant).attend(
        q, *cache.pools, cache.context(pairs), window=window, sinks=sink, scales=cache.scales,
        round_x=round_x,
    )  # fmt: skip
    rounded = round_x and dtype == torch.bfloat16 and variant == "avx512bf16"
    assert_close(actual, cache.expected(q, pairs, window=window, sinks=sink),
                 tolerance=5e-2 if rounded else 1e-5)  # fmt: skip


@every_variant
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_long_contexts(variant, dtype, head_dim) -> None:
    """Few rows, so that the chunks of one go to several threads; scores far apart."""
    cache = Cache([2100, 5], groups=1, head_dim=head_dim, dtype=dtype)
    pairs = [(0, 2100), (1, 3), (1, 4), (1, 5)]
    q = queries(4, 4, head_dim, seed=1) * 6
    actual = kernels_of(variant).attend(q, *cache.pools, cache.context(pairs), scales=cache.scales)
    # an error of a score, some 24 in size, is an error of its weight as a share of it
    assert_close(actual, cache.expected(q, pairs), tolerance=5e-5)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("round_x", [False, True])
def test_a_row_does_not_depend_on_its_company(variant, dtype, window, round_x) -> None:
    """Bit for bit: alone as in decode, in any run of a prompt, with 1 to 3 threads."""
    lengths = [700, 30, 300, *range(1, 33)]
    cache = Cache(lengths, groups=2, head_dim=64, dtype=dtype)
    pairs = [
        (s, n) for s, length in enumerate(lengths) for n in range(max(1, length - 150), length + 1)
    ]
    q = queries(len(pairs), 8, 64, seed=1)
    together = None
    for threads in (1, 2, 3):
        kernels = kernels_of(variant, threads)
        out = kernels.attend(
            q, *cache.pools, cache.context(pairs), window=window, scales=cache.scales,
            round_x=round_x,
        )  # fmt: skip
        together = out if together is None else together
        assert torch.equal(together, out)
        for some in ([0], [150], [151], [400], list(range(140, 147)), list(range(3, 400, 50)),
                     list(range(60, 150))):  # fmt: skip
            part = kernels.attend(
                q[some],
                *cache.pools,
                cache.context([pairs[k] for k in some]),
                window=window,
                scales=cache.scales,
                round_x=round_x,
            )
            assert torch.equal(together[some], part)


@every_variant
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_shows_and_stays_alone(variant, bad) -> None:
    cache = Cache([300, 20], groups=1, head_dim=32, dtype=torch.float32)
    pairs = [(0, 300), (1, 20)]
    q = queries(2, 2, 32)
    q[0, 1, 5] = bad
    out = kernels_of(variant).attend(q, *cache.pools, cache.context(pairs))
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all() and out[1].isfinite().all()
    block = int(cache.tables[0, 4])
    cache.pools[0][block, 7] = bad  # a key
    out = kernels_of(variant).attend(q, *cache.pools, cache.context(pairs))
    assert not out[0].isfinite().any() and out[1].isfinite().all()


def test_no_rows() -> None:
    cache = Cache([3], groups=1, head_dim=32, dtype=torch.float32)
    out = kernels_of(variants()[0]).attend(queries(0, 2, 32), *cache.pools, cache.context([]))
    assert out.shape == (0, 2, 32)
