"""Words of the ledger: none that hold on one machine alone, and none that Markdown would obey."""

import re
import socket

LOCAL = re.compile(
    r"""
    (?<![\w.)/-])/[\w.]                          # an absolute path, but not loss/baseline
    | ~[\w-]*/ | \$\{?[A-Z]+ | \b[A-Za-z]:[\\/]  # a home folder, a variable, a drive
    | \\\\\w | @[\w-]+ | ://                     # a share, a user or host, an address
    | \blocalhost\b | \b\d{1,3}(?:\.\d{1,3}){3}\b
    | \b[\w-]+\.(?:local|internal|lan|corp|home|com|org|net|edu|gov|io|dev|cloud)\b
    """,
    re.VERBOSE,
)
_MARKS = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": r"\|"})


def local_name(text: str) -> str | None:
    """The path, host or user that a text names, as far as it can be told; None if there is none."""
    found = LOCAL.search(text)
    return None if found is None else found[0]


def names_this_machine(text: str) -> bool:
    """Whether a text names the machine that we are on; only for new texts, since its name may be any word."""
    host = socket.gethostname().partition(".")[0]
    return re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text, re.IGNORECASE) is not None


def plain(text: str) -> str:
    """A text that shows as it is in a Markdown table or list: no HTML, no further column, no link, no second line."""
    return re.sub(r"[\[\]]", r"\\\g<0>", " ".join(text.split()).translate(_MARKS))


def code(text: str) -> str:
    """A command as code in a Markdown table; a backtick, which would end it, is shown as an apostrophe."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", r"\|") + "`"
