import json
import re
import statistics
from dataclasses import replace

import pytest

from torchrum.training import ConfigError, RunError, read_metrics, run_sweep
from torchrum.training.sweep import grid, search
from training.tiny import tiny

SHORT = replace(tiny(), steps=4, log_every=2, eval_every=2)


def test_grid_is_every_combination_and_seed():
    runs = grid(SHORT, ["optimizer.lr=0.1,0.01", "model.hidden_size=4,8"], seeds=2)
    assert len(runs) == 8
    config = runs["optimizer.lr=0.01,model.hidden_size=4/seed-1"]
    assert (config.optimizer.lr, config.model.hidden_size, config.seed) == (0.01, 4, 1)
    with pytest.raises(ConfigError, match="is not a grid"):
        grid(SHORT, ["steps"])
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        grid(SHORT, ["stepz=1,2"])


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
    assert error.endswith(f"all of it: {tmp_path / 'summary.json'}\n")


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


@pytest.mark.parametrize("content", [b"garbage\n", b"null\n", b"[]\n", b'{"op_code": 99}\n', b"\xff\xfe\n", None])
def test_a_damaged_study_is_named(tmp_path, content):
    pytest.importorskip("optuna", reason="Optuna is an extra")
    if content is None:
        (tmp_path / "optuna.log").symlink_to(tmp_path / "victim")
    else:
        (tmp_path / "optuna.log").write_bytes(content)
    with pytest.raises(
        RunError, match=r"optuna.log is (damaged|not a plain file).*remove it, and the search begins anew"
    ):
        search(SHORT, ["optimizer.lr=1e-3:1e-2"], 1, tmp_path, quiet=True)
    assert not (tmp_path / "victim").exists()


def test_a_trial_that_diverges_does_not_end_the_search(tmp_path, capsys):
    pytest.importorskip("optuna", reason="Optuna is an extra")
    longer = replace(SHORT, steps=8)
    with pytest.raises(RunError, match=r"none of the 2 trials in .* has a score; search in another range"):
        search(longer, ["optimizer.lr=9e37:1e38"], 2, tmp_path, quiet=True)
    assert len(re.findall(r"trial-000\d: the loss is (nan|inf) at step", capsys.readouterr().err)) == 2
    assert search(longer, ["optimizer.lr=1e-3:1e-2"], 3, tmp_path, quiet=True) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["best"]["trial"] == 2
