"""Tokens per second of every schedule, of accelerate's offloading, and of the roofline, in one run.

For an NVIDIA GPU: a Mixtral-8x7B-shaped model with random weights that are made in memory, the GPU's
memory capped. Steady decode at a given context length; one JSON document at the end. Not a test.

    python tests/benchmarks/bench_schedules.py --gpu-memory 16GiB --json schedules.json
    python tests/benchmarks/bench_schedules.py --device emulated:t4-mini --shape tiny   # to try it
"""

import argparse
import contextlib
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moebatch.model.families import FAMILIES
from moebatch.model.stored import Quantization, TensorEntry
from moebatch.plan.device_fit import fit
from moebatch.plan.memory import kv_block_bytes
from moebatch.plan.pipeline import STYLES
from moebatch.plan.policy import KV_BLOCK_TOKENS, Policy
from moebatch.plan.schedule import Lane
from moebatch.runtime.batch import Segment
from moebatch.runtime.device_backend import DeviceBackend
from moebatch.runtime.devices import open_device
from moebatch.runtime.host import describe
from moebatch.runtime.kv_cache import BlockTable
from moebatch.units import parse_bytes

SHAPES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 256, "intermediate_size": 448, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
    },
}  # fmt: skip
COMMON = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
          "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
          "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False}  # fmt: skip


class RandomCheckpoint:
    """Stands in for the files of a Mixtral: small random bf16 numbers, the same for every tensor."""

    quantization = Quantization()

    def __init__(self, config: dict[str, Any]) -> None:
        hidden, expert = config["hidden_size"], config["intermediate_size"]
        kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,),
                  "lm_head": (config["vocab_size"], hidden)}  # fmt: skip
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            shapes |= {
                at + "input_layernorm": (hidden,),
                at + "post_attention_layernorm": (hidden,),
            }
            for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
                shapes[f"{at}self_attn.{name}_proj"] = (rows, hidden)
            shapes[at + "block_sparse_moe.gate"] = (8, hidden)
            for e in range(8):
                for name, shape in (("w1", (expert, hidden)), ("w3", (expert, hidden)),
                                    ("w2", (hidden, expert))):  # fmt: skip
                    shapes[f"{at}block_sparse_moe.experts.{e}.{name}"] = shape
        self._shapes = {name + ".weight": shape for name, shape in shapes.items()}
        noise = torch.randn(1 << 20) * hidden**-0.5
        self._noise = memoryview(noise.bfloat16().view(torch.uint8).numpy())

    def has(self, name: str) -> bool:
        return name in self._shapes

    def entry(self, name: str) -> TensorEntry:
        shape = self._shapes[name]
        count = 1
        for size in shape:
            count *= size
        return TensorEntry(name=name, dtype="bfloat16", shape=shape, path=Path(name), offset=0,
                           num_bytes=2 * count)  # fmt: skip

    def read_into(self, entry: TensorEntry, buffer: memoryview) -> None:
        for first in range(0, len(buffer), len(self._noise)):
            part = buffer[first : first + len(self._noise)]
            part[:] = self._noise[: len(part)]

    def forget(self, entry: TensorEntry) -> None:
        """Nothing is kept."""


def measure(args: argparse.Namespace, config: dict[str, Any], name: str) -> dict[str, Any]:
    """Steady decode under one schedule."""
    family = FAMILIES["mixtral"]
    spec = replace(family.spec(config), weight_dtype="bfloat16")
    device = open_device(args.device, memory_bytes=parse_bytes(args.gpu_memory))
    assert device is not None, "give --device"
    blocks = -(-(args.context + args.steps + 8) // KV_BLOCK_TOKENS)
    host = Policy(batch_size=args.batch_size, micro_batch_size=args.micro_batch_size,
                  kv_blocks=blocks * args.batch_size, kv_dtype="bfloat16",
                  prefill_tokens=args.batch_size)  # fmt: skip
    policy = fit(spec, host, schedule=name, device_bytes=device.memory.limit,
                 micro_batch_size=args.micro_batch_size, weights_resident=None)  # fmt: skip
    checkpoint: Any = RandomCheckpoint(config)
    backend = DeviceBackend(checkpoint, spec=spec, family=family, policy=policy, device=device,
                            compute="float32")  # fmt: skip
    try:
        backend.load(threads=4, progress=lambda done, total: None)
        tables = [BlockTable() for _ in range(policy.batch_size)]
        for table in tables:
            backend.kv.extend(table, args.context + args.steps + 4)
        seconds, used = [], []
        for step in range(args.steps + 2):
            rows = [Segment(token_ids=(7,), start=args.context + step, blocks=t) for t in tables]
            size = policy.micro_batch_size
            start = time.perf_counter()
            result = backend.compute([rows[k : k + size] for k in range(0, len(rows), size)])
            backend.logits(torch.tensor([t for group in result.last_tokens for t in group]))
            seconds.append(time.perf_counter() - start)
            used.append(result.timeline.utilization(Lane.H2D))
        streamed = sum(cut.num_bytes for cut in backend.stream.layers)
    finally:
        backend.close()
        device.close()
    step_s = statistics.median(seconds[2:])
    return {"schedule": name, "batch_size": policy.batch_size, "step_s": step_s,
            "tokens_per_s": policy.batch_size / step_s, "link_utilization": statistics.mean(used[2:]),
            "weights_resident": policy.weights_resident, "streamed_bytes": streamed,
            "kv_bytes": policy.kv_blocks * kv_block_bytes(spec, policy.kv_dtype)}  # fmt: skip


def roofline(args: argparse.Namespace, best: dict[str, Any]) -> dict[str, Any]:
    """The HRM's bound on a decode step with host attention: weights over the link, KV over host memory.

    Both rates are measured here and now; source: MoE-Lightning, eq. 12.
    """
    source, times = torch.empty(1 << 28, dtype=torch.uint8), []
    for _ in range(3):
        start = time.perf_counter()
        source.sum()
        times.append(time.perf_counter() - start)
    host_bytes_per_s = source.nbytes / min(times)
    device = open_device(args.device, memory_bytes=None)
    assert device is not None
    size = min(1 << 28, device.memory.limit // 2)
    pinned, target = device.pinned(size), device.empty((size,), torch.uint8)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        device.copy_in(target, pinned)
        if not device.emulated:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    device.close()
    link_bytes_per_s = pinned.numel() / min(times)
    step_s = max(best["streamed_bytes"] / link_bytes_per_s, best["kv_bytes"] / host_bytes_per_s)
    return {"link_bytes_per_s": link_bytes_per_s, "host_bytes_per_s": host_bytes_per_s,
            "step_s": step_s, "tokens_per_s": best["batch_size"] / step_s}  # fmt: skip


def accelerate_offloading(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """`transformers` with weights offloaded by accelerate hooks: steady decode, static batch."""
    from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
    from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM

    with init_empty_weights():
        model = MixtralForCausalLM(MixtralConfig(**config)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    limit = {0: parse_bytes(args.gpu_memory) * 8 // 10, "cpu": 10**12}
    device_map = infer_auto_device_map(
        model, max_memory=limit, no_split_module_classes=["MixtralDecoderLayer"]
    )
    model = dispatch_model(model, device_map)
    batch, cache = args.accelerate_batch, DynamicCache()
    ids = torch.full((batch, args.context), 7)
    with torch.no_grad():
        model(ids.cuda(), past_key_values=cache, logits_to_keep=1)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            model(ids[:, :1].cuda(), past_key_values=cache)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    step_s = statistics.median(seconds)
    return {"batch_size": batch, "step_s": step_s, "tokens_per_s": batch / step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu-memory", default="16GiB")
    parser.add_argument("--shape", choices=SHAPES, default="mixtral-8x7b")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--schedules", default=",".join(STYLES))
    parser.add_argument("--accelerate-batch", type=int, default=8)
    parser.add_argument("--no-accelerate", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = {**COMMON, **SHAPES[args.shape]}
    found = [measure(args, config, name) for name in args.schedules.split(",")]
    bound = roofline(args, found[0])
    for row in found:
        print(f"{row['schedule']:16} {row['tokens_per_s']:9.1f} tok/s  "
              f"{row['tokens_per_s'] / bound['tokens_per_s']:6.1%} of the bound")  # fmt: skip
    print(f"{'HRM bound':16} {bound['tokens_per_s']:9.1f} tok/s")
    other = None
    if not args.no_accelerate and not args.device.startswith("emulated"):
        with contextlib.suppress(ImportError):
            other = accelerate_offloading(args, config)
        text = "not installed" if other is None else f"{other['tokens_per_s']:9.1f} tok/s"
        print(f"{'accelerate':16} {text}")
    if args.json:
        machine = {**describe(), "gpu": args.device if args.device.startswith("emulated")
                   else torch.cuda.get_device_name()}  # fmt: skip
        result = {"machine": machine, "settings": {k: str(v) for k, v in vars(args).items()},
                  "schedules": found, "bound": bound, "accelerate": other}  # fmt: skip
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
