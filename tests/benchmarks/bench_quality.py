"""What rounding costs: perplexity of the demo model on its held-out stories. Not a test.

    python tests/benchmarks/bench_quality.py tinystories_sample.txt

The stories are those that moebatch/demo/train.py kept apart; the last line is one JSON document.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from run_forward import logits_everywhere

from moebatch.demo import train
from moebatch.model.linear import has_bf16
from moebatch.plan.policy import Policy

DEMO = Path(train.__file__).parent / "model"


def held_out_ids(corpus: Path) -> list[list[int]]:
    """BOS, the story, EOS: as the training script scores them."""
    recipe = train.Recipe()
    stories = train.read_stories(corpus)
    order = np.random.default_rng(recipe.seed).permutation(len(stories))
    held = [stories[i] for i in order[: int(len(stories) * recipe.held_out)]]
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    coded = tokenizer.encode_batch(held)
    return [[*one.ids, train.EOS][: train.Shape().context + 1] for one in coded]


def perplexity(rows: list[list[int]], **how: str) -> tuple[float, int]:
    policy = Policy(
        batch_size=16, micro_batch_size=16, kv_blocks=1, page_slots=1, prefill_tokens=8192
    )
    total, count = 0.0, 0
    for first in range(0, len(rows), 16):
        part = rows[first : first + 16]
        logits = logits_everywhere(DEMO, [ids[:-1] for ids in part], policy, chunk=4096, **how)
        for ids, scores in zip(part, logits, strict=True):
            targets = torch.tensor(ids[1:])
            total += torch.nn.functional.cross_entropy(scores, targets, reduction="sum").item()
            count += len(targets)
    return math.exp(total / count), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    args = parser.parse_args()
    rows = held_out_ids(args.corpus)
    results = {}
    arms = {
        "float32": {},
        "int8 weights": {"quantization": "int8"},
        "int4 weights": {"quantization": "int4"},
    }
    if has_bf16():
        arms |= {
            "bf16": {"compute": "bfloat16"},
            "int8 weights and activations": {"compute": "bfloat16", "quantization": "int8"},
            "int4 weights, 8-bit activations": {"compute": "bfloat16", "quantization": "int4"},
        }
    for name, how in arms.items():
        results[name], count = perplexity(rows, **how)
        print(f"{name:<32} perplexity {results[name]:.4f} on {len(rows)} stories, {count} tokens")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
