"""The native kernels against this machine's roofs and against PyTorch, in one run. Not a test.

    python tests/benchmarks/bench_kernels.py [--threads 2] [--variant avx512bf16] [--only ffn,...]

Roofs are measured first: multiply-adds on registers alone, and reading memory once. Weights rotate
through more memory than the caches hold, as in a model. Every figure is the median of interleaved
repeats; the last line is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from moebatch.model.linear import PackedBf16Linear, PackedLinear, has_bf16, has_fbgemm
from moebatch.native.kernels import Context, Kernels, load_kernels

HIDDEN, INNER, NUM_EXPERTS = 1024, 3584, 8
ROUNDS = 4_000_000  # of a register-only loop: some tenths of a second
LAYERS = 3  # of different weights: 530 MB in bf16


def seconds(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each arm, taken in turns after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def roofs(kernels: Kernels) -> dict[str, float]:
    """FLOP/s of both instructions and bytes/s of reading memory."""
    found = {}
    for name, round_x in (("fma", False), ("dot", True)):
        done = kernels.peak_flops(1000, round_x=round_x)
        time_s = seconds({name: lambda r=round_x: kernels.peak_flops(ROUNDS, round_x=r)}, 5)[name]
        found[name] = done * ROUNDS / 1000 / time_s
    data = kernels.pack(torch.zeros(1 << 17, 1 << 11, dtype=torch.bfloat16)).buffer
    time_s = seconds({"read": lambda: kernels.read_all(data)}, 9)["read"]
    found["read"] = data.numel() / time_s
    return found


def print_row(name: str, cells: dict[str, str]) -> None:
    print(f"{name:<30}" + "".join(f"{key} {value:<12}" for key, value in cells.items()))


def bench_ffn(kernels: Kernels, roof: dict[str, float], repeats: int) -> list[dict]:
    """The experts of a layer with equal and with uneven loads."""
    weights = [
        torch.randn(2 * INNER, HIDDEN).bfloat16().mul_(0.03) for _ in range(LAYERS * NUM_EXPERTS)
    ]
    downs = [torch.randn(HIDDEN, INNER).bfloat16().mul_(0.02) for _ in weights]
    experts = []
    for stacked, down in zip(weights, downs, strict=True):
        packed = kernels.pack(stacked)
        gate, up = kernels.rows(packed, 0, INNER), kernels.rows(packed, INNER, 2 * INNER)
        experts.append(kernels.ffn_weights(gate, up, kernels.pack(down)))
    rival = PackedBf16Linear if has_bf16() else PackedLinear if has_fbgemm() else None
    rivals = []
    if rival:
        rivals = [(rival(a), rival(b)) for a, b in zip(weights, downs, strict=True)]
    del weights, downs
    uneven = [1, 2, 5, 9, 14, 20, 31, 46]
    results = []
    for name, counts in [
        *((str(n), [n] * NUM_EXPERTS) for n in (1, 2, 4, 8, 16, 32, 64, 128)),
        ("uneven, 16 on average", uneven),
    ]:
        results.append(_ffn_row(kernels, roof, repeats, name, counts, experts, rivals))
    return results


def _ffn_row(kernels, roof, repeats, name, counts, experts, rivals) -> dict:
    total = sum(counts)
    starts = [sum(counts[:e]) for e in range(NUM_EXPERTS + 1)]
    tokens, scale = torch.arange(total), torch.rand(total, 1)
    x, out = torch.randn(total, HIDDEN), torch.zeros(total, HIDDEN)

    def layer(k: int) -> list:
        return experts[k * NUM_EXPERTS : (k + 1) * NUM_EXPERTS]

    def ours(round_x: bool) -> None:
        for k in range(LAYERS):
            kernels.add_ffn(out, x, layer(k), starts=starts, tokens=tokens, weights=scale,
                            round_x=round_x)  # fmt: skip

    def torch_way() -> None:
        for e, (gate_up, down) in enumerate(rivals):
            part = slice(starts[e % NUM_EXPERTS], starts[e % NUM_EXPERTS + 1])
            rows = tokens[part]
            both = gate_up(x.index_select(0, rows))
            h = torch.nn.functional.silu(both[:, :INNER]) * both[:, INNER:]
            out.index_add_(0, rows, down(h) * scale[part])

    arms: dict[str, Callable[[], object]] = {"dot": lambda: ours(True), "fma": lambda: ours(False)}
    if kernels.variant != "avx512bf16":
        del arms["dot"]
    if rivals:
        arms["torch"] = torch_way
    found = seconds(arms, repeats)
    flops = 6.0 * HIDDEN * INNER * total * LAYERS
    read = 6.0 * HIDDEN * INNER * NUM_EXPERTS * LAYERS
    row = {"tokens_per_expert": name}
    cells = {}
    for arm in ("dot", "fma"):
        if arm not in found:
            continue
        rate = flops / found[arm]
        attainable = min(roof[arm], flops / (read / roof["read"]))
        row |= {arm: rate, f"{arm}_of_peak": rate / roof[arm]}
        row |= {f"{arm}_of_attainable": rate / attainable}
        cells[f"{arm} GFLOP/s"] = f"{rate / 1e9:.0f}"
        cells["of peak"] = f"{rate / roof[arm]:.0%}"
        cells["of roof"] = f"{rate / attainable:.0%}"
        print_row(f"ffn {name} tokens/expert", cells)
        cells = {}
    if rivals:
        row["torch"] = flops / found["torch"]
        best = min(found[arm] for arm in ("dot", "fma") if arm in found)
        row["over_torch"] = found["torch"] / best
        print_row("", {"PyTorch GFLOP/s": f"{row['torch'] / 1e9:.0f}",
                       "ours/its": f"{row['over_torch']:.2f}"})  # fmt: skip
    return row


def bench_decode(kernels: Kernels, roof: dict[str, float], repeats: int) -> list[dict]:
    """One query a row, grouped heads, bf16 cache in shuffled blocks; many rows and few."""
    results = []
    for heads, groups, head_dim in ((32, 8, 128), (16, 4, 64)):
        for context, rows in ((512, 64), (4096, 8), (4096, 1)):
            per_row = 2 * 2 * context * groups * head_dim
            copies = max(1, -(-(200 << 20) // (rows * per_row)))  # beyond the caches
            count = copies * rows * (context // 16)
            pools = [torch.randn(count * groups, 16, head_dim).bfloat16() for _ in range(2)]
            order = torch.randperm(count).to(torch.int32).view(copies, rows, -1)
            q = torch.randn(rows, heads, head_dim)
            contexts = [
                Context(sequences=torch.arange(rows), lengths=torch.full((rows,), context),
                        tables=order[k].contiguous(), num_kv_heads=groups)
                for k in range(copies)
            ]  # fmt: skip

            def ours(q=q, pools=pools, contexts=contexts) -> None:
                for one in contexts:
                    kernels.attend(q, *pools, one)

            found = seconds({"ours": ours}, repeats)["ours"]
            read = copies * rows * per_row / found
            row = {"heads": heads, "kv_heads": groups, "head_dim": head_dim, "context": context,
                   "rows": rows, "bytes_per_s": read, "of_read": read / roof["read"]}  # fmt: skip
            print_row(
                f"decode {heads}/{groups}x{head_dim} ctx {context} rows {rows}",
                {"GB/s": f"{read / 1e9:.1f}", "of reading": f"{read / roof['read']:.0%}"},
            )
            results.append(row)
    return results


BENCHES = {"ffn": bench_ffn, "decode": bench_decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant", default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default=",".join(BENCHES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = load_kernels(args.threads, args.variant)
    assert kernels is not None, "installed without native kernels"
    roof = roofs(kernels)
    print(f"{kernels.variant}, {args.threads} threads: fma {roof['fma'] / 1e9:.0f} GFLOP/s, "
          f"dot {roof['dot'] / 1e9:.0f} GFLOP/s, read {roof['read'] / 1e9:.1f} GB/s")  # fmt: skip
    results = {name: BENCHES[name](kernels, roof, args.repeats) for name in args.only.split(",")}
    print(json.dumps({"variant": kernels.variant, "roofs": roof, "results": results}))


if __name__ == "__main__":
    main()
