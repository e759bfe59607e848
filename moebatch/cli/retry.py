"""`moebatch retry`: the command that made an output once more, for the rows that failed."""

import os
import sys
from collections.abc import Iterator, Sequence

import typer

from moebatch.cli import options as opt
from moebatch.cli import run
from moebatch.errors import InputNotFound, UsageError

# What would drop or keep the failures instead of computing them again.
_NOT_AGAIN = ("--overwrite", "--no-resume", "--keep-errors")


def retry(
    output: opt.RunOutput,
    more: opt.MoreOptions = None,
) -> None:
    """Compute the rows of an output again that failed, and go on with those that were left.

    Runs the command that made OUT, in the folder it was started in. More options of run are added
    to it: moebatch retry out.jsonl --memory 8GiB
    """
    from moebatch.data.manifest import read_manifest
    from moebatch.data.side import side_path

    path = opt.existing_output(output).absolute()
    manifest = read_manifest(side_path(path) / "manifest.json")
    if manifest is None:
        raise InputNotFound(
            f"there is no run of {output}", hint="name the output as it was given to run -o"
        )
    session = next(
        (one for one in reversed(manifest.sessions) if one.argv[1:2] == ("run",)), None
    )  # fmt: skip
    if session is None:
        raise UsageError(f"{output} was not made by `moebatch run`; start its program again")
    args = [*_again(session.argv[2:]), *(more or [])]
    if "-" in args[:1]:
        raise UsageError(
            "the rows came from standard input, which is gone",
            hint=f"give them once more: moebatch {' '.join(session.argv[1:])} < ROWS",
        )
    try:
        os.chdir(session.cwd)
    except OSError as error:
        raise InputNotFound(f"the folder {session.cwd} is gone: {error.strerror}") from None
    typer.echo(f"in {session.cwd}: moebatch run {' '.join(args)}", err=True)
    sys.argv = [sys.argv[0], "run", *args]  # what the manifest and the report will say
    command = typer.Typer(pretty_exceptions_enable=False)
    command.command("run")(run.run)
    raise typer.Exit(command(args, prog_name="moebatch run", standalone_mode=False) or 0)


def _again(args: Sequence[str]) -> Iterator[str]:
    """The options of the first run, without those that would drop or keep failures."""
    for arg, after in zip(args, [*args[1:], ""], strict=True):
        alone = arg == "--resume" and after not in ("auto", "numeric")
        if arg not in _NOT_AGAIN and not alone:
            yield arg
