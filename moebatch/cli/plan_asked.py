"""What `moebatch plan` was asked: model, workload, machine, limits; and the plans that answer it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from moebatch.cli.cached_accelerator import refuse_to_cache
from moebatch.cli.regime import RegimeOptions, known_shares, refuse_on_device
from moebatch.cli.this_machine import read_machine, this_machine
from moebatch.errors import ModelError, UsageError
from moebatch.model.families.known import KNOWN
from moebatch.model.resolve import LocalModel, resolve_model
from moebatch.plan.catalogue import catalogued
from moebatch.plan.machine import MachineSpec, Numbers, changed
from moebatch.plan.model_spec import ModelSpec
from moebatch.plan.outlook import Limits, Outlook, look
from moebatch.plan.policy import Overrides
from moebatch.plan.search_accelerator import Space
from moebatch.plan.workload import WorkloadSpec, named_workload
from moebatch.units import parse_bytes

_LOOKED_AT = 1000  # rows whose lengths stand for the data set
_BYTE_KEYS = ("cpu-memory", "gpu-memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question. `sweep` are further machines, each with the values that make it."""

    model_name: str
    spec: ModelSpec
    workload: WorkloadSpec
    workload_name: str
    machine: MachineSpec
    compute: str
    limits: Limits
    fixed: Overrides
    space: Space
    shares: Numbers | None = None
    sweep: tuple[tuple[dict[str, str], MachineSpec], ...] = ()

    @classmethod
    def read(cls, *, model: str, dataset: Sequence[str], workload: str | None, hardware: str,
             memory: str, gpu_memory: str | None, max_tokens: int | None, dtype: str, space: Any,
             cpu_threads: int | None, what_if: str | None, quiet: bool,
             regime: RegimeOptions, fixed: Overrides) -> "Asked":  # fmt: skip
        """Look everything up.

        Raises: UsageError, ModelError or InputError that says what is wrong.
        """
        if max_tokens is not None and max_tokens < 1:
            raise UsageError("--max-tokens must be at least 1")
        local, spec = _model(model)
        machine = _machine(hardware, threads=cpu_threads, quiet=quiet)
        machines = _swept(machine, what_if)
        machine = machines[0][1] if len(machines) == 1 else machine
        if machine.accelerator is not None:
            refuse_on_device(regime)
            refuse_to_cache(None, fixed, regime.given)
        return cls(
            model_name=model,
            spec=spec,
            workload=_workload(dataset, workload, max_tokens, local, model),
            workload_name=", ".join(dataset) if dataset else workload or "mtbench",
            machine=machine,
            compute=_compute(dtype, machine, spec),
            limits=Limits(
                host=None if memory == "auto" else parse_bytes(memory),
                accelerator=None if gpu_memory is None else parse_bytes(gpu_memory),
            ),
            fixed=regime.overrides(spec, fixed),
            shares=None if local is None else known_shares(local),
            space=_space(space, machine),
            sweep=tuple(machines) if len(machines) > 1 else (),
        )

    def look(self, machine: MachineSpec | None = None) -> Outlook:
        """The plan, for the machine that was asked about or another one.

        Raises: NoFeasiblePolicy.
        """
        return look(self.spec, self.workload, machine or self.machine, limits=self.limits,
                    compute=self.compute, fixed=self.fixed, space=self.space,
                    shares=self.shares)  # fmt: skip


def overrides(*, batch_size: int | None, micro_batch_size: int | None, attention: str, ffn: str,
              weights_resident: str, kv_resident: str, kv_cache_dtype: str) -> Overrides:  # fmt: skip
    """What the user fixed.

    Raises: UsageError for numbers out of range.
    """
    from moebatch.cli.run import share

    for name, value in (("--batch-size", batch_size), ("--micro-batch-size", micro_batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1")
    return Overrides(
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        attention=_processor(attention),
        ffn=_processor(ffn),
        weights_resident=share("--weights-resident", weights_resident),
        kv_resident=share("--kv-resident", kv_resident),
        kv_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
    )


def _processor(text: str) -> Literal["cpu", "gpu"] | None:
    if text == "cpu":
        return "cpu"
    return "gpu" if text == "gpu" else None


def _space(name: Any, machine: MachineSpec) -> Space:
    if name == "paper" and machine.accelerator is None:
        raise UsageError(
            "--policy-space paper is about machines with an accelerator",
            hint="name one with --hardware, for example t4",
        )
    return "paper" if name == "paper" else "full"


def _model(name: str) -> tuple[LocalModel | None, ModelSpec]:
    """The model's shapes: of a directory, or by short name without a download."""
    if name in KNOWN and not Path(name).is_dir():
        return None, KNOWN[name].spec
    known = next((model for model in KNOWN.values() if model.repo == name), None)
    if known is not None and not Path(name).is_dir():
        return None, known.spec
    local = resolve_model(name, weights=False)
    return local, local.spec


def _machine(hardware: str, *, threads: int | None, quiet: bool) -> MachineSpec:
    if hardware == "this":
        return this_machine(threads=threads, quiet=quiet)
    if hardware.endswith(".json") or "/" in hardware:
        return read_machine(Path(hardware))
    return catalogued(hardware)


def _compute(dtype: str, machine: MachineSpec, spec: ModelSpec) -> str:
    """The data type of the products: bf16 where the machine was seen to have it."""
    if machine.accelerator is not None:
        return spec.weight_dtype
    native = spec.weight_dtype == "bfloat16" and "bfloat16" in (machine.rates or machine.host.flops)
    if dtype == "bfloat16" and not native:
        raise UsageError(
            "--dtype bfloat16 needs bf16 weights and a processor with AVX512-BF16 or AMX"
        )
    return "bfloat16" if native and dtype != "float32" else "float32"


def _swept(machine: MachineSpec, what_if: str | None) -> list[tuple[dict[str, str], MachineSpec]]:
    """The machines of `--what-if`: the product of all values, in order."""
    if not what_if:
        return [({}, machine)]
    axes: list[tuple[str, list[str]]] = []
    for part in what_if.split(","):
        key, _, values = part.partition("=")
        if not values:
            raise UsageError(f"--what-if {part!r} is not of the form key=value")
        axes.append((key.strip(), values.split(":")))
    result = []
    for chosen in product(*(values for _, values in axes)):
        each = dict(zip((key for key, _ in axes), chosen, strict=True))
        result.append((each, _changed(machine, each)))
    return result


def _changed(machine: MachineSpec, values: dict[str, str]) -> MachineSpec:
    for key, text in values.items():
        if key == "gpu":
            machine = catalogued(text)
        elif key in _BYTE_KEYS:
            machine = changed(machine, key, float(parse_bytes(text)))
        else:
            try:
                number = float(text)
            except ValueError:
                raise UsageError(f"--what-if {key}={text}: {text} is no number") from None
            machine = changed(machine, key, number)
    return machine


def _workload(dataset: Sequence[str], name: str | None, max_tokens: int | None,
              local: LocalModel | None, model: str) -> WorkloadSpec:  # fmt: skip
    if not dataset:
        return named_workload(name or "mtbench", gen_len=max_tokens)
    lengths, total = _lengths(dataset, max_tokens, local, model)
    if not lengths:
        raise UsageError(f"no row of {', '.join(dataset)} can be planned for",
                         hint="moebatch validate says what is wrong with each row")  # fmt: skip
    measured = WorkloadSpec.measure(lengths, complete=True)
    return measured if total <= _LOOKED_AT else measured.of_size(total)


def _lengths(dataset: Sequence[str], max_tokens: int | None, local: LocalModel | None,
             model: str) -> tuple[list[tuple[int, int]], int]:  # fmt: skip
    """(prompt, generated) of the first rows, each choice of a row on its own; and all rows' number."""
    from itertools import islice

    from moebatch.cli import asked, prompts
    from moebatch.data.columns import ColumnNames
    from moebatch.data.requests import RowError
    from moebatch.data.tokenizer import load_tokenizer

    if local is None:
        try:
            local = resolve_model(model, offline=True, weights=False)
        except ModelError:
            raise UsageError(
                f"the rows are counted with {model}'s tokenizer, which is not on this machine",
                hint="download the model once, or plan with --workload",
            ) from None
    rows = asked.InputOptions(sources=list(dataset), input_format="auto", columns=ColumnNames(),
                              limit=None, offset=0, subset=None, split=None)  # fmt: skip
    wanted = asked.PromptOptions(
        sampling={} if max_tokens is None else {"max_tokens": max_tokens}, strict=False,
        generation_config="auto", chat_template=None, apply_chat_template="auto", system=None,
        on_too_long="skip", truncation_side="left", max_model_len=None,
    )  # fmt: skip
    builder = prompts.request_builder(
        local, wanted, tokenizer=load_tokenizer(local.path), columns=rows.columns,
        template=prompts.chat_template(local, wanted), defaults=prompts.row_defaults(local, wanted),
    )  # fmt: skip
    lengths: list[tuple[int, int]] = []
    with rows.open() as data:
        survey = data.survey(on_duplicate="row-error")
        for row in islice(data.rows(survey), _LOOKED_AT):
            request = None if isinstance(row, RowError) else builder.build(row)
            if request is None or isinstance(request, RowError):
                continue
            length = (len(request.prompt_token_ids), request.params.max_tokens or 1)
            lengths += [length] * request.params.n
        return lengths, survey.num_rows


def to_values(asked: Asked) -> dict[str, Any]:
    """The question as plain values."""
    return {
        "model": asked.model_name,
        "workload": asked.workload_name,
        "machine": asked.machine.name,
        "machine_source": asked.machine.source,
        "compute_dtype": asked.compute,
        "policy_space": asked.space,
    }
