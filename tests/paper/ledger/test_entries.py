import dataclasses
import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import ConfigError, RunError, Trainer, evaluate, override, read_config, read_metrics
from torchrum.lab.training.evaluation import read_looks, write_look
from torchrum.paper.ledger import LedgerError, read_ledger, record
from torchrum.paper.ledger.entries import changes, from_json, read_run, thin, write_entry
from torchrum.paper.ledger.tables import task_tables

RESULTS = Path(__file__).parents[3] / "results"


def test_every_entry_of_the_ledger_is_sound():
    """Layout, recipe, numbers that follow from the curve, and names: reading checks them all."""
    entries = read_ledger(RESULTS)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in RESULTS.glob("*.jsonl")}
    assert texts.keys() == {"babi", "char", "copying", "recall"}
    for task, text in texts.items():
        assert text == "".join(f"{entry.to_json()}\n" for entry in entries if entry.task == task)
        assert socket.gethostname() not in text
        assert len(text) < 2_000_000


@pytest.fixture
def data(run) -> dict:
    return json.loads(read_run(run, commit="abc1234").to_json())


def test_a_sound_entry_is_read(data):
    entry = from_json(json.dumps(data), "here")
    assert json.loads(entry.to_json()) == data


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": "7"}, "seed is '7', but it must be a whole number"),
        ({"steps": True}, "steps is True, but it must be a whole number"),
        ({"final": {"loss": float("nan")}}, r"final\.loss is nan, but it must be a finite number"),
        ({"test": {"loss": 1.0, "step": 6}, "tested": ["2026-01-31"]}, "test must have ratio and the step"),
        ({"test": {"ratio": 1.0, "step": 7}, "tested": ["2026-01-31"]}, "the step of its checkpoint, up to 6"),
        ({"test": {"ratio": 1.0, "step": 6}, "tested": []}, "test and tested belong together"),
        ({"surprise": 1}, "'surprise' is not a field of it"),
        ({"format": 2}, "format is 2, but this version reads 1"),
        ({"recipe": "copying-lstmm-t200"}, "its recipe cannot be rebuilt: no recipe 'copying-lstmm-t200'"),
        ({"recipe": "os:abort"}, "its recipe cannot be rebuilt: no recipe 'os:abort'"),
        ({"recipe": "copying-lstm"}, "its recipe cannot be rebuilt: no recipe 'copying-lstm'"),
        ({"overrides": ["task.dilay=3"]}, "its recipe cannot be rebuilt: no field 'task.dilay'"),
        ({"overrides": ["task.delay=0"]}, "its recipe cannot be rebuilt: Copying: delay=0"),
        ({"baseline": 0.5}, "baseline is 0.5, but the task's is"),
        ({"steps": 5}, "steps is 5, but the curve ends at 6"),
        ({"command": "torchrum train copying-lstm-t200 --out /home/me/runs"}, "names a path or a machine"),
        ({"hardware": "me@box"}, "names a path or a machine"),
        ({"note": "see /data/runs"}, r"names a path or a machine \('/d'\)"),
        ({"note": "(/data/runs)"}, "names a path or a machine"),
        ({"note": "in ~me/runs"}, "names a path or a machine"),
        ({"note": "in $HOME"}, "names a path or a machine"),
        ({"note": r"on \\server\share"}, "names a path or a machine"),
        ({"note": "on 10.1.2.3"}, "names a path or a machine"),
        ({"note": "on node7.cluster.example.com"}, "names a path or a machine"),
        ({"note": "https://a/b"}, "names a path or a machine"),
        ({"note": "one line\n\n# another"}, "is more than one line"),
        ({"hardware": "a\x1b[31mb"}, "has characters that cannot be printed"),
        ({"train_curve": {"step": [1, 1], "loss": [2.0, 2.0]}}, "the steps of train_curve must rise"),
        ({"train_curve": {"step": [1, 2], "loss": [2.0]}}, "lists of one length, at most 200 points"),
        ({"train_curve": {"step": [], "loss": []}}, "train_curve needs step and loss"),
    ],
)
def test_an_unsound_entry_is_refused(data, change, message):
    with pytest.raises(LedgerError, match=message):
        from_json(json.dumps(data | change), "here")


@pytest.mark.parametrize("score", ["loss", "accuracy"])
def test_final_numbers_must_follow_from_the_curve(data, score):
    data["final"][score] *= 0.9
    data["final"][score] += 0.001
    with pytest.raises(LedgerError, match=r"final is .* but the curve ends with"):
        from_json(json.dumps(data), "here")


def test_text_that_is_no_entry_is_refused():
    with pytest.raises(LedgerError, match="this is not JSON"):
        from_json("{", "here")
    with pytest.raises(LedgerError, match=r"it is .*, but it must be an object"):
        from_json("[]", "here")


def test_an_entry_in_the_wrong_file_is_refused(data, tmp_path):
    (tmp_path / "recall.jsonl").write_text(json.dumps(data))
    with pytest.raises(LedgerError, match=r"recall\.jsonl, line 1: this entry belongs in copying\.jsonl"):
        read_ledger(tmp_path)


def test_a_run_with_two_lines_is_refused(data, tmp_path):
    (tmp_path / "copying.jsonl").write_text(2 * f"{json.dumps(data)}\n")
    with pytest.raises(LedgerError, match=r"line 2: copying-lstm-t200-seed7-\w+ has more than one line"):
        read_ledger(tmp_path)


@pytest.mark.parametrize("note", ["loss/baseline of 0.5", "and/or", "at 1e-3, model.lam 1.", "T = 200 / 4"])
def test_plain_words_are_no_paths(data, note):
    assert from_json(json.dumps(data | {"note": note}), "here").note == note


COMMIT = "0123456789abcdef"


def test_an_entry_tells_its_run(run, tmp_path):
    recorded = record(run, tmp_path, commit=COMMIT, note="tried once")
    (entry,) = read_ledger(tmp_path)
    assert recorded == entry
    assert (tmp_path / "copying.jsonl").read_text() == f"{entry.to_json()}\n"
    assert entry.name.startswith("copying-lstm-t200-seed7-")
    assert entry.recipe == "copying-lstm-t200"
    assert entry.seed == 7
    assert set(entry.overrides) == {
        "batch_size=4", "eval_every=2", "model.hidden_size=4", "steps=6", "task.delay=3", "task.validation_size=16",
    }  # fmt: skip
    assert entry.note == "tried once"
    assert entry.commit == COMMIT
    assert entry.steps == 6
    assert entry.curve["step"] == [2, 4, 6]
    assert entry.train_curve["step"] == [1, 2, 3, 4, 5, 6]
    last = read_metrics(run, "validation")[-1]
    assert entry.final == pytest.approx({key: last[key] for key in ("loss", "accuracy", "ratio")}, rel=1e-5)
    assert entry.parameters == 4 * 4 * (10 + 4) + 2 * 4 * 4 + 9 * (4 + 1)  # torch's LSTM has two biases; read-out
    assert entry.config().task.delay == 3
    assert entry.test["step"] in (2, 4, 6)  # of the best checkpoint
    scored = evaluate(run, "test", "best", device="cpu")
    assert entry.test["ratio"] == pytest.approx(scored["ratio"], rel=1e-5)
    validated = evaluate(run, "validation", "best", device="cpu")
    assert scored["ratio"] != validated["ratio"]  # they are other examples
    assert len(entry.tested) == 1


def test_a_record_is_not_written_over(run, tmp_path):
    record(str(run), str(tmp_path), commit=COMMIT)
    path = tmp_path / "copying.jsonl"
    assert read_ledger(str(tmp_path)) == read_ledger(tmp_path) != []
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"already has copying-lstm-t200-seed7-\w+; pass --replace"):
        record(run, tmp_path, commit=COMMIT, note="again")
    assert path.read_bytes() == before
    record(run, tmp_path, commit=COMMIT, note="again", replace=True)
    (entry,) = read_ledger(tmp_path)
    assert entry.note == "again"


def test_a_record_keeps_the_other_lines_and_their_order(run, tmp_path):
    entry = record(run, tmp_path, commit=COMMIT)
    others = [dataclasses.replace(entry, seed=seed) for seed in (9, 1)]
    for other in others:
        write_entry(tmp_path, other)
    before = (tmp_path / "copying.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in before] == [1, 7, 9]
    record(run, tmp_path, commit=COMMIT, note="again", replace=True)
    after = (tmp_path / "copying.jsonl").read_text().splitlines()
    assert [after[0], after[2]] == [before[0], before[2]]
    assert json.loads(after[1])["note"] == "again"


def test_processes_that_record_at_once_lose_nothing(run, tmp_path):
    entry = read_run(run, commit=COMMIT)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: write_entry(tmp_path, dataclasses.replace(entry, seed=seed)), range(24)))
    assert sorted(entry.seed for entry in read_ledger(tmp_path)) == list(range(24))


def test_a_damaged_ledger_is_not_written_over(run, tmp_path):
    (tmp_path / "copying.jsonl").write_text('{"recipe": "cop\n')
    with pytest.raises(LedgerError, match=r"copying\.jsonl has a damaged line, .*; restore the file first"):
        record(run, tmp_path, commit=COMMIT)
    assert (tmp_path / "copying.jsonl").read_text() == '{"recipe": "cop\n'


def test_recording_evaluates_nothing(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "test.json").unlink()
    with pytest.raises(LedgerError, match=r"run has no test scores of its best checkpoint; run torchrum eval .*/run"):
        record(copy, tmp_path / "results", commit=COMMIT)
    assert not (tmp_path / "results").exists()
    assert not (copy / "test.json").exists()


def test_settings_of_dynamic_evaluation_are_recorded(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (look,) = read_looks(copy)
    for bpc, settings in ((1.3, "segment 50"), (1.2, "segment 20")):
        write_look(copy, look.step, {"bpc": bpc}, settings)
    entry = record(copy, tmp_path / "results", commit=COMMIT)
    assert (entry.test["dynamic_bpc"], entry.dynamic) == (1.2, "segment 20")  # the last of them
    assert len(entry.tested) == 3
    assert "dynamic evaluation with segment 20" in "".join(t.markdown() for t in task_tables([entry], "copying"))


def test_a_run_that_has_not_ended_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "result.json").unlink()
    with pytest.raises(LedgerError, match="has not ended; finish it with"):
        record(copy, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        record(tmp_path, tmp_path / "results")


def test_a_run_that_does_not_know_its_commit_needs_one(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    environment = json.loads((copy / "environment.json").read_text())
    (copy / "environment.json").write_text(json.dumps(environment | {"commit": None}))
    with pytest.raises(LedgerError, match="does not say which commit it ran; pass it as --commit"):
        read_run(copy)
    (copy / "environment.json").write_text(json.dumps(environment | {"commit": "abc1234", "uncommitted_changes": True}))
    assert read_run(copy).commit == "abc1234+changes"


def test_parameters_of_an_older_run_are_counted(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    environment = json.loads((copy / "environment.json").read_text())
    counted = environment.pop("parameters")
    (copy / "environment.json").write_text(json.dumps(environment))
    assert read_run(copy, commit=COMMIT).parameters == read_run(run, commit=COMMIT).parameters == counted > 0


def test_a_run_of_no_recipe_is_refused(run, tmp_path):
    Trainer(dataclasses.replace(read_config(run), name="my-own"), quiet=True).fit(tmp_path / "run")
    with pytest.raises(LedgerError, match=r"no recipe 'my-own'.*The ledger holds runs of recipes"):
        record(tmp_path / "run", tmp_path / "results")


def test_a_run_names_no_module(run):
    with pytest.raises(LedgerError, match="no recipe 'os:abort'"):
        changes(dataclasses.replace(read_config(run), name="os:abort"))


@pytest.mark.parametrize("commit", ["", "main", "abc", "HEAD~1", "g" * 10, "0" * 41, "/home/me"])
def test_a_given_commit_is_a_hash(run, tmp_path, commit):
    with pytest.raises(ConfigError, match=r"--commit is .*, but it must be a hash of 7 to 40 hexadecimal digits"):
        record(run, tmp_path / "results", commit=commit)


EDITS = {
    "name": ({"name": "copying-gru-t200"}, "name 'copying-lstm-t200' -> 'copying-gru-t200'"),
    "seed": ({"seed": 8}, "seed 7 -> 8"),
    "steps": ({"steps": 7}, "steps 6 -> 7"),
    "batch_size": ({"batch_size": 5}, "batch_size 4 -> 5"),
    "precision": ({"precision": "bf16-mixed"}, "precision '32-true' -> 'bf16-mixed'"),
    "task": ({"task": {"delay": 4}}, r"task.delay 3 -> 4"),
    "model": ({"model": {"hidden_size": 5}}, r"model.hidden_size 4 -> 5"),
    "layer": ({"model": {"layer": "gru"}}, r"model.layer 'lstm' -> 'gru'"),
    "rate": ({"optimizer": {"lr": 0.5}}, r"optimizer.lr 0.001 -> 0.5"),
}


def edit(run, change):
    config = json.loads((run / "config.json").read_text())
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (run / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_config_is_neither_recorded_nor_scored(run, tmp_path, name):
    copy = shutil.copytree(run, tmp_path / "run")
    change, message = EDITS[name]
    edit(copy, change)
    with pytest.raises(RunError, match=rf"config\.json is not the config of the run's checkpoint: {message}"):
        record(copy, tmp_path / "results", commit=COMMIT)
    assert not (tmp_path / "results").exists()
    if name == "steps":  # the weights and the examples are the same
        assert evaluate(copy, device="cpu") == evaluate(run, device="cpu")
    else:
        with pytest.raises(RunError, match=message):
            evaluate(copy, device="cpu")


def test_a_run_is_not_resumed_under_another_name(run, tmp_path):
    """Its next checkpoint would have that name, and be recorded as a run of another recipe."""
    copy = shutil.copytree(run, tmp_path / "run")
    edit(copy, {"name": "copying-gru-t200"})
    longer = dataclasses.replace(read_config(copy), steps=8)
    with pytest.raises(RunError, match="belongs to another run: name 'copying-lstm-t200' -> 'copying-gru-t200'"):
        Trainer(longer, quiet=True).fit(copy, resume=True)
    with pytest.raises(ConfigError, match="a resumed run cannot change name 'copying-lstm-t200' -> 'copying-gru-t200'"):
        Trainer(longer, quiet=True).fit(run, resume=True)


@pytest.mark.parametrize("damage", ["first", "middle", "changed", "added", "all"])
def test_metrics_that_are_not_those_of_the_run_are_not_recorded(run, tmp_path, damage):
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join({
        "first": lines[1:],
        "middle": lines[:3] + lines[4:],
        "changed": [*lines[:3], lines[3].replace('"loss": ', '"loss": 1'), *lines[4:]],
        "added": [*lines, lines[-1]],
        "all": [],
    }[damage]))  # fmt: skip
    with pytest.raises(RunError, match=r"metrics\.jsonl is not as the run wrote it: lines are missing"):
        record(copy, tmp_path / "results", commit=COMMIT)


def test_a_run_without_a_checkpoint_is_not_recorded(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(RunError, match="has no last checkpoint"):
        record(copy, tmp_path / "results", commit=COMMIT)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.lam=1", "optimizer.clip=1.0", "stop_at=none"],
        ["graph=false", "precision=bf16-mixed", "task.symbols=4"],
        ["model.eta=0.5", "optimizer.betas=0.9,0.99", "task.delay=7"],
        ["model.layer=gru"],
        ["model.layer=ln_lstm", "model.zoneout=0.1"],
    ],
)
def test_overrides_rebuild_the_config(overrides):
    recipe = load_recipe("copying-rum-paper-t200")
    config = override(recipe, overrides)
    assert len(changes(config)) == len(overrides)
    assert override(recipe, changes(config)) == config


def test_thinning_keeps_both_ends_and_the_limit():
    lines = [{"kind": "train", "step": i, "loss": i / 3, "seconds": 1.0, "lr": 1e-3} for i in range(1, 1001)]
    thinned = thin(lines)
    assert set(thinned) == {"step", "loss"}
    assert len(thinned["step"]) == 200
    assert (thinned["step"][0], thinned["step"][-1]) == (1, 1000)
    assert all(loss == pytest.approx(step / 3, rel=1e-5) for step, loss in zip(*thinned.values(), strict=True))
    assert thin(lines[:7])["step"] == [1, 2, 3, 4, 5, 6, 7]


def test_an_option_with_the_name_of_a_field_stays_an_option():
    changed = override(load_recipe("char-ptb-hyper-lstm"), ["model.options.embedding_size=4"])
    assert changes(changed) == ["model.options.embedding_size=4"]
    assert override(load_recipe("char-ptb-hyper-lstm"), changes(changed)) == changed
