"""`moebatch models`: which architectures are supported, what of each, and the short names."""

import json
from collections.abc import Sequence
from typing import Any

import typer

from moebatch.model.families import FAMILIES, REFUSED
from moebatch.model.families.known import KNOWN
from moebatch.model.stored import FORMATS
from moebatch.plan.model_spec import ModelSpec
from moebatch.units import format_bytes, format_count

_JSON = typer.Option(False, "--json", help="Print one JSON object, sizes in parameters and bytes.")
_KV_DTYPE = "bfloat16"


def models(as_json: bool = _JSON) -> None:
    """List the supported architectures and the short names, with their sizes."""
    if as_json:
        typer.echo(json.dumps(_as_object(), indent=2))
        return
    rows = [("SHORT NAME", "HUB ID", "FAMILY", "PARAMS", "ACTIVE", "EXPERTS", "KV/TOKEN")]
    for name, known in KNOWN.items():
        spec = known.spec
        rows.append(
            (
                name,
                known.repo,
                spec.family,
                format_count(spec.total_params),
                format_count(spec.active_params),
                f"{spec.num_experts}/{spec.top_k}" if spec.has_router else "dense",
                format_bytes(spec.kv_bytes_per_token(_KV_DTYPE)),
            )
        )
    typer.echo(_table(rows))
    typer.echo("\nAny model of these families runs, by hub id or from a directory:")
    typer.echo("  " + ", ".join(FAMILIES))
    typer.echo("\nWeights are read as safetensors: " + ", ".join(FORMATS) + ".")
    typer.echo("\nNot supported:")
    for model_type, reason in REFUSED.items():
        typer.echo(f"  {model_type}: {reason}")


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their longest entry."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(widths[k]) for k, cell in enumerate(row)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _as_object() -> dict[str, Any]:
    return {
        "families": list(FAMILIES),
        "formats": list(FORMATS),
        "not_supported": dict(REFUSED),
        "short_names": {
            name: {"repo": known.repo, **_facts(known.spec)} for name, known in KNOWN.items()
        },
    }


def _facts(spec: ModelSpec) -> dict[str, Any]:
    return {
        "family": spec.family,
        "params": spec.total_params,
        "active_params": spec.active_params,
        "num_layers": spec.num_layers,
        "num_experts": spec.num_experts if spec.has_router else 0,
        "top_k": spec.top_k if spec.has_router else 0,
        "expert_params": spec.expert_params,
        "kv_bytes_per_token": spec.kv_bytes_per_token(_KV_DTYPE),
        "max_model_len": spec.max_model_len,
    }
