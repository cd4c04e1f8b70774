"""Two processes on the CPU learn what one does, started by the command itself or by torchrun."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.training.processes import run_rank, start
from torchrum.cli import main
from torchrum.lab.training import RunError, read_metrics
from torchrum.lab.training.checkpoint import pack_checkpoint, write_checkpoint
from torchrum.lab.training.distributed import leave_together
from torchrum.lab.training.trainer import advice_on_failure

ROOT = Path(__file__).parents[3]
TRAIN = ["-m", "torchrum", "train", "lab.training.tiny:tiny", "--quiet", "--steps", "20", "--log_every", "2"]


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    return kept | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    assert main([*TRAIN[2:], "--out", str(folder)]) == 0
    return read_metrics(folder / "tiny")


def check_same(folder, one):
    lines = read_metrics(folder)
    assert [(line["kind"], line["step"]) for line in lines] == [(line["kind"], line["step"]) for line in one]
    for ours, theirs in zip(lines, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], rel=1e-5)


def test_two_processes_give_the_curve_of_one_and_resume(one, tmp_path):
    """Started by the command itself, and resumed by processes as torchrun starts them."""
    run(*TRAIN, "--out", str(tmp_path), "--devices", "2", "--steps", "10")
    (tmp_path / "errors").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free, as far as one can know
    arguments = ["train", "lab.training.tiny:tiny", "--resume", str(tmp_path / "tiny"), "--steps", "20"]
    ranks = [start(run_rank, arguments, str(tmp_path / "errors"), rank, port) for rank in (0, 1)]
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0], (tmp_path / "errors").read_text()
    check_same(tmp_path / "tiny", one)


@pytest.mark.slow
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


def test_an_exchange_with_a_killed_process_says_how_to_resume(tmp_path):
    engine, run = SimpleNamespace(world_size=2), tmp_path / "run"
    lost = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:27274: Connection reset by peer."
    with pytest.raises(RunError, match=r"has ended.*torchrum train RECIPE"), advice_on_failure(engine, run):
        raise RuntimeError(lost)
    run.mkdir()
    write_checkpoint(run, pack_checkpoint(1, {}, {}), False)
    with pytest.raises(RunError, match=f"torchrum train --resume {run}"), advice_on_failure(engine, run):
        raise RuntimeError(lost)
    with pytest.raises(RuntimeError, match=r"^a bug$"), advice_on_failure(engine, run):
        raise RuntimeError("a bug")


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_one_line(tmp_path):
    command = ["-m", "torchrum", "train", "lab.training.tiny:longer", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, *command, "--devices", "2", "--out", str(tmp_path)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "longer" / "checkpoints" / "index.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(child) for child in children if b"torchrum" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"torchrum train --resume {tmp_path / 'longer'}" in error
    assert "Traceback" not in error
    run(*command, "--resume", str(tmp_path / "longer"), "--steps", "100", "--devices", "1")
