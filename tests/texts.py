"""A small text that needs no licence: sentences of a tiny grammar."""

import os
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORT_MEMORY = (
    "model.activation=relu model.eta=1 model.ln_order=before model.target_bias_init=1 model.embed_bias_init=0 "
    "model.embed_scale=none model.gate_scale=1"
)
"""The paper's options for the RUM of char-rum: what a few dozen steps change slowly and surely."""
WHO = ("the old captain", "a young sailor", "the cook", "the north wind", "a grey gull")
DOES = ("watches", "follows", "forgets", "praises")
WHAT = ("the harbour", "the long night", "his only coat", "the quiet sea")


def small_text(size: int = 20_000, seed: int = 0) -> bytes:
    """About ``size`` bytes of lines such as ``the cook follows the quiet sea.``"""
    draw, lines, length = random.Random(seed), [], 0
    while length < size:
        line = f"{draw.choice(WHO)} {draw.choice(DOES)} {draw.choice(WHAT)}.\n"
        lines.append(line)
        length += len(line)
    return "".join(lines).encode()


def penn_treebank() -> Path:
    """The data directory that holds Penn Treebank; the test is skipped where there is none."""
    root = Path(os.environ.get("TORCHRUM_DATA") or ROOT.parent / "shared" / "data")
    if not (root / "ptb" / "train.txt").exists():
        pytest.skip("Penn Treebank is not here: set TORCHRUM_DATA to a folder with ptb/train.txt")
    return root
