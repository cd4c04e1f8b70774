"""Two processes on the CPU learn what one does, started by the command itself or by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrum.training import read_metrics
from torchrum.training.fabric import leave_together

ROOT = Path(__file__).parents[2]
TRAIN = ["-m", "torchrum", "train", "training.tiny:tiny", "--quiet", "--steps", "20", "--log_every", "2"]


def run(*arguments):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")
    }
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run(*TRAIN, "--out", str(folder))
    return read_metrics(folder / "tiny")


def check_same(folder, one):
    lines = read_metrics(folder)
    assert [(line["kind"], line["step"]) for line in lines] == [(line["kind"], line["step"]) for line in one]
    for ours, theirs in zip(lines, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], rel=1e-5)


def test_two_processes_give_the_curve_of_one_and_resume(one, tmp_path):
    run(*TRAIN, "--out", str(tmp_path), "--devices", "2", "--steps", "10")
    run("-m", "torchrum", "train", "training.tiny:tiny", "--resume", str(tmp_path / "tiny"), "--steps", "20")
    check_same(tmp_path / "tiny", one)


def test_torchrun_gives_the_same_curve(one, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]
    run(*launcher, *TRAIN, "--out", str(tmp_path), "--devices", "2")
    check_same(tmp_path / "tiny", one)
    assert (tmp_path / "tiny" / "result.json").exists()


def test_processes_leave_together(tmp_path):
    leave_together()  # a single process has no one to part from
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    leave_together()
    assert not torch.distributed.is_initialized()
