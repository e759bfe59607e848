"""The exception of a row that cannot become a request. It never leaves the row's border."""

from moebatch.data.requests import ErrorCode


class RowProblem(Exception):
    """Why a row cannot be answered; the request builder turns it into a `RowError` value."""

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode = "invalid_request",
        param: str | None = None,
        skipped: bool = False,
    ) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.param = param
        self.skipped = skipped


def unsupported(param: str, *, message: str | None = None) -> RowProblem:
    """The problem of a field that would change the output and that moebatch cannot honour."""
    text = message or f"{param} is not supported"
    return RowProblem(text, code="unsupported_parameter", param=param)
