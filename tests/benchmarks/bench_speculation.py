"""What drafts gain on a model whose weights are streamed: acceptance, tokens per pass, tokens a second.

Per number of rows one engine, and in it all numbers of drafts by turns; the gain is of medians. Beside
each stands what the cost model says of the same acceptance. One JSON document at the end. Not a test.
With `--regime cache` experts come from a cache, and `4@10` are 4 drafts whose model names experts of
the first 10 layers (`4`: of as many as are chosen).

    python tests/benchmarks/bench_speculation.py MODEL --prompts rows.jsonl --memory 1300MiB
    python tests/benchmarks/bench_speculation.py MODEL --prompts rows.jsonl --draft-model SMALLER
"""

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moebatch.cli.asked import ResourceOptions
from moebatch.cli.planning import plan_run, with_actual_dtype
from moebatch.cli.regime import RegimeOptions
from moebatch.cli.speculation import Drafting, Speculation
from moebatch.cli.this_machine import this_machine
from moebatch.data.requests import Request, SamplingParams
from moebatch.data.tokenizer import load_tokenizer
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import LocalModel, resolve_model
from moebatch.plan.draft_time import pass_seconds
from moebatch.plan.optimizer import job_time
from moebatch.plan.policy import Overrides
from moebatch.plan.workload import WorkloadSpec
from moebatch.runtime import host
from moebatch.runtime.arithmetic import Arithmetic, prepare
from moebatch.runtime.engine import Engine
from moebatch.units import parse_bytes


def main() -> None:
    asked = _parser().parse_args()
    model = resolve_model(asked.model)
    with Checkpoint(model.path) as checkpoint:
        model = with_actual_dtype(model, checkpoint)
        requests = _requests(model, asked)
        how = prepare(dtype="auto", quantization="none", weight_dtype=model.spec.weight_dtype,
                      threads=asked.threads, accelerator=False)  # fmt: skip
        found = [_rows(model, checkpoint, requests[:rows], asked, how) for rows in asked.rows]
    print(json.dumps({"model": asked.model, "draft": asked.draft_model, "memory": asked.memory,
                      "temperature": asked.temperature, "rows": found}, indent=1))  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with a "prompt"')
    parser.add_argument("--draft-model")
    parser.add_argument("--memory", default="1300MiB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafts", nargs="+", default=["0", "1", "2", "4", "8", "auto"])
    parser.add_argument("--regime", choices=["stream", "cache"], default="stream")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def _requests(model: LocalModel, asked: Any) -> list[Request]:
    tokenizer = load_tokenizer(model.path)
    params = SamplingParams(max_tokens=asked.max_tokens, temperature=asked.temperature,
                            ignore_eos=True)  # fmt: skip
    texts = [json.loads(line)["prompt"] for line in asked.prompts.read_text().splitlines()]
    ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return [Request(index=i, id=f"r{i}", prompt_token_ids=one, params=params)
            for i, one in enumerate(ids)]  # fmt: skip


def _rows(model: LocalModel, checkpoint: Checkpoint, requests: list[Request], asked: Any,
          how: Arithmetic) -> dict[str, Any]:  # fmt: skip
    """One engine: all numbers of drafts, several times each."""
    rows, compute = len(requests), how.compute
    work = WorkloadSpec.measure([(len(r.prompt_token_ids), asked.max_tokens) for r in requests],
                                complete=True)  # fmt: skip
    draft = resolve_model(asked.draft_model) if asked.draft_model else None
    drafting = Speculation(source="draft" if draft else "ngram", model=draft).prepared(work)
    budget = parse_bytes(asked.memory)
    resources = ResourceOptions(memory_bytes=budget, cpu_threads=asked.threads, dtype="auto",
                                quantization="none",
                                regime=RegimeOptions(regime=asked.regime),
                                overrides=Overrides(batch_size=rows, draft_tokens=8))  # fmt: skip
    base = host.base_bytes() + drafting.memory_bytes
    plan = plan_run(model, work, resources, compute=compute, threads=asked.threads, budget=budget,
                    base_bytes=base)  # fmt: skip
    policy = replace(plan.policy, tail_rows=0)  # no cache at the tail: it streams
    job = job_time(model.spec, work, policy, machine=this_machine(threads=asked.threads),
                   compute=compute)  # fmt: skip
    plan = replace(plan, policy=policy, job=job)
    seconds = pass_seconds(model.spec, work, plan.policy, compute=compute, job=job,
                           machine=this_machine(threads=asked.threads))  # fmt: skip
    runs: dict[str, list[dict[str, float]]] = {count: [] for count in asked.drafts}
    answers = set()
    with ExitStack() as stack, Engine(
        checkpoint, spec=model.spec, family=model.family, policy=plan.policy, eos_token_ids=(),
        open_stream=lambda skip: None, decode=lambda ids, skip: "", compute=compute,
        kernels=how.kernels, max_model_len=model.spec.max_model_len,
    ) as engine:  # fmt: skip
        engine.load(threads=1)
        sources = {count: _speculator(drafting, stack, count, model, work, plan, how)
                   for count in asked.drafts}  # fmt: skip
        for _ in range(asked.repeats):
            for count, opened in sources.items():
                engine._speculator = opened
                if engine._backend.foresight is not None:
                    engine._backend.foresight.fixed = _cutoff(count)
                run, said = _run(engine, requests)
                runs[count].append(run)
                print(rows, count, run, file=sys.stderr, flush=True)
                answers.add(said)
        assert len(answers) == 1, "drafts changed an answer"
        engine._speculator = None
        for opened in sources.values():
            if opened is not None:
                opened.close()
    plain = statistics.median(run["decode_s"] for run in runs[asked.drafts[0]])
    return {
        "rows": rows,
        "weights_resident": plan.policy.weights_resident,
        "drafts": [_line(count, runs[count], plain, rows, seconds) for count in asked.drafts],
    }


def _speculator(drafting: Drafting, stack: ExitStack, count: str, model: LocalModel,
                work: WorkloadSpec, plan: Any, how: Arithmetic) -> Any:  # fmt: skip
    if count == "0":
        return None
    tokens = None if count == "auto" else int(count.split("@", maxsplit=1)[0])
    source = Speculation(source=drafting.asked.source, model=drafting.asked.model, tokens=tokens)
    one = Drafting(asked=source, model=drafting.model, policy=drafting.policy)
    return one.open(stack, model.spec, work, plan, how)


def _cutoff(count: str) -> int | None:
    """The layers that a draft model names experts of; None: as many as are chosen."""
    return int(count.split("@")[1]) if "@" in count else None


def _run(engine: Engine, requests: list[Request]) -> tuple[dict[str, float], Any]:
    """Seconds and counts of one run's decode passes; drafting counts, prompts do not."""
    stats, speculator = engine.stats, engine._speculator
    before = (stats.decode_s, stats.passes, *_drafted(speculator), *_found(engine))
    outcomes = sorted(engine.run(requests), key=lambda one: one.request.index)
    after = (stats.decode_s, stats.passes, *_drafted(speculator), *_found(engine))
    names = ("decode_s", "passes", "drafted", "accepted", "row_passes", "tokens", "draft_s",
             "bytes_read", "hits", "misses")  # fmt: skip
    done = dict(zip(names, (b - a for a, b in zip(before, after, strict=True)), strict=True))
    told = (engine.speculation or {}).get("cutoff_layer")
    done |= {} if told is None else {"cutoff": told, "right": engine.speculation["named_needed"]}
    return done, tuple(one.choices[0].token_ids for one in outcomes)


def _found(engine: Engine) -> tuple[int, int, int]:
    counts = engine.regime.counts
    found = (0, 0) if counts is None else (counts.hits, counts.misses)
    return (engine.disk_read_bytes, *found)


def _drafted(speculator: Any) -> tuple[int, int, int, int, float]:
    if speculator is None:
        return (0, 0, 0, 0, 0.0)
    stats = speculator.stats
    return (stats.drafted, stats.accepted, stats.row_passes, stats.tokens, stats.draft_s)


def _line(count: str, runs: list[dict[str, float]], plain: float, rows: int, seconds: Any,
          ) -> dict[str, Any]:  # fmt: skip
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    row_passes = median["row_passes"]
    asked_for = median["hits"] + median["misses"]
    line = {
        "hit_rate": median["hits"] / asked_for if asked_for else None,
        "bytes_read": median["bytes_read"],
        **{name: median[name] for name in ("cutoff", "right") if name in median},
        "drafts": count,
        "decode_s": median["decode_s"],
        "spread_s": [min(run["decode_s"] for run in runs), max(run["decode_s"] for run in runs)],
        "passes": median["passes"],
        "gain": plain / median["decode_s"],
    }
    if row_passes:
        each = median["tokens"] / row_passes
        drafts = median["drafted"] / row_passes
        alone, checked = seconds(np.array([float(rows), rows * (1 + drafts)]))
        line |= {
            "acceptance": median["accepted"] / median["drafted"] if median["drafted"] else None,
            "tokens_per_pass": each,
            "draft_s": median["draft_s"],
            "predicted_gain": each
            * float(alone / (checked + median["draft_s"] / median["passes"])),
        }
    return line


if __name__ == "__main__":
    main()
