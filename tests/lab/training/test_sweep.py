import json
import math
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lab.training import processes
from lab.training.tiny import tiny
from torchrum.lab.data import DataUnavailableError
from torchrum.lab.training import ConfigError, RunError, distributed, read_metrics, run_sweep
from torchrum.lab.training.run_folder import read_result
from torchrum.lab.training.sweep import _summarise, grid, read_range, search

SHORT = replace(tiny(), steps=4, log_every=2, eval_every=2)


def test_grid_is_every_combination_and_seed():
    runs = grid(SHORT, ["optimizer.lr=0.1,0.01", "model.hidden_size=4,8"], seeds=2)
    assert len(runs) == 8
    config = runs["optimizer.lr=0.01,model.hidden_size=4/seed-1"]
    assert (config.optimizer.lr, config.model.hidden_size, config.seed) == (0.01, 4, 1)
    with pytest.raises(ConfigError, match="is not a grid"):
        grid(SHORT, ["steps"])
    with pytest.raises(ConfigError, match="'steps=3': steps has a grid already; write all its values in one"):
        grid(SHORT, ["steps=1,2", "steps=3"])
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        grid(SHORT, ["stepz=1,2"])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: grid(SHORT, "steps=1,2"), r"grid: choices is 'steps=1,2'; pass a list, such as \['steps=10,20'\]"),
        (
            lambda: run_sweep({"../a": SHORT}, "x"),
            r"run_sweep: '\.\./a' is not the name of a folder inside that of the",
        ),
        (lambda: run_sweep({f"{Path.cwd()}/a": SHORT}, "x"), "is not the name of a folder inside"),
        (lambda: run_sweep({".": SHORT}, "x"), r"'\.' is not the name of a folder inside"),
    ],
)
def test_a_sweep_says_what_it_takes(tmp_path, monkeypatch, call, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        call()
    assert not list(tmp_path.iterdir())


def test_seeds_are_trained_summed_up_and_kept(tmp_path):
    runs = {f"seed-{seed}": replace(SHORT, seed=seed) for seed in range(2)}
    results = run_sweep(runs, tmp_path, quiet=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    scores = [result.scores["accuracy"] for result in results]
    assert summary["means"]["all"] == {
        "runs": 2,
        "mean": statistics.fmean(scores),
        "spread": statistics.pstdev(scores),
    }
    assert read_metrics(tmp_path / "seed-0") != read_metrics(tmp_path / "seed-1")
    before = (tmp_path / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    again = run_sweep(runs, tmp_path, quiet=True)
    assert [result.scores for result in again] == [result.scores for result in results]
    assert (tmp_path / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    with pytest.raises(RunError, match="another config: batch_size 8 -> 4"):
        run_sweep({"seed-0": replace(SHORT, batch_size=4)}, tmp_path, quiet=True)
    with pytest.raises(ConfigError, match="nothing to train"):
        run_sweep({}, tmp_path)


def test_a_run_that_diverges_does_not_end_the_sweep(tmp_path, capsys):
    runs = grid(replace(SHORT, steps=8), ["optimizer.lr=1e38,0.01"])
    bad, good = run_sweep(runs, tmp_path)
    assert (bad.stopped, bad.exit_code, bad.scores) == ("diverged", 1, {})
    assert (good.stopped, good.exit_code) == ("finished", 0)
    error = capsys.readouterr().err
    assert "optimizer.lr=1e38/seed-0: the loss is nan at step" in error.replace("inf", "nan")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["runs"]["optimizer.lr=1e38/seed-0"]["stopped"] == "diverged"
    assert list(summary["means"]) == ["optimizer.lr=0.01"]
    assert "optimizer.lr=0.01/seed-0, 2 of 2\n" in error
    assert f"optimizer.lr=0.01: accuracy {good.scores['accuracy']:.4f} +- 0.0000 over 1\n" in error
    assert error.endswith(f"summary: {tmp_path / 'summary.json'}\n")


def test_a_search_tries_values_in_range_and_goes_on(tmp_path):
    pytest.importorskip("optuna", reason="Optuna is an extra")
    space = ["optimizer.lr=1e-4:1e-1:log", "model.hidden_size=4:6", "optimizer.name=adam,rmsprop_tf"]
    assert search(SHORT, space, 2, tmp_path, quiet=True) == 0
    assert search(SHORT, space, 3, tmp_path, quiet=True) == 0
    assert sorted(path.name for path in tmp_path.glob("trial-*")) == ["trial-0000", "trial-0001", "trial-0002"]
    chosen = [json.loads((path / "config.json").read_text()) for path in tmp_path.glob("trial-*")]
    assert all(1e-4 <= config["optimizer"]["lr"] <= 1e-1 for config in chosen)
    assert {config["model"]["hidden_size"] for config in chosen} <= {4, 5, 6}
    summary = json.loads((tmp_path / "summary.json").read_text())
    best = [json.loads((path / "result.json").read_text())["best"] for path in tmp_path.glob("trial-*")]
    assert summary["trials"] == 3
    assert summary["best"]["value"] == max(best)
    with pytest.raises(ConfigError, match="is not a search range"):
        search(SHORT, ["optimizer.lr=1:2:3:4"], 1, tmp_path / "x")


@pytest.mark.parametrize("ends", ["nan:1", "1:inf", "1:1e400", "2:1", "a:b", "0:1:log"])
def test_a_range_that_cannot_be_searched_is_refused(tmp_path, ends):
    pytest.importorskip("optuna", reason="Optuna is an extra")
    with pytest.raises(ConfigError, match=f"the search range optimizer.lr={ends} is not possible: "):
        search(SHORT, [f"optimizer.lr={ends}"], 1, tmp_path, quiet=True)


@pytest.mark.parametrize(
    "space, message",
    [
        (["name=1:2"], "name=1:2 is not possible: name must be a number, .*write name=a,b,c"),
        (["graph=0:1"], "graph must be a number"),
        (["precision=16:32"], "precision must be a number"),
        (["model.hidden_size=1.5:2.5"], "model.hidden_size is '1.5', but it must be a whole number"),
        (["optimizer.lr=-1:1"], "lr is -1.0, but it must be greater than 0"),
        (["optimizer.name=adam,sgd"], "optimizer.name is 'sgd', but it must be one of"),
        (["optimizer.ls=1:2"], "no field 'optimizer.ls'; did you mean"),
        (["optimizer.lr=1:2", "optimizer.lr=3:4"], "a field is searched twice: optimizer.lr=1:2, optimizer.lr=3:4"),
    ],
)
def test_a_range_that_its_field_does_not_take_is_refused_before_anything_is_written(tmp_path, space, message):
    pytest.importorskip("optuna", reason="Optuna is an extra")
    with pytest.raises(ConfigError, match=message):
        search(SHORT, space, 1, tmp_path / "x", quiet=True)
    assert not (tmp_path / "x").exists()


def test_a_range_has_the_numbers_of_its_field():
    """A learning rate from 0 to 1 is not 0 or 1."""
    config = replace(SHORT, model=replace(SHORT.model, layer="rum"))
    for text, whole in {
        "optimizer.lr=1:2": False,
        "optimizer.clip=1:2": False,
        "model.hidden_size=4:6": True,
        "task.length=2:1e1": True,
        "model.lam=0:1": False,
        "model.options.zoneout=0:0.5": False,
    }.items():
        found = read_range(config, text)
        assert isinstance(found.low, int) == isinstance(found.high, int) == whole, text


def test_a_trial_that_diverges_does_not_end_the_search(tmp_path, capsys):
    pytest.importorskip("optuna", reason="Optuna is an extra")
    longer = replace(SHORT, steps=8)
    with pytest.raises(RunError, match=r"none of the 2 trials in .* has a score; search in another range"):
        search(longer, ["optimizer.lr=9e37:1e38"], 2, tmp_path, quiet=True)
    assert len(re.findall(r"trial-000\d: the loss is (nan|inf) at step", capsys.readouterr().err)) == 2
    assert search(longer, ["optimizer.lr=1e-2:1e-2"], 1, tmp_path / "x", quiet=True) == 0
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["best"]["trial"] == 0


RATES = ["optimizer.lr=1e-3:1e-1:log"]


def die(run):
    os.kill(os.getpid(), signal.SIGKILL)


def work(folder, storage, trials, on_end=None, steps=4):
    """Be one process of a study."""
    sys.exit(search(replace(SHORT, steps=steps), RATES, trials, folder, True, on_end, storage=storage))


def serve(port, database):
    import optuna

    optuna.storages.run_grpc_proxy_server(optuna.storages.RDBStorage(database), host="127.0.0.1", port=port)


@pytest.fixture
def storage(request, tmp_path):
    """The address of a storage of each kind."""
    pytest.importorskip("optuna", reason="Optuna is an extra")
    database = f"sqlite:///{tmp_path}/study.db"
    if request.param != "grpc":
        yield database if request.param == "sqlite" else f"journal://{tmp_path}/study.log"
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    proxy = processes.start(serve, port, database)
    yield f"grpc://127.0.0.1:{port}"
    proxy.kill()
    proxy.join()


@pytest.mark.parametrize(
    "storage", ["journal", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sqlite", "grpc"))], indirect=True
)
def test_processes_share_a_study_and_one_may_die(tmp_path, storage, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    dies = processes.start(work, first, storage, 4, die)
    deadline = time.monotonic() + 60
    while not list(first.glob("trial-*")):  # else the other could do all the trials before this one has imported torch
        assert dies.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    lives = processes.start(work, second, storage, 4)
    for worker in (dies, lives):
        worker.join(60)
    assert [dies.exitcode, lives.exitcode] == [-signal.SIGKILL, 0]
    (lost,) = first.glob("trial-*")
    summary = json.loads((second / "summary.json").read_text())
    assert summary["trials"] == 4 == len(list(second.glob("trial-*")))
    best = second / f"trial-{summary['best']['trial']:04d}"
    assert read_result(best).best == summary["best"]["value"]
    trained = (lost / "result.json").stat().st_mtime_ns
    assert search(SHORT, RATES, 5, first, storage=storage) == 0  # the lost trial, and no other
    assert list(first.glob("trial-*")) == [lost]
    assert (lost / "result.json").stat().st_mtime_ns == trained
    summary = json.loads((first / "summary.json").read_text())
    assert summary["trials"] == 5
    (best,) = tmp_path.glob(f"*/trial-{summary['best']['trial']:04d}")
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"best of 5 trials: accuracy [\d.]+ with optimizer.lr=[\d.e-]+, in [^ /]+:{best}", line)
    configs = [json.loads(path.read_text()) for path in tmp_path.glob("*/trial-*/config.json")]
    assert len({config["optimizer"]["lr"] for config in configs}) == 5


@pytest.mark.parametrize("storage", ["journal"], indirect=True)
def test_a_trial_that_a_signal_stopped_goes_on(tmp_path, storage):
    worker = processes.start(work, tmp_path / "runs", storage, 1, None, 1000)
    metrics, deadline = tmp_path / "runs" / "trial-0000" / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size > 200):
        assert worker.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(60)
    assert worker.exitcode == 128 + signal.SIGTERM
    assert not (metrics.parent / "result.json").exists()
    assert search(replace(SHORT, steps=1000), RATES, 1, tmp_path / "runs", quiet=True, storage=storage) == 0
    assert [path.name for path in (tmp_path / "runs").glob("trial-*")] == ["trial-0000"]
    assert read_result(metrics.parent).step == 1000


@pytest.mark.parametrize(
    "address, message",
    [
        ("study.db", "the storage is 'study.db', but it must be a URL: postgresql://"),
        ("grpc://head", "a proxy is grpc://HOST:PORT"),
        ("nonsense://x", "the storage nonsense://x failed: Can't load plugin"),
        ("sqlite:////missing/study.db", "the storage sqlite:////missing/study.db failed: .*unable to open database"),
        ("journal:///missing/study.log", "the storage journal:///missing/study.log failed: .*No such file"),
        ("mysql+x://me:secret@host/name", r"the storage mysql\+x://me:\*\*\*@host/name failed"),
        pytest.param("grpc://127.0.0.1:1", "grpc://127.0.0.1:1 failed: GRPC connection", marks=pytest.mark.slow),
    ],
)
def test_a_storage_that_cannot_be_used_is_one_line(tmp_path, address, message):
    pytest.importorskip("optuna", reason="Optuna is an extra")
    with pytest.raises((ConfigError, RunError), match=message) as caught:
        search(SHORT, RATES, 1, tmp_path / "runs", quiet=True, storage=address)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("storage", ["journal"], indirect=True)
def test_a_study_of_another_search_is_refused(tmp_path, storage):
    assert search(SHORT, RATES, 1, tmp_path / "a", quiet=True, storage=storage) == 0
    other = replace(SHORT, device="auto", about="on another machine")
    assert search(other, RATES, 2, tmp_path / "b", quiet=True, storage=storage) == 0
    for config, space, message in (
        (replace(SHORT, steps=8), RATES, "steps 4 -> 8"),
        (SHORT, ["optimizer.lr=1e-3:1:log"], "optimizer.lr '1e-3:1e-1:log' -> '1e-3:1:log'"),
    ):
        with pytest.raises(ConfigError, match=f"has a study 'tiny' of another search: {message}"):
            search(config, space, 3, tmp_path / "c", quiet=True, storage=storage)


def test_side_by_side_is_the_same_as_one_after_another(tmp_path, capsys):
    runs = grid(replace(SHORT, steps=8), ["optimizer.lr=0.01,1e38"], seeds=2)
    in_turn = run_sweep(runs, tmp_path / "in_turn", quiet=True)
    together = run_sweep(runs, tmp_path / "together", jobs=3)
    assert [result.stopped for result in together] == [result.stopped for result in in_turn]
    assert [result.scores for result in together] == [result.scores for result in in_turn]
    losses = []
    for name in ("in_turn", "together"):
        metrics = read_metrics(tmp_path / name / "optimizer.lr=0.01" / "seed-1")
        losses.append([line["loss"] for line in metrics if line["kind"] == "train"])
    assert losses[0] == losses[1] and losses[0]
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("in_turn", "together")]
    assert summaries[0]["means"] == summaries[1]["means"]
    error = capsys.readouterr().err
    assert error.startswith("4 runs, 3 at a time\n")
    assert "optimizer.lr=1e38/seed-0: the loss is" in error
    assert re.search(r"optimizer.lr=0.01/seed-1, \d of 4: finished at step 8, accuracy 0\.\d{4}, \d+ s\n", error)


def test_a_run_without_scores_is_left_out_of_the_means(tmp_path):
    runs = {f"seed-{seed}": replace(SHORT, seed=seed) for seed in range(3)}
    empty = distributed.Result(tmp_path, "finished", 4, {}, None, 0, 1.0)
    scored = [replace(empty, scores={"accuracy": value}) for value in (0.5, math.nan)]
    means = _summarise(tmp_path, runs, dict(zip(runs, [empty, *scored], strict=True)))
    assert means == {"all": {"runs": 1, "mean": 0.5, "spread": 0.0}}


def unavailable():
    raise DataUnavailableError("no text", ["tried in vain"])


def test_an_error_for_the_user_comes_whole_from_another_process(capfd):
    with pytest.raises(DataUnavailableError, match="no text") as caught:
        distributed.train_side_by_side({"one": unavailable}, 2, lambda label, outcome: None)
    assert caught.value.lines == ["no text", "tried in vain"]
    assert "Traceback" not in capfd.readouterr().err


def test_jobs_of_several_processes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="set devices and nodes to 1, or jobs to 1"):
        run_sweep({"a": replace(SHORT, devices=2)}, tmp_path, jobs=2)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_the_runs_side_by_side(tmp_path, number):
    """Two runs that only a signal ends, and a third that does not begin."""
    places = [tmp_path / f"seed-{seed}" / "metrics.jsonl" for seed in range(2)]
    ended = threading.Event()

    def interrupt():
        while not ended.wait(0.05):
            if all(place.exists() and place.stat().st_size > 200 for place in places):
                os.kill(os.getpid(), number)
                return

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    runs = {f"seed-{seed}": replace(SHORT, steps=10**7, seed=seed) for seed in range(3)}
    try:
        results = run_sweep(runs, tmp_path, jobs=2)
    finally:
        ended.set()
        watcher.join()
    assert [result.stopped for result in results] == [number.name] * 2
    for place in places:
        assert list(place.parent.glob("checkpoints/step-*/model.safetensors"))
    assert not (tmp_path / "seed-2").exists()


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="this system cannot hold signals back")
def test_ctrl_c_while_the_first_training_starts_is_not_lost(tmp_path, monkeypatch, capsys):
    def interrupt(process):
        signal.raise_signal(signal.SIGINT)
        return start(process)

    start = distributed.multiprocessing.context.ForkServerProcess.start
    monkeypatch.setattr(distributed.multiprocessing.context.ForkServerProcess, "start", interrupt)
    runs = {f"seed-{seed}": replace(SHORT, steps=10**7) for seed in range(3)}
    results = run_sweep(runs, tmp_path / "sweep", jobs=2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert [result.stopped for result in results] == ["SIGINT"]
    if not last.startswith("to resume all 3 runs"):  # it was told before it began to train
        assert last == "stopped before the first run began; the same command starts over"
        assert not (tmp_path / "sweep").exists()


def killer(folder):
    """A training that is killed from outside, as the kernel does it to one that takes all memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleeper(folder):
    time.sleep(60)


def test_a_training_that_is_killed_ends_the_others(tmp_path):
    start = time.monotonic()
    calls = {"first": partial(sleeper, tmp_path), "second": partial(killer, tmp_path)}
    with pytest.raises(
        RunError, match=r"second was killed by SIGKILL\. To resume it, run the same command with --resume"
    ):
        distributed.train_side_by_side(calls, 2, lambda label, outcome: None)
    assert time.monotonic() - start < 50
