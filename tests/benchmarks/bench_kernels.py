"""The native kernels against this machine's roofs and against PyTorch, in one run. Not a test.

    python tests/benchmarks/bench_kernels.py [--threads 2] [--variant avx512bf16] [--only ffn,...]
        [--tokens 1,8,64]

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
from torch import Tensor

from moebatch.model.linear import PackedBf16Linear, PackedLinear, has_bf16, has_fbgemm
from moebatch.native import kernels as native
from moebatch.native.kernels import INT4, INT8, Context, FfnWeights, Kernels, Packed, load_kernels
from moebatch.native.rounding import Rounding

HIDDEN, INNER, NUM_EXPERTS = 1024, 3584, 8
ROUNDS = 4_000_000  # of a register-only loop: some tenths of a second
SETTLE_S = 0.02  # PyTorch's OpenMP threads spin for a while and would take a core from the next arm
LAYERS = 3  # of different weights: 530 MB in bf16


def seconds(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each arm, taken in turns after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in arms.items():
            time.sleep(SETTLE_S)
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
    print(f"{name:<44}" + "".join(f"{key} {value:<12}" for key, value in cells.items()))


def bench_ffn(kernels: Kernels, roof: dict[str, float], repeats: int,
              counts: list[int]) -> list[dict]:  # fmt: skip
    """The experts of a layer with equal and with uneven loads."""
    weights = [
        torch.randn(2 * INNER, HIDDEN).bfloat16().mul_(0.03) for _ in range(LAYERS * NUM_EXPERTS)
    ]
    downs = [torch.randn(HIDDEN, INNER).bfloat16().mul_(0.02) for _ in weights]
    experts = {
        "bf16": [_expert(kernels.pack, kernels, *both) for both in zip(weights, downs, strict=True)]
    }
    for name, rounding in (("int8", INT8), ("int4", INT4)):

        def pack(weight: Tensor, how: Rounding = rounding) -> Packed:
            return kernels.pack_rounded(weight, how)

        experts[name] = [_expert(pack, kernels, *both) for both in zip(weights, downs, strict=True)]
    rival = PackedBf16Linear if has_bf16() else PackedLinear if has_fbgemm() else None
    rivals = []
    if rival:
        rivals = [(rival(a), rival(b)) for a, b in zip(weights, downs, strict=True)]
    del weights, downs
    uneven = [1, 2, 5, 9, 14, 20, 31, 46]
    results = []
    for name, loads in [
        *((str(n), [n] * NUM_EXPERTS) for n in counts),
        ("uneven, 16 on average", uneven),
    ]:
        results.append(_ffn_row(kernels, roof, repeats, name, loads, experts, rivals))
    return results


def _expert(pack: Callable[[Tensor], Packed], kernels: Kernels, stacked: Tensor,
            down: Tensor) -> FfnWeights:  # fmt: skip
    packed = pack(stacked)
    gate, up = kernels.rows(packed, 0, INNER), kernels.rows(packed, INNER, 2 * INNER)
    return kernels.ffn_weights(gate, up, pack(down))


def _ffn_row(kernels, roof, repeats, name, counts, experts, rivals) -> dict:
    total = sum(counts)
    starts = [sum(counts[:e]) for e in range(NUM_EXPERTS + 1)]
    tokens, scale = torch.arange(total), torch.rand(total, 1)
    x, out = torch.randn(total, HIDDEN), torch.zeros(total, HIDDEN)

    def ours(kind: str, round_x: bool) -> None:
        for k in range(LAYERS):
            layer = experts[kind][k * NUM_EXPERTS : (k + 1) * NUM_EXPERTS]
            kernels.add_ffn(out, x, layer, starts=starts, tokens=tokens, weights=scale,
                            round_x=round_x)  # fmt: skip

    def torch_way() -> None:
        for e, (gate_up, down) in enumerate(rivals):
            part = slice(starts[e % NUM_EXPERTS], starts[e % NUM_EXPERTS + 1])
            rows = tokens[part]
            both = gate_up(x.index_select(0, rows))
            h = torch.nn.functional.silu(both[:, :INNER]) * both[:, INNER:]
            out.index_add_(0, rows, down(h) * scale[part])

    arms: dict[str, Callable[[], object]] = {
        "dot": lambda: ours("bf16", True),
        "fma": lambda: ours("bf16", False),
        "int8": lambda: ours("int8", True),
        "int4": lambda: ours("int4", True),
    }
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
    bf16 = min(found[arm] for arm in ("dot", "fma") if arm in found)
    for arm in ("int8", "int4"):
        row |= {arm: flops / found[arm], f"{arm}_over_bf16": bf16 / found[arm]}
        print_row("", {f"{arm} GFLOP/s": f"{row[arm] / 1e9:.0f}",
                       "over bf16": f"{row[f'{arm}_over_bf16']:.2f}"})  # fmt: skip
    if rivals:
        row["torch"] = flops / found["torch"]
        best = min(found[arm] for arm in ("dot", "fma") if arm in found)
        row["over_torch"] = found["torch"] / best
        print_row("", {"PyTorch GFLOP/s": f"{row['torch'] / 1e9:.0f}",
                       "ours/its": f"{row['over_torch']:.2f}"})  # fmt: skip
    return row


def bench_decode(kernels: Kernels, roof: dict[str, float], repeats: int) -> list[dict]:
    """One query a row, grouped heads, a cache in shuffled blocks; many rows and few."""
    return [
        _decode_row(kernels, roof, repeats, heads, context, dtype)
        for heads in ((32, 8, 128), (16, 4, 64))
        for context in ((512, 64), (4096, 8), (4096, 1))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
    ]


def _decode_row(kernels, roof, repeats, heads, context, dtype) -> dict:
    (num_heads, groups, head_dim), (length, rows) = heads, context
    per_token = head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0)
    per_row = 2 * length * groups * per_token
    copies = max(1, -(-(200 << 20) // (rows * per_row)))  # beyond the caches
    count = copies * rows * (length // 16)
    pools = [_pool(count * groups, head_dim, dtype) for _ in range(2)]
    scales = tuple(torch.rand(count * groups, 16) for _ in pools) if dtype == torch.int8 else None
    order = torch.randperm(count).to(torch.int32).view(copies, rows, -1)
    q = torch.randn(rows, num_heads, head_dim)
    contexts = [
        Context(sequences=torch.arange(rows), lengths=torch.full((rows,), length),
                tables=order[k].contiguous(), num_kv_heads=groups)
        for k in range(copies)
    ]  # fmt: skip

    def ours(round_x: bool) -> None:
        for one in contexts:
            kernels.attend(q, *pools, one, scales=scales, round_x=round_x)

    arms = {"exact": lambda: ours(False)}
    if dtype == torch.bfloat16 and kernels.variant == "avx512bf16":
        arms["rounded"] = lambda: ours(True)
    kind = str(dtype).removeprefix("torch.")
    row = {"heads": num_heads, "kv_heads": groups, "head_dim": head_dim, "context": length,
           "rows": rows, "dtype": kind}  # fmt: skip
    for arm, time_s in seconds(arms, repeats).items():
        read = copies * rows * per_row / time_s
        row |= {f"{arm}_bytes_per_s": read, f"{arm}_of_read": read / roof["read"]}
        print_row(
            f"decode {num_heads}/{groups}x{head_dim} ctx {length} rows {rows} {kind} {arm}",
            {"GB/s": f"{read / 1e9:.1f}", "of reading": f"{read / roof['read']:.0%}"},
        )
    return row


def _pool(heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Blocks of one head each, of any values, on huge pages."""
    module = native.extension()
    assert module is not None
    pool = native._huge_buffer(heads * 16 * head_dim * dtype.itemsize, module)
    pool = pool.view(dtype).view(heads, 16, head_dim)
    return pool.random_(-127, 128) if dtype == torch.int8 else pool.normal_()


BENCHES = ("ffn", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant", default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default=",".join(BENCHES))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128", help="of each expert")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = load_kernels(args.threads, args.variant)
    assert kernels is not None, "installed without native kernels"
    roof = roofs(kernels)
    print(f"{kernels.variant}, {args.threads} threads: fma {roof['fma'] / 1e9:.0f} GFLOP/s, "
          f"dot {roof['dot'] / 1e9:.0f} GFLOP/s, read {roof['read'] / 1e9:.1f} GB/s")  # fmt: skip
    results = {}
    if "ffn" in args.only:
        counts = [int(n) for n in args.tokens.split(",")]
        results["ffn"] = bench_ffn(kernels, roof, args.repeats, counts)
    if "decode" in args.only:
        results["decode"] = bench_decode(kernels, roof, args.repeats)
    print(json.dumps({"variant": kernels.variant, "roofs": roof, "results": results}))


if __name__ == "__main__":
    main()
