"""The exception tree: one class per exit code, each error one sentence and one hint.

MoebatchError
  UsageError          exit 2    options that contradict each other or cannot be understood
  TooManyErrors       exit 4    stopped by --max-errors, --fail-fast, or 20 equal errors at the start
  NoFeasiblePolicy    exit 5    no policy fits the memory; subclass: the accelerator's ran out
  InputError          exit 6    the data set as a whole: missing columns, empty, unreadable;
                                subclass: not found (7)
  ModelError          exit 7    not found, gated, offline, broken, or an unsupported architecture
  OutputError         exit 8    the output exists, or belongs to another run; subclasses: locked
                                (9), no space or I/O error (1), reader of standard output gone (141)

A bad row is not an exception: it is a `RowError` value (moebatch.data.requests) and becomes an
output row.
"""


class MoebatchError(Exception):
    """An error that the user can act on; `str(error)` is one sentence, `hint` says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(MoebatchError):
    """Options that contradict each other, or a path that cannot be used."""

    exit_code = 2


class TooManyErrors(MoebatchError):
    """More rows failed than the user allows; what is finished stays."""

    exit_code = 4


class NoFeasiblePolicy(MoebatchError):
    """The memory is too small for any policy; the hint names the smallest that would do."""

    exit_code = 5


class DeviceMemoryFull(NoFeasiblePolicy):
    """The accelerator had less memory than the plan thought; a smaller plan may do."""


class InputError(MoebatchError):
    """The data set as a whole cannot be used."""

    exit_code = 6


class InputNotFound(InputError):
    """The data set does not exist, or cannot be reached."""

    exit_code = 7


class ModelError(MoebatchError):
    """The model cannot be found, read or understood."""

    exit_code = 7


class OutputError(MoebatchError):
    """The output exists already, or belongs to a run that does not match this one."""

    exit_code = 8


class OutputLocked(OutputError):
    """Another process that is alive writes the same output."""

    exit_code = 9


class OutputWriteError(OutputError):
    """The output could not be written: the disk is full or an I/O error came up."""

    exit_code = 1


class OutputClosed(OutputError):
    """Whoever read our standard output went away (`| head`): stop quietly, print nothing."""

    exit_code = 141


class Interrupted(Exception):
    """A run was asked to stop, and stopped between two steps; what it has so far is in order."""
