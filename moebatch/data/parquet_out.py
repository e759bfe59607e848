"""Lines of JSON become one Parquet file, in two passes that each hold a few rows.

The first pass learns the type of every column over all rows, the second writes. Nested values and
columns of mixed types are kept as JSON texts; lists of numbers stay lists.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from moebatch.data.json_text import to_json

# "wide" integers need all 64 bits: as doubles, beside fractions, they would change their value.
ColumnType = Literal[
    "null", "bool", "int", "wide", "float", "string", "empty", "ints", "wides", "floats", "json"
]

# Metadata that lists the columns of JSON texts, so that reading brings back what was written.
JSON_COLUMNS = "moebatch.json_columns"

_GROUP_ROWS = 4096
_GROUP_BYTES = 64 * 2**20  # of JSON: long rows fill a row group sooner
_INT64 = 2**63
_EXACT_FLOAT = 2**53


def write_parquet(lines: Path, path: Path, *, metadata: Mapping[str, str],
                  types: Mapping[str, ColumnType] | None = None) -> None:  # fmt: skip
    """Write the rows of a JSONL file as Parquet; `types` must hold all of them (None: find out).

    Raises: OSError when a file cannot be read or written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = column_types(lines) if types is None else types
    as_json = [name for name, kind in types.items() if kind == "json"]
    described = dict(metadata) | ({JSON_COLUMNS: json.dumps(as_json)} if as_json else {})
    fields = [pa.field(name, _arrow_type(pa, kind)) for name, kind in types.items()]
    with pq.ParquetWriter(path, pa.schema(fields, metadata=described)) as writer:
        for rows in _groups(lines):
            arrays = [_array(pa, rows, name=name, kind=kind) for name, kind in types.items()]
            writer.write_table(pa.table(arrays, schema=writer.schema))


def column_types(lines: Path) -> dict[str, ColumnType]:
    """The type of each column over all rows, in the order the columns first appear."""
    types: dict[str, ColumnType] = {}
    for rows in _groups(lines):
        for row in rows:
            for name, value in row.items():
                types[name] = _join(types.get(name, "null"), _type_of(value))
    return types


def join_types(
    one: Mapping[str, ColumnType], other: Mapping[str, ColumnType]
) -> dict[str, ColumnType]:
    """The types that hold the values of both, columns in the order they first appear."""
    names = dict.fromkeys((*one, *other))
    return {name: _join(one.get(name, "null"), other.get(name, "null")) for name in names}


def _groups(lines: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of a file in groups of bounded size."""
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    with open(lines, "rb") as stream:
        for line in stream:
            rows.append(json.loads(line))
            num_bytes += len(line)
            if len(rows) >= _GROUP_ROWS or num_bytes >= _GROUP_BYTES:
                yield rows
                rows, num_bytes = [], 0
    if rows:
        yield rows


def _type_of(value: Any) -> ColumnType:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return _int_type(value)
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "string"
    return _list_type(value) if isinstance(value, list) else "json"


def _int_type(value: int) -> ColumnType:
    if abs(value) <= _EXACT_FLOAT:
        return "int"
    return "wide" if -_INT64 <= value < _INT64 else "json"


def _list_type(values: list[Any]) -> ColumnType:
    """The type of a list: numbers joined like a column of their own, anything else is JSON."""
    joined: ColumnType = "null"
    for value in values:
        joined = _join(joined, "json" if value is None else _type_of(value))
    lists: dict[ColumnType, ColumnType] = {
        "null": "empty", "int": "ints", "wide": "wides", "float": "floats",
    }  # fmt: skip
    return lists.get(joined, "json")


# Two types and the one that holds the values of both; for all other pairs that is JSON text.
_JOINS: dict[frozenset[ColumnType], ColumnType] = {
    frozenset(("int", "wide")): "wide",
    frozenset(("int", "float")): "float",
    frozenset(("ints", "wides")): "wides",
    frozenset(("ints", "floats")): "floats",
    frozenset(("empty", "ints")): "ints",
    frozenset(("empty", "wides")): "wides",
    frozenset(("empty", "floats")): "floats",
}


def _join(one: ColumnType, other: ColumnType) -> ColumnType:
    if "null" in (one, other):
        return other if one == "null" else one
    return one if one == other else _JOINS.get(frozenset((one, other)), "json")


def _arrow_type(pa: Any, kind: ColumnType) -> Any:
    """A column without any value is text: readers know no column of nothing."""
    types = {
        "bool": pa.bool_(),
        "int": pa.int64(),
        "wide": pa.int64(),
        "float": pa.float64(),
        "ints": pa.list_(pa.int64()),
        "wides": pa.list_(pa.int64()),
        "floats": pa.list_(pa.float64()),
        "empty": pa.list_(pa.int64()),
    }
    return types.get(kind, pa.string())


def _array(pa: Any, rows: list[dict[str, Any]], *, name: str, kind: ColumnType) -> Any:
    values = [row.get(name) for row in rows]
    if kind == "json":
        values = [None if value is None else to_json(value) for value in values]
    elif kind == "string":
        values = [None if value is None else _utf8(value) for value in values]
    elif kind == "floats":
        values = [None if value is None else list(map(float, value)) for value in values]
    return pa.array(values, type=_arrow_type(pa, kind))


def _utf8(text: str) -> str:
    """A text that a table can hold: a lone surrogate becomes U+FFFD."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
