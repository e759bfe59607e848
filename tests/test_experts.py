"""Routing against float64, grouping that loses nothing, grouped experts against the plain form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.model import experts as module
from moebatch.model.experts import Expert, add_expert, ffn_plain, swiglu
from moebatch.model.linear import TensorLinear, pack
from moebatch.model.router import Router, everything, group_by_expert, route
from moebatch.plan.model_spec import RouterSpec

TOLERANCE = 2e-5  # relative to the largest value: float32 sums in another order


def softmax(norm_top_k):
    return RouterSpec(norm_p=1.0 if norm_top_k else None)


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def random_matrices(num_experts, hidden_size, expert_size, *, seed=0, dtype=torch.float32):
    """gate, up, down of each expert, scaled so that outputs stay of order one."""
    generator = generator_of(seed)

    def matrix(rows, columns):
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    return [
        (
            matrix(expert_size, hidden_size),
            matrix(expert_size, hidden_size),
            matrix(hidden_size, expert_size),
        )
        for _ in range(num_experts)
    ]


def experts_of(matrices, form=TensorLinear):
    return [
        Expert(index=e, size=gate.shape[0], gate_up=form(torch.cat((gate, up))), down=form(down))
        for e, (gate, up, down) in enumerate(matrices)
    ]


def grouped(hidden, weights, experts, matrices, form=TensorLinear):
    rows = group_by_expert(weights, experts, len(matrices))
    output = torch.zeros_like(hidden)
    for expert in experts_of(matrices, form):
        add_expert(output, hidden, rows, expert)
    return output


def assert_equals_plain(hidden, weights, experts, matrices, form=TensorLinear) -> None:
    expected = ffn_plain(hidden, weights, experts, matrices)
    actual = grouped(hidden, weights, experts, matrices, form)
    assert (expected - actual).abs().max() <= TOLERANCE * max(1.0, expected.abs().max())


@st.composite
def cases(draw):
    num_experts = draw(st.integers(1, 9))
    return {
        "num_experts": num_experts,
        "top_k": draw(st.integers(1, num_experts)),
        "tokens": draw(st.integers(1, 40)),
        "hidden_size": draw(st.integers(1, 20)),
        "expert_size": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=80, deadline=None)
@given(
    case=cases(), norm_top_k=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_grouped_experts_equal_the_plain_form(case, norm_top_k, dtype) -> None:
    size, seed = case["hidden_size"], case["seed"]
    hidden = torch.randn(case["tokens"], size, generator=generator_of(seed))
    router = torch.randn(case["num_experts"], size, generator=generator_of(seed + 1))
    weights, experts = route(
        hidden, Router(weight=router), softmax(norm_top_k), top_k=case["top_k"]
    )
    matrices = random_matrices(
        case["num_experts"], size, case["expert_size"], seed=seed, dtype=dtype
    )
    assert_equals_plain(hidden, weights, experts, matrices)


@pytest.mark.parametrize("form", [TensorLinear, pack])
@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("expert", [0, 2, 5])
def test_all_tokens_to_one_expert(expert, tokens, form) -> None:
    """The other experts are empty, also the first and the last one."""
    hidden = torch.randn(tokens, 12, generator=generator_of(1))
    weights = torch.rand(tokens, 1, generator=generator_of(2))
    experts = torch.full((tokens, 1), expert)
    rows = group_by_expert(weights, experts, 6)
    assert rows.starts == (0,) * (expert + 1) + (tokens,) * (6 - expert)
    assert_equals_plain(hidden, weights, experts, random_matrices(6, 12, 7), form)


def test_one_token_of_real_width_through_packed_experts() -> None:
    hidden = torch.randn(1, 512, generator=generator_of(3))
    matrices = random_matrices(4, 512, 896, dtype=torch.bfloat16)
    weights, experts = torch.tensor([[0.75, 0.25]]), torch.tensor([[3, 1]])
    assert_equals_plain(hidden, weights, experts, matrices, pack)


def test_rows_beyond_one_tile(monkeypatch) -> None:
    """More rows than one call carries give what one call gives."""
    hidden = torch.randn(200, 8, generator=generator_of(4))
    weights = torch.rand(200, 2, generator=generator_of(5))
    experts = torch.randint(0, 3, (200, 1), generator=generator_of(6))
    experts = torch.cat((experts, (experts + 1) % 3), dim=1)
    matrices = random_matrices(3, 8, 6)
    whole = grouped(hidden, weights, experts, matrices)
    monkeypatch.setattr(module, "_MAX_INTERMEDIATE", 1)  # tiles of 64 rows
    assert_equals_plain(hidden, weights, experts, matrices)
    assert (whole - grouped(hidden, weights, experts, matrices)).abs().max() < TOLERANCE


def test_output_is_added_to_and_hidden_is_left_alone() -> None:
    hidden = torch.randn(5, 8, generator=generator_of(7))
    before, residual = hidden.clone(), torch.randn(5, 8, generator=generator_of(8))
    rows = everything(5)
    expert = experts_of(random_matrices(1, 8, 6))[0]
    output = residual.clone()
    add_expert(output, hidden, rows, expert)
    assert torch.equal(before, hidden)
    assert torch.allclose(residual + swiglu(hidden, expert), output, atol=1e-6)


def test_everything_is_one_expert_with_weight_one() -> None:
    hidden = torch.randn(9, 8, generator=generator_of(9))
    matrices = random_matrices(1, 8, 6)
    output = torch.zeros_like(hidden)
    add_expert(output, hidden, everything(9), experts_of(matrices)[0])
    ones, zeros = torch.ones(9, 1), torch.zeros(9, 1, dtype=torch.int64)
    assert torch.allclose(ffn_plain(hidden, ones, zeros, matrices), output, atol=TOLERANCE)


def test_ffn_plain_by_hand() -> None:
    """One token, two experts, numbers that can be followed: silu(x) = x / (1 + e^-x)."""
    one, two = torch.tensor([[1.0]]), torch.tensor([[2.0]])
    matrices = [(one, one, one), (two, one, two)]
    silu_1, silu_2 = 1 / (1 + 2.718281828**-1), 2 / (1 + 2.718281828**-2)
    output = ffn_plain(
        torch.ones(1, 1), torch.tensor([[0.25, 0.75]]), torch.tensor([[0, 1]]), matrices
    )
    assert abs(output.item() - (0.25 * silu_1 + 0.75 * silu_2 * 2)) < 1e-6


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_grouping_loses_nothing(case) -> None:
    """Each (token, expert, weight) once, sorted by expert, tokens in order within an expert."""
    generator = generator_of(case["seed"])
    tokens, num_experts, top_k = case["tokens"], case["num_experts"], case["top_k"]
    experts = torch.stack(
        [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)]
    )
    weights = torch.rand(tokens, top_k, generator=generator)
    rows = group_by_expert(weights, experts, num_experts)
    assert len(rows.starts) == num_experts + 1
    assert (rows.starts[0], rows.starts[-1]) == (0, tokens * top_k)
    found = []
    for e in range(num_experts):
        part = slice(rows.starts[e], rows.starts[e + 1])
        members = rows.tokens[part].tolist()
        assert members == sorted(members)
        found += [(t, e, w) for t, w in zip(members, rows.weights[part, 0].tolist(), strict=True)]
    expected = [
        (t, int(experts[t, k]), float(weights[t, k])) for t in range(tokens) for k in range(top_k)
    ]
    assert sorted(expected) == sorted(found)


@settings(max_examples=100, deadline=None)
@given(case=cases(), norm_top_k=st.booleans())
def test_routing_equals_float64(case, norm_top_k) -> None:
    generator = generator_of(case["seed"])
    hidden = torch.randn(case["tokens"], case["hidden_size"], generator=generator)
    router = torch.randn(case["num_experts"], case["hidden_size"], generator=generator)
    top_k = case["top_k"]
    weights, experts = route(hidden, Router(weight=router), softmax(norm_top_k), top_k=top_k)
    assert weights.dtype == torch.float32
    assert weights.shape == experts.shape == (case["tokens"], top_k)
    exact = torch.softmax(hidden.double() @ router.double().t(), dim=-1)
    chosen = exact.gather(1, experts)
    # Whatever was chosen is as probable as the true k-th; ties may fall either way.
    best = exact.topk(top_k, dim=-1).values
    assert torch.allclose(best, chosen, rtol=1e-4, atol=1e-7)
    assert all(len(set(row)) == top_k for row in experts.tolist())
    if norm_top_k:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        assert torch.allclose(weights.sum(dim=-1), torch.ones(case["tokens"]), atol=1e-6)
    assert torch.allclose(chosen, weights.double(), rtol=1e-4, atol=1e-7)


def test_routing_of_large_logits_stays_finite() -> None:
    weights, experts = route(
        torch.full((2, 4), 1e4),
        Router(weight=torch.eye(4) * torch.tensor([1.0, 2.0, 3.0, 4.0])),
        softmax(True),
        top_k=2,
    )  # fmt: skip
    assert weights.isfinite().all()
    assert experts[:, 0].tolist() == [3, 3]


def test_routers_by_hand() -> None:
    """Each kind on logits that can be followed with a pencil."""
    hidden = torch.eye(4)[:1]
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    weight = torch.zeros(4, 4)
    weight[:, 0] = logits

    def routed(router=None, **spec):
        weights, experts = route(
            hidden, router or Router(weight=weight), RouterSpec(**spec), top_k=2
        )
        return weights[0].tolist(), experts[0].tolist()

    e = torch.e
    weights, experts = routed(scores="softmax_of_chosen")
    assert experts == [0, 1]
    assert weights == pytest.approx([e / (1 + e), 1 / (1 + e)])
    weights, experts = routed(norm_p=2.0, scale=3.0)
    assert weights[0] ** 2 + weights[1] ** 2 == pytest.approx(9.0)
    biased = Router(weight=weight, selection_bias=torch.tensor([0.0, 0.0, 0.0, 5.0]))
    weights, experts = routed(biased, scores="sigmoid", has_selection_bias=True, norm_p=None)
    assert experts == [3, 0]  # chosen by the bias, weighed without it
    assert weights == pytest.approx([1 / (1 + e), 1 / (1 + e**-2)])
    weights, experts = routed(biased, scores="sigmoid", norm_p=None, num_groups=2, top_groups=1,
                              group_score="best_two")  # fmt: skip
    assert experts == [3, 2]  # the second group has the larger sum
    weights, experts = routed(scores="sparsemixer", jitter=0.3, norm_p=None)
    assert experts == [0, 1]
    # within 60 % of 2: 2 and 1; then of what is left, within 60 % of 1 or of their own size: 1
    assert weights == pytest.approx([e / (1 + e), 1.0])
