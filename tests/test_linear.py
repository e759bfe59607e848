"""The forms of y = x W^T agree with float64, and the packed one knows what it cannot hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.model import linear as module
from moebatch.model.linear import (
    Bf16Linear,
    PackedBf16Linear,
    PackedLinear,
    TensorLinear,
    has_bf16,
    has_fbgemm,
    linear_plain,
    pack,
)

EPSILON = 2.0**-24  # half the spacing of float32 at one
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_fbgemm = pytest.mark.skipif(not has_fbgemm(), reason="PyTorch was built without fbgemm")


def random_pair(rows, columns, tokens, *, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    return torch.randn(tokens, columns, generator=generator), weight


def assert_within_float32(x, weight, y) -> None:
    """Error of a sum of I products: at most (I + 1) roundings of the sum of magnitudes."""
    assert y.dtype == torch.float32
    assert y.shape == (x.shape[0], weight.shape[0])
    exact = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    assert ((y - exact).abs() <= (x.shape[1] + 1) * EPSILON * magnitude + 1e-30).all()


shapes = {
    "rows": st.integers(1, 70),
    "columns": st.integers(1, 70),
    "tokens": st.integers(1, 20),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=80, deadline=None)
@given(**shapes, dtype=st.sampled_from(DTYPES), tile=st.integers(1, 500))
def test_tiled_linear_equals_float64(*, rows, columns, tokens, seed, dtype, tile) -> None:
    """Tiles of any size: smaller than a row, with and without a remainder."""
    x, weight = random_pair(rows, columns, tokens, dtype=dtype, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE_ELEMENTS", tile)
        assert_within_float32(x, weight, TensorLinear(weight)(x))
    assert_within_float32(x, weight, linear_plain(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens"), [(1, 1, 1), (700, 1031, 1), (513, 1024, 7), (1200, 515, 33)]
)
def test_real_tiles_equal_float64(rows, columns, tokens, dtype) -> None:
    """Weights larger than one tile of the size that is used."""
    x, weight = random_pair(rows, columns, tokens, dtype=dtype)
    assert_within_float32(x, weight, TensorLinear(weight)(x))
    assert_within_float32(x, weight, linear_plain(x, weight))
    assert_within_float32(x, weight, pack(weight)(x))


@needs_fbgemm
@settings(max_examples=80, deadline=None)
@given(**shapes, dtype=st.sampled_from(DTYPES[1:]))
def test_packed_linear_equals_float64(*, rows, columns, tokens, seed, dtype) -> None:
    """bf16 weights of ordinary size are exact in fp16, so the packed form loses nothing."""
    x, weight = random_pair(rows, columns, tokens, dtype=dtype, seed=seed)
    ordinary = torch.where(weight.abs() < 2.0**-14, torch.zeros_like(weight), weight)
    assert_within_float32(x, ordinary, PackedLinear(ordinary)(x))


@needs_fbgemm
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 33, 1023])
@pytest.mark.parametrize("columns", [1, 3, 8, 127, 512, 513, 1025])
def test_packed_linear_of_odd_shapes(rows, columns) -> None:
    for tokens in (1, 2, 6, 13, 64):
        x, weight = random_pair(rows, columns, tokens, dtype=torch.float16)
        assert_within_float32(x, weight, PackedLinear(weight)(x))


def test_no_tokens() -> None:
    for form in (TensorLinear, pack):
        assert form(torch.randn(5, 4).bfloat16())(torch.empty(0, 4)).shape == (0, 5)


def test_tokens_do_not_depend_on_their_neighbours() -> None:
    """One token alone, or among others: equal within float32 for every form."""
    x, weight = random_pair(65, 129, 9, dtype=torch.bfloat16)
    for form in (TensorLinear(weight), pack(weight)):
        together = form(x)
        for t in range(9):
            assert torch.allclose(together[t : t + 1], form(x[t : t + 1]), rtol=0, atol=2e-5)


def test_bf16_of_ordinary_size_is_exact_in_fp16() -> None:
    """All bf16 numbers with 2^-14 <= |w| <= 65504, one by one."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    size = numbers.float().abs()
    ordinary = numbers[(size >= 2.0**-14) & (size <= 65504.0)].float()
    assert ordinary.numel() > 7000
    assert torch.equal(ordinary, ordinary.half().float())


def test_small_bf16_loses_little_in_fp16() -> None:
    bits = torch.arange(0, 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).float()
    small = numbers[numbers < 2.0**-14]
    assert (small - small.half().float()).abs().max() < 3e-8


@needs_fbgemm
@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 5), seed=st.integers(0, 99))
def test_packed_small_numbers_stay_within_the_stated_error(tokens, seed) -> None:
    x, weight = random_pair(9, 33, tokens, dtype=torch.bfloat16, seed=seed)
    weight = (weight * 1e-5).to(torch.bfloat16)
    error = (PackedLinear(weight)(x) - x.double() @ weight.double().t()).abs()
    assert (error <= 3e-8 * x.double().abs().sum(dim=1, keepdim=True) + 1e-9).all()


@needs_fbgemm
@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, torch.bfloat16, True),
        (1.0, torch.float16, True),
        (1.0, torch.float32, False),
        (65504.0, torch.float16, True),
        (65280.0, torch.bfloat16, True),
        (65536.0, torch.bfloat16, False),
        (-65536.0, torch.bfloat16, False),
        (3e38, torch.bfloat16, False),
        (float("inf"), torch.bfloat16, False),
        (float("-inf"), torch.float16, False),
        (float("nan"), torch.bfloat16, False),
    ],
)
def test_can_pack(value, dtype, expected) -> None:
    weight = torch.zeros(3, 4, dtype=dtype)
    weight[1, 2] = value
    assert expected == PackedLinear.can_pack(weight)


def test_pack_falls_back_to_a_copy() -> None:
    weight = torch.full((3, 4), 1e30, dtype=torch.bfloat16)
    form = pack(weight)
    weight.zero_()
    assert isinstance(form, TensorLinear)
    x = torch.ones(2, 4)
    expected = linear_plain(x, torch.full((3, 4), 1e30, dtype=torch.bfloat16))
    assert torch.equal(expected, form(x))


def test_pack_does_not_keep_its_argument() -> None:
    for dtype in DTYPES:
        x, weight = random_pair(5, 7, 3, dtype=dtype)
        form, expected = pack(weight), x @ weight.float().t()
        weight.fill_(9.0)
        assert torch.allclose(expected, form(x), atol=1e-5)


needs_bf16 = pytest.mark.skipif(not has_bf16(), reason="this processor has no bf16 arithmetic")


@needs_bf16
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (320, 192), (513, 1024), (96, 31)])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_bf16_arithmetic_equals_float64_to_bf16_accuracy(rows, columns, tokens) -> None:
    """Inputs are rounded to bf16, sums are float32, the result is rounded once more."""
    x, weight = random_pair(rows, columns, tokens, dtype=torch.bfloat16)
    exact = x.bfloat16().double() @ weight.double().T
    scale = x.bfloat16().double().abs() @ weight.double().abs().T
    for form in (Bf16Linear(weight), PackedBf16Linear(weight)):
        error = (form(x).double() - exact).abs()
        assert (error <= exact.abs() * 2**-8 + scale * 2**-20).all()


@needs_bf16
@pytest.mark.parametrize(("rows", "columns"), [(320, 192), (1536, 1024), (1024, 3584)])
def test_bf16_results_do_not_depend_on_the_batch_nor_on_packing(rows, columns) -> None:
    """Bit for bit: this is what lets a row have one text under every policy."""
    x, weight = random_pair(rows, columns, 260, dtype=torch.bfloat16)
    together = Bf16Linear(weight)(x)
    for form in (Bf16Linear(weight), PackedBf16Linear(weight)):
        single = [(k, k + 1) for k in range(0, 260, 13)]
        for first, last in (*single, (3, 5), (3, 10), (17, 64), (100, 260), (0, 260)):
            assert torch.equal(form(x[first:last]), together[first:last])
