"""Checkpoints: each a folder that is complete or absent, with an index that names the last and the best.

    checkpoints/index.json          {"last": "step-00001000", "best": "step-00000500", "written": both, "run": ...}
    checkpoints/step-00001000/      model.safetensors, state.pt (read with weights_only), manifest.json (sizes, sha256)

A checkpoint is written under another name, forced to the disk, renamed, and only then entered in the index. A crash
between any two of these leaves the index on the checkpoint before. Removed are those alone that the index lists as
written; without an index, the newest checkpoint that is intact counts.
"""

import hashlib
import io
import os
import random
import re
import secrets
import shutil
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchrum.lab.training.errors import RunError
from torchrum.lab.training.files import read_bytes, read_json, sync_folder, write_json, write_synced
from torchrum.lab.training.typed_data import Reader

FORMAT = "torchrum checkpoint 1"
MODEL, STATE, MANIFEST, INDEX = "model.safetensors", "state.pt", "manifest.json", "index.json"
NAME = re.compile(r"step-\d{8,18}")
ADVICE = "Restore it from a backup, or train again in another folder."


@dataclass(frozen=True, kw_only=True)
class Index:
    """``checkpoints/index.json``."""

    format: str = FORMAT
    last: str | None = None
    """The checkpoint to resume from."""
    best: str | None = None
    """The one that scored best."""
    written: list[str] = field(default_factory=list)
    """Every checkpoint that this run wrote and has not removed; nothing else is ever removed."""
    run: str = ""
    """Drawn once for a run, and written into each checkpoint of it."""

    def __post_init__(self) -> None:
        for name in (self.last, self.best, *self.written):
            if name is not None and not NAME.fullmatch(name):
                raise ValueError(f"{name!r:.60} is not the name of a checkpoint, such as step-00001000.")

    @property
    def known(self) -> set[str]:
        """Checkpoints that this run wrote; an index from before ``written`` knows the two that it names."""
        return {name for name in (self.last, self.best, *self.written) if name is not None}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint, in its manifest."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``manifest.json`` of a checkpoint."""

    format: str
    step: int
    files: dict[str, FileEntry]
    best: str | None = None
    """The best checkpoint when this one was written."""
    run: str = ""
    """That of the index."""


def _root(run: Path) -> Path:
    root = run / "checkpoints"
    if root.is_symlink():
        raise RunError(f"{root} is a symbolic link, which is never followed; link the whole run folder instead.")
    return root


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _index(run: Path) -> Index:
    path = _root(run) / INDEX
    if not path.exists():
        return _search(run)
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RunError(f"{path} is not an index of torchrum checkpoints.")
    return Reader(path).build(Index, data)


def _search(run: Path) -> Index:
    """The index as it must have been, from the checkpoints that are intact."""
    root, found = _root(run), {}
    for path in sorted(root.glob("step-*"), key=lambda path: (len(path.name), path.name)):
        try:
            manifest, _ = _read(path)
        except RunError:
            continue
        found[path.name] = manifest
    if not found:
        return Index()
    last, newest = list(found.items())[-1]
    best = newest.best if newest.best in found else None
    return Index(last=last, best=best, written=[last, *([best] if best else [])], run=newest.run)


def has_checkpoint(run: Path) -> bool:
    """Whether there is anything to resume from."""
    return _index(run).last is not None


def checkpoint_step(run: Path, which: Literal["last", "best"]) -> int:
    """Steps of training before the last or the best checkpoint."""
    return int(_chosen(run, which).removeprefix("step-"))


class Packed(NamedTuple):
    """A checkpoint in memory."""

    step: int
    """Steps done."""
    contents: dict[str, bytes]
    """Each file by its name."""


def pack_checkpoint(step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Packed:
    """Serialise a checkpoint; a full disk then shows as an OSError of a plain write, with nothing half done.

    Args:
        step: steps done.
        weights: the model's state dict.
        state: everything else that a run needs to be resumed; tensors and plain Python data.
    """
    from safetensors.torch import save

    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    weights = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in weights.items()}
    return Packed(step, {MODEL: save(weights, {"format": "pt", "step": str(step)}), STATE: buffer.getvalue()})


def write_checkpoint(run: Path, packed: Packed, best: bool) -> None:
    """Write a checkpoint and make it the last one, and the best one if ``best``; this run's others are removed then.

    Args:
        run: the run folder.
        packed: the checkpoint.
        best: whether the model scored better than ever.
    """
    step, contents = packed
    root, name = _root(run), f"step-{step:08d}"
    index = _index(run)
    if name in (index.last, index.best):  # written already; at most it has become the best
        if best and index.best != name:
            write_json(root / INDEX, asdict(replace(index, best=name)))
        return
    token, best_name, known = index.run or secrets.token_hex(8), name if best else index.best, {*index.known, name}
    files = {file: FileEntry(bytes=len(data), sha256=_digest(data)) for file, data in contents.items()}
    manifest = Manifest(format=FORMAT, step=step, files=files, best=best_name, run=token)
    if not root.exists():
        root.mkdir()
        sync_folder(run)
    temporary = root / f".{name}.tmp"
    _remove(temporary)
    try:
        temporary.mkdir()
        for file, content in contents.items():
            write_synced(temporary / file, content)
        write_json(temporary / MANIFEST, asdict(manifest))
        _make_way(root / name, token)
        os.rename(temporary, root / name)
        sync_folder(root)
        # what is about to be removed is still listed: after a crash before that, the next save removes it
        write_json(root / INDEX, asdict(Index(last=name, best=best_name, written=sorted(known), run=token)))
    finally:
        _remove(temporary)
    for old in known - {name, best_name}:
        _remove(root / old)


def _remove(path: Path) -> None:
    """Remove a folder of ours; of a link the link itself, never what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _make_way(path: Path, token: str) -> None:
    """Free the name of a new checkpoint: this run's own, from a crash before it was indexed, goes; others are moved."""
    if not path.is_symlink() and not path.exists():
        return
    try:
        own = not path.is_symlink() and _manifest(path).run == token
    except RunError:
        own = False
    if own:
        _remove(path)
        return
    count = 1
    while (other := path.with_name(f"{path.name}.other-{count}")).is_symlink() or other.exists():
        count += 1
    os.rename(path, other)


def load_checkpoint(run: Path, which: Literal["last", "best"] = "last") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint and check it whole before anything is used.

    Returns:
        The model's weights, and the state that ``pack_checkpoint`` was given; on the CPU.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    name = _chosen(run, which)
    while True:
        folder = _root(run) / name
        try:
            if not folder.is_dir():
                raise RunError(f"{_root(run) / INDEX} names the checkpoint {name!r}, which is not there. {ADVICE}")
            _, contents = _read(folder)
            break
        except RunError:  # the run may be going on, and have removed it for a newer one meanwhile
            if (newer := _chosen(run, which)) == name:
                raise
            name = newer
    try:
        return load(contents[MODEL]), unpack(contents[STATE])
    except (SafetensorError, ValueError) as error:
        raise RunError(f"{folder} is not a torchrum checkpoint: {error}.") from error


def _chosen(run: Path, which: Literal["last", "best"]) -> str:
    index = _index(run)
    name = index.last if which == "last" else index.best
    if name is None:
        first = "; the first validation writes one" if which == "best" and has_checkpoint(run) else ""
        raise RunError(f"{run} has no {which} checkpoint yet{first}. Train it further: torchrum train --resume {run}")
    return name


def _manifest(folder: Path) -> Manifest:
    data = read_json(folder / MANIFEST)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RunError(f"{folder} is not a torchrum checkpoint: its {MANIFEST} says {data!r:.80}.")
    return Reader(folder / MANIFEST).build(Manifest, data)


def _read(folder: Path) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the files of a checkpoint, compared with it."""
    manifest, contents = _manifest(folder), {}
    if folder.name != f"step-{manifest.step:08d}":
        raise RunError(f"{folder / MANIFEST} is that of step {manifest.step}. {ADVICE}")
    for file in (MODEL, STATE):
        expected = manifest.files.get(file)
        if expected is None:
            raise RunError(f"{folder / MANIFEST}: the field files.{file} is missing.")
        try:
            size = (folder / file).stat().st_size
            if size != expected.bytes:  # before it is read: it may have grown without end
                raise RunError(f"{folder / file} is damaged: it has {size} bytes instead of {expected.bytes}. {ADVICE}")
            contents[file] = read_bytes(folder / file, expected.bytes)
        except OSError as error:
            raise RunError(f"{folder / file} cannot be read: {error.strerror}. {ADVICE}") from error
        if _digest(contents[file]) != expected.sha256:
            raise RunError(f"{folder / file} is damaged: its content has changed since it was written. {ADVICE}")
    return manifest, contents


HOLD = 60.0
"""Seconds between two writes within which a new best model waits in memory: one that improves at every validation
would be written each time. A process that is killed meanwhile loses a minute, and comes to the same model again."""


class Keeper:
    """Writes the checkpoints of a run, in its first process.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._written = run, time.monotonic()
        self._held: Packed | None = None

    def keep(self, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any], best: bool, due: bool) -> None:
        """Keep a checkpoint: on the disk if it is ``due``, else, being the best, for a while in memory.

        Args:
            step: steps done.
            weights: the model's state dict.
            state: everything else that a run needs to be resumed.
            best: whether the model scored better than ever.
            due: whether it must be on the disk now.
        """
        packed = pack_checkpoint(step, weights, state)
        if best:
            self._held = None  # no longer the best
        if best and not due and time.monotonic() - self._written < HOLD:
            self._held = packed
            return
        self.flush()
        write_checkpoint(self._run, packed, best)
        self._written = time.monotonic()

    def flush(self) -> None:
        """Write what waits in memory."""
        if self._held is not None:
            write_checkpoint(self._run, self._held, best=True)
            self._held = None


MAX_DEPTH = 32
"""Of lists, tuples and dictionaries inside each other."""
SPREAD = 16
"""A tensor may take this many times the memory that its file does: the same numbers may stand for several rows."""


def unpack(content: bytes) -> Any:
    """What ``torch.save`` packed, on the CPU; a ValueError says what is wrong with other content."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            items = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise ValueError(f"it is not an archive: {error}") from error
    whole = sum(item.file_size for item in items)
    if whole > len(content) or any(item.compress_type != zipfile.ZIP_STORED for item in items):
        raise ValueError("its archive is compressed, which torch never does: it could grow without end")
    try:
        data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged pickle makes its reader do
        raise ValueError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}") from error
    _check_size(data, len(content))
    return data


def _check_size(data: Any, size: int) -> None:
    """Refuse data that hold more than a file of ``size`` bytes can: the same list or tensor over and over again."""
    budget, numbers = size, SPREAD * size
    level, depth = [data], 0
    while level:
        budget, depth = budget - len(level), depth + 1
        if budget < 0 or depth > MAX_DEPTH:
            raise ValueError("its data is nested too deep, or too many times")
        for value in level:
            if isinstance(value, Tensor):
                if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
                    raise ValueError("it has a tensor that is not a plain tensor")
                numbers -= value.numel() * value.element_size()
        if numbers < 0:
            raise ValueError("its tensors claim more numbers than the file holds")
        level = [inner for value in level for inner in _inner(value)]


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, list | tuple | set | frozenset) else []


def seed_process(seed: int, rank: int) -> None:
    """Seed torch, Python and (where it is in use) numpy; processes differ, so that their dropout masks do."""
    mixed = (seed * 1_000_003 + rank * 7_919 + 1) % 2**31
    torch.manual_seed(mixed)
    random.seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed)


def collect_random_state(generator: torch.Generator) -> dict[str, Any]:
    """The states of torch, CUDA, Python, numpy and of the generator that makes the data."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "device": generator.device.type,
        "data": generator.get_state(),
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    if generator.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(generator.device)
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def restore_random_state(state: dict[str, Any], generator: torch.Generator) -> bool:
    """Put ``collect``'s states back; False if they come from another kind of device and so could not be."""
    if state["device"] != generator.device.type:
        return False
    generator.set_state(state["data"])
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], generator.device)
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    return True
