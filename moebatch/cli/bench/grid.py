"""The settings of one benchmark: every model, limit, number of requests and length that was asked
for, measured one after the other."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebatch.cli.bench import arms as arms_of
from moebatch.cli.bench import prompts as prompts_of
from moebatch.cli.bench import record, words
from moebatch.cli.bench.curves import curves
from moebatch.cli.bench.dummy import dummy_model
from moebatch.cli.bench.measure import Effort, Setting, measure
from moebatch.cli.run import share
from moebatch.cli.this_machine import num_cores, this_machine
from moebatch.errors import UsageError
from moebatch.model.resolve import LocalModel, resolve_model
from moebatch.plan.definitions import NAMES, definition
from moebatch.units import parse_bytes, parse_duration

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for, checked. `memories`: bytes, floats for shares of the weights, None: auto."""

    workload: str
    models: tuple[str, ...]
    num_prompts: tuple[int, ...]
    output_lens: tuple[int, ...]
    memories: tuple[int | float | None, ...]
    schedules: tuple[str | None, ...]
    options: dict[str, Any]
    input_len: int | None
    dataset: Path | None
    padded: bool
    seed: int
    dummy: bool
    device: str
    threads: int
    repeats: int
    warm_ups: int
    timeout_s: float
    baselines: tuple[str, ...]
    pythons: tuple[str, ...]
    baseline_dtype: str
    batches: tuple[int, ...]
    server: str | None
    work: Path | None

    @classmethod
    def read(cls, *, workload: str, models: Sequence[str], num_prompts: str, output_len: str | None,
             memory: str, schedule: str, load_format: str, cpu_threads: int | None, repeats: int,
             warm_ups: int, timeout: str, baseline: str | None, batches: str, pythons: Sequence[str],
             work: Path | None, policy: str, batch_size: int | None, micro_batch_size: int | None,
             weights_resident: str, dtype: str, quantization: str, gpu_memory: str | None,
             device: str,
             **others: Any) -> "Asked":  # fmt: skip
        """Read the options.

        Raises: UsageError that says which is wrong.
        """
        if not models:
            raise UsageError("which model?", hint="name one with --model, for example demo")
        if load_format not in ("auto", "dummy"):
            raise UsageError(f"--load-format {load_format} does not exist", hint="auto or dummy")
        for name, value, least in (("--repeats", repeats, 1), ("--num-warmups", warm_ups, 0)):
            if value < least:
                raise UsageError(f"{name} must be at least {least}")
        if work is not None and not work.is_dir():
            raise UsageError(f"--work-folder {work} is not a folder")
        lens = tuple(_counts("--output-len", output_len)) if output_len else ()
        names = arms_of.known(baseline)
        return cls(
            workload=workload,
            models=tuple(models),
            num_prompts=tuple(_counts("--num-prompts", num_prompts)),
            output_lens=lens or _default_lens(workload),
            memories=tuple(_memories(memory)),
            schedules=tuple(_schedules(schedule)),
            options=_engine_options(policy=policy, batch_size=batch_size, dtype=dtype,
                                    micro_batch_size=micro_batch_size, device=device,
                                    quantization=quantization, gpu_memory=gpu_memory,
                                    weights_resident=weights_resident),
            dummy=load_format == "dummy",
            device=device,
            threads=cpu_threads or num_cores(),
            repeats=repeats,
            warm_ups=warm_ups,
            timeout_s=parse_duration(timeout),
            baselines=names,
            batches=tuple(_counts("--baseline-batch", batches)),
            pythons=tuple(arms_of.baseline_pythons(pythons)) if names else (),
            work=work,
            **others,
        )  # fmt: skip


def _counts(option: str, text: str) -> Iterator[int]:
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise UsageError(f"{option} {text}: {part.strip()!r} is no whole number from 1 on")
        yield int(part)


def _memories(text: str) -> Iterator[int | float | None]:
    for part in (part.strip() for part in text.split(",")):
        share = part[:-1] if part.endswith("%") else ""
        if share and not (share.isdecimal() and 0 < int(share) <= 1000):
            raise UsageError(f"--memory {part} is no share", hint="write it like 50% or 6GiB")
        yield None if part == "auto" else int(share) / 100 if share else parse_bytes(part)


def _bytes_of(memory: int | float | None, model: LocalModel) -> int | None:
    """Bytes of a limit; of a share of the model's weights as they lie on disk."""
    if not isinstance(memory, float):
        return memory
    files = [path.stat().st_size for path in model.path.glob("*.safetensors")]
    return round(memory * sum(files))


def _default_lens(workload: str) -> tuple[int, ...]:
    return (definition(workload).gen_len,) if workload in NAMES else ()


def _schedules(text: str) -> Iterator[str | None]:
    from moebatch.plan.pipeline import STYLES

    for name in (part.strip() for part in text.split(",")):
        if name not in ("auto", "zigzag", *STYLES):
            raise UsageError(f"--schedule {name} does not exist",
                             hint="one of: auto, zigzag, " + ", ".join(STYLES))  # fmt: skip
        yield None if name == "auto" else name


def _engine_options(*, policy: str, batch_size: int | None, micro_batch_size: int | None,
                    weights_resident: str, gpu_memory: str | None,
                    **plain: str) -> dict[str, Any]:  # fmt: skip
    """What moebatch's own arm is given besides the job, as plain values."""
    from dataclasses import asdict

    from moebatch.cli.planning import read_policy
    from moebatch.plan.policy import Overrides

    fixed = Overrides(batch_size=batch_size, micro_batch_size=micro_batch_size,
                      weights_resident=share("--weights-resident", weights_resident))  # fmt: skip
    given = read_policy(policy)
    return {
        **plain,
        "overrides": asdict(fixed),
        "policy": None if given is None else asdict(given),
        "gpu_memory": None if gpu_memory is None else parse_bytes(gpu_memory),
    }


def run(asked: Asked, *, say: Say,
        save: Callable[[dict[str, Any]], None] = lambda document: None) -> dict[str, Any]:  # fmt: skip
    """Measure all settings; the record, which `save` gets after each of them.

    Raises: MoebatchError.
    """
    from moebatch.runtime.host import describe

    machine = this_machine(threads=asked.threads)
    document = record.head(machine, describe(), threads=asked.threads)
    for line in words.machine(document):
        say(line)
    with ExitStack() as stack:
        work = asked.work or Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="moebatch-bench-")))  # fmt: skip
        effort = Effort(repeats=asked.repeats, warm_ups=asked.warm_ups, threads=asked.threads,
                        timeout_s=asked.timeout_s, work=work)  # fmt: skip
        specs = {}
        for name in asked.models:
            model = dummy_model(name, work, say=say) if asked.dummy else resolve_model(name)
            specs[short_name(model)] = model.spec
            for setting in _settings(asked, model):
                document["settings"].append(_measured(asked, setting, model, effort, say=say))
                save(document)
    document["curves"] = curves(document, machine, specs)
    document["finished_at"] = record.now()
    return document


def _settings(asked: Asked, model: LocalModel) -> Iterator[Setting]:
    for count in asked.num_prompts:
        prompts = prompts_of.make(
            asked.workload, model, count=count, input_len=asked.input_len, dataset=asked.dataset,
            seed=asked.seed, has_tokenizer=_has_tokenizer(model),
        )  # fmt: skip
        if asked.padded:
            prompts = prompts.pad()
        for gen_lens in _gen_lens(asked, prompts):
            prompts_of.check_lengths(prompts, model, max(gen_lens))
            for memory in asked.memories:
                yield Setting(
                    model=short_name(model), model_path=model.path, prompts=prompts,
                    gen_lens=gen_lens, memory_bytes=_bytes_of(memory, model),
                )  # fmt: skip


def _gen_lens(asked: Asked, prompts: prompts_of.Prompts) -> list[tuple[int, ...]]:
    """What each request generates: what was asked for, else what the rows of a FILE say."""
    count = len(prompts.token_ids)
    if not asked.output_lens:
        return [prompts.gen_lens or (128,) * count]
    return [(length,) * count for length in asked.output_lens]


def _has_tokenizer(model: LocalModel) -> bool:
    return any((model.path / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def short_name(model: LocalModel) -> str:
    """A model's name in tables: of a folder its last part, of a hub id the short name if it has one."""
    from moebatch.model.resolve import SHORT_NAMES

    repos = {repo: name for name, repo in SHORT_NAMES.items()}
    return repos.get(model.name) or model.name.rstrip("/").rpartition("/")[2]


def _measured(asked: Asked, setting: Setting, model: LocalModel, effort: Effort, *,
              say: Say) -> dict[str, Any]:  # fmt: skip
    arms = arms_of.ours(asked.schedules, asked.options) + arms_of.rivals(
        asked.baselines, asked.pythons, rows=len(setting.gen_lens), dtype=asked.baseline_dtype,
        memory_bytes=setting.memory_bytes, server=asked.server, batches=asked.batches,
        quantization=asked.options["quantization"],
    )  # fmt: skip
    warm = prompts_of.warm_up(setting.prompts, model, count=asked.warm_ups, seed=asked.seed)
    for line in words.setting(setting):
        say(line)
    found = measure(setting, arms, effort, warm_up=warm, say=say,
                    on_plan=lambda arm, planned: say(words.plan(arm.label, planned)))  # fmt: skip
    return record.setting_facts(setting, found, device=asked.device)
