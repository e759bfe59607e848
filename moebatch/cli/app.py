"""The command line as a whole: commands, and how an error becomes one line and an exit code.

Heavy libraries are imported inside the commands, so `--help` answers at once.
"""

import itertools
import os
import sys
import traceback
from typing import Any

import typer

from moebatch import __version__
from moebatch.cli import (
    convert,
    doctor,
    merge,
    models,
    plan,
    replay,
    report,
    retry,
    run,
    status,
    validate,
)
from moebatch.cli.bench.command import bench
from moebatch.errors import MoebatchError, OutputClosed

EXIT_CODES = """Exit codes: 0 all rows answered, 1 internal or write error, 2 usage, 3 some rows
failed, 4 stopped by --max-errors, 5 no policy fits the memory, 6 input invalid, 7 model or data set
not found, 8 output belongs to another run, 9 output locked by a live run, 75 --time-limit, 130
Ctrl-C, 143 SIGTERM (after these three the same command goes on)."""

app = typer.Typer(
    name="moebatch",
    help="Batch inference of Mixture-of-Experts language models that do not fit the accelerator.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", epilog=EXIT_CODES)(run.run)
app.command("plan", epilog=EXIT_CODES)(plan.plan)
app.command(
    "bench", epilog="Exit codes: 0 measured, 1 moebatch failed in a setting, and as of run."
)(bench)
app.command("report", epilog="Exit codes: 0 shown, 6 no report, 7 not found.")(report.report)
app.command("doctor")(doctor.doctor)
app.command("models")(models.models)
app.command("replay", epilog="Exit codes: 0 compared, 2 usage, 6 no routing trace.")(replay.replay)
app.command("validate", epilog="Exit codes: 0 all rows are good, 6 some are not.")(
    validate.validate
)
app.command("status", epilog="Exit codes: 0 shown, 7 no such run.")(status.status)
app.command("retry", epilog="Exit codes: as of run.",
            context_settings={"ignore_unknown_options": True})(retry.retry)  # fmt: skip
app.command("merge", epilog="Exit codes: 0 joined, 6 shards are missing, unfinished or of other data,"
            " 8 of other runs.")(merge.merge)  # fmt: skip
app.command("convert", epilog="Exit codes: 0 converted, 6 a row cannot be.")(convert.convert)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moebatch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Options that stand before the command."""


# Typer brings its own copy of click or uses the installed one; this is the base class in either.
_WRONG_COMMAND_LINE: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(_guarded(sys.argv[1:]))


def _guarded(args: list[str]) -> int:
    try:
        result = app(_with_plain_resume(args), prog_name="moebatch", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except MoebatchError as error:
        if not isinstance(error, OutputClosed):
            _complain(str(error), hint=error.hint)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # the last border
        if isinstance(error, _WRONG_COMMAND_LINE):
            _complain(error.format_message(), hint="see moebatch --help or moebatch run --help")
            return 2
        if os.environ.get("MOEBATCH_DEBUG"):
            traceback.print_exc()
        _complain(
            f"internal error: {type(error).__name__}: {str(error) or 'no message'}".splitlines()[0],
            hint="please report it, with what MOEBATCH_DEBUG=1 prints",
        )
        return 1


def _with_plain_resume(args: list[str]) -> list[str]:
    """`--resume` may stand alone: then it says what is the default."""
    return [
        "--resume=auto" if arg == "--resume" and after not in ("auto", "numeric") else arg
        for arg, after in itertools.pairwise([*args, ""])
    ]


def _complain(message: str, *, hint: str | None) -> None:
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
