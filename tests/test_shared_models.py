"""Real, trained models that do not belong to the project: same greedy text as `transformers`.

stories260k-moe8 lies in ../shared/data. The 692 M-parameter Mixtral that
../shared/tools/upcycle_smollm2.py builds is looked for in $MOEBATCH_SMOLLM2_MOE.
"""

import os
from pathlib import Path

import pytest
import run_engine
import torch
from run_engine import POLICY, request, run, tokens

from moebatch.data.tokenizer import load_tokenizer

PROMPTS = [
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog. In 1969, the first humans walked on the Moon, and",
    "Lily and Tom went to the park. They saw a big",
    "One day",
]
NEW_TOKENS = 24


def reference(path: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        found.append(out[0, len(prompt) :].tolist())
    return found


def compare(path: Path, prompts: list[str]) -> None:
    tokenizer = load_tokenizer(path)
    ids = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    expected = reference(path, ids, NEW_TOKENS)
    requests = [request(i, x, max_tokens=NEW_TOKENS) for i, x in enumerate(ids)]
    for resident in (0.0, 1.0):
        outcomes = run(path, requests, POLICY, weights_resident=resident)
        assert expected == tokens(outcomes)


def test_stories260k_moe8(shared) -> None:
    compare(shared / "data" / "stories260k-moe8", PROMPTS)


def test_stories260k_dense(shared) -> None:
    compare(shared / "data" / "stories260k", PROMPTS)


def test_upcycled_smollm2() -> None:
    path = Path(os.environ.get("MOEBATCH_SMOLLM2_MOE", ""))
    if not (path / "config.json").is_file():
        pytest.skip("MOEBATCH_SMOLLM2_MOE does not name the upcycled model")
    compare(path, PROMPTS)


def test_demo_speaks_as_the_reference_does() -> None:
    path = Path(run_engine.__file__).parents[1] / "moebatch" / "demo" / "model"
    compare(path, PROMPTS)
