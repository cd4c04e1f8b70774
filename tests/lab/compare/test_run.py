"""A whole comparison with a few steps: its search, its folder, its page and its saved model."""

import json
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrum.lab.compare import Comparison, compare, load, resume, run
from torchrum.lab.compare.models import MODELS
from torchrum.lab.compare.run import RATES, SEEDS, plan_steps, read_settings, read_trainings
from torchrum.lab.training.errors import ConfigError, RunError

STEPS = 6
ALL = len(MODELS) * (len(RATES) + len(SEEDS))
EXACT = "donot_use_mm_for_euclid_dist"
NAME = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "plan_steps", lambda *_: STEPS)


def columns(count: int = 120) -> dict[str, np.ndarray]:
    """Sequences of four rows: is the first number of a sequence above zero?"""
    values = np.random.default_rng(0).normal(size=(count, 4))
    return {
        "id": np.repeat(np.arange(count), 4),
        NAME: values.ravel(),
        "other": values.ravel() ** 2,
        "label": np.repeat(np.where(values[:, 0] > 0, "up", "down"), 4),
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "plan_steps", lambda *_: STEPS)
        patch.chdir(tmp_path_factory.mktemp("compare"))
        return compare(columns(), minutes=5, out=tmp_path_factory.mktemp("out") / "finished", quiet=True)


def scores(folder: Path) -> set[tuple[object, ...]]:
    """What does not depend on the clock."""
    return {
        (row.model, row.rate, row.seed, row.validation, row.test, *(point[::2] for point in map(tuple, row.curve)))
        for row in read_trainings(folder)
    }


def test_every_training_has_the_same_steps_and_the_same_search(finished):
    rows = read_trainings(finished.folder)
    assert len(rows) == ALL
    assert {row.curve[-1][0] for row in rows} == {STEPS} == {read_settings(finished.folder).steps}
    for model in MODELS:
        own = [row for row in rows if row.model == model]
        assert {row.rate for row in own if row.seed == 0} == set(RATES)
        assert sorted(row.seed for row in own if row.seed) == sorted(SEEDS)
        assert len({row.rate for row in own if row.seed}) == 1
        assert all((row.test is None) == (row.seed == 0) for row in own)


def test_the_test_part_does_not_influence_the_choices(finished, tmp_path):
    """Other targets there change the test scores, and nothing else."""
    problem = run.load_problem(finished.folder)
    outcomes = []
    for flip in (False, True):
        folder = tmp_path / str(flip)
        folder.mkdir()
        part = run.Part(inputs=problem.test.inputs, targets=[1 - y if flip else y for y in problem.test.targets])
        given = run.Problem(**vars(problem) | {"test": part})
        run.save_problem(folder, given)
        run.train_all(folder, run.settings_for(given, "", {}), 5, run.time.monotonic(), True)
        outcomes.append(scores(folder))
    assert {row[:4] + row[5:] for row in outcomes[0]} == {row[:4] + row[5:] for row in outcomes[1]}
    assert outcomes[0] != outcomes[1]
    assert outcomes[0] == scores(finished.folder)


def test_a_resumed_comparison_ends_like_an_uninterrupted_one(finished, tmp_path, monkeypatch, capsys):
    add, count = run.add_training, 0

    def interrupt(folder: Path, row: run.Finished) -> None:
        nonlocal count
        add(folder, row)
        count += 1
        if count == 29:  # among the fresh seeds
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run, "add_training", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare(columns(), minutes=5, out=tmp_path / "again")
    said = capsys.readouterr().out
    assert f"To go on: torchrum compare --resume {tmp_path / 'again'}" in said
    assert "Undecided: " in said
    done = len(read_trainings(tmp_path / "again"))
    assert 29 <= done < ALL
    with (tmp_path / "again" / "trainings.jsonl").open("a") as file:
        file.write('{"model": "GRU", "rate"')  # as a crash leaves it
    monkeypatch.setattr(run, "add_training", add)
    monkeypatch.setattr(run, "plan_steps", None)  # the steps are fixed
    outcome = resume(tmp_path / "again", quiet=True)
    assert scores(tmp_path / "again") == scores(finished.folder)
    assert outcome.verdict.sentence == finished.verdict.sentence


def test_the_same_call_again_goes_on_and_another_one_does_not(finished, monkeypatch, tmp_path):
    before = (finished.folder / "trainings.jsonl").read_bytes()
    outcome = compare(columns(), minutes=5, out=finished.folder, quiet=True)
    assert outcome.verdict == finished.verdict
    assert (finished.folder / "trainings.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="holds something else already; name another folder with --out"):
        compare(columns(), minutes=6, out=finished.folder, quiet=True)
    with pytest.raises(ConfigError, match="holds something else already"):
        compare(columns(121), minutes=5, out=finished.folder, quiet=True)


def test_folders_are_named_after_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = {"hidden_sizes": {}, "parameters": {}, "digest": "1"}
    first, other = (run.Settings(data=name, options={}, **shared) for name in ("a/load.csv", "b/load.csv"))
    for settings, name in ((first, "load"), (other, "load-2"), (first, "load")):
        with run.claim_folder(None, "load", settings) as lock:
            assert lock.folder == Path("runs", name)
            run.write_json(lock.folder / "settings.json", vars(settings) | {"steps": 9})
    run.write_json(Path("runs/load/settings.json"), vars(first))  # it was planned, and nothing was trained
    with run.claim_folder(None, "load", other) as lock:
        assert lock.folder == Path("runs/load")


def test_without_time_the_outcome_is_undecided(tmp_path):
    outcome = compare(columns(), minutes=1e-9, out=tmp_path / "short", quiet=True)
    assert outcome.verdict.word == "undecided"
    assert {row[1] for row in outcome.table.rows[2:]} == {"not finished"}
    assert outcome.page.exists() and not (tmp_path / "short" / "best.json").exists()


def test_minutes_must_be_positive():
    with pytest.raises(ConfigError, match="minutes is 0; it must be a positive number"):
        compare(columns(), minutes=0)


def test_only_a_folder_of_a_comparison_can_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a folder of torchrum compare: it has no problem\.pt"):
        resume(tmp_path)


def test_a_damaged_folder_is_an_error(finished, tmp_path):
    (tmp_path / "problem.pt").write_bytes(b"junk")
    with pytest.raises(RunError, match=r"problem\.pt is damaged; start again"):
        resume(tmp_path)
    shutil.copy(finished.folder / "problem.pt", tmp_path)
    (tmp_path / "settings.json").write_text('{"a": 1}')
    with pytest.raises(RunError, match=r"settings\.json is not of a comparison"):
        resume(tmp_path)
    (tmp_path / "trainings.jsonl").write_text('{"model": "GRU"}\n')
    assert read_trainings(tmp_path) == []
    with pytest.raises(ConfigError, match="is a file; name a folder with --out"):
        compare(columns(), out=tmp_path / "trainings.jsonl")


def test_steps_fill_the_time_and_too_little_time_is_an_error():
    times = dict.fromkeys(MODELS, (0.001, 0.1))
    steps = plan_steps(times, 2, 300)
    assert len(MODELS) * 6 * (steps * 0.001 + 0.1) / 2 == pytest.approx(0.8 * 300, rel=0.01)
    assert plan_steps(times, 4, 300) > 1.9 * steps
    times["GRU"] = (0.010, 0.1)  # on many cores the slowest training takes all the time
    assert plan_steps(times, 24, 300) == int((0.8 * 300 - 0.2) / 0.020)
    with pytest.raises(
        ConfigError, match=r"the time left, 1 seconds, is too short for 50 steps .* --minutes 2 or more"
    ):
        plan_steps(times, 2, 1)


def test_the_page_is_complete_and_escapes_names(finished):
    page = finished.page.read_text(encoding="utf-8")
    assert finished.verdict.sentence.split(":")[0] in page
    assert page.index(finished.verdict.sentence[:20]) < page.index("<table>")
    assert all(name.replace("&", "&amp;") in page for name in MODELS)
    assert NAME not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("data:image/svg+xml") == 2  # light and dark
    assert not re.search(r'(?:src|href)="https?:', page)
    assert f'model = load("{finished.folder.resolve().as_posix()}")' in page.replace("&#34;", '"').replace(
        "&quot;", '"'
    )


def test_the_best_model_loads_and_has_the_recorded_score(finished):
    model, data = load(finished.folder), columns()
    problem = run.load_problem(finished.folder)
    wrong = [
        int(answer.argmax()) != int(y)
        for answer, y in zip(model.answers(problem.test.inputs), problem.test.targets, strict=True)
    ]
    assert sum(wrong) / len(wrong) == pytest.approx(model.described["test"])
    rows = [row for row in read_trainings(finished.folder) if row.test is not None]
    best = min((sum(row.validation for row in rows if row.model == name), name) for name in MODELS)[1]
    assert model.described["model"] == best
    # raw sequences are prepared as those of the problem
    raw = np.stack([data[NAME], data["other"]], 1).reshape(-1, 4, 2)
    prepared = torch.stack([model.prepare(x) for x in raw])
    known = torch.stack([*problem.train.inputs, *problem.validation.inputs, *problem.test.inputs])
    assert torch.cdist(known.flatten(1), prepared.flatten(1), compute_mode=EXACT).min(1).values.max() < 1e-5
    assert set(model.predict(raw[:20])) <= {"up", "down"}
    with pytest.raises(
        ConfigError, match=r"predict: a sequence has shape \(4, 1\); it must be \(steps, 2\), with the columns"
    ):
        model.predict([raw[0, :, 0]])


def test_a_process_that_dies_is_an_error(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "add_training", lambda *_: [child.kill() for child in multiprocessing.active_children()])
    folder = tmp_path / "dies"
    folder.mkdir()
    shutil.copy(finished.folder / "problem.pt", folder)
    with pytest.raises(RunError, match="a process that trains has ended unexpectedly"):
        run.train_all(folder, read_settings(finished.folder), 5, run.time.monotonic(), True)


def test_top_level_compare_is_this_one():
    import torchrum

    assert torchrum.compare is compare
    with pytest.raises(AttributeError, match="module 'torchrum' has no attribute 'compares'"):
        torchrum.compares  # noqa: B018


def test_files_are_readable(finished):
    words = json.loads((finished.folder / "problem.json").read_text())
    assert words["kind"] == "classification" and words["sequences"]["train"] == len(
        run.load_problem(finished.folder).train.inputs
    )
