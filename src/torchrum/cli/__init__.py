"""The command line: import a command when it is called, and report errors in one place."""

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from torchrum_command import COMMANDS, usage


def is_first() -> bool:
    """Whether this process prints for all processes of a run; a stale LOCAL_RANK of the shell is ignored."""
    rank, size = os.environ.get("LOCAL_RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))


def complain(text: str, *details: str) -> None:
    """Print an error on one line, once for all processes of a run; details follow on lines of their own."""
    if not is_first():
        return
    lines = []
    for line in (text, *details):
        words = " ".join(line.split())  # names from files may contain terminal escapes
        lines.append("".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in words))
    try:
        print("torchrum: " + "\n  ".join(lines), file=sys.stderr, flush=True)
    except OSError:  # stderr is closed
        silence(sys.stderr)


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print a warning of this package on one line, without its place in the code."""
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) in os.path.abspath(filename):
        complain(f"warning: {message}")
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), file=file or sys.stderr, end="")


def silence(stream: TextIO) -> None:
    """Discard buffered and further output, or Python would report the broken stream when it exits."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def open_streams() -> None:
    """Replace streams that the shell closed (``>&-``) by the null device, and escape letters that cannot be encoded.

    Otherwise a file of the run would get the file descriptor of a closed stream, which is None in Python.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # the file of the stream was replaced
                stream.reconfigure(errors="backslashreplace")


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once while a command imports its packages.

    A KeyboardInterrupt can be lost there: packages catch exceptions of an import, and Python drops those raised in
    the callbacks of its import locks. The training would start anyway.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # another handler is installed; a shell's background job ignores the signal
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    complain("interrupted")
    sys.stdout.flush()
    os._exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a wrong call, 1 for a failed run, 128 and more after a signal."""
    open_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            code = run_command([*(sys.argv[1:] if arguments is None else arguments)])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended
        silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF) or error.filename is not None:
            raise
        silence(sys.stdout)
        complain(f"the output cannot be written: {error.strerror}.")
        return 1
    return code


def run_command(arguments: list[str]) -> int:
    """Run a subcommand and return its exit code; print an error for the user on one line."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from torchrum import __version__

        print(__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        from torchrum.lab.training.overrides import unknown_name

        complain(str(unknown_name("command", name, COMMANDS, "see torchrum --help.")))
        return 2
    try:
        with leaving_at_once():
            run = command(name)
        return run(rest)
    except SystemExit as left:  # argparse has printed its help or an error
        return int(left.code or 0)
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except Exception as error:
        return explain(error)


def explain(error: Exception) -> int:
    """Print an error for the user on one line and return its exit code; raise one of ours, with its traceback."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        from torchrum.lab.training import EXTRA

        if (error.name or "").partition(".")[0] in EXTRA:
            complain(f'this command needs {error.name}; install it with: pip install "torchrum[train]"')
            return 2
    elif isinstance(error, OSError) and error.filename is not None:
        complain(f"{error.filename}: {error.strerror}")  # a file that the user named
        return 1
    elif isinstance(error, MemoryError):
        complain(f"not enough memory: {text or 'none is left'}.")
        return 1
    elif (code := getattr(error, "exit_code", None)) is not None:  # only errors for the user have one
        complain(*getattr(error, "lines", [text]))
        return code
    elif "could not create a primitive" in text:
        from torchrum.ops.kernels.machine import AMX_ADVICE

        complain(f"{AMX_ADVICE}.")
        return 1
    elif "valid value for backend" in text and (backend := os.environ.get("MPLBACKEND")):
        complain(f"MPLBACKEND is {backend!r}, which matplotlib does not know; unset it.")
        return 2
    raise error


def command(name: str) -> Callable[[list[str]], int]:
    """Import the function of a subcommand."""
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)
