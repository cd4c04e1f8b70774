import json
import socket
from pathlib import Path

import pytest

from torchrum.paper.ledger import LedgerError, read_ledger
from torchrum.paper.ledger.record import read_run
from torchrum.paper.ledger.schema import from_json

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
