"""Two small trained models that come with the package; README.md beside this file says how they were made.

Each is a run folder without what only training needs: ``load_model(ALICE)``, ``torchrum sample``.
"""

from pathlib import Path

ALICE = Path(__file__).parent / "alice"
"""A character model of "Alice's Adventures in Wonderland", which is in the public domain."""
RECALL = Path(__file__).parent / "recall"
"""A RUM with lam 1 that recalls one of up to eight pairs; the demonstration in the documentation."""

__all__ = ["ALICE", "RECALL"]
