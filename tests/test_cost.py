"""FLOPs and bytes of the cost model against counts taken from the real engine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import reference_model, save
from run_engine import POLICY, open_engine, request
from test_families import MIXTRAL_8X7B, spec_of
from torch.utils.flop_counter import FlopCounterMode

from moebatch.model.resolve import resolve_model
from moebatch.plan import cost
from moebatch.plan.job_time import passes
from moebatch.plan.schedule import Op
from moebatch.runtime.engine import Engine

MIXTRAL = spec_of(MIXTRAL_8X7B)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return save(reference_model("mixtral"), tmp_path_factory.mktemp("mixtral"))


def counted(path, requests, monkeypatch):
    """FLOPs of each op of a run, as PyTorch counts them, and each pass's (prompt, decode) tokens."""
    flops = dict.fromkeys(("head", *Op), 0)
    loads, attended = [], {"decode": 0, "prompt": 0}
    with open_engine(path, POLICY, weights_resident=0.0, native=False) as engine:
        for op, handler in list(engine._backend._executor._handlers.items()):

            def count(task, op=op, handler=handler):
                with FlopCounterMode(display=False) as counter:
                    handler(task)
                flops[op] += counter.get_total_flops()

            engine._backend._executor._handlers[op] = count
        plain_logits, plain_pass = engine._backend._forward.logits, Engine._pass

        def logits(tokens):
            with FlopCounterMode(display=False) as counter:
                result = plain_logits(tokens)
            flops["head"] += counter.get_total_flops()
            return result

        def one_pass(self, active):
            decoding = sum(not s.remaining_prompt for s in active)
            before = self.stats.prompt_tokens
            result = plain_pass(self, active)
            loads.append((self.stats.prompt_tokens - before, decoding))
            return result

        plain_begin = engine._backend._forward.begin

        def begin(one, **wanted):
            for part in one.micro_batches:
                attended["decode"] += sum(int(g.masks[None].sum()) for g in part.decode)
                for run in part.prompts:
                    first = run.context - (run.last - run.first)
                    attended["prompt"] += sum(range(first + 1, run.context + 1))
            plain_begin(one, **wanted)

        engine._backend._forward.begin = begin
        engine._backend._forward.logits = logits
        monkeypatch.setattr(Engine, "_pass", one_pass)
        list(engine.run(requests))
    return flops, loads, attended


def test_flops_and_passes_are_those_of_the_engine(mixtral, monkeypatch) -> None:
    """Prompts of one pass, then decoding: every product and both of attention's."""
    spec = resolve_model(str(mixtral)).spec
    # two micro-batches of three: a row alone would be counted twice by the router
    lengths = [(5, 4), (9, 4), (12, 4), (3, 4), (7, 4), (2, 4)]
    rows = [request(k, range(1, p + 1), max_tokens=n) for k, (p, n) in enumerate(lengths)]
    flops, loads, attended = counted(mixtral, rows, monkeypatch)
    predicted = list(passes(np.array(lengths), POLICY))
    assert [(load.prompt_tokens, load.rows) for load in predicted] == loads
    layers = spec.num_layers
    tokens = sum(load.tokens for load in predicted)
    sampled = sum(load.sampled for load in predicted)
    assert flops[Op.PRE_ATTN] == layers * cost.qkv_projection(spec, tokens).flops
    routed = cost.router(spec, tokens).flops
    assert flops[Op.POST_ATTN] == layers * (cost.output_projection(spec, tokens).flops + routed)
    # the last layer's experts see only the tokens that are sampled
    ffn = (layers - 1) * cost.experts(spec, tokens).flops + cost.experts(spec, sampled).flops
    assert flops[Op.FFN] == ffn
    assert flops["head"] == cost.lm_head(spec, sampled).flops
    # PyTorch does not count attention on a CPU: the pairs of query and visible key stand for it
    assert flops[Op.CPU_ATTN] == 0
    assert attended["decode"] == sum(load.context for load in predicted)
    assert attended["prompt"] == sum(load.pairs for load in predicted)


def test_bytes_of_a_layer_are_those_of_the_checkpoint(mixtral) -> None:
    spec = resolve_model(str(mixtral)).spec
    file = sum(path.stat().st_size for path in mixtral.glob("*.safetensors"))
    pages = spec.num_layers * cost.mean_attention_page_bytes(spec)
    pages += spec.num_expert_pages * cost.expert_page_bytes(spec)
    item = 4 if spec.weight_dtype == "float32" else 2
    # the planner counts the router twice: as stored, and in float32 as it is held
    routers = spec.num_layers * spec.float_params * 4
    stored = pages - routers + spec.vocabulary_params * item
    assert stored == pytest.approx(file, rel=0.02)


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 60), seed=st.integers(0, 99))
def test_distinct_experts_is_the_mean_of_even_routing(tokens, seed) -> None:
    generator = np.random.default_rng(seed)
    seen = [
        len({e for _ in range(tokens) for e in generator.choice(8, 2, replace=False)})
        for _ in range(120)
    ]
    assert np.mean(seen) == pytest.approx(cost.distinct_experts(MIXTRAL, tokens), abs=0.35)


def test_mixtral_by_hand() -> None:
    """One layer of Mixtral 8x7B in 16 bits is 2.90 GB, a token's KV cache 131 kB (models.md, spec)."""
    layer = cost.mean_attention_page_bytes(MIXTRAL) + 8 * cost.expert_page_bytes(MIXTRAL)
    assert layer == pytest.approx(2.90e9, rel=0.01)
    assert 32 * cost.kv_bytes(MIXTRAL, 1, "float16") == 131072
    assert cost.experts(MIXTRAL, 1).flops == 2 * 2 * 3 * 4096 * 14336
    attention = cost.decode_attention(MIXTRAL, 1, 512, "float16")
    assert attention.flops == 4 * 512 * 4096
    # GQA: four query heads share each key, so the intensity is 4 FLOPs a byte in 16 bits
    assert attention.intensity == pytest.approx(4.0, rel=0.02)


def test_arrays_and_numbers_agree() -> None:
    tokens = np.array([1.0, 7.0, 300.0])
    for function in (cost.experts, cost.qkv_projection, cost.router, cost.lm_head, cost.norm):
        together = function(MIXTRAL, tokens)
        for k, each in enumerate(tokens):
            assert function(MIXTRAL, float(each)).flops == together.flops[k]
