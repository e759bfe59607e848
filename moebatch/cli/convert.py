"""`moebatch convert`: rows from one format and schema to another."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from moebatch.cli import options as opt
from moebatch.errors import InputError

if TYPE_CHECKING:
    from moebatch.data.convert import Converter
    from moebatch.data.dataset import Dataset


def convert(
    dataset: opt.Dataset,
    output: opt.Output,
    schema: opt.ConvertSchema = "auto",
    output_format: opt.OutputFormat = "auto",
    overwrite: opt.Overwrite = False,
    body_model: opt.BodyModel = None,
    input_format: opt.InputFormat = "auto",
    prompt_column: opt.PromptColumn = None,
    messages_column: opt.MessagesColumn = None,
    token_ids_column: opt.TokenIdsColumn = None,
    id_column: opt.IdColumn = None,
    limit: opt.Limit = None,
    offset: opt.Offset = 0,
    hf_subset: opt.HubSubset = None,
    hf_split: opt.HubSplit = None,
    quiet: opt.Quiet = False,
) -> None:
    """Turn rows into another format (JSONL, Parquet) or schema (OpenAI batch lines, flat columns).

    Nothing is written unless every row can be converted.
    """
    from moebatch.cli.asked import InputOptions
    from moebatch.data.columns import ColumnNames
    from moebatch.data.convert import converter
    from moebatch.data.lines_out import write_lines
    from moebatch.data.places import check_output

    opt.check_choices(output_format=output_format, schema=schema)
    columns = ColumnNames(prompt=prompt_column, messages=messages_column,
                          prompt_token_ids=token_ids_column, id=id_column)  # fmt: skip
    rows = InputOptions(sources=dataset, input_format=input_format, limit=limit, offset=offset,
                        subset=hf_subset, split=hf_split, columns=columns)  # fmt: skip
    destination = opt.destination(output)
    wanted_format: Any = output_format
    left_out: Counter[str] = Counter()
    with rows.open() as data:
        check_output(destination, inputs=data.files, overwrite=overwrite,
                     output_format=wanted_format)  # fmt: skip
        change = converter(schema, columns=columns, model=body_model)
        lines = _lines(data, change, left_out)
        count = write_lines(destination, lines, output_format=wanted_format)
    if not quiet:
        typer.echo(f"{count:,} rows → {output}", err=True)
        for name, rows_with in left_out.items():
            typer.echo(f"warning: {name!r} has no place in the new schema; "
                       f"left out of {rows_with:,} rows", err=True)  # fmt: skip


def _lines(data: "Dataset", change: "Converter", left_out: Counter[str]) -> Iterator[bytes]:
    """The new lines; counts in `left_out` what was dropped from how many rows."""
    from moebatch.data.json_text import to_json
    from moebatch.data.problem import RowProblem
    from moebatch.data.requests import RowError

    for row, place in data.places():
        if isinstance(row, RowError):
            raise _refused(place, row.code, row.message)
        try:
            new, dropped = change(row)
        except RowProblem as problem:
            raise _refused(place, problem.code, str(problem)) from None
        left_out.update(dropped)
        yield to_json(new).encode()


def _refused(place: str, code: str, message: str) -> InputError:
    return InputError(
        f"{place} cannot be converted: {code}: {message}",
        hint="no file was written; `moebatch validate` lists all bad rows",
    )
