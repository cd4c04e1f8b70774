"""Save a run, load it back, and resume it in any number of processes.

A checkpoint is a folder that is complete or absent; an index names the last and the best:

    checkpoints/index.json          {"last": "step-00001000", "best": "step-00000500", "written": both}
    checkpoints/step-00001000/      model.safetensors, state.pt (read with weights_only), manifest.json (sizes, sha256)

A checkpoint is written under another name, forced to the disk, renamed, and only then entered in the index. A crash
between any two of these leaves the index on the checkpoint before. Removed are those alone that the index lists as
written; without an index, the newest checkpoint that is intact counts.
"""

import hashlib
import io
import os
import pickle
import random
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchrum.lab.training.config import CHANGEABLE, TrainConfig, differences
from torchrum.lab.training.distributed import Engine, on_host
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.files import Reader, read_json, sync_folder, write_json, write_synced
from torchrum.lab.training.run_folder import CONFIG, RESULT, Mark, Progress, check_metrics, read_config
from torchrum.lab.training.step import Trained, build, seed_process, to_device

FORMAT = "torchrum checkpoint 1"
MODEL, STATE, MANIFEST, INDEX = "model.safetensors", "state.pt", "manifest.json", "index.json"
NAME = re.compile(r"step-\d{8,18}")
ADVICE = "Restore it from a backup, or train again in another folder."


class Index(NamedTuple):
    """``checkpoints/index.json``."""

    last: str | None = None
    """The checkpoint to resume from."""
    best: str | None = None
    """The one that scored best."""
    written: frozenset[str] = frozenset()
    """Every checkpoint that this run wrote and has not removed; nothing else is ever removed."""


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
    data = _read_own(path)
    index = Index(data.get("last"), data.get("best"), frozenset(data.get("written", ())))
    for name in {index.last, index.best, *index.written} - {None}:
        if not NAME.fullmatch(str(name)):
            raise RunError(f"{path}: {name!r:.60} is not the name of a checkpoint, such as step-00001000.")
    return index


def _read_own(path: Path) -> dict[str, Any]:
    """Read an index or a manifest."""
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RunError(f"{path} is not that of a torchrum checkpoint: it says {data!r:.80}.")
    return data


def _search(run: Path) -> Index:
    """Rebuild the index from the checkpoints that are intact."""
    found = {}
    for path in sorted(_root(run).glob("step-*"), key=lambda path: (len(path.name), path.name)):
        try:
            found[path.name] = _read(path)[0].get("best")
        except RunError:
            continue
    if not found:
        return Index()
    last, best = list(found.items())[-1]
    best = best if best in found else None
    return Index(last, best, frozenset(name for name in (last, best) if name is not None))


def has_checkpoint(run: Path) -> bool:
    """Whether there is anything to resume from."""
    return _index(run).last is not None


def checkpoint_step(run: Path, which: Literal["last", "best"]) -> int:
    """Steps of training before the last or the best checkpoint."""
    return int(_chosen(run, which).removeprefix("step-"))


def _pack(step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, bytes]:
    """Serialise the files of a checkpoint: a full disk is then an OSError of a plain write with nothing half done."""
    from safetensors.torch import save

    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    weights = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in weights.items()}
    return {MODEL: save(weights, {"format": "pt", "step": str(step)}), STATE: buffer.getvalue()}


def write_checkpoint(run: Path, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any], best: bool) -> None:
    """Write a checkpoint and make it the last one, and the best one if ``best``; this run's others are removed then.

    Args:
        run: the run folder.
        step: steps done.
        weights: the model's state dict.
        state: everything else that a run needs to be resumed; tensors and plain Python data.
        best: whether the model scored better than ever.
    """
    root, name = _root(run), f"step-{step:08d}"
    index = _index(run)
    best_name, temporary = name if best else index.best, root / f".{name}.tmp"
    # an index from before ``written`` knows the two that it names
    known = {old for old in (index.last, index.best, *index.written, name) if old is not None}

    def write_index(last: str | None) -> None:
        write_json(root / INDEX, {"format": FORMAT, "last": last, "best": best_name, "written": sorted(known)})

    if name in (index.last, index.best):  # written already; at most it has become the best
        if best_name != index.best:
            write_index(index.last)
        return
    contents = _pack(step, weights, state)
    files = {file: {"bytes": len(data), "sha256": _digest(data)} for file, data in contents.items()}
    if not root.exists():
        root.mkdir()
        sync_folder(run)
    _remove(temporary)
    try:
        temporary.mkdir()
        for file, content in contents.items():
            write_synced(temporary / file, content)
        write_json(temporary / MANIFEST, {"format": FORMAT, "step": step, "files": files, "best": best_name})
        _make_way(root / name, files)
        os.rename(temporary, root / name)
        sync_folder(root)
        # what is about to be removed is still listed: after a crash before that, the next save removes it
        write_index(name)
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


def _make_way(path: Path, files: Mapping[str, Any]) -> None:
    """Free the name of a new checkpoint: the same one, from a crash before it was indexed, goes; others are moved."""
    if not os.path.lexists(path):
        return
    try:
        same = not path.is_symlink() and _read_own(path / MANIFEST)["files"] == files
    except RunError:
        same = False
    if same:
        _remove(path)
        return
    count = 1
    while os.path.lexists(other := path.with_name(f"{path.name}.other-{count}")):
        count += 1
    os.rename(path, other)


def load_checkpoint(run: Path, which: Literal["last", "best"] = "last") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint and check it whole before anything is used.

    Returns:
        The model's weights, and the state that ``write_checkpoint`` was given; on the CPU.
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
        raise RunError(f"{folder} is not a torchrum checkpoint: {str(error).splitlines()[0]}") from error


def _chosen(run: Path, which: Literal["last", "best"]) -> str:
    index = _index(run)
    name = index.last if which == "last" else index.best
    if name is None:
        first = "; the first validation writes one" if which == "best" and index.last else ""
        raise RunError(f"{run} has no {which} checkpoint yet{first}. Train it further: torchrum train --resume {run}")
    return name


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest and the files of a checkpoint, compared with it."""
    manifest, contents = _read_own(folder / MANIFEST), {}
    for file in (MODEL, STATE):
        try:
            contents[file] = (folder / file).read_bytes()
        except OSError as error:
            raise RunError(f"{folder / file} cannot be read: {error.strerror}. {ADVICE}") from error
        if _digest(contents[file]) != manifest["files"][file]["sha256"]:
            raise RunError(f"{folder / file} is damaged: its content has changed since it was written. {ADVICE}")
    return manifest, contents


MAX_DEPTH = 32
"""Largest depth of lists, tuples and dictionaries inside each other."""
SPREAD = 16
"""A tensor may take this many times the memory that its file does: the same numbers may stand for several rows."""


def unpack(content: bytes) -> Any:
    """Load what ``torch.save`` packed, on the CPU; a ValueError says what is wrong with other content."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                raise ValueError("its archive is compressed, which torch never does: it could grow without end")
        data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise ValueError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}") from error
    budget, numbers, level = len(content), SPREAD * len(content), [data]
    for _ in range(MAX_DEPTH):
        numbers -= sum(value.numel() * value.element_size() for value in level if isinstance(value, Tensor))
        budget -= len(level)
        if budget < 0 or numbers < 0:
            break
        level = [inner for value in level for inner in _inner(value)]
        if not level:
            return data
    raise ValueError("it claims more lists or numbers than its file can hold")


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, list | tuple | set | frozenset) else []


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
    """Restore the states of ``collect_random_state``; return False if they are of another kind of device."""
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


def check_config(run: Path, config: TrainConfig, state: Mapping[str, Any], whole: bool = False) -> None:
    """Refuse a config that differs from that of the checkpoint in ``identity`` or, with ``whole``, in any field.

    Args:
        run: the run folder.
        config: that of its ``config.json``.
        state: that of its checkpoint.
        whole: compare also the fields that a resumed run may change.
    """
    changed = differences(state["config"], config, None if whole else CHANGEABLE)
    if changed:
        raise RunError(
            f"{run / CONFIG} is not the config of the run's checkpoint: {'; '.join(changed)}. "
            "Change it back, or restore it from a backup."
        )


def check_ended_run(run: Path, config: TrainConfig) -> None:
    """Refuse a finished run whose config or metrics differ from its last checkpoint."""
    _, state = load_checkpoint(run)
    check_config(run, config, state, whole=True)
    if (mark := _mark(state)) is not None:
        check_metrics(run, mark, ended=True)


def _mark(state: Mapping[str, Any]) -> Mark | None:
    """Read the mark of metrics.jsonl; checkpoints of older versions have none."""
    return Mark(**state["metrics"]) if state.get("metrics") else None


WEIGHT_TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # other precisions keep float32 weights


def fill(model: nn.Module, weights: dict[str, Any], run: Path) -> None:
    """Load weights into a model; names and shapes must be equal."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"the checkpoint of {run} does not fit the model: {' '.join(str(error).split())}") from error


@on_host()
def load_model(run: Path | str, which: Literal["last", "best"] = "best") -> nn.Module:
    """Load the trained model of a run folder, on the CPU and in eval mode.

    Args:
        run: the run folder.
        which: the checkpoint to load: the best on validation, or the last.
    """
    Reader("load_model", ConfigError).value(Literal["last", "best"], which, "which")
    run = Path(run)
    config = read_config(run)
    weights, state = load_checkpoint(run, which)
    check_config(run, config, state)
    model = build(config).to(dtype=WEIGHT_TYPES.get(config.precision, torch.float32))
    fill(model, weights, run)
    return model.eval()


class Loaded(NamedTuple):
    """A checkpoint that belongs to the run."""

    weights: dict[str, Tensor]
    """Weights of the model that is scored: the trained ones, or their average."""
    state: dict[str, Any]
    """``config``, ``progress``, ``optimizer``, ``scaler``, ``metrics``, ``trained`` weights beside an average, and
    ``processes``: of each its ``random`` state, what it ``carried`` and the ``sums`` since the last log line."""
    progress: Progress
    mark: Mark | None


def load_run(folder: Path, config: TrainConfig, engine: Engine) -> Loaded | None:
    """Load the last checkpoint in ``folder``, if there is one, and compare it with ``config``."""
    if not engine.first(lambda: has_checkpoint(folder)):
        return None
    if engine.world_size > 1:
        engine.first(lambda: bool(load_checkpoint(folder)))  # one clear failure instead of one from each process
    weights, state = load_checkpoint(folder)
    changed = differences(state["config"], config)
    if changed:
        raise RunError(f"the checkpoint in {folder} belongs to another run: {'; '.join(changed)}.")
    mark, progress = _mark(state), Progress(**state["progress"])
    if mark is not None:
        engine.first(lambda: check_metrics(folder, mark))
    done = progress.step >= config.steps or (config.stop_at is not None and progress.reached >= config.stop_after)
    if done and engine.first(lambda: (folder / RESULT).exists()):
        steps = f"{progress.step} steps are done, {config.steps} are asked for"
        raise RunError(f"{folder} is complete: {steps}. Pass more --steps, or --stop_at none.")
    return Loaded(weights, state, progress, mark)


def restore(folder: Path, trained: Trained, loaded: Loaded) -> list[str]:
    """Restore model, optimizer, step and processes from a checkpoint, also if their number has changed.

    Returns:
        Lines to print.
    """
    config, engine, step, state = trained.config, trained.engine, trained.step, loaded.state
    own = trained.scored.state_dict()
    weights = {name: engine.share_like(value, own.get(name)) for name, value in loaded.weights.items()}
    fill(trained.scored, weights, folder)
    if trained.scored is not trained.module:
        fill(trained.module, state["trained"], folder)
    # the groups come from the config: they depend on the device
    params = [param for group in trained.optimizer.param_groups for param in group["params"]]
    moments = {
        index: {name: engine.share_like(value, params[index]) for name, value in found.items()}
        for index, found in state["optimizer"].items()
    }
    trained.optimizer.load_state_dict({**trained.optimizer.state_dict(), "state": moments})
    engine.fabric.strategy.precision.load_state_dict(state["scaler"])
    done, processes = loaded.progress.step, state["processes"]
    step.position.fill_(done)
    notes = [f"resuming {folder} at step {done}"]
    mine = processes[engine.rank] if len(processes) == engine.world_size else None
    if config.task.carries_state and mine is None:
        raise RunError(f"{folder} carries the state of {len(processes)} processes; resume it with the same number.")
    for name in processes[0]["sums"]:
        # sums are means over rows, so the mean over processes is right for any number of them
        totals = [process["sums"][name] for process in ([mine] if mine else processes)]
        step.sums[name] = (sum(totals[1:], totals[0]) / len(totals)).to(engine.device)
    if mine is not None:
        step.carried = to_device(mine["carried"], engine.device)
    known = mine if mine is not None else processes[0]  # the data come from the same state in every process
    if not restore_random_state(known["random"], step.generator):
        step.generator.manual_seed(config.seed + done)
        notes.append("the run was on another kind of device: its random numbers start again, results may differ")
    if mine is None:
        seed_process(config.seed + done, engine.rank)
    return notes
