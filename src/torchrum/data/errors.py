"""Failures of data that a user can fix: the command line prints them without a traceback."""


class DataError(RuntimeError):
    """A data file is not what it must be."""

    exit_code = 1


class DataUnavailableError(DataError):
    """A data set is neither here nor to be downloaded."""

    exit_code = 3
