"""Pieces of the equations that the cells' tests write out in numpy, for one row."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def sigmoid(z: ArrayLike) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.asarray(z)))


def normalised(x: NDArray, gain: NDArray, shift: NDArray, eps: float = 1e-3) -> NDArray[np.float64]:
    """Layer norm of ``(H,)``; ``eps`` is the default of the cells unless given."""
    return gain * (x - x.mean()) / np.sqrt(x.var() + eps) + shift
