"""Weights of 4 and 8 bits in the native kernels against float64, in every SIMD variant that this
processor has; bit equality of a token's result whatever its company."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native import assert_close, every_variant, ffn_float64, kernels_of, randn, routed

from moebatch.errors import ModelError, UsageError
from moebatch.native.kernels import variants
from moebatch.native.rounding import Rounding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = int(os.environ.get("MOEBATCH_FUZZ_EXAMPLES", "25"))
ROUNDINGS = [
    Rounding(bits=bits, group=group, zeros=zeros)
    for bits, group in ((4, 32), (4, 128), (8, 128))
    for zeros in (False, True)
]

pytestmark = pytest.mark.skipif(not variants(), reason="installed without native kernels")
roundings = st.builds(
    Rounding,
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64, 96, 128, 256]),
    zeros=st.booleans(),
)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)


def in_groups(values, group, fill=0.0):
    """[R, C] -> [R, groups, group], filled up."""
    spare = -values.shape[1] % group
    return torch.nn.functional.pad(values, (0, spare), value=fill).unflatten(1, (-1, group))


def rounded_x(x, group):
    """Each group of each row to 8 bits on its own scale; what the kernels are to do."""
    parts = in_groups(x, group)
    largest = parts.abs().amax(dim=2, keepdim=True)
    # A number over a tensor would be its reciprocal's multiple.
    most = torch.full_like(largest, 127.0)
    factor = torch.where(largest > 0, most / largest, torch.zeros_like(largest))
    whole = (parts * factor).round().double() * (largest / 127.0).double()
    return whole.flatten(1)[:, : x.shape[1]]


@every_variant
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rounding=roundings,
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 400),
    tokens=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    round_x=st.booleans(),
    seed=st.integers(0, 999),
)
def test_matmul_equals_float64(
    variant, *, rounding, outputs, inputs, tokens, dtype, round_x, seed
) -> None:
    """Nothing is lost but by rounding x, if that is asked for; rows of zeros have no scale."""
    kernels = kernels_of(variant)
    weight = randn(outputs, inputs, seed=seed, dtype=dtype)
    weight[outputs // 2] = 0
    x = randn(tokens, inputs, seed=seed + 1)
    x[tokens // 2] = 0
    packed = kernels.pack_rounded(weight, rounding)
    by_8_bits = round_x and kernels.rounds_x_to_int8
    seen = rounded_x(x, rounding.group) if by_8_bits else x
    actual = kernels.matmul(x, packed, round_x=round_x)
    assert_close(actual, seen, kernels.restored(packed))


@every_rounding
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_rounded_to_the_nearest_number(rounding, dtype) -> None:
    """Half a step of the group's range at most, and the same in every variant."""
    weight = randn(70, 300, dtype=dtype)
    weight[3, :100] = 0
    weight[4] = weight[4].abs()
    parts = in_groups(weight.float(), rounding.group)
    steps = 2**rounding.bits - 1
    if rounding.zeros:
        step = (parts.amax(2).clamp(min=0) - parts.amin(2).clamp(max=0)) / steps
    else:
        step = 2 * parts.abs().amax(2) / (steps + (1 if rounding.bits == 4 else -1))
    # A scale is rounded to fp16; of 4 bits the smaller side's last number may be cut off, and a
    # zero point is rounded too.
    allowed = {4: 1.02, 8: 0.7}[rounding.bits]
    found = {}
    for variant in variants():
        kernels = kernels_of(variant)
        found[variant] = kernels.restored(kernels.pack_rounded(weight, rounding))
        error = (in_groups(found[variant], rounding.group) - parts).abs().amax(2)
        assert (error <= allowed * step + 1e-30).all()
        assert torch.equal(found[variant], found[variants()[0]])
    typical = (found[variants()[0]] - weight.float()).square().mean().sqrt()
    assert typical <= 0.33 * step.mean()  # a uniform error has 0.29


def test_zero_points_help_lopsided_weights() -> None:
    kernels, weight = kernels_of(variants()[0]), randn(32, 256).abs()
    errors = [
        float((kernels.restored(kernels.pack_rounded(weight, rounding)) - weight).square().mean())
        for rounding in (Rounding(bits=4, group=32), Rounding(bits=4, group=32, zeros=True))
    ]
    assert errors[1] < 0.4 * errors[0]


def test_strided_weights_and_rows_of_a_packed_one() -> None:
    kernels, rounding = kernels_of(variants()[0]), Rounding(bits=4, group=64)
    weight = randn(90, 200, dtype=torch.bfloat16)
    part = kernels.pack_rounded(weight[:, 10:150], rounding)
    assert torch.equal(
        kernels.restored(part),
        kernels.restored(kernels.pack_rounded(weight[:, 10:150].clone(), rounding)),
    )
    turned = kernels.pack_rounded(weight.t(), rounding)
    assert kernels.restored(turned).shape == (200, 90)
    x, whole = randn(5, 140, seed=1), kernels.matmul(randn(5, 140, seed=1), part)
    assert torch.equal(whole[:, 32:70], kernels.matmul(x, kernels.rows(part, 32, 70)))


@every_variant
@every_rounding
@pytest.mark.parametrize("round_x", [False, True])
def test_a_token_alone_equals_the_token_among_others(variant, rounding, round_x) -> None:
    """Bit for bit: alone, among 7 and among 512, with one and with two threads."""
    weight, x = randn(90, 200, dtype=torch.bfloat16), randn(512, 200, seed=1)
    together = None
    for threads in (1, 2):
        kernels = kernels_of(variant, threads)
        packed = kernels.pack_rounded(weight, rounding)
        out = kernels.matmul(x, packed, round_x=round_x)
        together = out if together is None else together
        assert torch.equal(together, out)
        parts = [(k, k + 1) for k in range(0, 512, 37)]
        for first, last in [*parts, (0, 7), (3, 10), (505, 512), (17, 64), (5, 311)]:
            part = kernels.matmul(x[first:last], packed, round_x=round_x)
            assert torch.equal(together[first:last], part)


@every_variant
@every_rounding
@pytest.mark.parametrize("round_x", [False, True])
def test_ffn_equals_float64_and_does_not_depend_on_company(variant, rounding, round_x) -> None:
    """Uneven loads, an empty expert among them."""
    shapes = [(75, 130), (75, 130), (130, 75)]
    plain = [
        [randn(*shape, seed=3 * e + k) * shape[1] ** -0.5 for k, shape in enumerate(shapes)]
        for e in range(5)
    ]
    starts, tokens, weights = routed([9, 0, 31, 1, 20], 33, seed=2)
    x, together = randn(33, 130, seed=3), None
    for threads in (1, 2):
        kernels = kernels_of(variant, threads)
        rounded = [[kernels.pack_rounded(m, rounding) for m in one] for one in plain]
        packed = [kernels.ffn_weights(*one) for one in rounded]
        out = torch.zeros(33, 130)
        kernels.add_ffn(out, x, packed, starts=starts, tokens=tokens, weights=weights,
                        round_x=round_x)  # fmt: skip
        expected = ffn_float64(
            x, [[kernels.restored(m) for m in one] for one in rounded], starts, tokens, weights
        )
        tolerance = 3e-2 if round_x and kernels.rounds_x_to_int8 else 5e-6
        assert (out - expected).abs().max() <= tolerance * expected.abs().max()
        together = out if together is None else together
        assert torch.equal(together, out)
        for t in (0, 7, 32):
            rows = [k for k in range(starts[-1]) if tokens[k] == t]
            begins = [sum(k < edge for k in rows) for edge in starts]
            alone = torch.zeros(1, 130)
            kernels.add_ffn(alone, x[t : t + 1], packed, starts=begins, round_x=round_x,
                            tokens=torch.zeros(len(rows), dtype=torch.int64),
                            weights=weights[rows])  # fmt: skip
            assert torch.equal(together[t : t + 1], alone)


@every_variant
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_and_infinity_come_through(variant, bits, bad) -> None:
    """A broken row must show in its own results, and in no other row's."""
    kernels = kernels_of(variant)
    packed = kernels.pack_rounded(randn(40, 70), Rounding(bits=bits, group=32))
    x = randn(5, 70, seed=1)
    x[2, 7] = bad
    for round_x in (False, True):
        y = kernels.matmul(x, packed, round_x=round_x)
        assert not y[2].isfinite().any() and y[[0, 1, 3, 4]].isfinite().all()


def test_weights_without_a_scale_are_refused() -> None:
    kernels, rounding = kernels_of(variants()[0]), Rounding(bits=4, group=32)
    for bad in (float("nan"), float("inf"), -float("inf"), 1e9):
        for dtype in (torch.float32, torch.bfloat16):
            weight = randn(20, 50)
            weight[17, 40] = bad
            with pytest.raises(ModelError, match="cannot be rounded"):
                kernels.pack_rounded(weight.to(dtype), rounding)
    halves = randn(20, 50).half()
    halves[3, 3] = float("inf")
    with pytest.raises(ModelError, match="cannot be rounded"):
        kernels.pack_rounded(halves, rounding)


def test_tiny_and_large_weights_keep_their_size() -> None:
    """Scales in fp16 reach from 6e-8 to 65504; below that weights become zero."""
    kernels, rounding = kernels_of(variants()[0]), Rounding(bits=8, group=32)
    for size, error in ((1e-5, 0.05), (1e-3, 0.01), (1e4, 0.01)):
        weight = randn(16, 64) * size
        restored = kernels.restored(kernels.pack_rounded(weight, rounding))
        assert (restored - weight).norm() <= error * weight.norm()
    assert not kernels.restored(kernels.pack_rounded(randn(16, 64) * 1e-9, rounding)).any()


@pytest.mark.parametrize(("bits", "group"), [(3, 32), (4, 48), (8, 512), (4, 0)])
def test_a_rounding_that_there_is_not(bits, group) -> None:
    with pytest.raises(UsageError, match="cannot be rounded to"):
        Rounding(bits=bits, group=group)


def test_bits_per_weight() -> None:
    assert Rounding(bits=4, group=32).bits_per_weight == 4.5
    assert Rounding(bits=4, group=64, zeros=True).bits_per_weight == 4.375
    kernels = kernels_of(variants()[0])
    for rounding in ROUNDINGS:
        size = kernels.packed_bytes(rounding, 64, 1024)
        assert size == round(64 * 1024 * rounding.bits_per_weight / 8)
