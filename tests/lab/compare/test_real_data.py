"""Whole comparisons on data with a known winner; docs/compare.md has their outcome. They take minutes."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrum.lab.compare import compare, run

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def write_recall(path: Path) -> None:
    """Write 6,000 sequences of six keys with their values and one of the keys again; the answer is its value."""
    generator, (count, pairs, values) = torch.Generator().manual_seed(3), (6000, 6, 8)
    keys = torch.rand(count, pairs, generator=generator).argsort(-1)
    told = torch.randint(values, (count, pairs), generator=generator)
    asked = torch.randint(pairs, (count, 1), generator=generator)
    lines = ["sequence,symbol,answer"]
    for row in range(count):
        answer = f"v{told[row, asked[row, 0]]}"
        pair = [
            symbol
            for key, value in zip(keys[row].tolist(), told[row].tolist(), strict=True)
            for symbol in (f"k{key}", f"v{value}")
        ]
        lines += [f"{row},{symbol},{answer}" for symbol in (*pair, f"k{keys[row, asked[row, 0]]}")]
    path.write_text("\n".join(lines) + "\n")


def write_load(path: Path) -> None:
    """Write 6,000 hours of a load with a trend, a day, a week and noise."""
    hour = torch.arange(6000)
    noise = torch.randn(len(hour), generator=torch.Generator().manual_seed(1))
    day, week = torch.sin(2 * math.pi * hour / 24), torch.sin(2 * math.pi * hour / 168)
    load = (100 + 0.02 * hour + 10 * day + 5 * week + 2 * noise).tolist()
    start = np.datetime64("2024-01-01T00:00:00")
    rows = (f"{str(start + np.timedelta64(i, 'h')).replace('T', ' ')},{value:.3f}" for i, value in enumerate(load))
    path.write_text("time,load\n" + "\n".join(rows) + "\n")


def write_digits(path: Path) -> None:
    """Write 2,500 drawn digits, a row of eight pixels at each step."""
    from swap.digits import draw_digits

    images, labels = draw_digits(2500, torch.Generator().manual_seed(1))
    np.savez(path, x=images.numpy(), y=labels.numpy())


def write_text(path: Path) -> None:
    """Copy prose of the Python documentation."""
    shutil.copy(BENCHMARKS / "swap" / "text.txt", path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, write, steps, words",
    [
        ("recall.csv", write_recall, 2500, {"ahead"}),
        ("load.csv", write_load, 400, {"level", "behind"}),
        ("digits.npz", write_digits, 1200, {"level", "behind"}),
        ("text.txt", write_text, 300, {"level", "behind"}),
    ],
)
def test_the_known_winner_is_found(name, write, steps, words, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "plan_steps", lambda *_: steps)  # whatever the speed of the machine
    write(tmp_path / name)
    outcome = compare(tmp_path / name, minutes=300)
    assert outcome.verdict.word in words, outcome
