from pathlib import Path

import pytest

from torchrum.ledger import Entry, LedgerError
from torchrum.ledger.table import table_rows
from torchrum.plots.curve import draw_curve
from torchrum.plots.figures import draw_copying, draw_figure, draw_recall
from torchrum.recipes import load_recipe
from torchrum.tasks import Recall
from torchrum.training import RunError
from torchrum.training.config_file import to_json
from torchrum.training.files import write_json
from torchrum.training.records import CONFIG, MetricsFile


def entry(recipe: str, seed: int, steps: int = 400) -> Entry:
    at = list(range(100, steps + 1, 100))
    curve = {"step": at, "loss": [1 / step for step in at], "accuracy": [step / 1000 for step in at]}
    return Entry(
        recipe=recipe,
        overrides=[],
        seed=seed,
        command="",
        commit="",
        hardware="",
        processes=1,
        versions={},
        wall_seconds=1.0,
        steps=steps,
        parameters=1,
        baseline=1.0,
        final={},
        curve=curve,
        train_curve=curve | {"loss": [2 / step for step in at]},
    )


LEDGER = [
    *(entry(f"copying-{model}-t{delay}", seed) for model in ("rum", "lstm") for delay in (200, 500) for seed in (0, 1)),
    *(entry(f"recall-{model}-t{length}", 0) for model in ("rum-lam1", "gru") for length in (30, 50)),
]


def curves(axes) -> list[list[float]]:
    return [list(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata()) > 2]


def test_copying_shows_the_training_loss_of_every_seed_at_each_delay():
    figure = draw_copying(table_rows(LEDGER, "copying"))
    assert [axes.get_title() for axes in figure.axes] == ["T = 200", "T = 500"]
    for axes in figure.axes:
        assert curves(axes) == [[2 / step for step in (100, 200, 300, 400)]] * 4  # two models, two seeds
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["RUM λ=0", "LSTM"]


def test_recall_shows_loss_accuracy_and_the_plateau():
    figure = draw_recall(table_rows(LEDGER, "recall"))
    assert len(figure.axes) == 4
    loss, accuracy = figure.axes[2:]  # the row of T = 50
    assert curves(loss) == [[1 / step for step in (100, 200, 300, 400)]] * 2
    assert curves(accuracy) == [[0.1, 0.2, 0.3, 0.4]] * 2
    plateaus = [line.get_ydata()[0] for axes in (loss, accuracy) for line in axes.get_lines()[-1:]]
    assert plateaus == [Recall(length=50).baseline(), Recall(length=50).baseline_accuracy()]


@pytest.mark.parametrize("name", ["copying", "recall"])
def test_equal_ledgers_give_equal_files(name, tmp_path):
    runs = [run for run in LEDGER if run.recipe.endswith(("t200", "t30"))]
    first, again = (draw_figure(name, runs, tmp_path / folder) for folder in ("a", "b"))
    assert [path.name for path in first] == [f"{name}.png", f"{name}.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_unknown_figures_and_empty_ledgers_are_refused(tmp_path):
    with pytest.raises(LedgerError, match="no figure 'babi'; there are: copying, recall"):
        draw_figure("babi", LEDGER, tmp_path)
    with pytest.raises(LedgerError, match="no run of recall is in the ledger"):
        draw_figure("recall", [], tmp_path)


@pytest.fixture
def run(tmp_path) -> Path:
    write_json(tmp_path / CONFIG, to_json(load_recipe("recall-lstm-t30")))
    return tmp_path


def test_a_curve_of_a_run_folder(run):
    metrics = MetricsFile(run, 0)
    for step in (10, 20, 30):
        line = {"step": step, "loss": 2 / step, "accuracy": step / 30, "seconds": 1.0}
        metrics.append({"kind": "train", **line, "lr": 0.1})
        metrics.append({"kind": "validation", **line})
    metrics.close()
    assert draw_curve(run) == run / "curve.png"
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert draw_curve(run, run / "other.svg").exists()


def test_a_run_without_scores_has_no_curve(run):
    with pytest.raises(RunError, match="has no scores to draw yet"):
        draw_curve(run)
