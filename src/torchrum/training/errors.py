"""Failures that a user can mend: the command line prints them without a traceback, and leaves with their exit code."""


class RunError(RuntimeError):
    """A run cannot go on: its folder, its checkpoint, the disk or the numbers stand in the way."""

    exit_code = 1


class DivergedError(RunError):
    """The loss is not a number any more; another setting may do better."""


class ConfigError(ValueError):
    """A configuration that cannot be: an unknown field, an impossible value."""

    exit_code = 2
