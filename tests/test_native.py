"""The native kernels against float64, in every SIMD variant that this processor has; bit equality of
a token's result whatever its company."""

import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.errors import UsageError
from moebatch.native.extension import SIMD_VARIABLE, variants
from moebatch.native.kernels import SILU, Gate, Kernels, load_kernels

EPSILON = 2.0**-24  # half the spacing of float32 at one
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = int(os.environ.get("MOEBATCH_FUZZ_EXAMPLES", "25"))

pytestmark = pytest.mark.skipif(not variants(), reason="installed without native kernels")
_loaded: dict[tuple[str, int], Kernels] = {}


def kernels_of(variant, threads=2) -> Kernels:
    """Kept: a pool of threads for every example would be slow."""
    if (variant, threads) not in _loaded:
        _loaded[variant, threads] = load_kernels(threads, variant)
    return _loaded[variant, threads]


every_variant = pytest.mark.parametrize("variant", variants())


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual, x, weight) -> None:
    """Error of a sum of I products: at most (I + 1) roundings of the sum of magnitudes."""
    exact = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    assert actual.dtype == torch.float32
    assert actual.shape == exact.shape
    assert ((actual - exact).abs() <= (x.shape[1] + 2) * EPSILON * magnitude + 1e-30).all()


@every_variant
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 150),
    tokens=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    round_x=st.booleans(),
    x_type=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_matmul_equals_float64(
    variant, *, outputs, inputs, tokens, dtype, round_x, x_type, seed
) -> None:
    kernels = kernels_of(variant)
    weight = randn(outputs, inputs, seed=seed, dtype=dtype)
    x = randn(tokens, inputs, seed=seed + 1, dtype=x_type)
    seen = x.bfloat16() if round_x and dtype == torch.bfloat16 else x
    assert_close(kernels.matmul(x, kernels.pack(weight), round_x=round_x), seen, weight)


@every_variant
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens"), [(1536, 1024, 1), (48, 3584, 37), (300, 515, 1100)]
)
def test_matmul_of_real_sizes_equals_float64(variant, dtype, outputs, inputs, tokens) -> None:
    kernels = kernels_of(variant)
    weight, x = randn(outputs, inputs, dtype=dtype), randn(tokens, inputs, seed=1)
    assert_close(kernels.matmul(x, kernels.pack(weight)), x, weight)


@every_variant
def test_bias_and_strides(variant) -> None:
    kernels = kernels_of(variant)
    weight = randn(70, 96, dtype=torch.bfloat16)[::2, 3:60]
    x, bias = randn(9, 80, seed=1)[:, 5:62], randn(35, seed=2)
    plain = kernels.matmul(x, kernels.pack(weight))
    assert_close(plain, x, weight)
    assert torch.equal(plain + bias, kernels.matmul(x, kernels.pack(weight), bias=bias))
    turned = randn(57, 9, seed=3).t()
    assert_close(kernels.matmul(turned, kernels.pack(weight)), turned, weight)


@every_variant
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_in_place_is_packing(variant, dtype) -> None:
    kernels = kernels_of(variant)
    for outputs, inputs in ((48, 64), (48, 63), (47, 64)):  # the last two need a copy
        weight, x = randn(outputs, inputs, dtype=dtype), randn(5, inputs, seed=1)
        expected = kernels.matmul(x, kernels.pack(weight))
        packed = kernels.pack_in_place(weight)
        assert (packed.buffer.data_ptr() == weight.data_ptr()) == (outputs + inputs == 112)
        assert torch.equal(expected, kernels.matmul(x, packed))


@every_variant
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("round_x", [False, True])
def test_a_token_alone_equals_the_token_among_others(variant, dtype, round_x) -> None:
    """Bit for bit: alone, among 7 and among 512, with one and with two threads."""
    weight, x = randn(290, 200, dtype=dtype), randn(512, 200, seed=1)
    together = None
    for threads in (1, 2, 3):
        kernels = kernels_of(variant, threads)
        packed = kernels.pack(weight)
        out = kernels.matmul(x, packed, round_x=round_x)
        together = out if together is None else together
        assert torch.equal(together, out)
        parts = [(k, k + 1) for k in range(0, 512, 37)]
        parts += [(0, 7), (3, 10), (100, 107), (505, 512), (17, 64), (5, 311)]
        for first, last in parts:
            part = kernels.matmul(x[first:last], packed, round_x=round_x)
            assert torch.equal(together[first:last], part)


def random_experts(kernels, num_experts, hidden, inner, *, dtype, seed):
    """Matrices of order one, and their packed form."""
    plain = [
        tuple(
            (randn(*shape, seed=seed + 3 * e + k) * shape[1] ** -0.5).to(dtype)
            for k, shape in enumerate([(inner, hidden), (inner, hidden), (hidden, inner)])
        )
        for e in range(num_experts)
    ]
    packed = [kernels.ffn_weights(*(kernels.pack(m) for m in one)) for one in plain]
    return plain, packed


def routed(counts, num_tokens, *, seed):
    """For each expert its share of the tokens, no token twice, and weights."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randperm(num_tokens, generator=generator)[:n].sort().values for n in counts]
    starts = [0]
    for n in counts:
        starts.append(starts[-1] + n)
    return starts, torch.cat(tokens), torch.rand(starts[-1], generator=generator)


def ffn_float64(x, plain, starts, tokens, weights, *, gate=SILU, round_inner=False, biases=None):
    out = torch.zeros(x.shape[0], plain[0][2].shape[0], dtype=torch.float64)
    for e, (g, u, d) in enumerate(plain):
        part = slice(starts[e], starts[e + 1])
        rows = x[tokens[part]].double()
        a, b = rows @ g.double().t(), rows @ u.double().t()
        if biases is not None:
            a, b = a + biases[0].double(), b + biases[1].double()
        if gate.limit is not None:
            a, b = a.clamp(max=gate.limit), b.clamp(-gate.limit, gate.limit)
        h = (b + gate.shift) * a * torch.sigmoid(gate.alpha * a)
        h = h.bfloat16().double() if round_inner else h
        y = h @ d.double().t() + (0.0 if biases is None else biases[2].double())
        out.index_add_(0, tokens[part], weights[part, None].double() * y)
    return out


@every_variant
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_ffn_equals_float64(variant, *, counts, hidden, inner, dtype, seed) -> None:
    """Any loads, empty experts among them."""
    kernels = kernels_of(variant)
    plain, packed = random_experts(kernels, len(counts), hidden, inner, dtype=dtype, seed=seed)
    starts, tokens, weights = routed(counts, 40, seed=seed)
    x, before = randn(40, hidden, seed=seed + 1), randn(40, hidden, seed=seed + 2)
    out = before.clone()
    kernels.add_ffn(out, x, packed, starts=starts, tokens=tokens, weights=weights)
    expected = before.double() + ffn_float64(x, plain, starts, tokens, weights)
    assert (out - expected).abs().max() <= 3e-6 * max(1.0, expected.abs().max())


@every_variant
@pytest.mark.parametrize("dtype", DTYPES)
def test_ffn_of_many_experts_and_real_sizes(variant, dtype) -> None:
    kernels = kernels_of(variant)
    for counts, hidden, inner in (([3, 0, 1, 7] * 32, 64, 48), ([300, 2, 0, 900], 96, 4000)):
        plain, packed = random_experts(kernels, len(counts), hidden, inner, dtype=dtype, seed=5)
        starts, tokens, weights = routed(counts, 900, seed=6)
        x, out = randn(900, hidden, seed=7), torch.zeros(900, hidden)
        kernels.add_ffn(out, x, packed, starts=starts, tokens=tokens, weights=weights)
        expected = ffn_float64(x, plain, starts, tokens, weights)
        assert (out - expected).abs().max() <= 5e-6 * expected.abs().max()


@every_variant
def test_rounded_ffn_is_within_bf16_of_float64(variant) -> None:
    """x and the inner values are rounded to bf16, nothing else is."""
    kernels = kernels_of(variant)
    counts = [9, 0, 31, 1]
    plain, packed = random_experts(kernels, 4, 130, 200, dtype=torch.bfloat16, seed=1)
    starts, tokens, weights = routed(counts, 33, seed=2)
    x, out = randn(33, 130, seed=3), torch.zeros(33, 130)
    kernels.add_ffn(out, x, packed, starts=starts, tokens=tokens, weights=weights, round_x=True)
    expected = ffn_float64(x.bfloat16(), plain, starts, tokens, weights, round_inner=True)
    # an inner value on the edge between two bf16 numbers may fall to either side
    assert (out - expected).abs().max() <= 2e-3 * expected.abs().max()


@every_variant
def test_other_activations_and_biases(variant) -> None:
    kernels = kernels_of(variant)
    gate = Gate(alpha=1.702, shift=1.0, limit=0.7)
    plain, _ = random_experts(kernels, 1, 40, 37, dtype=torch.float32, seed=1)
    biases = randn(37, seed=2), randn(37, seed=3), randn(40, seed=4)
    expert = kernels.ffn_weights(*(kernels.pack(m) for m in plain[0]), biases=biases)
    starts, tokens, weights = routed([20], 20, seed=5)
    x, out = randn(20, 40, seed=6), torch.zeros(20, 40)
    kernels.add_ffn(out, x, [expert], starts=starts, tokens=tokens, weights=weights, gate=gate)
    expected = ffn_float64(x, plain, starts, tokens, weights, gate=gate, biases=biases)
    assert (out - expected).abs().max() <= 3e-6 * expected.abs().max()


@every_variant
@pytest.mark.parametrize("round_x", [False, True])
def test_ffn_of_a_token_does_not_depend_on_its_company(variant, round_x) -> None:
    """Bit for bit: alone, among 7 and among 512, grouped or expert by expert, 1 to 3 threads."""
    num_experts, hidden, inner = 6, 96, 80
    generator = torch.Generator().manual_seed(4)
    x = randn(512, hidden, seed=1)
    chosen = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(512)])
    scale = torch.rand(512, num_experts, generator=generator)

    def ffn(kernels, packed, some, *, grouped=True):
        rows = [[k for k, t in enumerate(some) if e in chosen[t]] for e in range(num_experts)]
        out = torch.ones(len(some), hidden)
        calls = [list(range(num_experts))] if grouped else [[e] for e in range(num_experts)]
        for part in calls:
            tokens = torch.tensor([k for e in part for k in rows[e]], dtype=torch.int64)
            weights = torch.tensor([float(scale[some[k], e]) for e in part for k in rows[e]])
            starts = [0]
            for e in part:
                starts.append(starts[-1] + len(rows[e]))
            kernels.add_ffn(out, x[some], [packed[e] for e in part], starts=starts,
                            tokens=tokens, weights=weights, round_x=round_x)  # fmt: skip
        return out

    together = None
    for threads in (1, 2, 3):
        kernels = kernels_of(variant, threads)
        packed = random_experts(kernels, num_experts, hidden, inner, dtype=torch.bfloat16, seed=2)[
            1
        ]
        out = ffn(kernels, packed, list(range(512)))
        together = out if together is None else together
        assert torch.equal(together, out)
        assert torch.equal(together, ffn(kernels, packed, list(range(512)), grouped=False))
        for some in ([0], [77], [511], list(range(7)), list(range(200, 207)), [3, 90, 40, 500]):
            assert torch.equal(together[some], ffn(kernels, packed, some))


@every_variant
def test_not_a_number_and_infinity_come_through(variant) -> None:
    """A broken row must show in its own logits, and in no other row's."""
    kernels = kernels_of(variant)
    plain, packed = random_experts(kernels, 1, 32, 32, dtype=torch.bfloat16, seed=1)
    for bad in (float("nan"), float("inf")):
        x, out = randn(5, 32, seed=2), torch.zeros(5, 32)
        x[2, 7] = bad
        y = kernels.matmul(x, kernels.pack(plain[0][0]), round_x=True)
        assert not y[2].isfinite().any() and y[[0, 1, 3, 4]].isfinite().all()
        kernels.add_ffn(out, x, packed, starts=[0, 5], tokens=torch.arange(5),
                        weights=torch.ones(5), round_x=True)  # fmt: skip
        assert out[2].isnan().any() and out[[0, 1, 3, 4]].isfinite().all()


def test_calls_from_several_threads_wait_for_each_other() -> None:
    kernels = kernels_of(variants()[0])
    packed = [kernels.pack(randn(200, 300, seed=s, dtype=torch.bfloat16)) for s in range(4)]
    x = randn(40, 300, seed=9)
    expected = [kernels.matmul(x, one) for one in packed]
    wrong: list[int] = []

    def repeat(k) -> None:
        for _ in range(50):
            if not torch.equal(kernels.matmul(x, packed[k]), expected[k]):
                wrong.append(k)

    workers = [threading.Thread(target=repeat, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_the_environment_forces_a_variant(monkeypatch) -> None:
    for name in variants():
        monkeypatch.setenv(SIMD_VARIABLE, name)
        assert name == load_kernels(1).variant
    monkeypatch.setenv(SIMD_VARIABLE, "off")
    assert load_kernels(1) is None
    monkeypatch.setenv(SIMD_VARIABLE, "mmx")
    with pytest.raises(UsageError, match="MOEBATCH_SIMD=mmx cannot run here"):
        load_kernels(1)
