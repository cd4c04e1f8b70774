"""Two processes on the CPU learn what one does, started by the command itself or by torchrun."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lab.training.processes import run_rank, start
from lab.training.tiny import tiny
from torchrum.cli import main
from torchrum.lab.training import ConfigError, RunError, evaluate, read_metrics
from torchrum.lab.training.checkpoint import write_checkpoint
from torchrum.lab.training.distributed import _shard, leave_together
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


def run_two(arguments, folder):
    """Run a command in two processes as torchrun starts them."""
    (folder / "errors").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free, as far as one can know
    ranks = [start(run_rank, arguments, str(folder / "errors"), rank, port) for rank in (0, 1)]
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0], (folder / "errors").read_text()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    assert main([*TRAIN[2:], "--out", str(folder)]) == 0
    return read_metrics(folder / "tiny")


def check_same(folder, one):
    lines = read_metrics(folder)
    assert [(line["kind"], line["step"]) for line in lines] == [(line["kind"], line["step"]) for line in one]
    for ours, theirs in zip(lines, one, strict=True):
        for name in theirs.keys() - {"kind", "seconds"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_two_processes_give_the_curve_of_one_and_resume(one, tmp_path):
    """Started by the command itself, and resumed by processes as torchrun starts them."""
    run(*TRAIN, "--out", str(tmp_path), "--devices", "2", "--steps", "10")
    run_two(["train", "lab.training.tiny:tiny", "--resume", str(tmp_path / "tiny"), "--steps", "20"], tmp_path)
    check_same(tmp_path / "tiny", one)


@pytest.fixture(scope="module")
def one_sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    assert main([*TRAIN[2:], *SHARDED, "--out", str(folder)]) == 0
    return read_metrics(folder / "tiny")


SHARDED = ["--model.layer", "rum", "--optimizer.name", "rmsprop_tf", "--optimizer.clip", "0.1"]


def test_fsdp_gives_the_curve_of_one_process_and_resumes(one_sharded, tmp_path):
    """A checkpoint has whole tensors, so one process can resume it too."""
    fsdp, resume = ["--devices", "2", "--strategy", "fsdp"], ["train", TRAIN[3], "--quiet", "--steps", "20", "--resume"]
    run_two([*TRAIN[2:], *SHARDED, "--out", str(tmp_path), *fsdp, "--steps", "10"], tmp_path)
    shutil.copytree(tmp_path / "tiny", tmp_path / "copy")
    run_two([*resume, str(tmp_path / "tiny"), *fsdp], tmp_path)
    assert main([*resume, str(tmp_path / "copy"), "--devices", "1", "--strategy", "ddp"]) == 0
    for folder in (tmp_path / "tiny", tmp_path / "copy"):
        check_same(folder, one_sharded)
        assert evaluate(folder, "validation", "last")["loss"] == pytest.approx(one_sharded[-2]["loss"])


def test_fsdp_that_cannot_work_is_refused():
    for changes, message in (
        ({"devices": 1}, "'fsdp', but it needs several processes: pass --devices 2 or more, or take strategy ddp"),
        ({"precision": "64-true"}, "precision is '64-true', but it must be one of 32-true"),
        ({"average": 0.9}, "set average to none"),
        ({"compile": True}, "set compile to false"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(tiny(), **{"strategy": "fsdp", "devices": 2, **changes})


def test_a_model_that_cannot_be_sharded_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"strategy fsdp cannot shard this model: .*scalar"):
        _shard(model, {"data_parallel": init_device_mesh("cpu", (1,))})
    leave_together()


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
    write_checkpoint(run, 1, {}, {}, False)
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
