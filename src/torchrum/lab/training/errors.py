"""Failures that a user can fix: the command line prints them without a traceback, and leaves with their exit code."""


class RunError(RuntimeError):
    """A run cannot continue because of its folder, its checkpoint, the disk or its numbers."""

    exit_code = 1


class DivergedError(RunError):
    """The loss is no longer finite; another setting may do better."""


class ConfigError(ValueError):
    """A configuration that cannot be: an unknown field, an impossible value."""

    exit_code = 2
