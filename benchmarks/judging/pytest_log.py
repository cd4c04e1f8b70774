"""What a test run did, in short, from pytest's output: numbers are worth what the tests beside them say."""

import re
from pathlib import Path
from typing import Any

COUNTS = ("passed", "failed", "errors", "skipped", "xfailed", "xpassed", "deselected", "warnings")
_COUNT = re.compile(r"(\d+) (" + "|".join([*COUNTS, "error", "warning"]) + r")\b")
_LAST = re.compile(r"^=*\s*((?:\d+ \w+(?:, )?)+) in (\d+(?:\.\d+)?)s\b", re.MULTILINE)


def summarise_tests(path: Path) -> dict[str, Any]:
    """Counts, seconds, failures and the command of a pytest run.

    Args:
        path: pytest's output; a line that begins with ``$ `` before it is the command.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace"))
    ends = list(_LAST.finditer(text))
    if not ends:
        raise ValueError(
            f"{path} has no last line of pytest such as '3 passed in 0.1s'; give the whole output of a finished run."
        )
    found: dict[str, Any] = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    for count, word in _COUNT.findall(ends[-1][1]):
        found[{"error": "errors", "warning": "warnings"}.get(word, word)] = int(count)
    found["seconds"] = float(ends[-1][2])
    failures = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.MULTILINE)
    command = re.search(r"^\$ (.+)$", text, re.MULTILINE)
    platform = re.search(r"^platform .+?(?= -- /|$)", text, re.MULTILINE)
    return {
        "command": command[1].strip() if command else None,
        "platform": platform[0] if platform else None,
        **found,
        "failures": failures,
    }
