"""Failures of data that a user can fix: the command line prints them without a traceback."""

from collections.abc import Sequence


class DataError(RuntimeError):
    """A data file is not what it must be."""

    exit_code = 1


class DataUnavailableError(DataError):
    """A data set is neither here nor to be downloaded.

    Args:
        text: what is wrong.
        details: what was tried and what to do, a line each.
    """

    exit_code = 3

    def __init__(self, text: str, details: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([text, *details]))
        self.lines = [text, *details]
