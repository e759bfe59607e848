"""The command line as a whole: commands, and how an error becomes one line and an exit code.

Heavy libraries are imported inside the commands, so `--help` answers at once.
"""

import os
import sys
import traceback
from typing import Any

import typer

from moebatch import __version__
from moebatch.cli import doctor, models, plan, run
from moebatch.errors import MoebatchError, OutputClosed

EXIT_CODES = """Exit codes: 0 all rows answered, 1 internal or write error, 2 usage, 3 some rows
failed, 5 no policy fits the memory, 6 input invalid, 7 model or data set not found, 8 output
exists, 130 Ctrl-C, 143 SIGTERM."""

app = typer.Typer(
    name="moebatch",
    help="Batch inference of Mixture-of-Experts language models that do not fit the accelerator.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", epilog=EXIT_CODES)(run.run)
app.command("plan", epilog=EXIT_CODES)(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("models")(models.models)


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
        result = app(args, prog_name="moebatch", standalone_mode=False)
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


def _complain(message: str, *, hint: str | None) -> None:
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
