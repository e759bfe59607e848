"""Where the report of a run goes."""

import sys
from pathlib import Path
from typing import Literal

from moebatch.data import durable
from moebatch.data.side import side_path
from moebatch.report import Report


def write_report(report: Report, *, path: str | None, output: Path | Literal["-"]) -> None:
    """Write the report where the user wants it, or beside the output.

    Raises: OutputWriteError when the file cannot be written.
    """
    if path == "-":
        sys.stdout.write(report.to_json() + "\n")
        return
    if path is None and output == "-":
        return
    target = Path(path) if path else side_path(Path(output)) / "report.json"
    try:
        durable.write_whole(target, [report.to_json().encode() + b"\n"])
    except OSError as error:
        raise durable.write_error(f"the report {target}", error) from None
