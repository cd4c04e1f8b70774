"""The right commit or none, and nothing that names the machine or its user. Tests of run_folder.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab.training.tiny import tiny, tiny_model
from torchrum.lab.training import ConfigError, RunError, Trainer
from torchrum.lab.training.run_folder import environment, given_commit, own_commit, read_environment, without_folders
from torchrum.paper.bench.measure import conditions


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
