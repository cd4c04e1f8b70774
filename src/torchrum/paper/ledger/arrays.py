"""The small arrays of a trained RUM that its figures need, in a file beside the entry; no weights are kept.

A file ``results/arrays/<entry>.npz`` holds, T being the steps of one validation sequence and P the sampled ones:

    symbols (T,)           the sequence, as the task numbers its symbols; absent if it may not be quoted
    at (P,)                the sampled steps
    steps (S,)             steps of training where the diagonal was measured

and for each recurrence, below its name in the model, as ``layer.l0/theta``:

    theta (T,)             angle of each rotation, the mean over the heads of the gated form
    norm (T,)              norm of the state after each step
    overlap (P, P)         agreement of two steps' planes, from 0 to 1: |P_s^T P_t|^2 / 2, the same mean
    phases (P, H // 2)     angles of R_t's conjugate pairs of eigenvalues, rising; with lam other than 0
    tau, u (N, N)          the blocks of W_hh, whole up to 256 units, else the first 128 rows and columns
    tau_diagonal (H,)      the diagonal, the same for u
    tau_map (64, 64)       root mean square of each tile, where the block is not whole; the same for u
    tau_dominance (S,)     mean |diagonal| over mean |other|, during training; the same for u

Matrices are held as small integers with a factor (``tau_unit``): a picture shows no more.
"""

import io
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrum.lab.tasks.base import Task
from torchrum.lab.training.checkpoint import load_model
from torchrum.lab.training.files import read_bytes, write_atomic
from torchrum.lab.training.run_folder import read_config, read_metrics
from torchrum.layers.introspection import Observation, observe, recurrent_blocks
from torchrum.paper.ledger.entries import LedgerError

Arrays = dict[str, NDArray[np.generic]]

LONGEST = 1100
"""Most steps of the sequence to follow."""
SAMPLES = 96
"""Number of steps whose planes are compared and whose R is decomposed."""
WHOLE, CORNER, TILES = 256, 128, 64
"""Most units of a block that is kept whole, rows of the corner of a larger one, and tiles per side of its map."""


def collect_arrays(run: Path) -> Arrays:
    """Follow the best model of a run folder over the first sequence of its validation set.

    Returns:
        The arrays by name, as the head of this module lists them; empty for a model without a RUM.
    """
    config = read_config(run)
    model = load_model(run).float()
    arrays: Arrays = {}
    for name, block, matrix in recurrent_blocks(model):
        arrays |= {f"{name}/{key}": value for key, value in _block(block, matrix).items()}
    if not arrays:
        return arrays
    arrays |= _dominance(run)
    symbols, observations = _follow(model, config.task, config.seed)
    count = len(symbols)
    at = np.unique(np.linspace(0, count - 1, min(count, SAMPLES)).round().astype(np.int64))
    arrays["at"] = at.astype(np.int32)
    if config.task.quotable:
        arrays["symbols"] = symbols.numpy().astype(np.int32)
    for seen in observations:
        arrays |= {f"{seen.name}/{key}": value for key, value in _traces(seen, at).items()}
    return arrays


def write_arrays(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> Path:
    """Write arrays compressed; equal arrays give equal files."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **dict(arrays))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())
    return path


def read_arrays(path: Path) -> dict[str, NDArray[np.float64]]:
    """Read the arrays of a file as numbers to draw."""
    try:
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as file:
            return drawable({name: file[name] for name in file.files})
    except Exception as error:  # a damaged archive may raise anything
        raise LedgerError(f"{path} cannot be read: {error}. Write it again with torchrum record --arrays.") from error


def drawable(arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.float64]]:
    """Convert arrays to numbers to draw; matrices are multiplied by their factors."""
    raw = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    units = {name: raw.pop(name) for name in list(raw) if name.endswith("_unit")}
    return {name: value * units.get(f"{name}_unit", 1.0) for name, value in raw.items()}


def _follow(model: nn.Module, task: Task, seed: int) -> tuple[Tensor, list[Observation]]:
    batch = next(iter(task.validation(seed))).rows(0, 1)
    length = batch.x.shape[1] if batch.lengths is None else int(batch.lengths[0])
    x = batch.x[:, : min(length, LONGEST)]
    lengths = None if batch.lengths is None else torch.tensor([x.shape[1]])
    return x[0], observe(model, lambda: model(x, lengths, None) if task.carries_state else model(x, lengths))


def _traces(seen: Observation, at: NDArray[np.int64]) -> Arrays:
    at = at[at < len(seen.theta)]
    theta, planes = seen.theta[:, 0], seen.planes()[at, 0]  # (T,), (P, H, 2)
    if seen.head_size is None:
        theta, planes = theta.unsqueeze(1), planes.unsqueeze(1)
    shared = torch.einsum("sghi,tghj->stgij", planes, planes).square().sum((-2, -1)).mean(-1) / 2
    arrays: Arrays = {
        "theta": theta.mean(1).numpy().astype(np.float16),
        "norm": seen.state[:, 0].float().norm(dim=-1).numpy(),
    }
    arrays |= _quantised("overlap", shared, 127)
    kept = set(at.tolist())
    rotations = [R[0] for t, R in enumerate(seen.rotations()) if t in kept]
    if rotations:
        arrays["phases"] = np.stack([phases(R) for R in rotations]).astype(np.float16)
    return arrays


def phases(R: Tensor) -> NDArray[np.float64]:
    """Compute the H // 2 angles of the conjugate pairs of eigenvalues of a rotation ``(H, H)``, 0 to pi, rising."""
    angles = torch.linalg.eigvals(R.double()).angle().abs().sort().values
    return angles[len(angles) % 2 :: 2].numpy()  # pairs are neighbours; an odd H has one real eigenvalue


def _block(name: str, matrix: Tensor) -> Arrays:
    H = len(matrix)
    corner = matrix if H <= WHOLE else matrix[:CORNER, :CORNER]
    arrays = _quantised(name, corner, 127 if H <= CORNER else 31)  # fewer levels compress better
    arrays[f"{name}_diagonal"] = matrix.diagonal().numpy().astype(np.float16)
    if H > WHOLE:
        edges = np.linspace(0, H, TILES + 1).round().astype(int)
        rows = [matrix[start:stop].square() for start, stop in pairwise(edges)]
        tiles = [[row[:, a:b].mean().sqrt() for a, b in pairwise(edges)] for row in rows]
        arrays |= _quantised(f"{name}_map", torch.tensor(tiles), 127)
    return arrays


def _quantised(name: str, matrix: Tensor, levels: int) -> Arrays:
    unit = float(matrix.abs().max()) / levels or 1.0
    whole = (matrix / unit).round().numpy().astype(np.int8)
    return {name: whole, f"{name}_unit": np.asarray(unit, np.float32)}


def _dominance(run: Path) -> Arrays:
    lines = read_metrics(run, "weights")
    if not lines:
        return {}
    names = [name for name in lines[0] if name.endswith("_dominance")]
    columns: Arrays = {name: np.array([line[name] for line in lines], np.float32) for name in names}
    return {"steps": np.array([line["step"] for line in lines], np.int32), **columns}
