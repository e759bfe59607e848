"""Memory: a model larger than the budget runs within it, and many rows take no more than few."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moebatch.model.resolve import resolve_model

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
TOKENIZER = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
    "post_processor": None, "decoder": None, "truncation": None, "padding": None,
    "model": {"type": "WordLevel", "vocab": {"a": 3}, "unk_token": "a"},
}  # fmt: skip


def write_model(directory: Path, **changes: int) -> int:
    """A bf16 Mixtral with a file for each layer, from one block of noise; returns its bytes."""
    config = {"model_type": "mixtral", "hidden_act": "silu", "dtype": "bfloat16",
              "eos_token_id": 2, **SHAPE, **changes}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    model = resolve_model(str(directory))
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(2**20, generator=generator) * 0.03).bfloat16()
    files: dict[str, dict[str, torch.Tensor]] = {}
    total = 0
    for part in model.parts():
        rows = part.shape[0] // len(part.sources)
        for k, name in enumerate(source.name for source in part.sources):
            if part.name == "qkv":
                rows = (model.spec.q_size, model.spec.kv_size, model.spec.kv_size)[k]
            shape = (rows, *part.shape[1:])
            count = torch.Size(shape).numel()
            tensor = noise.repeat(count // noise.numel() + 1)[:count].reshape(shape)
            shard = name.split(".")[2] if name.startswith("model.layers") else "rest"
            files.setdefault(shard, {})[name] = tensor if len(shape) > 1 else tensor.abs() + 0.5
            total += 2 * count
    index = {}
    for shard, tensors in files.items():
        save_file(tensors, directory / f"model-{shard}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"model-{shard}.safetensors")
    text = json.dumps({"weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)
    return total


def write_requests(path: Path, count: int, *, longest: int, new_tokens: int) -> Path:
    rng = random.Random(0)
    with path.open("w") as file:
        for i in range(count):
            ids = [rng.randrange(3, 90) for _ in range(rng.randint(1, longest))]
            file.write(json.dumps({"id": i, "prompt_token_ids": ids, "max_tokens": new_tokens}))
            file.write("\n")
    return path


def run(data: Path, model: Path, out: Path, *flags: object) -> dict:
    result = subprocess.run(
        [sys.executable, "-m", "moebatch", "run", str(data), "-m", str(model), "-o", str(out),
         "--ignore-eos", "--cpu-threads", "1", *map(str, flags)],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=500, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(Path(f"{out}.moebatch/report.json").read_text())


def test_a_model_larger_than_the_budget_runs_within_it(tmp_path) -> None:
    """Peak RSS within 10 % + 300 MB of the budget; the model alone is twice the budget."""
    num_bytes = write_model(tmp_path)
    budget = 700 * 2**20
    assert num_bytes > 1.9 * budget
    data = write_requests(tmp_path / "in.jsonl", 24, longest=60, new_tokens=3)
    report = run(data, tmp_path, tmp_path / "out.jsonl", "--memory", budget)
    peak = report["memory_peak"]["cpu_rss"]
    assert peak < 1.1 * budget + 300e6
    assert 0 < report["policy"]["weights_resident"] < 1
    streamed = (1 - report["policy"]["weights_resident"]) * num_bytes
    assert report["io"]["disk_read_bytes"] > report["passes"] * 0.8 * streamed
    assert report["tokens"]["generated"] == 72


@pytest.mark.parametrize("rows", [10_000])
def test_memory_does_not_grow_with_the_number_of_rows(rows, tiny_models, tmp_path) -> None:
    path = tiny_models("mixtral")[1]
    model = tmp_path / "model"
    model.mkdir()
    for file in path.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    peaks = []
    for count in (rows // 10, rows):
        data = write_requests(tmp_path / f"{count}.jsonl", count, longest=12, new_tokens=2)
        out = tmp_path / f"{count}.out.jsonl"
        report = run(data, model, out, "--batch-size", 256, "--memory", "2GiB")
        assert report["requests"]["succeeded"] == count
        with out.open() as file:
            assert [str(i) for i in range(count)] == [str(json.loads(x)["id"]) for x in file]
        peaks.append(report["memory_peak"]["cpu_rss"])
    assert peaks[1] - peaks[0] < 16 * 2**20
