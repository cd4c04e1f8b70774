"""Figures of the ledger: ``catalog``, ``curves`` and ``style``, and the curve of a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from entries import make_entry
from torchrum.cli import main
from torchrum.lab.plot_style import DARK, Figure, drawing, save, save_themes
from torchrum.lab.recipes import load_recipe
from torchrum.lab.tasks import Recall
from torchrum.lab.training import ConfigError, RunError
from torchrum.lab.training.config import to_json
from torchrum.lab.training.files import write_json
from torchrum.lab.training.run_folder import CONFIG, MetricsFile
from torchrum.paper.ledger import Entry, LedgerError, read_ledger
from torchrum.paper.ledger.runs import table_rows
from torchrum.paper.plots.catalog import FIGURES, draw_figure, plan
from torchrum.paper.plots.curves import (
    babi_figure,
    char_figure,
    copying_figure,
    gradients_figure,
    over_seeds,
    recall_figure,
)
from torchrum.paper.plots.run import draw_curve


def entry(recipe: str, seed: int, steps: int = 400) -> Entry:
    at = list(range(100, steps + 1, 100))
    curve = {"step": at, "loss": [1 / step for step in at], "accuracy": [step / 1000 for step in at]}
    train_curve = curve | {"loss": [2 / step for step in at]}
    return make_entry(recipe, seed, curve, final={"loss": 1 / steps}, train_curve=train_curve)


LEDGER = [
    *(entry(f"copying-{model}-t{delay}", seed) for model in ("rum", "lstm") for delay in (200, 500) for seed in (0, 1)),
    *(entry(f"recall-{model}-t{length}", 0) for model in ("rum-lam1", "gru") for length in (30, 50)),
]


def curves(axes) -> list[list[float]]:
    return [list(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata()) > 2]


def test_copying_shows_the_training_loss_at_each_delay():
    with drawing():
        figure = copying_figure(table_rows(LEDGER, "copying"))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["T = 200", "T = 500"]
    for axes in shown:
        assert curves(axes) == [[2 / step for step in (100, 200, 300, 400)]] * 2  # two models, seeds in one line
        assert len(axes.collections) == 2  # and a band each
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["RUM λ=0", "LSTM", "memoryless baseline"]


def test_recall_shows_loss_accuracy_and_the_plateau():
    with drawing():
        figure = recall_figure(table_rows(LEDGER, "recall"))
    assert len(figure.axes) == 4
    loss, accuracy = figure.axes[2:]  # the row of T = 50
    assert curves(loss) == [[1 / step for step in (100, 200, 300, 400)]] * 2
    assert curves(accuracy) == [[0.1, 0.2, 0.3, 0.4]] * 2
    plateaus = [line.get_ydata()[0] for axes in (loss, accuracy) for line in axes.get_lines()[-1:]]
    assert plateaus == [Recall(length=50).baseline(), Recall(length=50).baseline_accuracy()]


def text_entry(recipe: str) -> Entry:
    return make_entry(recipe, 0, {"step": [100, 200, 300], "loss": [1.0, 0.9, 0.8], "bpc": [1.5, 1.4, 1.3]})


def test_models_of_the_papers_table_are_not_drawn_beside_small_ones():
    both = [text_entry("char-ptb-rum-2000"), text_entry("char-rum")]
    for entries, label in ((both, "RUM λ=0, η=1"), (both[1:], "RUM λ=0, η=7")):
        with drawing():
            figure = char_figure(table_rows(entries, "char"))
        (axes,), (legend,) = figure.axes, figure.legends
        assert curves(axes) == [[1.5, 1.4, 1.3]]
        assert [text.get_text() for text in legend.get_texts()] == [label]


def test_models_of_one_text_share_a_panel_that_counts_epochs():
    entries = [text_entry("char-ptb-rum-2000"), text_entry("char-ptb-nas")]  # 265 and 398 steps per epoch
    with drawing():
        (axes,) = char_figure(table_rows(entries, "char")).axes
    assert sorted(line.get_xdata()[-1] for line in axes.get_lines()) == [300 / 398, 300 / 265]
    assert axes.get_xlabel() == "epoch"


def with_losses(seed: int, steps: list[int], losses: list[float]) -> Entry:
    curve = {"step": steps, "loss": losses, "accuracy": losses}
    return replace(entry("recall-rum-lam1-t30", seed), curve=curve, train_curve=curve, steps=steps[-1])


def test_seeds_become_a_median_and_a_range():
    row = [with_losses(seed, [100, 300], [value, value + 2]) for seed, value in enumerate((1.0, 5.0, 2.0))]
    steps, median, low, high = over_seeds(row, "curve", "loss")
    assert steps.tolist() == [100, 300]
    assert (median.tolist(), low.tolist(), high.tolist()) == ([2, 4], [1, 3], [5, 7])


def test_curves_are_read_between_their_points_and_a_goal_is_kept():
    full = load_recipe("recall-rum-lam1-t30").steps
    row = [with_losses(0, [100, 300, full], [4.0, 2.0, 2.0]), with_losses(1, [200], [1.0])]
    steps, _, low, high = over_seeds(row, "curve", "loss")
    assert steps.tolist() == [100, 200, 300, full]
    assert high.tolist() == [4, 3, 2, 2]
    assert low.tolist() == [4, 1, 1, 1]  # the second run ended at its goal and keeps its score
    cut = [with_losses(0, [100, full], [4.0, 2.0]), with_losses(1, [100, full], [3.0, 1.0])]
    assert over_seeds(cut, "curve", "loss")[1].tolist() == [3.5, 1.5]


@pytest.mark.parametrize("name", ["copying", "recall"])
def test_equal_ledgers_give_equal_files(name, tmp_path):
    runs = [run for run in LEDGER if run.recipe.endswith(("t200", "t30"))]
    (drawn,) = plan(name, runs, tmp_path)
    first, again = (save_themes(drawn.draw, tmp_path / folder / name) for folder in ("a", "b"))
    assert [path.name for path in first] == [f"{name}.svg", f"{name}-dark.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    light, dark = (path.read_text() for path in first)
    assert DARK["figure.facecolor"] in dark
    assert DARK["figure.facecolor"] not in light


def test_unknown_figures_and_empty_ledgers_are_refused(tmp_path):
    with pytest.raises(LedgerError, match="no figure 'bench'; there are: copying, recall"):
        draw_figure("bench", tmp_path, tmp_path)
    with pytest.raises(LedgerError, match="nothing to draw recall from; add a run with torchrum record RUN"):
        draw_figure("recall", str(tmp_path), str(tmp_path))
    with pytest.raises(LedgerError, match="nothing to draw phases from; add a run with torchrum record --arrays RUN"):
        draw_figure("phases", tmp_path, tmp_path)


def test_gradients_need_no_run_and_rum_keeps_them():
    with drawing():
        figure = gradients_figure(delay=30, units=16, sequences=4)
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert lines["RUM λ=0"][0] > 100 * lines["GRU"][0]  # index 0 is the first step, furthest back
    assert all(lines[label][-1] == pytest.approx(1) for label in ("RUM λ=0", "RUM λ=1", "LSTM", "GRU"))


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
    assert draw_curve(str(run), str(run / "other.svg")).exists()
    assert main(["figure", str(run), "--out", str(run / "elsewhere")]) == 0
    assert (run / "elsewhere" / "curve.png").exists()


@pytest.mark.parametrize("name", ["x.xyz", "x", "."])
def test_a_name_that_is_no_pictures_is_refused(name):
    with pytest.raises(ConfigError, match=r"is not a picture; its name must end in .png, .svg, .pdf"):
        save(Figure(), Path(name))


def test_a_run_without_scores_has_no_curve(run):
    with pytest.raises(RunError, match="has no scores to draw yet"):
        draw_curve(run)


def test_babi_has_a_dot_for_each_task_and_a_range_over_seeds():
    scored = [replace(entry("babi-rum-qa2", seed), test={"accuracy": 0.4 + seed / 10}) for seed in (0, 1)]
    tasks = {f"task{number:02d}": 0.5 for number in range(1, 21)}
    joint = replace(entry("babi-joint-rum", 0), test={"accuracy": 0.5, **tasks})
    changed = replace(scored[0], seed=5, overrides=["task.variant=en"])
    with drawing():
        figure = babi_figure([*scored, joint, changed])
    alone, together = figure.axes
    dots = {line.get_label(): line.get_xdata() for line in alone.get_lines()}
    assert "RUM in the paper (mean 73.2%)" in dots
    assert dots["RUM λ=0"].tolist() == pytest.approx([0.45])  # the changed task is not among them
    assert [text.get_text() for text in together.get_legend().get_texts()] == ["RUM λ=0 (mean 50.0%)"]


def test_a_set_of_babi_that_is_not_complete_gives_way_to_one_that_is():
    whole = [replace(entry(f"babi-rum-qa{task}", 0), test={"accuracy": 0.5}) for task in range(1, 21)]
    part = replace(entry("babi-lstm-qa2", 0), test={"accuracy": 0.4})
    with drawing():
        (axes,) = babi_figure([*whole, part]).axes
    assert [line.get_label() for line in axes.get_lines()][1:-1] == ["RUM λ=0 (mean 50.0%)"]


def test_the_headline_has_a_panel_for_each_kind_of_input(tmp_path):
    fresh = [entry(f"recall-{model}-fresh-t50", 1) for model in ("rum-lam1", "lstm")]
    window = entry("recall-delta-net-window-t50", 1)
    (drawn,) = plan("headline", [*fresh, window, entry("recall-gru-t50", 0)], tmp_path)
    with drawing():
        left, right = drawn.draw().axes
    assert left.get_legend_handles_labels()[1] == ["bag of values", "RUM λ=1", "LSTM"]
    assert right.get_legend_handles_labels()[1] == ["bag of values", "DeltaNet"]
    assert list(plan("headline", fresh, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_no_words_are_cut_off(name):
    """Titles, labels and legends of the committed figures lie inside them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    results = Path(__file__).parents[3] / "results"
    drawings = list(plan(name, read_ledger(results), results))
    assert drawings
    for each in drawings:
        with drawing():
            figure = each.draw()
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
        words = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
        for axes in figure.axes:
            words += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for text in words:
            if text is not None and text.get_text():
                box = text.get_window_extent(canvas.get_renderer())
                assert figure.bbox.padded(1).contains(box.x0, box.y0), (each.name, text.get_text())
                assert figure.bbox.padded(1).contains(box.x1, box.y1), (each.name, text.get_text())
        above = figure._suptitle and figure._suptitle.get_window_extent(canvas.get_renderer())
        for axes in figure.axes:
            if above is not None and axes.title.get_text():
                assert not above.overlaps(axes.title.get_window_extent(canvas.get_renderer())), each.name
