"""Checkpoints: each a folder that is complete or absent, with an index that names the last and the best.

    checkpoints/index.json          {"last": "step-00001000", "best": "step-00000500"}
    checkpoints/step-00001000/      model.safetensors, state.pt (read with weights_only), manifest.json (sizes, sha256)

A checkpoint is written under another name, forced to the disk, renamed, and only then entered in the index. A crash
between any two of these leaves the index on the checkpoint before.
"""

import hashlib
import io
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchrum.training.errors import RunError
from torchrum.training.records import read_json, write_json

FORMAT = "torchrum checkpoint 1"
MODEL, STATE, MANIFEST, INDEX = "model.safetensors", "state.pt", "manifest.json", "index.json"


def _root(run: Path) -> Path:
    return run / "checkpoints"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _index(run: Path) -> dict[str, Any]:
    path = _root(run) / INDEX
    if not path.exists():
        return {"format": FORMAT, "last": None, "best": None}
    index = read_json(path)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise RunError(f"{path} is not an index of torchrum checkpoints.")
    return index


def has_checkpoint(run: Path) -> bool:
    """Whether there is anything to resume from."""
    return _index(run)["last"] is not None


def save_checkpoint(run: Path, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any], best: bool) -> None:
    """Write a checkpoint and make it the last one, and the best one if ``best``; others are removed afterwards.

    Args:
        run: the run folder.
        step: steps done.
        weights: the model's state dict.
        state: everything else that a run needs to go on; tensors and plain Python data.
        best: whether the model scored better than ever.
    """
    from safetensors.torch import save

    root, name = _root(run), f"step-{step:08d}"
    index = _index(run)
    if name in (index["last"], index["best"]):  # written already; at most it has become the best
        if best and index["best"] != name:
            write_json(root / INDEX, {**index, "best": name})
        return
    # serialised in memory first: a full disk then shows as an OSError of a plain write, with nothing half done
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    weights = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in weights.items()}
    contents = {MODEL: save(weights, {"format": "pt", "step": str(step)}), STATE: buffer.getvalue()}

    root.mkdir(exist_ok=True)
    temporary = root / f".{name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for file, content in contents.items():
            _write(temporary / file, content)
        files = {file: {"bytes": len(data), "sha256": _digest(data)} for file, data in contents.items()}
        write_json(temporary / MANIFEST, {"format": FORMAT, "step": step, "files": files})
        shutil.rmtree(root / name, ignore_errors=True)  # from a crash before it was entered in the index
        os.rename(temporary, root / name)
        _sync_folder(root)
        write_json(root / INDEX, {"format": FORMAT, "last": name, "best": name if best else index["best"]})
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    kept = {name, name if best else index["best"]}
    for old in root.iterdir():
        if old.is_dir() and old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(run: Path, which: Literal["last", "best"] = "last") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint and check it whole before anything is used.

    Returns:
        The model's weights, and the state that ``save_checkpoint`` was given; on the CPU.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    name = _index(run)[which]
    if name is None:
        raise RunError(f"{run} has no {which} checkpoint yet.")
    folder = _root(run) / str(name)
    advice = "Copy it back from elsewhere, or train anew in another folder."
    if not re.fullmatch(r"step-\d{8,}", str(name)) or not folder.is_dir():
        raise RunError(f"{_root(run) / INDEX} names the checkpoint {name!r}, which is not there. {advice}")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RunError(f"{folder} is not a torchrum checkpoint: its {MANIFEST} says {manifest!r:.80}.")
    contents = {}
    for file in (MODEL, STATE):
        try:
            contents[file] = (folder / file).read_bytes()
        except OSError as error:
            raise RunError(f"{folder / file} cannot be read: {error.strerror}. {advice}") from error
        expected = manifest["files"][file]
        if len(contents[file]) != expected["bytes"]:
            found = f"{len(contents[file])} bytes instead of {expected['bytes']}"
            raise RunError(f"{folder / file} is damaged: it has {found}. {advice}")
        if _digest(contents[file]) != expected["sha256"]:
            raise RunError(f"{folder / file} is damaged: its content has changed since it was written. {advice}")
    try:
        weights = load(contents[MODEL])
        state = torch.load(io.BytesIO(contents[STATE]), map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise RunError(f"{folder} is not a torchrum checkpoint: {error}") from error
    return weights, state
