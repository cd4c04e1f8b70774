import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from entries import make_entry
from torchrum.lab.recipes import RECIPES, paper_preset
from torchrum.lab.tables import markdown_tables
from torchrum.lab.training import RunError
from torchrum.paper.ledger import Entry, LedgerError, read_ledger
from torchrum.paper.ledger.runs import best_settings, changed_settings, place, table_rows
from torchrum.paper.ledger.tables import asked_table, task_tables, write_tables

ROOT = Path(__file__).parents[3]


def entry(recipe: str, seed: int, **final: float) -> Entry:
    curve = {"step": [100]} | {key: [value] for key, value in final.items()}
    return make_entry(recipe, seed, curve, parameters=11_060, baseline=1.94771)


RUM = [
    entry("recall-rum-lam1-t30", seed, loss=0.01, accuracy=accuracy) for seed, accuracy in enumerate((1.0, 0.99, 0.98))
]
LSTM = entry("recall-lstm-t30", 0, loss=1.95, accuracy=0.25)


def table(entries: list[Entry], task: str, budget: int | None = None) -> str:
    return markdown_tables(task_tables(entries, task, budget))


def lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_seeds_share_a_row_with_mean_and_range():
    header, _, rum, lstm, weinet = lines(table([LSTM, *RUM], "recall"))
    assert header == ["model", "settings", "parameters", "steps", "seeds", "accuracy", "paper", "command"]
    assert rum == [
        "RUM λ=1", "H 50, adam 0.001", "11,060", "100", "3", "99.00% (98.00% to 100.00%)", "100%",
        "`torchrum train recall-rum-lam1-t30 --seeds 3`",
    ]  # fmt: skip
    assert lstm[5:7] == ["25.00%", "25.6%"]
    assert weinet[0].startswith("WeiNet")
    assert weinet[-2:] == ["100%", "not run"]


def test_overrides_make_a_row_of_their_own():
    other = replace(LSTM, overrides=["optimizer.name=rmsprop_tf", "task.train_size=none"])
    rows = lines(table([LSTM, other], "recall"))[2:4]
    assert [row[1] for row in rows] == ["H 50, adam 0.001", "H 50, rmsprop_tf 0.001, task.train_size=none"]


def test_a_tuned_recipe_says_where_it_differs_from_the_papers():
    tuned, preset = (entry(f"recall-rum-lam1{name}-t50", 0, loss=0.01, accuracy=1.0) for name in ("", "-paper"))
    rows = lines(table([preset, tuned], "recall"))[2:4]
    assert [row[1] for row in rows] == [
        "H 50, adam 0.003, optimizer.clip=1.0, optimizer.schedule=80000:0.3,92000:0.1",
        "H 50, adam 0.001",
    ]
    assert "(best of 2 settings)" in table([preset, tuned], "recall", 1000)


def test_a_calibrated_model_is_shown_with_and_without_its_temperature():
    curve = {"step": [100], "loss": [0.8], "bpc": [1.2]}
    plain, tuned = (make_entry(f"char-ptb-fs-rum-2-{end}", 0, curve) for end in ("cosine", "tuned"))
    plain, tuned = replace(plain, test={"bpc": 1.21}), replace(tuned, test={"bpc": 1.19, "uncalibrated_bpc": 1.2})
    header, _, *rows = lines(table([plain, tuned], "char"))
    shown = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["test, temperature 1"] for row in shown] == ["", "1.2000"]
    assert "optimizer.schedule=cosine" in shown[0]["settings"]
    for text in ("model.calibrated=true", "optimizer.weight_decay=0.05", "average=0.999"):
        assert text in shown[1]["settings"] and text not in shown[0]["settings"]


def test_another_problem_has_a_table_of_its_own_without_the_papers_numbers():
    other = replace(LSTM, overrides=["task.length=20"])
    text = table([other, LSTM], "recall")
    assert text.index("**recall, T = 30**") < text.index("**recall, T = 30, task.length=20**")
    header, _, row = lines(text[text.index("task.length=20") :])
    assert dict(zip(header, row, strict=True))["paper"] == ""
    assert f"baseline {other.config().task.baseline():.4f}" in text


def test_copying_shows_loss_and_accuracy_and_each_delay_has_a_table():
    runs = [entry(f"copying-rum-t{delay}", 0, loss=0.1, accuracy=1.0, ratio=0.005) for delay in (1000, 200)]
    text = table(runs, "copying")
    assert text.index("T = 200") < text.index("T = 1000")
    assert lines(text)[0][5:7] == ["loss / baseline", "accuracy"]
    assert lines(text)[2][5:7] == ["0.0050", "100.00%"]


def test_a_run_that_diverged_says_so_and_is_no_best_setting():
    lost = replace(LSTM, overrides=["optimizer.lr=0.1"], final={**LSTM.final, "loss": 0.1}, diverged=150)
    rows = lines(table([LSTM, lost], "recall"))[2:4]
    assert [row[3] for row in rows] == ["100", "100 (diverged at 150)"]
    assert best_settings([[lost], [LSTM]]) == [[LSTM]]
    assert "(diverged" not in table([LSTM, lost], "recall", 1000)


def test_notes_stand_below_their_table():
    text = table([replace(LSTM, note="three learning rates were tried")], "recall")
    assert "- recall-lstm-t30, seed 0: three learning rates were tried" in text


def test_the_command_repeats_the_seeds_of_its_row():
    rows = {seeds: [replace(LSTM, seed=seed) for seed in seeds] for seeds in ((0,), (2,), (1, 2, 3), (0, 2))}
    commands = {seeds: lines(table(row, "recall"))[2][-1].strip("`") for seeds, row in rows.items()}
    assert commands == {
        (0,): "torchrum train recall-lstm-t30",
        (2,): "torchrum train recall-lstm-t30 --seed 2",
        (1, 2, 3): "torchrum train recall-lstm-t30 --seed 1 --seeds 3",
        (0, 2): "torchrum train recall-lstm-t30",
    }


README = "before\n<!-- torchrum:table recall -->\nold\n<!-- /torchrum:table -->\nafter\n"


def test_tables_are_written_between_their_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(README)
    assert write_tables(path, RUM)
    text = path.read_text()
    assert table(RUM, "recall") in text
    assert "old" not in text
    assert text.startswith("before\n<!-- torchrum:table recall -->\n")
    assert text.endswith("<!-- /torchrum:table -->\nafter\n")
    assert not write_tables(path, RUM)  # nothing new


def test_a_device_is_not_read_for_markers(tmp_path):
    with pytest.raises(RunError, match="/dev/zero cannot be read: it is not a plain file"):
        write_tables(Path("/dev/zero"), RUM)


def test_a_file_without_markers_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("no place")
    with pytest.raises(RunError, match="has no markers to write between; put <!-- torchrum:table copying -->"):
        write_tables(tmp_path / "README.md", RUM)
    assert (tmp_path / "README.md").read_text() == "no place"


@pytest.mark.parametrize("words", ["recall within", "recall best many", "recall papers", "recall best 20 30"])
def test_a_marker_that_asks_for_no_table_is_refused(words):
    with pytest.raises(LedgerError, match=f"there is no table '{words}'; write .* best STEPS, within BUDGET, paper"):
        asked_table(words, RUM)


@pytest.mark.parametrize("content, words", [(None, "No such file"), (b"\xff\xfe", "it is not UTF-8 text")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "README.md").write_bytes(content)
    with pytest.raises(RunError, match=f"README.md cannot be read: {words}"):
        write_tables(tmp_path / "README.md", RUM)


def test_a_budget_keeps_the_best_setting_of_each_model_within_it_and_beyond():
    def run(steps: int, loss: float, *overrides: str):
        return replace(LSTM, steps=steps, overrides=list(overrides), final={**LSTM.final, "loss": loss})

    runs = [run(10, 0.5), run(10, 0.4, "optimizer.lr=0.1"), run(30, 0.3, "steps=30"), run(40, 0.2, "steps=40"), *RUM]
    text = table(runs, "recall", 20)
    assert len(lines(text)) == len(lines(table(RUM, "recall"))) + 2
    lstm = [row for row in lines(text) if row[0] == "LSTM"]
    assert [(row[1], row[3]) for row in lstm] == [
        ("H 50, adam 0.1 (best of 2 settings)", "10"),
        ("H 50, adam 0.001 (best of 2 settings)", "40"),
    ]
    assert asked_table("recall best 20", runs) == text


@pytest.mark.parametrize("name", ["docs/results.md", "docs/findings.md"])
def test_the_tables_are_those_of_the_ledger(name, tmp_path):
    page = Path(shutil.copy(ROOT / name, tmp_path))
    changed = write_tables(page, read_ledger(ROOT / "results"))  # a page without markers is an error
    assert not changed, f"run make pages (torchrum table --write {name})"


def test_texts_of_an_entry_show_as_they_are():
    """No HTML, no further column, no link, and no command that ends its code."""
    note = "<script>alert(1)</script> a|b [link](x) & more"
    text = table([replace(LSTM, note=note, command="torchrum train `x` | y")], "recall")
    assert r"seed 0: &lt;script&gt;alert(1)&lt;/script&gt; a\|b \[link\](x) &amp; more" in text
    assert r"| `torchrum train 'x' \| y` |" in text
    assert "<" not in text


@pytest.mark.parametrize("task, steps", [("copying", 10_000), ("recall", 100_000)])
def test_tuned_recipes_are_the_best_settings_of_the_ledger(task, steps):
    """Within the steps of the recipes."""
    entries = [entry for entry in read_ledger(ROOT / "results", task) if entry.steps <= steps]
    chosen = [row[0] for row in best_settings(table_rows(entries, task)) if not place(row)[1]]
    presets = {paper_preset(name): name for name in RECIPES if paper_preset(name) != name}
    for run in chosen:
        if any(text.startswith(("model.eta=", "model.start_norm=")) for text in run.overrides):
            continue  # that is another model, which has no recipe of its own
        assert run.recipe not in presets, f"{presets.get(run.recipe)} is not tuned as {run.overrides}"
        if run.recipe in presets.values():
            assert not changed_settings(run)
    assert {run.recipe for run in chosen} & set(presets.values())
