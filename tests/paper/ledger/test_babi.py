"""The tables of bAbI, from runs on made-up files to Markdown, and from made-up entries."""

import json
import shutil
from dataclasses import replace

import pytest

from paper.ledger.test_tables import entry, lines, table
from stories import use_made_up_task1
from torchrum.cli import main
from torchrum.cli.list import recipe_lines
from torchrum.lab.recipes.babi import PAPER
from torchrum.lab.training import run_sweep
from torchrum.paper.ledger import read_ledger
from torchrum.paper.ledger.babi import Column, babi_table, best_columns, setting_words
from torchrum.paper.ledger.tables import asked_table

TINY = ["--steps", "6", "--eval_every", "3", "--log_every", "3", "--model.hidden_size", "4", "--device", "cpu"]


def single(model: str, task: int, seed: int, accuracy: float, **fields):
    """A run of one task."""
    run = entry(f"babi-{model}-qa{task}", seed, loss=1.0, accuracy=0.5)
    return replace(run, test={"step": 100.0, "loss": 1.0, "accuracy": accuracy}, tested=["2026-01-31"], **fields)


def joint(seed: int, accuracy: float, **fields):
    """A run of all tasks, each with the same accuracy."""
    run = entry("babi-joint-rum", seed, loss=1.0, accuracy=0.5)
    each = {f"task{task:02d}": accuracy for task in range(1, 21)}
    test = {"step": 100.0, "loss": 1.0, "accuracy": accuracy, "solved": 0.0, **each}
    return replace(run, test=test, tested=["2026-01-31"], **fields)


RUNS = [single("rum", task, seed, 0.96 if task <= 5 else 0.5 + seed / 10) for seed in (0, 1) for task in range(1, 21)]


def test_seeds_share_a_column_beside_the_papers():
    text = table([*RUNS, single("gru", 2, 0, 0.25)], "babi")
    header, _, *rows = lines(text)
    assert header == ["task", "paper", "RUM λ=0 `babi-rum`", "GRU `babi-gru`"]
    assert rows[0] == ["1 single supporting fact", "79.7", "96.0", ""]
    assert rows[1] == ["2 two supporting facts", "39.4", "96.0", "25.0"]
    assert rows[6][2] == "55.0"
    assert rows[20] == ["**mean**", "73.2", "65.2 (61.5 to 69.0)", "25.0 of 1 task"]
    assert rows[21] == ["**mean, best seed by validation**", "", "61.5", ""]  # equal on validation: the first seed
    assert rows[22] == ["**solved (95% or more)**", "5", "5", "0"]
    assert rows[23] == ["**seeds**", "", "2", "1"]
    assert rows[24] == ["**minutes of training per seed (H200)**", "", "0.3", ""]  # 20 runs of a second
    elsewhere = [replace(single("gru", task, 0, 0.25), hardware="CPU") for task in range(1, 21)]
    *_, last = lines(table([*RUNS, *elsewhere], "babi"))
    assert last == ["**minutes of training per seed (H200)**", "", "0.3", "0.3 (CPU)"]


def test_other_settings_and_joint_models_stand_apart():
    other = single("rum", 1, 0, 0.7, overrides=["task.question=twice"])
    runs = [*RUNS, other, joint(0, 0.96), joint(1, 0.9), joint(0, 1.0, overrides=["task.question=twice"])]
    first, second = table(runs, "babi").split("**bAbI, one model for all tasks**")
    assert lines(first)[0][2:] == ["RUM λ=0 `babi-rum`", "RUM λ=0 `babi-rum`, question twice"]
    header, _, *rows = lines(second)
    assert header[1:] == ["RUM λ=0 `babi-joint-rum`", "RUM λ=0 `babi-joint-rum`, question twice"]
    assert rows[20][1:] == ["93.0 (90.0 to 96.0)", "100.0"]
    assert rows[22][1:] == ["0", "20"]


def test_validation_chooses_the_seed_of_each_task():
    lucky = single("rum", 20, 1, 0.3)  # best on validation, worse on the test set
    lucky = replace(lucky, curve={"step": [50, 100], "loss": [1.0, 1.0], "accuracy": [0.9, 0.1]})
    runs = [run for run in RUNS if (run.recipe, run.seed) != ("babi-rum-qa20", 1)]
    rows = lines(table([*runs, lucky], "babi"))[2:]
    assert rows[21] == ["**mean, best seed by validation**", "", "60.5"]  # 61.5, with 30 instead of 50% on one of 20


def test_notes_name_the_runs_that_they_are_about():
    noted = [replace(run, note="shared the GPU; task 3 is partly made up") for run in RUNS]
    other = single("gru", 2, 0, 0.25, note="task 3 is partly made up")
    text = table([*noted, other], "babi")
    assert text.endswith("\n- `babi-rum`: Shared the GPU.\n- Task 3 is partly made up.\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("task.extra=", "no extra"),
        ("model.original_embedding=true", "original embedding"),
        ("model.original_embedding=false", "no original embedding"),
        ("model.embedding_std=2.0", "embedding std 2.0"),
        ("optimizer.clip=1.0", "clip 1.0"),
        ("steps=56280", "steps 56280"),
    ],
)
def test_a_changed_setting_is_told_in_words(change, words):
    assert setting_words(change) == words


def test_the_papers_column_stands_once_before_whatever_settings_there_are():
    changed = [single("rum", 1, 0, 0.7, overrides=[f"model.hidden_size={size}"]) for size in (64, 128)]
    header, _, first, *_ = lines(table([*changed, single("rum", 1, 0, 0.1, overrides=["task.question=twice"])], "babi"))
    assert [title for title in header if title == "paper"] == ["paper"]
    assert first[:3] == ["1 single supporting fact", "79.7", "70.0"]
    assert "paper" not in lines(table([single("rum", 1, 0, 0.1, overrides=["task.question=twice"])], "babi"))[0]


def test_the_best_setting_says_of_how_many():
    changed = [single("rum", 1, seed, 0.7, overrides=["optimizer.clip=1.0"]) for seed in (0, 1)]
    other = single("rum", 1, 0, 0.1, overrides=["task.question=twice"])
    entries = [*changed, single("rum", 1, 0, 0.8), other, single("goru", 1, 0, 0.6, overrides=["compile=true"])]
    header, _, first, *_ = lines(table(entries, "babi", 1))
    assert header[1:] == ["paper", "RUM λ=0 `babi-rum`, clip 1.0 (best of 2 settings)", "paper", "GORU `babi-goru`"]
    assert first[1:] == ["79.7", "70.0", "46", "60.0"]
    assert asked_table("babi best", entries) == table(entries, "babi", 1)


def test_how_a_run_is_computed_is_no_setting():
    entries = [single("goru", 1, 0, 0.6, overrides=["compile=true"]), single("goru", 1, 1, 0.8)]
    header, _, first, *rest = lines(table(entries, "babi"))
    assert header[1:] == ["paper", "GORU `babi-goru`"] and first[2] == "70.0"
    assert ["**seeds**", "", "2"] in rest


def test_columns_of_others_data_are_marked():
    header, _, *rows = lines(babi_table([Column("babi-lstm", "LSTM", {0: {7: 0.5}}, paper=True)], [7]).markdown())
    assert header == ["task", "paper, 1k", "LSTM"]
    assert rows[0] == ["7 counting", str(PAPER["lstm"][6]), "50.0"]


def test_of_several_settings_the_one_with_the_most_seeds_stands_for_a_recipe():
    """A single good seed does not; nor does a changed task."""
    lucky = replace(joint(0, 1.0, overrides=["steps=100"]), final={"loss": 0.1})
    found = best_columns([*RUNS, joint(0, 0.96), joint(1, 0.9), lucky, joint(2, 1.0, overrides=["task.extra=17"])])
    assert [(column.name, column.joint) for column in found] == [("babi-rum", False), ("babi-joint-rum", True)]
    assert found[1].whole() == pytest.approx([0.96, 0.9])


def test_a_set_is_trained_recorded_and_shown(tmp_path, monkeypatch, capsys):
    use_made_up_task1(monkeypatch, tmp_path / "data")
    out, results = tmp_path / "runs", tmp_path / "results"
    assert main(["train", "babi-rum", "--task", "1", "--out", str(out), "--seeds", "2", *TINY]) == 0
    printed = capsys.readouterr().out
    header, _, first, *_ = lines(printed)
    assert "checkpoint that was best on validation, of equal ones the earliest; seeds 0, 1." in printed
    assert "- Task 1's training text is made up." in printed
    assert header == ["task", "paper", "babi-rum"] and first[:2] == ["1 single supporting fact", "79.7"]
    folders = sorted(path.parent for path in out.rglob("config.json"))
    assert [str(folder.relative_to(out)) for folder in folders] == ["babi-rum/seed-0/qa1", "babi-rum/seed-1/qa1"]

    runs = [str(path) for path in sorted((out / "babi-rum").iterdir())]  # what runs/babi-rum/* stands for
    assert any(run.endswith("summary.json") for run in runs)
    unfinished = folders[0].parent / "qa2"
    shutil.copytree(folders[0], unfinished)
    (unfinished / "result.json").unlink()  # as after a loss that was not finite
    assert main(["record", *runs, "--results", str(results), "--note", "tried", "--commit", "abcdef0"]) == 1
    assert "has not ended" in capsys.readouterr().err
    entries = read_ledger(results)
    assert [entry.seed for entry in entries] == [0, 1]
    assert all(entry.note == "tried; task 1's training text is made up" for entry in entries)
    shutil.rmtree(unfinished)
    looks = json.loads((folders[0] / "test.json").read_text())
    assert len(looks) == 1  # the table's look is the record's too
    assert entries[0].test["accuracy"] == pytest.approx(looks[0]["scores"]["accuracy"])
    capsys.readouterr()
    assert main(["table", "babi", "--results", str(results)]) == 0
    shown = capsys.readouterr().out
    assert main(["table", "babi", "--best", "--results", str(results)]) == 0
    assert capsys.readouterr().out == shown  # there is one setting
    assert "- Tried.\n- Task 1's training text is made up.\n" in shown and first[2] in shown
    lines_of_list = {line["recipe"]: line for line in recipe_lines(results)}
    assert lines_of_list["babi-rum"]["ours"] == ""  # the settings are not the recipe's

    assert main(["train", "babi-rum", "--task", "1", "--resume", str(out / "babi-rum"), "--seeds", "2", *TINY]) == 0
    assert lines(capsys.readouterr().out)[2] == first  # all of it was done


def test_a_set_that_was_interrupted_has_no_table_and_no_look_at_the_test(tmp_path, monkeypatch, capsys):
    use_made_up_task1(monkeypatch, tmp_path / "data")

    def interrupted(*arguments, **options):
        return [replace(result, stopped="SIGINT") for result in run_sweep(*arguments, **options)]

    monkeypatch.setattr("torchrum.cli.train.run_sweep", interrupted)
    assert main(["train", "babi-rum", "--task", "1", "--out", str(tmp_path / "runs"), *TINY]) == 130
    assert not capsys.readouterr().out
    assert list(tmp_path.glob("runs/**/config.json")) and not list(tmp_path.glob("runs/**/test.json"))


def test_a_set_reads_no_text_of_ones_own(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("a book")
    assert main(["train", "babi-rum", "--data", str(tmp_path / "book.txt"), "--out", str(tmp_path / "runs")]) == 2
    assert "babi-rum-qa1 cannot read your own text" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_sweep_takes_no_set(tmp_path, capsys):
    assert main(["sweep", "babi-rum", "--grid", "optimizer.lr=0.1,0.2", "--out", str(tmp_path / "runs")]) == 2
    assert "babi-rum is a set of 20 recipes, and a sweep takes one, such as babi-rum-qa1" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_list_shows_a_set_as_one_line(tmp_path, monkeypatch, capsys):
    assert main(["list", "--plain", "--results", str(tmp_path)]) == 0
    rows = {line.split("\t")[0]: line.split("\t") for line in capsys.readouterr().out.splitlines()}
    assert rows["babi-rum"][1] == "73.2% on average" and "babi-rum-qa1" not in rows
    assert rows["babi-lstm"][1] == "49.2% on average (1k)"
    assert rows["babi-gru"][1] == "" and "babi-joint-rum" in rows
    assert main(["list", "babi-rum"]) == 0
    assert "task.question" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["21", "x", "1,99"])
def test_a_task_that_is_not_there(task, capsys):
    assert main(["train", "babi-rum", "--task", task]) == 2
    assert f"--task is '{task}', but babi-rum has the tasks 1 to 20" in capsys.readouterr().err


def test_without_the_files_there_is_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHRUM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TORCHRUM_OFFLINE", "1")
    assert main(["train", "babi-rum", "--task", "2", "--out", str(tmp_path), *TINY]) == 3
    message = capsys.readouterr().err
    assert "TORCHRUM_OFFLINE is set" in message and "Traceback" not in message
    assert not list(tmp_path.rglob("config.json"))


def test_an_average_has_its_sign_beside_the_number():
    tasks = range(1, 21)
    one, both = {0: dict.fromkeys(tasks, 0.5)}, {0: dict.fromkeys(tasks, 0.5), 1: dict.fromkeys(tasks, 0.7)}
    assert [
        Column("rum", "rum", scores).average("%") for scores in (one, both, {0: {3: 0.25}}, {0: {3: 0.2, 4: 0.4}})
    ] == [
        "50.0%",
        "60.0% (50.0 to 70.0)",
        "25.0% of 1 task",
        "30.0% of 2 tasks",
    ]
