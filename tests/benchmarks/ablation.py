"""The small-batch regime part by part, on an emulated accelerator that holds a third of the weights.

Each arm adds one part to the one before: streaming (the best of the schedules), experts fetched as
they are missed, the host computes what is missed, the layer is scheduled, routers prefetch, scores
say who stays; with `--draft-model` that model drafts, without and with naming experts to bring. Arms
run one after the other, several rounds, and the best round of each counts.
All memories and links are those of a T4 server, `--slowdown` times slower, so that this machine can
stand for all of it. Usage: python tests/benchmarks/ablation.py MODEL [--rows 1,4,8] [--json FILE]
"""

import argparse
import json
import random
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from run_engine import NoText, decode

from moebatch.cli.speculation import Speculation
from moebatch.data.requests import Request, SamplingParams
from moebatch.data.tokenizer import load_tokenizer
from moebatch.errors import NoFeasiblePolicy
from moebatch.model.checkpoint import Checkpoint
from moebatch.model.resolve import resolve_model
from moebatch.plan.cached_fit import fit_cache
from moebatch.plan.cost import expert_page_bytes
from moebatch.plan.device_fit import fit
from moebatch.plan.policy import KV_BLOCK_TOKENS, Policy
from moebatch.plan.profiles import LinkProfile
from moebatch.plan.schedule import Lane, Op
from moebatch.plan.workload import WorkloadSpec
from moebatch.runtime.arithmetic import prepare
from moebatch.runtime.emulated import EmulatedDevice
from moebatch.runtime.engine import Engine
from moebatch.runtime.executor import Ended, ThreadQueue

STREAMING = ("layerwise", "flexgen", "cgopipe", "fastdecode")
PARTS = {"misses": "fetch", "prefetch_layers": 0, "keep_computed": False, "eviction": "lru"}
ARMS = {
    "on-demand LRU": {},
    "+ host computes misses": {"misses": "host", "keep_computed": True},
    "+ scheduling": {"misses": "balanced", "keep_computed": True},
    "+ prefetch": {"misses": "balanced", "keep_computed": True, "prefetch_layers": 3},
    "+ MRS": {"misses": "balanced", "keep_computed": True, "prefetch_layers": 3,
              "eviction": "mrs"},
}  # fmt: skip
# Beside the ladder: other ways to have one part.
VARIANTS = {
    "scheduling by rules": {"misses": "rules", "keep_computed": True},
    "host, nothing kept": {"misses": "host"},
    "all but prefetch": {"misses": "balanced", "keep_computed": True, "eviction": "mrs"},
    "all with LFU": {"misses": "balanced", "keep_computed": True, "prefetch_layers": 3,
                     "eviction": "lfu"},
}  # fmt: skip
# With a draft model: what they add to all of the ladder. None: the cutoff layer that is chosen.
DRAFTED = {"+ drafts": 0, "+ drafts that name experts": None}
NGRAM = "all, drafts by n-grams"


@dataclass(frozen=True)
class Rates:
    """Bytes per second of the accelerator's memory, the host's, and the link."""

    device: float
    host: float
    link: float


# Memory of a T4 (datasheet: 320 GB/s, 300 reached), of its host, PCIe 3 x16; see policies of L4, T4.
T4_SERVER = Rates(device=300e9, host=76e9, link=12e9)


@dataclass(frozen=True)
class Setting:
    """What all arms share."""

    model: Path
    rates: "Rates"
    expert_bytes: int
    link: LinkProfile
    rows: int
    prompt_len: int
    gen_len: int
    prompts: Path | None
    draft_model: Path | None
    draft_tokens: int
    fixed_cutoffs: tuple[int, ...]


class PacedLinear:
    """A product that takes as long as reading its weight takes the accelerator's memory."""

    def __init__(self, inner, seconds):
        self._inner, self._seconds, self.dtype = inner, seconds, inner.dtype

    def __call__(self, x):
        start = time.perf_counter()
        y = self._inner(x)
        fill(start, self._seconds)
        return y


class PacedExperts(ThreadQueue):
    """The host's lane: an expert takes as long as reading it takes the host's memory."""

    def __init__(self, seconds):
        self._seconds = seconds

    def launch(self, handler, task):
        start = time.perf_counter()
        handler(task)
        if task.op is Op.FFN:
            fill(start, self._seconds)
        return Ended(start, time.perf_counter())


def fill(start, seconds):
    if (rest := start + seconds - time.perf_counter()) > 0:
        time.sleep(rest)


class PacedDevice(EmulatedDevice):
    """An emulated accelerator whose memory has a speed too, beside a host whose memory has one.

    The emulated accelerator is the host: without this both would compute equally fast.
    """

    def __init__(self, setting):
        super().__init__(setting.link)
        self._pace = setting.rates.device
        self.queues[Lane.CPU] = PacedExperts(setting.expert_bytes / setting.rates.host)

    def linear(self, weight, compute):
        return PacedLinear(super().linear(weight, compute), weight.nbytes / self._pace)


def requests_of(setting, vocab_size):
    params = SamplingParams(max_tokens=setting.gen_len, temperature=0.0, ignore_eos=True)
    return [
        Request(index=i, id=str(i), params=params, prompt_token_ids=ids)
        for i, ids in enumerate(prompts_of(setting, vocab_size))
    ]


def prompts_of(setting, vocab_size):
    """Token ids: the beginnings of real prompts, or random ones."""
    if setting.prompts is None:
        rng = random.Random(17)
        return [tuple(rng.randrange(3, vocab_size) for _ in range(setting.prompt_len))
                for _ in range(setting.rows)]  # fmt: skip
    tokenizer = load_tokenizer(setting.model)
    lines = setting.prompts.read_text().splitlines()[: setting.rows]
    return [tuple(tokenizer.encode(json.loads(line)["prompt"],
                                   add_special_tokens=False)[: setting.prompt_len])
            for line in lines]  # fmt: skip


@contextmanager
def speculator(setting, model, name):
    """What drafts in an arm; a draft model's passes take what reading it takes the host's memory."""
    if name != NGRAM and name not in DRAFTED and not name.startswith("cutoff"):
        yield None
        return
    draft = None if name == NGRAM else resolve_model(str(setting.draft_model))
    asked = Speculation(source="ngram" if draft is None else "draft", model=draft,
                        tokens=setting.draft_tokens)  # fmt: skip
    how = prepare(dtype="float32", quantization="none", weight_dtype=model.spec.weight_dtype,
                  threads=1, accelerator=True)  # fmt: skip
    lengths = [(setting.prompt_len, setting.gen_len)] * setting.rows
    work = WorkloadSpec.measure(lengths, complete=True)
    with ExitStack() as stack:
        made = asked.prepared(work).open(stack, model.spec, work, None, how)
        if draft is not None:
            weights = sum(file.stat().st_size for file in setting.draft_model.glob("*.safetensors"))
            backend = made._source._backend
            backend.compute = paced(backend.compute, weights / setting.rates.host)
        yield made


def paced(compute, seconds):
    def wrapped(*args, **kwargs):
        start = time.perf_counter()
        done = compute(*args, **kwargs)
        fill(start, seconds)
        return done

    return wrapped


def base_policy(setting):
    blocks = -(-(setting.prompt_len + setting.gen_len) // KV_BLOCK_TOKENS)
    return Policy(batch_size=setting.rows, micro_batch_size=setting.rows, kv_dtype="float32",
                  kv_blocks=setting.rows * blocks, prefill_tokens=128)  # fmt: skip


def measure(setting, policy, name):
    """One run: tokens/s of the whole job and of its decode passes, and what the cache says."""
    model = resolve_model(str(setting.model))
    device = PacedDevice(setting)
    with (
        Checkpoint(setting.model) as checkpoint,
        speculator(setting, model, name) as guesses,
        Engine(checkpoint, spec=model.spec, family=model.family, policy=policy,
               open_stream=lambda skip: NoText(), decode=decode,
               eos_token_ids=model.eos_token_ids, max_model_len=model.spec.max_model_len,
               device=device, speculator=guesses) as engine,
    ):  # fmt: skip
        engine.load(threads=2)
        if engine._backend.foresight is not None:
            engine._backend.foresight.fixed = cutoff_of(name)
        work = requests_of(setting, model.spec.vocab_size)
        answers = sorted(engine.run(work), key=lambda done: done.request.index)
        stats = engine.stats
        texts = [list(done.choices[0].token_ids) for done in answers]
        found = {
            "tokens_per_s": stats.generated_tokens / (stats.prefill_s + stats.decode_s),
            "decode_tokens_per_s": (stats.generated_tokens - setting.rows) / stats.decode_s,
            "gpu_peak_bytes": device.memory.peak,
            "lane_busy_s": {str(k): round(v, 3) for k, v in stats.lane_busy_s.items()},
        }
        return texts, found | engine.regime.to_dict() | (engine.speculation or {})


def cutoff_of(name):
    """The cutoff layer that an arm keeps to; None: the chosen one."""
    return int(name.split()[1]) if name.startswith("cutoff") else DRAFTED.get(name)


def policies(setting):
    """The arms in order; streaming in each schedule."""
    spec = resolve_model(str(setting.model)).spec
    found = {}
    for schedule in STREAMING:
        try:
            found[f"streaming, {schedule}"] = fit(
                spec, base_policy(setting), schedule=schedule, micro_batch_size=setting.rows,
                device_bytes=setting.link.memory_bytes, weights_resident=None)  # fmt: skip
        except NoFeasiblePolicy as error:
            print(f"{schedule}: {error}", file=sys.stderr)
    cached = fit_cache(spec, base_policy(setting), device_bytes=setting.link.memory_bytes)
    for name, parts in (ARMS | VARIANTS).items():
        found[name] = replace(cached, **{**PARTS, **parts})
    drafted = [NGRAM]
    if setting.draft_model is not None:
        drafted += [*DRAFTED, *(f"cutoff {n}" for n in setting.fixed_cutoffs)]
    guessing = replace(base_policy(setting), draft_tokens=setting.draft_tokens)
    guessing = fit_cache(spec, guessing, device_bytes=setting.link.memory_bytes)
    for name in drafted:
        found[name] = replace(guessing, **{**PARTS, **ARMS["+ MRS"]})
    return found


def streamed_bytes(setting, policy):
    """Bytes that each pass of a streaming policy brings over the link."""
    spec = resolve_model(str(setting.model)).spec
    pages = spec.num_layers + spec.num_expert_pages
    kept = round(policy.weights_resident * pages)
    return (pages - max(kept, spec.num_layers)) * spec.expert_params * 2


def run(setting, rounds, only):
    """The best round of each arm; all must give the same text."""
    best, expected = {}, None
    for number in range(rounds):
        for name, policy in policies(setting).items():
            if only and name not in only:
                continue
            texts, found = measure(setting, policy, name)
            expected = expected or texts
            found["same_text"] = texts == expected
            if policy.regime == "stream":
                found["link_bytes"] = streamed_bytes(setting, policy) * setting.gen_len
            if name not in best or found["tokens_per_s"] > best[name]["tokens_per_s"]:
                best[name] = found
            print(f"{setting.rows} rows, round {number}, {name}: {found['tokens_per_s']:.2f} "
                  f"tokens/s (decode {found['decode_tokens_per_s']:.2f}), hits "
                  f"{found.get('hit_rate', 0):.1%}, link {found['link_bytes'] / 1e9:.2f} GB, "
                  f"{found.get('computed')} {found.get('brought')} prefetched "
                  f"{found.get('prefetch_hits')}/{found.get('prefetched')} same {found['same_text']} "
                  f"accepted {found.get('accepted')}/{found.get('drafted')} "
                  f"cutoff {found.get('cutoff_layer')} right {found.get('named_needed')}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return best


def table(results):
    lines = ["| rows | arm | tokens/s | to on-demand LRU | hit rate | GB over the link |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for rows, arms in results.items():
        base = arms["on-demand LRU"]["tokens_per_s"]
        for name, one in arms.items():
            hits = f"{one['hit_rate']:.1%}" if "hit_rate" in one else "-"
            lines.append(f"| {rows} | {name} | {one['tokens_per_s']:.2f} | "
                         f"{one['tokens_per_s'] / base:.2f} | {hits} | "
                         f"{one['link_bytes'] / 1e9:.2f} |")  # fmt: skip
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--slowdown", type=float, default=100.0)
    parser.add_argument("--memory-share", type=float, default=1 / 3)
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--prompts", type=Path, help='JSON lines with a "prompt"; else random ids')
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--cutoffs", default="", help="fixed cutoff layers to sweep, like 0,10,20")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    weights = sum(file.stat().st_size for file in asked.model.glob("*.safetensors"))
    rates = Rates(*(rate / asked.slowdown for rate in astuple(T4_SERVER)))
    link = LinkProfile(name="ablation", memory_bytes=int(weights * asked.memory_share),
                       h2d_bytes_per_s=rates.link, d2h_bytes_per_s=rates.link,
                       latency_s=10e-6)  # fmt: skip
    spec = resolve_model(str(asked.model)).spec
    results = {}
    for rows in map(int, asked.rows.split(",")):
        setting = Setting(
            model=asked.model,
            rates=rates,
            expert_bytes=expert_page_bytes(spec),
            link=link,
            rows=rows,
            prompt_len=asked.prompt_len,
            gen_len=asked.gen_len,
            prompts=asked.prompts,
            draft_model=asked.draft_model,
            draft_tokens=asked.draft_tokens,
            fixed_cutoffs=tuple(int(n) for n in asked.cutoffs.split(",") if n),
        )
        results[rows] = run(setting, asked.rounds, asked.only)
    if not asked.only:
        print(table(results))
    if asked.json:
        record = {
            "command": " ".join(["python", "tests/benchmarks/ablation.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "model": asked.model.name,
            "bytes_per_s": asdict(rates),
            "device_memory_bytes": link.memory_bytes,
            "threads_per_lane": asked.threads,
            "torch": torch.__version__,
            "results": results,
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
