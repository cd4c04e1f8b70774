"""Figures of a trained RUM: heat maps, angles, planes, phases, diagonals."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrum import RUM
from torchrum.cli import main
from torchrum.lab.plot_style import drawing
from torchrum.lab.recipes import load_recipe
from torchrum.lab.tasks import Copying, Recall
from torchrum.lab.training import ConfigError, RunError, Trainer, override
from torchrum.layers.introspection import gradient_norms
from torchrum.paper.ledger import read_ledger, record
from torchrum.paper.ledger.entries import arrays_path
from torchrum.paper.plots.catalog import draw_run, plan, representative
from torchrum.paper.plots.run import diagonal_figure, kernels_figure, phases_figure, rotation_figure, symbol_names

TINY = ["task.length=6", "task.validation_size=8", "task.test_size=8", "model.hidden_size=8", "device=cpu"]


def train(folder: Path, recipe: str, *overrides: str) -> Path:
    settings = [*TINY, "task.train_size=none", "batch_size=4", "steps=4", "eval_every=2", *overrides]
    Trainer(override(load_recipe(recipe), settings), quiet=True).fit(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "run", "recall-rum-lam1-t30")


def arrays(H: int = 6, T: int = 9, large: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {
        "symbols": np.array([1, 5, 2, 4, 3, 6, 0, 0, 2.0]),
        "at": np.arange(T, dtype=float),
        "steps": np.array([10.0, 20.0]),
        "layer.l0/theta": rng.uniform(0, math.pi, T),
        "layer.l0/norm": rng.uniform(1, 2, T),
        "layer.l0/overlap": np.eye(T),
        "layer.l0/phases": rng.uniform(0, math.pi, (T, H // 2)),
    }
    for block in ("tau", "u"):
        found[f"layer.l0/{block}"] = np.full((H, H), 0.5) + 1.5 * np.eye(H)
        found[f"layer.l0/{block}_diagonal"] = np.full(H, 2.0)
        found[f"layer.l0/{block}_dominance"] = np.array([1.0, 4.0])
        if large:
            found[f"layer.l0/{block}_map"] = np.ones((64, 64))
    return found


def test_heat_maps_name_the_block_that_generates_the_target():
    with drawing():
        figure = kernels_figure(arrays(), "a run")
    tau, u = (axes for axes in figure.axes if axes.get_title())
    assert "generates the target τ" in tau.get_title()
    assert "generates the update gate u" in u.get_title()
    assert "is 4 times the rest" in tau.get_title()
    assert np.array_equal(tau.get_images()[0].get_array(), arrays()["layer.l0/tau"])


def test_large_blocks_show_a_corner_and_the_tiles_of_the_whole():
    with drawing("dark"):
        figure = kernels_figure(arrays(large=True), "a run")
    titles = [axes.get_title() for axes in figure.axes]
    assert sum("first 6 of 6 units" in title for title in titles) == 2
    assert sum("root mean square of each tile" in title for title in titles) == 2


def test_angles_norms_and_planes_follow_the_arrays():
    data = arrays()
    with drawing():
        figure = rotation_figure(data, "a run", Recall(length=6))
    theta, norm, planes = figure.axes[:3]
    assert theta.get_lines()[0].get_ydata().tolist() == data["layer.l0/theta"].tolist()
    assert norm.get_lines()[0].get_ydata().tolist() == data["layer.l0/norm"].tolist()
    assert np.array_equal(planes.get_images()[0].get_array(), np.eye(9))
    assert [label.get_text() for label in norm.get_xticklabels()] == list("a1b0c2??b")
    assert not any(line.get_visible() for axes in (theta, norm) for line in axes.xaxis.get_gridlines())


def test_phases_lie_on_the_circle():
    data = arrays()
    with drawing():
        figure = phases_figure(data, "a run", Recall(length=6))
    _, circle = figure.axes
    last = circle.get_lines()[-1]
    assert np.allclose(np.hypot(last.get_xdata(), last.get_ydata()), 1)
    assert sorted(np.arctan2(last.get_ydata(), last.get_xdata())[:3]) == pytest.approx(
        sorted(data["layer.l0/phases"][-1])
    )


def test_the_diagonal_over_training():
    with drawing():
        figure = diagonal_figure({"a run": arrays()})
    for axes in figure.axes:
        line = axes.get_lines()[0]
        assert line.get_ydata().tolist() == [1, 4]
        assert line.get_xdata().tolist() == [0.5, 1]  # runs of any length share the axis
        assert line.get_label() == "a run (20 steps)"


def test_symbols_have_names():
    names = symbol_names(Recall(length=6))
    assert [names(symbol) for symbol in (0, 1, 3, 4, 13)] == ["?", "a", "c", "0", "9"]
    names = symbol_names(Copying(delay=5))
    assert [names(symbol) for symbol in (0, 3, 9)] == ["·", "3", "cue"]


@pytest.mark.parametrize("name", ["kernels", "rotation", "phases", "diagonal"])
def test_one_command_draws_a_figure_of_a_run(name, run, tmp_path, capsys):
    assert main(["figure", name, str(run), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{name}.svg"), str(tmp_path / f"{name}-dark.svg")]


def test_figures_of_the_ledger_need_no_weights(run, tmp_path):
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    record(run, tmp_path, commit="abc1234", arrays=True)
    (entry,) = read_ledger(tmp_path)
    assert representative("recall", [entry], tmp_path) == (entry, arrays_path(tmp_path, entry))
    other = replace(entry, seed=entry.seed + 1)  # has no arrays
    assert representative("recall", [other], tmp_path) is None
    for name in ("kernels", "rotation", "phases", "diagonal"):
        (drawn,) = plan(name, [entry, other], tmp_path)
        with drawing():
            drawn.draw()
        assert (entry.recipe in drawn.caption) is (name != "diagonal")


def test_runs_that_cannot_be_drawn_say_why(run, tmp_path):
    with pytest.raises(ConfigError, match="'copying' cannot be drawn for one run; choose from: kernels"):
        draw_run("copying", run, tmp_path)
    lstm = train(tmp_path / "lstm", "recall-lstm-t30")
    with pytest.raises(RunError, match="has no RUM to draw: its model is 'lstm'"):
        draw_run("kernels", str(lstm), str(tmp_path))
    plain = train(tmp_path / "plain", "recall-rum-t30")
    with pytest.raises(RunError, match="accumulates no rotation"):
        draw_run("phases", plain, tmp_path)


@pytest.mark.parametrize("kind", [RUM, torch.nn.GRU])
def test_gradient_norms_need_one_direction(kind):
    with pytest.raises(ValueError, match="bidirectional"):
        gradient_norms(kind(3, 4, bidirectional=True), torch.randn(5, 2, 3), torch.Generator())


def test_gradient_norms_need_time_first():
    for kind in (torch.nn.GRU, RUM):
        with pytest.raises(ValueError, match=r"the layer has batch_first=True; give one that reads \(T, B, I\)"):
            gradient_norms(kind(3, 4, batch_first=True), torch.randn(5, 2, 3), torch.Generator())
    with pytest.raises(ValueError, match=r"x has shape \(5, 3\); it must be \(T, B, I\)"):
        gradient_norms(RUM(3, 4), torch.randn(5, 3), torch.Generator())


def test_gradient_norms_are_those_of_the_jacobian():
    torch.manual_seed(0)
    layer = torch.nn.RNN(2, 3).double()
    x = torch.randn(4, 1, 2, dtype=torch.float64)
    norms = gradient_norms(layer, x, torch.Generator().manual_seed(0))
    direction = torch.randn(1, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rest(h: torch.Tensor, first: int) -> torch.Tensor:
        return (layer(x[first:], h)[1] * direction).sum()

    states = layer(x)[0]
    for t in range(3):
        slope = torch.func.grad(rest)(states[t : t + 1].detach(), t + 1)
        assert norms[t, 0].item() == pytest.approx((slope.norm() / direction.norm()).item())
