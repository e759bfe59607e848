"""moebatch against `transformers` generate() on the same requests, in one run. Not a test.

    python tests/benchmarks/bench_rivals.py MODEL_DIR REQUESTS.jsonl [--repeats 3] [--arms a,b]

Requests are rows with prompt_token_ids and max_new_tokens; every row generates exactly that many
tokens. Each arm runs in a process of its own; repeats are interleaved; medians and ratios are
printed, then one JSON document. Generation throughput = generated tokens / (prefill + decode time),
loading excluded, for every arm.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ARMS = ["moebatch", "hf-float32-16", "hf-float32-64", "hf-bfloat16-16", "hf-bfloat16-64"]


def read_requests(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def run_transformers(model_dir: Path, data: Path, *, dtype: str, batch: int) -> dict:
    """generate() on batches of similar length, padded on the left; the lengths are forced."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    rows = sorted(read_requests(data), key=lambda row: len(row["prompt_token_ids"]))
    generated, seconds = 0, 0.0
    # A first, uncounted call: allocations and lazy initialisation are not the rival's speed.
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        longest = max(len(row["prompt_token_ids"]) for row in part)
        pads = [longest - len(row["prompt_token_ids"]) for row in part]
        ids = torch.tensor(
            [[0] * n + r["prompt_token_ids"] for n, r in zip(pads, part, strict=True)]
        )
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads])
        new = part[0]["max_new_tokens"]
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new,
                                 do_sample=False, pad_token_id=0)  # fmt: skip
        seconds += time.perf_counter() - start
        generated += (out.shape[1] - longest) * len(part)
    return {"generated": generated, "seconds": seconds, "peak_rss": peak_rss_bytes()}


def run_moebatch(model_dir: Path, data: Path, flags: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        subprocess.run(
            [sys.executable, "-m", "moebatch", "run", str(data), "-m", str(model_dir), "-o",
             str(out), "--ignore-eos", "--greedy", "-q", *flags],
            check=True,
        )  # fmt: skip
        report = json.loads(Path(f"{out}.moebatch/report.json").read_text())
    times = report["time_s"]
    return {
        "generated": report["tokens"]["generated"],
        "seconds": times["prefill"] + times["decode"],
        "peak_rss": report["memory_peak"]["cpu_rss"],
        "load_s": times["load"],
        "prefill_s": times["prefill"],
        "weights_resident": report["policy"]["weights_resident"],
    }


def run_arm(arm: str, args: argparse.Namespace) -> dict:
    if arm == "moebatch":
        return run_moebatch(args.model, args.requests, args.flags.split())
    command = [sys.executable, __file__, str(args.model), str(args.requests), "--one", arm]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--flags", default="", help="more options for moebatch run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _, dtype, batch = args.one.split("-")
        print(
            json.dumps(run_transformers(args.model, args.requests, dtype=dtype, batch=int(batch)))
        )
        return
    rows = read_requests(args.requests)
    expected = sum(row["max_new_tokens"] for row in rows)
    results: dict[str, list[dict]] = {arm: [] for arm in args.arms.split(",")}
    for repeat in range(args.repeats):
        for arm, found in results.items():
            found.append(run_arm(arm, args))
            assert found[-1]["generated"] == expected, (arm, found[-1], expected)
            rate = expected / found[-1]["seconds"]
            print(f"{repeat + 1}/{args.repeats} {arm}: {rate:.1f} tok/s", file=sys.stderr)
    rates = {arm: [expected / one["seconds"] for one in found] for arm, found in results.items()}
    ours = statistics.median(rates.get("moebatch", [float("nan")]))
    print(f"{'arm':<16} {'tok/s':>7} {'min':>7} {'max':>7} {'ours/it':>8} {'peak GiB':>9}")
    for arm, values in rates.items():
        middle = statistics.median(values)
        peak = statistics.median(one["peak_rss"] for one in results[arm]) / 2**30
        print(f"{arm:<16} {middle:7.1f} {min(values):7.1f} {max(values):7.1f} "
              f"{ours / middle:8.2f} {peak:9.2f}")  # fmt: skip
    print(json.dumps({"model": args.model.name, "requests": len(rows), "results": results}))


if __name__ == "__main__":
    main()
