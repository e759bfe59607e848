"""Streaming against the expert cache on this machine, in the same memory: tokens/s, bytes, crossover.

    python tests/benchmarks/bench_regimes.py one MODEL --memory 1500MiB
    python tests/benchmarks/bench_regimes.py crossover MODEL --memory 1500MiB --rows 1,2,4,8,16,32
    python tests/benchmarks/bench_regimes.py tail MODEL --memory 1500MiB --rows 200

Prompts are random tokens, lengths are forced. All arms are interleaved, round by round; a number is
the median of the rounds. `--seconds` ends it early, after whole rounds.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from run_engine import NoText, decode, request

from moebatch.cli.this_machine import this_machine
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import resolve_model
from moebatch.plan.policy import Overrides
from moebatch.plan.regime import Question, cache_plan, choose_regime
from moebatch.plan.workload import WorkloadSpec
from moebatch.runtime import host
from moebatch.runtime.arithmetic import prepare
from moebatch.runtime.disk_probe import file_bandwidth
from moebatch.runtime.engine import Engine
from moebatch.units import parse_bytes

PROMPT = 16


@dataclass
class Measured:
    """One run: seconds of decoding and of all passes, tokens, bytes read after loading."""

    decode_tok_s: float
    total_s: float
    bytes_per_token: float
    hit_rate: float | None
    changed: int | None
    passes: int
    texts: list


class Bench:
    """One model under one budget."""

    def __init__(self, path, memory):
        self.model = resolve_model(str(path))
        how = prepare(dtype="auto", quantization="none", accelerator=False,
                      weight_dtype=self.model.spec.weight_dtype, threads=host.num_cores())  # fmt: skip
        self.compute, self.kernels = how.compute, how.kernels
        largest = max(Path(path).glob("*.safetensors"), key=lambda file: file.stat().st_size)
        machine = this_machine(threads=host.num_cores())
        self.machine = replace(machine, disk_bandwidth=file_bandwidth(largest))
        self.memory, self.base = parse_bytes(memory), host.base_bytes()
        print(
            f"{path}: {memory}, disk {self.machine.disk_bandwidth / 1e9:.2f} GB/s, kernels "
            f"{how.variant}, load {Path('/proc/loadavg').read_text()}"
        )

    def question(self, lengths, **fixed):
        workload = WorkloadSpec.measure(lengths, complete=True)
        return Question(
            spec=self.model.spec,
            workload=workload,
            machine=self.machine,
            compute=self.compute,
            memory_bytes=self.memory,
            base_bytes=self.base,
            fixed=Overrides(**fixed),
        )

    def run(self, policy, requests):
        model = self.model
        with (
            Checkpoint(model.path) as checkpoint,
            Engine(
                checkpoint,
                spec=model.spec,
                family=model.family,
                policy=policy,
                open_stream=lambda skip: NoText(),
                decode=decode,
                eos_token_ids=model.eos_token_ids,
                max_model_len=model.spec.max_model_len,
                compute=self.compute,
                kernels=self.kernels,
            ) as engine,
        ):
            engine.load(threads=2)
            start, loaded = time.perf_counter(), engine.disk_read_bytes
            outcomes = sorted(engine.run(requests), key=lambda one: one.request.index)
            total = time.perf_counter() - start
            stats, facts = engine.stats, engine.regime
            return Measured(
                decode_tok_s=(stats.generated_tokens - len(requests)) / stats.decode_s,
                total_s=total,
                bytes_per_token=(engine.disk_read_bytes - loaded) / stats.generated_tokens,
                hit_rate=facts.counts.hit_rate if facts.counts else None,
                changed=facts.changed_before_pass,
                passes=stats.passes,
                texts=[one.choices[0].token_ids for one in outcomes],
            )


def requests_of(lengths, vocab):
    rng = random.Random(1)
    return [
        request(k, [rng.randrange(3, vocab) for _ in range(prompt)], max_tokens=tokens)
        for k, (prompt, tokens) in enumerate(lengths)
    ]


def rounds(bench, arms, args):
    """name -> runs; every round runs every arm once."""
    start, found = time.monotonic(), {name: [] for name in arms}
    for number in range(args.rounds):
        for name, (policy, requests) in arms.items():
            found[name].append(bench.run(policy, requests))
        took = (time.monotonic() - start) / (number + 1)
        if time.monotonic() - start + took > args.seconds:
            break
    return found


def median(runs, field):
    values = [getattr(run, field) for run in runs]
    return None if values[0] is None else statistics.median(values)


def line(name, runs):
    hit = median(runs, "hit_rate")
    print(
        f"{name:34} {median(runs, 'decode_tok_s'):8.2f} tok/s  "
        f"{median(runs, 'bytes_per_token') / 1e6:8.1f} MB/token  "
        + ("" if hit is None else f"hit rate {hit:.1%}  ")
        + f"{median(runs, 'total_s'):7.2f} s  ({len(runs)} rounds)",
        flush=True,
    )


def one(bench, args):
    """One row: streaming, and the cache under every policy, with and without prefetch."""
    lengths = [(PROMPT, args.tokens)]
    requests = requests_of(lengths, bench.model.spec.vocab_size)
    arms = {"stream": (choose_regime(bench.question(lengths, regime="stream")).policy, requests)}
    for eviction in ("lru", "lfu", "mrs"):
        for layers in (0, 3):
            policy = cache_plan(
                bench.question(lengths, regime="cache", eviction=eviction, prefetch_layers=layers)
            ).policy
            name = f"cache {policy.expert_slots}, {eviction}, prefetch {layers}"
            arms[name] = policy, requests
    found = rounds(bench, arms, args)
    for name, runs in found.items():
        line(name, runs)
    texts = [run.texts for runs in found.values() for run in runs]
    print("same text in all arms:", all(text == texts[0] for text in texts))


def crossover(bench, args):
    """Decode passes of B rows in both regimes, each in the whole budget."""
    rows = [int(part) for part in args.rows.split(",")]
    many = [(PROMPT, args.tokens)] * max(rows)
    plan = choose_regime(bench.question(many, batch_size=max(rows)))
    print(
        f"predicted crossover: {plan.crossover} rows (batch {plan.policy.batch_size}, "
        f"{plan.policy.expert_slots} slots in the tail, {plan.policy.weights_resident:.0%} of the "
        "weights resident)"
    )
    streamed = choose_regime(bench.question(many, batch_size=max(rows), regime="stream")).policy
    arms, layers = {}, [int(part) for part in args.prefetch.split(",")]
    for count in rows:
        requests = requests_of([(PROMPT, args.tokens)] * count, bench.model.spec.vocab_size)
        arms["stream", count] = streamed, requests
        for ahead in layers:
            arms[f"cache, prefetch {ahead}", count] = replace(
                streamed, tail_rows=count, expert_slots=max(1, plan.policy.expert_slots),
                eviction=plan.policy.eviction, prefetch_layers=ahead), requests  # fmt: skip
    found = rounds(bench, arms, args)
    for (name, count), runs in found.items():
        line(f"{count} rows, {name}", runs)


def tail(bench, args):
    """A job of rows with uneven lengths: with the change at its tail and without."""
    rng = random.Random(2)
    count = int(args.rows)
    lengths = [
        (PROMPT, min(8 * args.tokens, 1 + int(rng.expovariate(1 / args.tokens))))
        for _ in range(count)
    ]
    requests = requests_of(lengths, bench.model.spec.vocab_size)
    both = {}
    batch = {"batch_size": args.batch} if args.batch else {}
    for name, fixed in (("without", {"regime": "stream"}), ("with", {})):
        plan = choose_regime(bench.question(lengths, **fixed, **batch))
        both[name] = plan
        print(
            f"{name:8} predicted {plan.job.total_s:.1f} s; regime {plan.policy.regime}, batch "
            f"{plan.policy.batch_size}, tail from {plan.policy.tail_rows} rows on, "
            f"{plan.policy.expert_slots} slots"
        )
    found = rounds(bench, {name: (plan.policy, requests) for name, plan in both.items()}, args)
    for name, runs in found.items():
        line(name, runs)
        print(f"  changed before pass {runs[0].changed} of {runs[0].passes}")
    print("same text:", found["with"][0].texts == found["without"][0].texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["one", "crossover", "tail"])
    parser.add_argument("model")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--prefetch", default="3")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    {"one": one, "crossover": crossover, "tail": tail}[args.what](
        Bench(args.model, args.memory), args
    )


if __name__ == "__main__":
    main()
