"""SIGKILL at any moment costs at most the steps since the last checkpoint, and the rest comes out bit for bit.

Tests of training/checkpoint.py.
"""

import json
import os
import random
import signal
import time

import pytest

from lab.training.processes import start, train, train_until_call
from lab.training.tiny import numbers
from torchrum.lab.training import read_metrics
from torchrum.lab.training.checkpoint import has_checkpoint, load_checkpoint

STEPS, EVERY = 48, 8


def finish(function, *arguments):
    process = start(function, *arguments)
    process.join(60)
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert finish(train, folder, STEPS) == 0
    return numbers(folder)


def saved(folder):
    """Name of the last checkpoint; the index is safe to read while the run goes on, the checkpoint may be removed."""
    index = folder / "checkpoints" / "index.json"
    return json.loads(index.read_text())["last"] if index.exists() else None


def check_intact(folder):
    """At most EVERY steps are lost, and the checkpoint can be read."""
    done = max((line["step"] for line in read_metrics(folder)), default=0)
    kept = load_checkpoint(folder)[1]["progress"]["step"] if has_checkpoint(folder) else 0
    # the line of a step is written before its checkpoint, so the step that was being saved counts as lost
    assert done - kept <= EVERY
    return kept


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments(whole, tmp_path, count):
    moments, kills, chains, places = random.Random(0), 0, 0, set()
    while kills < count:
        folder, chains = tmp_path / f"run-{chains}", chains + 1
        while kills < count:
            process = start(train, folder, STEPS)
            before = saved(folder)
            while kills % 2 and process.is_alive() and saved(folder) == before:
                time.sleep(0.005)  # every second one comes further than the one before
            process.join(moments.uniform(0.0, 0.2))
            if process.exitcode is not None:
                # 1: the last kill came between the run's last word and its end, so there was nothing left to do
                assert process.exitcode == 0 or (process.exitcode == 1 and (folder / "result.json").exists())
                break
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            kills += 1
            places.add(check_intact(folder))
        assert finish(train, folder, STEPS) in (0, 1)  # 1: there was nothing left to do
        assert numbers(folder) == whole
        assert (folder / "result.json").exists()
    assert len(places) > count // 6  # the kills came early and late, not all before the first checkpoint


# the writes and renames of the config, of the first checkpoint and of the second, which removes the first
@pytest.mark.parametrize("number", [2, 5, 8, 10, 13, 14, 15, 16, 17, 18, 19, 25, 28, 29, 31, 33, 34])
def test_a_kill_at_each_change_of_the_disk(whole, tmp_path, number):
    folder, steps = tmp_path / "run", 20
    assert finish(train_until_call, folder, steps, number) == -signal.SIGKILL
    check_intact(folder)
    assert finish(train, folder, steps) == 0
    assert numbers(folder) == [line for line in whole if line["step"] <= steps]
    assert not [path for path in folder.rglob("*.tmp") if path.is_dir()]
