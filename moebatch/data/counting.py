"""How many rows a data set has, where that is cheap to know: for progress, never for logic."""

from collections.abc import Sequence
from pathlib import Path


def count_rows(sources: Sequence[str], *, limit: int | None, offset: int) -> int | None:
    """Rows of plain files of lines and Parquet files; None for anything else."""
    total = 0
    for source in sources:
        count = _count(Path(source))
        if count is None:
            return None
        total += count
    total = max(0, total - offset)
    return total if limit is None else min(total, limit)


def _count(path: Path) -> int | None:
    if not path.is_file():
        return None
    if path.suffix.lower() in (".jsonl", ".json", ".txt"):
        return _count_lines(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        return _count_parquet(path)
    return None


def _count_lines(path: Path) -> int:
    """Lines, the last one also when it does not end; blank ones count, though they are no rows."""
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")


def _count_parquet(path: Path) -> int | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowInvalid, OSError):
        return None
