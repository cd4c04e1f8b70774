"""The saved model reads new data as the comparison read its own, and answers in their units."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from torchrum.lab.compare import Best, load
from torchrum.lab.compare.best import save_best
from torchrum.lab.compare.data import read_problem
from torchrum.lab.compare.models import train
from torchrum.lab.compare.problem import Problem
from torchrum.lab.compare.run import WEIGHTS, settings_for, weights_file
from torchrum.lab.compare.verdict import Standing

RANDOM = np.random.default_rng(0)


def trained(folder: Path, problem: Problem, name: str) -> Best:
    """Train one model for a few steps, save it as the best, and load it."""
    settings = settings_for(problem, "", {})
    size, device = settings.hidden_sizes[name], torch.device("cpu")
    row, weights = train(problem, name, size, 1e-3, 1, 10, True, device, lambda: None)
    (folder / WEIGHTS).mkdir()
    save_file(weights[row.best_step], weights_file(folder, row))
    save_best(folder, [Standing(name, 1e-3, [row])], problem, settings)
    return load(folder)


@pytest.mark.parametrize("name", ["LSTM", "RUM lam=1, window"])
def test_regression_has_the_recorded_error_in_the_units_of_the_data(tmp_path, name):
    x = 3 + 100 * RANDOM.normal(size=(60, 5, 2))
    problem = read_problem((x, 1000 + x[:, 0, 0]), kind="regression")
    model = trained(tmp_path, problem, name)
    means, scales = (torch.tensor(model.reading[key]) for key in ("means", "scales"))
    errors = []
    for prepared, target in zip(problem.test.inputs, problem.test.targets, strict=True):
        raw = prepared * scales + means
        y = 1000 + raw[0, 0]
        assert math.isclose(
            float(target * problem.target_scale + model.reading["target_means"][0]), float(y), rel_tol=1e-4
        )
        errors.append(model.predict([raw.tolist()])[0] - y)
    assert torch.cat(errors).square().mean().sqrt().item() == pytest.approx(model.described["test"], rel=1e-3)


def forecasting(rising: bool) -> dict[str, Any]:
    days = np.arange("2024-01-01", "2024-12-31", dtype="datetime64[D]")
    noise = RANDOM.normal(size=len(days))
    return {"day": days, "level": 50 + (noise.cumsum() + 0.5 * np.arange(len(days)) if rising else noise)}


@pytest.mark.parametrize("rising", [False, True])
def test_a_network_that_answers_nothing_forecasts_the_mean_or_the_last_value(tmp_path, rising):
    data = forecasting(rising)
    problem = read_problem(data)
    model = trained(tmp_path, problem, "GRU, window")
    for weight in model.network.readout.parameters():
        weight.data.zero_()
    values = data["level"][:20]
    (found,) = model.predict([values])
    mean = model.reading["target_means"][0]
    if rising:  # the target is the change
        wanted = values + mean
        assert abs(mean) < 1
    else:
        wanted = np.full(20, mean)
        assert 49 < mean < 51
    torch.testing.assert_close(found[:, 0], torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=1e-5)


def test_inputs_that_trend_are_read_as_changes(tmp_path):
    data = forecasting(rising=True)
    problem = read_problem(data)
    model = trained(tmp_path, problem, "RUM")
    start = problem.train.inputs[0]
    torch.testing.assert_close(model.prepare(data["level"][: len(start)]), start)


def test_symbols_are_texts(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcabcabd" * 200 + "q")
    problem = read_problem(text)
    (tmp_path / "out").mkdir()
    model = trained(tmp_path / "out", problem, "RUM")
    (found,) = model.predict(["abcab"])
    assert len(found) == 5 and set(found) <= {"a", "b", "c", "d", None}
    assert model.prepare("aq").tolist() == [problem.train.inputs[0][0].item(), problem.symbols - 1]  # q is rare


def test_tags_are_one_for_each_step(tmp_path):
    x = RANDOM.normal(size=(40, 6, 1))
    problem = read_problem((x, np.where(x[..., 0] > 0, 7, 3)), kind="tagging")
    model = trained(tmp_path, problem, "RUM")
    short, long = model.predict([x[0, :2], x[1]])
    assert len(short) == 2 and len(long) == 6 and {*short, *long} <= {3, 7}
    assert model.predict([x[0, :2]]) == [short]  # padding has no effect
