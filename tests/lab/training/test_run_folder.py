"""One run folder, one process; and what a run ran on: the right commit or none, and nothing that names the machine."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.training.processes import start, train_fresh
from lab.training.tiny import tiny, tiny_model
from torchrum.lab.training import ConfigError, RunError, Trainer, run_sweep
from torchrum.lab.training.checkpoint import load_checkpoint
from torchrum.lab.training.run_folder import (
    LOCK,
    environment,
    given_commit,
    lock_folder,
    lock_free_folder,
    own_commit,
    read_environment,
    read_metrics,
    without_folders,
)
from torchrum.paper.bench.measure import conditions


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


def git(folder, *arguments):
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def project(folder: Path, package: str, tracked: bool) -> tuple[Path, str]:
    """A repository with a package in it; the package, and the commit of the repository."""
    inner = folder / package
    inner.mkdir(parents=True)
    (inner / "__init__.py").touch()
    (folder / "notes.txt").touch()
    git(folder, "init", "-q")
    git(folder, "add", "." if tracked else "notes.txt")
    git(folder, "commit", "-q", "-m", "x")
    return inner.resolve(), git(folder, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "package, tracked, own",
    [
        ("src/torchrum", True, True),
        ("src/torchrum", False, False),
        (".venv/lib/python3.12/site-packages/torchrum", False, False),
        (".venv/lib/python3.12/site-packages/torchrum", True, False),  # somebody has committed a virtual environment
        ("third_party/torchrum/src/torchrum", True, False),
    ],
)
def test_only_the_commit_of_our_own_repository_counts(tmp_path, package, tracked, own):
    inner, commit = project(tmp_path, package, tracked)
    assert own_commit(inner) == ((commit, False) if own else None)


def test_edited_files_are_noted(tmp_path):
    inner, commit = project(tmp_path, "src/torchrum", True)
    (inner / "__init__.py").write_text("x = 1")
    assert own_commit(inner) == (commit, True)


def test_the_variables_of_git_do_not_lead_elsewhere(tmp_path, monkeypatch):
    inner, commit = project(tmp_path / "ours", "src/torchrum", True)
    project(tmp_path / "theirs", "src/torchrum", True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "theirs" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "theirs"))
    monkeypatch.setattr("torchrum.lab.training.run_folder.PACKAGE", inner)
    assert own_commit(inner) == (commit, False)


def test_head_is_that_of_our_own_checkout(monkeypatch):
    monkeypatch.setattr("torchrum.lab.training.run_folder.own_commit", lambda: None)
    with pytest.raises(ConfigError, match="torchrum is not running from a checkout of its own; pass the hash"):
        given_commit("HEAD")
    assert given_commit("ABCDEF0") == "abcdef0"


@pytest.mark.parametrize(
    "argument, shown",
    [
        ("/home/me/runs", ".../runs"),
        ("--out=/home/me/runs/", "--out=.../runs"),
        ("task.path=/Users/me/a.txt", "task.path=.../a.txt"),
        ("~/runs", ".../runs"),
        (r"C:\Users\me\runs", ".../runs"),
        ("/", ".../"),
        ("/home/me", "..."),
        ("--x=/Users/me/", "--x=..."),
        ("~me", "..."),
        ("a=/home/me/x,/root/y", "a=.../x,.../y"),
        ("runs/tiny", "runs/tiny"),
        ("optimizer.schedule=plateau/0.5/3", "optimizer.schedule=plateau/0.5/3"),
        ("--model.lam", "--model.lam"),
    ],
)
def test_a_command_is_kept_without_folders(argument, shown):
    assert without_folders(argument) == shown


@pytest.mark.parametrize(
    "program, shown", [("/home/me/torchrum/__main__.py", "python -m torchrum"), ("/home/me/bin/torchrum", "torchrum")]
)
def test_runs_and_timings_record_one_command(monkeypatch, program, shown):
    monkeypatch.setattr("sys.argv", [program, "bench", "--json", "/home/me/cpu.json"])
    wanted = f"{shown} bench --json .../cpu.json"
    assert " ".join(environment(torch.device("cpu"), 1).command) == wanted
    assert conditions("abcdef0").items() >= {"command": wanted, "commit": "abcdef0", "torch": torch.__version__}.items()


def test_the_environment_names_no_home_folder(tmp_path, monkeypatch):
    home = str(Path.home())
    monkeypatch.setattr(sys, "argv", [f"{home}/bin/torchrum", "train", "x", "--out", f"{home}/runs", f"--set=a={home}"])
    Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(tmp_path / "run")
    text = (tmp_path / "run" / "environment.json").read_text()
    assert home not in text
    assert json.loads(text)["command"] == [
        "torchrum",
        "train",
        "x",
        "--out",
        ".../runs",
        "--set=a=...",
    ]


def test_a_damaged_environment_names_the_field(tmp_path):
    Trainer(tiny(), tiny_model(tiny()), quiet=True).fit(tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"threads": "two"}))
    with pytest.raises(RunError, match=r"environment.json: threads is 'two', but it must be a whole number"):
        read_environment(tmp_path / "run")
