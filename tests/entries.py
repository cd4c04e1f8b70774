"""Entries of a ledger, for tests that read one."""

from typing import Any

from torchrum.paper.ledger import Entry


def make_entry(recipe: str, seed: int, curve: dict[str, list[Any]], **changes: Any) -> Entry:
    """A run of ``recipe`` with ``curve``, which begins with its steps; the last value of each is the final one."""
    final = {name: values[-1] for name, values in curve.items() if name != "step"}
    fields = {
        "recipe": recipe,
        "overrides": [],
        "seed": seed,
        "command": f"torchrum train {recipe} --seed {seed}",
        "commit": "abc1234",
        "hardware": "H200",
        "processes": 1,
        "versions": {},
        "wall_seconds": 1.0,
        "steps": curve["step"][-1],
        "parameters": 1,
        "baseline": 1.0,
        "final": final,
        "curve": curve,
        "train_curve": curve,
    }
    return Entry(**{**fields, **changes})
