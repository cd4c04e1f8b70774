"""The swap suite: its data are what they say, a job learns, its table tells who is ahead."""

import json
import multiprocessing.dummy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not installed with the package", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import swap_suite  # noqa: E402
from swap.digits import draw_digits  # noqa: E402
from swap.models import MODELS, SwapModel  # noqa: E402
from swap.table import fill, read_results, standing, summary  # noqa: E402
from swap.tasks import TASKS, read_text  # noqa: E402
from swap.train import run_job  # noqa: E402


@pytest.mark.parametrize("name", TASKS)
def test_every_task_fits_a_gru(name):
    task = replace(TASKS[name], updates=2, batch_size=4)
    batch, again = (task.train(0, torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(batch.x, again.x) and torch.equal(batch.y, again.y)
    assert torch.equal(task.held_out().x, task.held_out().x)
    answers, _, outputs = SwapModel(task, nn.GRU)(batch.x)
    lead = batch.x.shape[:2] if task.every_step else batch.x.shape[1:2]
    assert answers.shape == (*lead, task.outputs) and batch.y.shape[: len(lead)] == lead
    assert outputs.shape == (*batch.x.shape[:2], task.hidden_size)
    result = run_job(task, nn.GRU, 0)
    assert result["score"] is not None and not result["diverged"] and result["grad_max"] > 0


def test_carried_text_is_consecutive():
    task = TASKS["carried"]
    first, second = (task.train(step, torch.Generator()) for step in range(2))
    assert torch.equal(first.y[-1], second.x[0])


def test_held_out_text_is_not_trained_on():
    train, held_out, symbols = read_text()
    assert len(held_out) == 20_000 and max(train.max(), held_out.max()) < symbols
    known, asked = bytes(train.tolist()), bytes(held_out.tolist())
    pieces = [asked[start : start + 120] for start in range(0, len(asked) - 120, 120)]
    assert (
        sum(piece in known for piece in pieces) <= len(pieces) / 50
    )  # the reference repeats a sentence here and there


def test_digits_are_told_apart_by_their_nearest_neighbours():
    images, labels = draw_digits(600, torch.Generator().manual_seed(0))
    others, right = draw_digits(200, torch.Generator().manual_seed(1))
    nearest = torch.cdist(others.flatten(1), images.flatten(1)).argmin(1)
    assert (labels[nearest] == right).float().mean() > 0.75  # chance is 0.1


def test_a_job_learns():
    result = run_job(replace(TASKS["rows"], updates=200), MODELS["rum"].layer, 0)
    assert result["score"] > 0.45  # chance is 0.1


def test_a_loss_that_is_not_finite_ends_a_job():
    def broken(inputs, hidden):
        layer = nn.GRU(inputs, hidden)
        nn.init.constant_(layer.weight_ih_l0, float("nan"))
        return layer

    result = run_job(replace(TASKS["rows"], updates=5), broken, 0)
    assert result["diverged"] and result["score"] is None


def test_standing_is_by_the_reference_seeds():
    assert standing("rows", [0.9, 0.92], [0.8, 0.9]) == "ahead"
    assert standing("rows", [0.85], [0.8, 0.9]) == "level"
    assert standing("rows", [0.7], [0.8, 0.9]) == "behind"
    assert standing("series", [0.7], [0.8, 0.9]) == "ahead"  # an error: less is better


def test_the_first_seeds_come_first_and_the_reference_before_all():
    jobs = [(model, seed) for _, model, seed, _ in swap_suite.planned(2, "rows", "gru,lstm,rum-paper", 1.0)]
    assert jobs == [("gru", 0), ("gru", 1), ("lstm", 0), ("rum-paper", 0), ("lstm", 1), ("rum-paper", 1)]


def begin(path: Path) -> list[str]:
    """A file with one result and half a line, and the arguments that add another."""
    row = {"task": "rows", "model": "gru", "seed": 0, "score": 0.5}
    path.write_text(json.dumps(row) + "\n" + '{"task": "ro')  # the second was cut off
    return ["--json", str(path), "--share", "0.01", "--seeds", "1", "--tasks", "rows", "--models", "gru,rum-paper"]


def check_added(path: Path, printed: str) -> None:
    rows = read_results(path)
    assert [(row["model"], row["seed"]) for row in rows] == [("gru", 0), ("rum-paper", 0)]
    assert rows[1]["updates"] == 15
    assert "| rum-paper |" in printed and "| 50.0 |" in printed


def test_suite_adds_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["swap_suite.py", *begin(tmp_path / "out.jsonl")])
    threads_for_processes = SimpleNamespace(get_context=lambda method: multiprocessing.dummy, TimeoutError=TimeoutError)
    monkeypatch.setattr(swap_suite, "multiprocessing", threads_for_processes)
    threads = torch.get_num_threads()
    swap_suite.main()
    torch.set_num_threads(threads)  # a job takes one
    check_added(tmp_path / "out.jsonl", capsys.readouterr().out)


@pytest.mark.slow
def test_suite_as_a_script_with_processes(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "swap_suite.py"), *begin(tmp_path / "out.jsonl")]
    environment = {"PYTHONPATH": str(BENCHMARKS.parent / "src"), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    check_added(tmp_path / "out.jsonl", done.stdout)


def test_summary_marks_what_is_behind():
    rows = [
        {"task": "rows", "model": "gru", "seed": 0, "score": 0.9},
        {"task": "rows", "model": "rum-paper", "seed": 0, "score": 0.8},
        {"task": "rows", "model": "rum-paper", "seed": 1, "score": None},
    ]
    last = summary(rows).splitlines()[-1]
    assert "80.0 −" in last and last.endswith("| 0 | 1 | 1 |")


def test_a_page_gets_its_tables():
    row = {"task": "carried", "seed": 0, "h_norms": [1.0, 2.0], "h_norm_train": 3.0, "grad_max": 7.0}
    rows = [
        {**row, "model": "gru", "score": 2.5},
        {**row, "model": "rum-paper", "score": 2.0, "h_norm_train": 33.0, "grad_max": 1047.3},
    ]
    page = (
        "a\n<!-- swap:tasks gru,rum-paper -->\nOLD\n<!-- /swap -->\nb\n<!-- swap:norms rum-paper -->\n<!-- /swap -->\n"
    )
    filled = fill(page, rows)
    assert "OLD" not in filled and filled.startswith("a\n") and "\nb\n" in filled
    assert "| bits per character | 2.500 | 2.000 + |" in filled
    assert "| **ahead / behind / diverged** |  | 0 | 1 / 0 / 0 |" in filled
    assert "| rum-paper | 33 | 33 | 1,047 |" in filled
    assert fill(filled, rows) == filled
    cut_off = fill(page, [{**row, "task": "rows", "model": "rum-paper", "score": 0.5}])  # before the others had run
    assert "| rum-paper | - | 3 | 7 |" in cut_off


@pytest.mark.parametrize("missing", ["json", "write"])
def test_a_file_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys, missing):
    paths = {name: tmp_path / name for name in ("json", "write")}
    for name, path in paths.items():
        if name != missing:
            path.touch()
    monkeypatch.setattr(sys, "argv", ["swap_suite.py", *(f"--{name}={path}" for name, path in paths.items())])
    with pytest.raises(SystemExit):
        swap_suite.main()
    assert capsys.readouterr().err.endswith(f"error: --{missing} {paths[missing]} is not a file\n")
