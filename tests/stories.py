"""bAbI for tests: the real files where they are, and made-up files of task 1 everywhere."""

import hashlib
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from torchrum.lab.data import CORPORA
from torchrum.lab.data.babi import NAMES
from torchrum.lab.data.files import BABI, DataFile

REAL = Path(os.environ.get("TORCHRUM_DATA") or Path(__file__).parents[2] / "shared" / "data")
needs_babi = pytest.mark.skipif(
    not (REAL / "babi" / "en-10k").is_dir(), reason="the bAbI files are not on this machine"
)

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
MOVES = ("journeyed to", "moved to", "travelled to", "went back to", "went to")


def task1(stories: int, seed: int) -> str:
    """A file as task 1 has it: people go somewhere, and after every second statement one is asked for."""
    draw, lines = random.Random(seed), []
    for _ in range(stories):
        where: dict[str, tuple[str, int]] = {}
        for number in range(1, 16):
            if number % 3:
                person, place = draw.choice(PEOPLE), draw.choice(PLACES)
                where[person] = place, number
                lines.append(f"{number} {person} {draw.choice(MOVES)} the {place}.")
            else:
                person = draw.choice(sorted(where))
                place, line = where[person]
                lines.append(f"{number} Where is {person}? \t{place}\t{line}")
    return "\n".join(lines) + "\n"


def use_made_up_task1(monkeypatch: pytest.MonkeyPatch, root: Path, stories: int = 60) -> None:
    """Put made-up files of task 1 into a data directory and let the corpus accept them."""
    (root / "babi" / "en-10k").mkdir(parents=True)
    files = []
    for split, seed in (("train", 1), ("test", 2)):
        path = f"en-10k/qa1_{NAMES[0]}_{split}.txt"
        content = task1(stories if split == "train" else 20, seed).encode()
        (root / "babi" / path).write_bytes(content)
        files.append(DataFile(path, {f"sha256:{hashlib.sha256(content).hexdigest()}": "made up"}))
    monkeypatch.setitem(CORPORA, "babi", replace(BABI, files=tuple(files), sources=()))
    monkeypatch.setenv("TORCHRUM_DATA", str(root))
