"""Heat maps of the recurrent matrices: Figure 3 of the paper, and those of its appendix."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from torchrum.paper.plots.style import Axes, Figure, is_dark

Arrays = Mapping[str, NDArray[np.float64]]

TITLES = {"tau": "$W_{hh}^{\\tau}$: generates the target τ", "u": "$W_{hh}^{u}$: generates the update gate u"}


def recurrences(arrays: Arrays) -> list[str]:
    """Names of the recurrences that a file of arrays holds, in the order of their names."""
    return sorted({name.rpartition("/")[0] for name in arrays if name.endswith("/tau")})


def kernels_figure(arrays: Arrays, title: str, recurrence: str | None = None) -> Figure:
    """The blocks of W_hh side by side, each with the block's name and how far its diagonal stands out.

    Where a block was too large to be kept, its first rows and columns are shown, and below them the root mean square of
    every tile of the whole.

    Args:
        arrays: what ``torchrum.paper.ledger.arrays.read_arrays`` returns.
        title: what was trained.
        recurrence: which of the model's recurrences; the first if None.
    """
    name = recurrence or recurrences(arrays)[0]
    blocks = [block for block in TITLES if f"{name}/{block}" in arrays]
    whole = f"{name}/tau_map" not in arrays
    figure = Figure(figsize=(3.5 * len(blocks), 3.9 if whole else 6.8), layout="constrained")
    grid = figure.subplots(1 if whole else 2, len(blocks), squeeze=False)
    for column, block in enumerate(blocks):
        _signed(grid[0, column], arrays[f"{name}/{block}"])
        diagonal = arrays[f"{name}/{block}_diagonal"]
        shown = "" if whole else f"\nfirst {len(arrays[f'{name}/{block}'])} of {len(diagonal)} units"
        grid[0, column].set_title(f"{TITLES[block]}\n{_contrast(arrays, name, block)}{shown}", fontsize=8.5)
        if not whole:
            _sizes(grid[1, column], arrays[f"{name}/{block}_map"], len(diagonal))
    figure.suptitle(title, fontsize=10)
    return figure


def _contrast(arrays: Arrays, name: str, block: str) -> str:
    """How far the diagonal stands out, from the whole block where there is one."""
    diagonal = np.abs(arrays[f"{name}/{block}_diagonal"])
    matrix = np.abs(arrays[f"{name}/{block}"])
    others = (matrix.sum() - matrix.diagonal().sum()) / max(matrix.size - len(matrix), 1)
    return f"mean |diagonal| is {diagonal.mean() / max(others, 1e-12):.2g} times the rest"


def _signed(axes: Axes, matrix: NDArray[np.float64]) -> None:
    # a few large entries must not wash out the others: the scale ends at the largest 0.5 %
    limit = float(np.quantile(np.abs(matrix), 0.995)) or 1.0
    image = axes.imshow(
        matrix,
        cmap="berlin" if is_dark() else "RdBu_r",  # a dark centre on a dark page
        norm=TwoSlopeNorm(0, -limit, limit),
        interpolation="nearest",
    )
    axes.set(xlabel="from unit", ylabel="to unit")
    _dress(axes, image, "extend")


def _sizes(axes: Axes, tiles: NDArray[np.float64], units: int) -> None:
    image = axes.imshow(
        tiles, cmap="viridis", interpolation="nearest", extent=(0.0, float(units), float(units), 0.0), vmin=0
    )
    axes.set(xlabel="from unit", ylabel="to unit", title="root mean square of each tile, all units")
    axes.title.set_fontsize(8.5)
    _dress(axes, image, "")


def _dress(axes: Axes, image: AxesImage, extend: str) -> None:
    axes.grid(False)
    axes.spines[:].set_visible(False)
    figure = axes.figure
    bar = figure.colorbar(image, ax=axes, shrink=0.75, extend="both" if extend else "neither")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)
