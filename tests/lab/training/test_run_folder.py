"""One run folder, one process: what is locked, who holds it, and that the lock ends with its holder."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lab.training.processes import start, train_fresh
from lab.training.tiny import tiny, tiny_model
from torchrum.lab.training import ConfigError, RunError, Trainer, run_sweep
from torchrum.lab.training.checkpoint import load_checkpoint
from torchrum.lab.training.run_folder import LOCK, lock_folder, lock_free_folder, read_metrics


def hold(folder: Path, ready: Path) -> None:
    """In a process of its own: lock, say so, and wait to be killed."""
    lock = lock_folder(folder)
    ready.touch()
    time.sleep(60)
    lock.release()


@pytest.fixture
def holder(tmp_path):
    """A process that has locked ``tmp_path / "run"``."""
    (tmp_path / "run").mkdir()
    process = start(hold, tmp_path / "run", tmp_path / "ready")
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_the_second_process_says_who_holds_the_folder(holder, tmp_path):
    with pytest.raises(RunError, match=rf"run is in use by process {holder.pid}; wait for it to end"):
        Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {LOCK}
    with pytest.raises(RunError, match=f"in use by process {holder.pid}"):
        run_sweep({"seed-0": tiny()}, tmp_path / "run", quiet=True)


def test_a_new_run_takes_the_next_name(holder, tmp_path):
    result = Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(tmp_path / "run", rename=True)
    assert result.folder == tmp_path / "run-2"
    assert not (tmp_path / "run-2" / LOCK).exists()
    again = Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(tmp_path / "run", rename=True)
    assert again.folder == tmp_path / "run-3"


def test_the_lock_ends_with_its_holder(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (tmp_path / "run" / LOCK).exists()  # the file outlives a killed process, the lock does not
    with lock_free_folder(tmp_path / "run") as lock:
        assert lock.folder == tmp_path / "run"
        assert (tmp_path / "run" / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_live_run_is_not_resumed(tmp_path):
    run = tmp_path / "run"
    refused = []

    class Nosy(type(tiny_model(tiny()))):
        def forward(self, x, lengths=None):
            if self.training and not refused and (run / "checkpoints").exists():
                with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
                    Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(run, resume=True)
                refused.append(len(read_metrics(run)))
            return super().forward(x, lengths)

    result = Trainer(tiny(), Nosy(tiny().task), quiet=True).fit(run)
    assert refused
    assert result.stopped == "finished"
    assert [line["step"] for line in read_metrics(run, "train")] == [7, 14, 21, 28, 35, 40]


def test_an_empty_folder_goes_with_its_lock(tmp_path):
    with lock_folder(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK).exists()
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    with lock_folder(tmp_path / "there"):
        pass
    assert not list((tmp_path / "there").iterdir())


def test_the_parents_that_were_made_go_too(tmp_path):
    (tmp_path / "there").mkdir()
    with lock_folder(tmp_path / "there" / "out" / "run"):
        assert (tmp_path / "there" / "out" / "run" / LOCK).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())
    with lock_folder(tmp_path / "out" / "run"):
        (tmp_path / "out" / "other").mkdir()  # another process's
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["other"]


def test_a_config_that_cannot_be_built_leaves_no_folder(tmp_path):
    bad = replace(tiny(), model=replace(tiny().model, options={"gate": 1}))
    with pytest.raises(ConfigError, match="is not known"):
        Trainer(bad, quiet=True).fit(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def merged(folder: Path) -> bool:
    """Whether what is in a run folder comes from more than one process."""
    hidden = json.loads((folder / "config.json").read_text())["model"]["hidden_size"]
    weights, state = load_checkpoint(folder)
    steps = [line["step"] for line in read_metrics(folder, "train")]
    return not (
        weights["layer.weight_hh_l0"].shape[1] == hidden == state["config"]["model"]["hidden_size"]
        and steps == sorted(set(steps))
        and steps[-1] == 16
    )


@pytest.mark.parametrize("pairs", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_two_processes_started_at_once_never_merge(tmp_path, pairs):
    """Of each pair one gets the folder; the other is refused, or with ``rename`` takes the next name."""
    for pair in range(pairs):
        folder, rename = tmp_path / f"run-{pair}", pair % 2 == 1
        at = time.time() + 0.5
        two = [start(train_fresh, folder, size, rename, at) for size in (3, 5)]
        for process in two:
            process.join(60)
        codes = sorted(process.exitcode for process in two)
        folders = [folder, folder.with_name(folder.name + "-2")] if rename else [folder]
        assert codes == ([0, 0] if rename else [0, 3])
        assert not any(merged(path) for path in folders)
        assert sorted(path.name for path in tmp_path.glob(f"{folder.name}*")) == [path.name for path in folders]


@pytest.mark.slow
def test_two_commands_started_at_once_never_merge(tmp_path):
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    for pair in range(8):
        out = tmp_path / str(pair)
        command = [sys.executable, "-m", "torchrum", "train", "lab.training.tiny:tiny", "--quiet", "--out", str(out)]
        two = [
            subprocess.Popen(
                [*command, "--steps", "16", "--log_every", "1", "--model.hidden_size", size], env=environment
            )
            for size in ("3", "5")
        ]
        assert [process.wait(600) for process in two] == [0, 0]
        assert not any(merged(out / name) for name in ("tiny", "tiny-2"))
