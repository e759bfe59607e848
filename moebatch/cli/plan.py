"""`moebatch plan`: what would happen, without weights, a GPU or torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moebatch.cli import options as opt
from moebatch.errors import UsageError

if TYPE_CHECKING:
    from moebatch.cli.plan_asked import Asked

Dataset = Annotated[
    list[str] | None, typer.Argument(metavar="[DATASET]", help="Plan for these rows.")
]
Workload = Annotated[
    str | None,
    typer.Option("--workload", "-w", help="mtbench (default), helm-synthetic, helm-summarization."),
]
Hardware = Annotated[
    str,
    typer.Option("--hardware", help="this, a name like t4, 2xl4, a100-80, h200, or a JSON file."),
]
GpuMemory = Annotated[
    str | None,
    typer.Option("--gpu-memory", help="Accelerator memory that may be used, like 14GiB."),
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Tokens to generate for a row.")
]
Attention = Annotated[str, typer.Option(help="auto, cpu or gpu: where decode attention runs.")]
Ffn = Annotated[str, typer.Option("--ffn", help="auto, cpu or gpu: where the experts run.")]
KvResident = Annotated[
    str, typer.Option(help="Share of the KV cache in accelerator memory: auto or 0..1.")
]
Space = Annotated[
    str, typer.Option("--policy-space", help="full, or paper: MoE-Lightning's six fields alone.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Also what would help, alternatives and the roofs.")
]
Save = Annotated[Path | None, typer.Option("--save", help="Write the policy, for run --policy.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw the roofline model into a .png, .svg or .pdf.")
]
WhatIf = Annotated[
    str | None,
    typer.Option("--what-if", help="Other figures, k=v,…; several values k=a:b make a table."),
]


def plan(
    dataset: Dataset = None,
    model: opt.Model = "",
    workload: Workload = None,
    hardware: Hardware = "this",
    memory: opt.Memory = "auto",
    gpu_memory: GpuMemory = None,
    max_tokens: MaxTokens = None,
    dtype: opt.Dtype = "auto",
    batch_size: opt.BatchSize = None,
    micro_batch_size: opt.MicroBatchSize = None,
    attention: Attention = "auto",
    ffn: Ffn = "auto",
    weights_resident: opt.WeightsResident = "auto",
    kv_resident: KvResident = "auto",
    kv_cache_dtype: opt.KvCacheDtype = "auto",
    regime: opt.RegimeName = "auto",
    expert_cache: opt.ExpertCache = "auto",
    eviction: opt.Eviction = "auto",
    prefetch_layers: opt.PrefetchLayers = None,
    policy_space: Space = "full",
    cpu_threads: opt.CpuThreads = None,
    what_if: WhatIf = None,
    as_json: AsJson = False,
    explain: Explain = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Print the policy for a job, its memory, its times and what binds it."""
    from moebatch.cli import plan_asked, plan_view
    from moebatch.cli.regime import regime_options

    if not model:
        raise UsageError("which model?", hint="name one with --model, for example mixtral-8x7b")
    if dataset and workload:
        raise UsageError("give a DATASET or --workload, not both")
    opt.check_choices(dtype=dtype, kv_cache_dtype=kv_cache_dtype, attention=attention, ffn=ffn,
                  policy_space=policy_space)  # fmt: skip
    if plot is not None:
        plan_view.check_plot(plot)
    asked = plan_asked.Asked.read(
        model=model, dataset=dataset or [], workload=workload, hardware=hardware, memory=memory,
        gpu_memory=gpu_memory, max_tokens=max_tokens, dtype=dtype, space=policy_space,
        cpu_threads=cpu_threads, what_if=what_if, quiet=as_json,
        regime=regime_options(
            regime=regime, expert_cache=expert_cache, eviction=eviction,
            prefetch_layers=prefetch_layers, weights_resident=weights_resident,
        ),
        fixed=plan_asked.overrides(
            batch_size=batch_size, micro_batch_size=micro_batch_size, attention=attention, ffn=ffn,
            weights_resident=weights_resident, kv_resident=kv_resident,
            kv_cache_dtype=kv_cache_dtype,
        ),
    )  # fmt: skip
    _answer(asked, as_json=as_json, explain=explain, save=save, plot=plot)


def _answer(asked: "Asked", *, as_json: bool, explain: bool, save: Path | None,
            plot: Path | None) -> None:  # fmt: skip
    from moebatch.cli import plan_view

    if asked.sweep:
        if save or plot:
            raise UsageError("--save and --plot want one plan", hint="give each what-if one value")
        plan_view.print_sweep(asked, as_json=as_json)
        return
    outlook = asked.look()
    if save is not None:
        plan_view.write_policy(outlook.policy, save)
    if plot is not None:
        from moebatch.cli.roofline_plot import draw

        draw(asked, outlook, plot)
    if as_json:
        typer.echo(plan_view.to_json(asked, outlook))
    else:
        plan_view.show(asked, outlook, explain=explain)
