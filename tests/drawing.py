"""Pages and figures drawn in half the time, for tests that look at something else."""

import shutil
from pathlib import Path

import pytest

from torchrum.lab import plot_style
from torchrum.paper.plots import curves


def draw_less(patch: pytest.MonkeyPatch) -> None:
    """Draw the light theme alone, without a search for a tight layout; the figure that reads no file has few steps.

    The dark figure, the same data in other colours, becomes a copy of the light one.
    """
    save, gradients = plot_style.save, curves.initial_gradients

    def save_light(figure: plot_style.Figure, path: Path) -> Path:
        if path.stem.endswith("-dark"):
            shutil.copy(path.with_name(path.name.replace("-dark", "")), path)
            return path
        figure.set_layout_engine("none")
        return save(figure, path)

    patch.setattr(plot_style, "save", save_light)
    patch.setattr(curves, "initial_gradients", lambda delay, units, sequences: gradients(5, 4, 2))
