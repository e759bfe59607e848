"""Every schedule on an emulated accelerator: executed against simulated, and against each other.

Decode steps of a random Mixtral-shaped model whose layers take as long to cross the emulated link as
computation takes on this machine, times a few: the paper's regime in the small. Durations of
computation are measured in a run of their own (--calibrate's schedules), those of copies follow from
bytes and the link; the simulator then predicts every schedule. Nothing else should run meanwhile.

    python tests/benchmarks/schedule_ratios.py --json ratios.json
"""

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))

import models
import torch

from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import resolve_model
from moebatch.plan.calibrate import measured_seconds
from moebatch.plan.pipeline import STYLES
from moebatch.plan.policy import Policy
from moebatch.plan.profiles import LinkProfile
from moebatch.plan.schedule import Lane, Op
from moebatch.plan.timeline import simulate_steps
from moebatch.runtime.batch import Segment
from moebatch.runtime.device_backend import DeviceBackend
from moebatch.runtime.emulated import EmulatedDevice
from moebatch.runtime.kv_cache import BlockTable

ON_DEVICE = ("flexgen", "layerwise")  # attention there
LINK_OPS = (Op.LOAD_PAGE,)
WARM_UP = 2


def make_model(args, directory):
    model = models.reference_model(
        "mixtral", hidden_size=args.hidden, intermediate_size=args.expert_size,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 32, head_dim=32,
        num_key_value_heads=args.hidden // 64, num_local_experts=8, vocab_size=256,
        max_position_embeddings=4096,
    )  # fmt: skip
    return models.save(model, Path(directory))


def policy_of(args, name):
    batch = args.micro_batch * args.micro_batches
    return Policy(
        batch_size=batch,
        micro_batch_size=batch if name == "layerwise" else args.micro_batch,
        schedule=name,
        attention="gpu" if name in ON_DEVICE else "cpu",
        ffn="gpu",
        weights_resident=0.0,
        kv_resident=0.0,
        kv_blocks=batch * (args.context // 16 + 2),
    )


def run(args, path, name):
    """Timelines of decode steps, with what the simulator needs to know of them."""
    model = resolve_model(str(path))
    profile = LinkProfile(name="bench", memory_bytes=2**32, h2d_bytes_per_s=args.link * 1e6,
                          d2h_bytes_per_s=args.link * 1e6, latency_s=1e-5)  # fmt: skip
    policy = policy_of(args, name)
    with Checkpoint(path) as checkpoint:
        backend = DeviceBackend(checkpoint, spec=model.spec, family=model.family, policy=policy,
                                device=EmulatedDevice(profile), compute="float32")  # fmt: skip
        backend.load(threads=1, progress=lambda done, total: None)
        rows = [BlockTable() for _ in range(policy.batch_size)]
        for blocks in rows:
            backend.kv.extend(blocks, args.context + 16)
        results = []
        for step in range(args.steps + WARM_UP):
            segments = [Segment(token_ids=(5 + step,), start=args.context + step, blocks=blocks)
                        for blocks in rows]  # fmt: skip
            size = policy.micro_batch_size
            groups = [segments[k : k + size] for k in range(0, len(segments), size)]
            results.append(backend.compute(groups))
        backend.close()
    kept = results[WARM_UP:]
    gaps = [b.timeline.start_s - a.timeline.end_s for a, b in pairwise(kept)]
    return {
        "timelines": [r.timeline for r in kept],
        "tasks": kept[0].tasks,
        "prologue": backend.prologue,
        "plan": backend.stream,
        "between_s": mean(gaps),
        "batch": policy.batch_size,
    }


def seconds_of(args, measured, plan):
    """Copies of weights by bytes and link, all else as measured."""

    def seconds(task):
        if task.op is Op.LOAD_PAGE:
            size = plan.layers[task.layer].page_bytes(task.page)
            return 1e-5 + size / (args.link * 1e6)
        return measured(task)

    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--expert-size", type=int, default=448)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--link", type=float, default=200.0, help="MB/s")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--calibrate", default="cgopipe,flexgen")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = make_model(args, directory)
        runs = {name: run(args, path, name) for name in STYLES}
        calibration = {name: run(args, path, name) for name in args.calibrate.split(",")}
    host = measured_seconds(calibration["cgopipe"]["timelines"])
    device = measured_seconds(calibration["flexgen"]["timelines"])
    grouped = measured_seconds(runs["cgopipe-grouped"]["timelines"])
    whole = measured_seconds(runs["layerwise"]["timelines"])
    table, fastest = [], mean(t.makespan_s for t in runs["cgopipe"]["timelines"])
    for name, one in runs.items():
        kinds = device if name in ON_DEVICE else host
        kinds = {"cgopipe-grouped": grouped, "layerwise": whole}.get(name, kinds)
        simulated = simulate_steps(
            one["prologue"], one["tasks"], seconds_of(args, kinds, one["plan"]),
            num_steps=4, between_s=one["between_s"],
        )[-1]  # fmt: skip
        executed = mean(t.makespan_s for t in one["timelines"])
        table.append(
            {
                "schedule": name,
                "executed_ms": 1e3 * executed,
                "simulated_ms": 1e3 * simulated.makespan_s,
                "executed_over_simulated": executed / simulated.makespan_s,
                "link_utilization": mean(t.utilization(Lane.H2D) for t in one["timelines"]),
                "tokens_per_s": one["batch"] / (executed + one["between_s"]),
                "over_cgopipe": executed / fastest,
            }
        )
    print(f"{'schedule':16} executed simulated  ratio  link  tok/s  x cgopipe")
    for row in table:
        print(f"{row['schedule']:16} {row['executed_ms']:6.0f}ms {row['simulated_ms']:7.0f}ms "
              f"{row['executed_over_simulated']:6.3f} {row['link_utilization']:5.1%} "
              f"{row['tokens_per_s']:6.0f} {row['over_cgopipe']:6.2f}")  # fmt: skip
    ops = {op: [s.end_s - s.start_s for t in runs["cgopipe"]["timelines"] for s in t.spans
                if s.task.op is op] for op in Op}  # fmt: skip
    print({op.value: round(1e3 * mean(v), 2) for op, v in ops.items() if v})
    print(runs["cgopipe"]["timelines"][-1].grid(120))
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k != "json"}
        args.json.write_text(json.dumps({"settings": settings, "schedules": table}, indent=2))


if __name__ == "__main__":
    main()
