"""Damaged run folders and ledgers: every command ends with success or one line, and writes nowhere else."""

import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path

import pytest

from drawing import draw_less
from fuzz.mutations import mutate
from texts import small_text
from torchrum.cli import main
from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import Trainer, override
from torchrum.paper.ledger import record

ROOT = Path(__file__).parents[2]
SMALL = ["eval_every=2", "log_every=1", "device=cpu", "batch_size=4"]
COPYING = ["task.delay=3", "task.validation_size=16", "model.hidden_size=4", "steps=6", "seed=7", *SMALL]
RECALL = ["task.train_size=4", "task.validation_size=4", "task.test_size=4", "model.hidden_size=2", "steps=2", *SMALL]
BUSY, IDLE = 60, 600  # seconds of processor and of the clock after which a command hangs; the machine may be shared

HERE = ["--quiet", "--device", "cpu", "--devices", "1", "--nodes", "1"]  # a damaged config may ask for any number
TEXT = ["--batch_size", "4", "--task.lanes", "4", "--task.segment", "10", "--task.validation_lanes", "2"]
COMMANDS = {
    "eval": ["eval", "run", "--device", "cpu"],
    "eval last": ["eval", "run", "--device", "cpu", "--checkpoint", "last", "--split", "validation", "--json"],
    "record": ["record", "run", "--results", "new", "--commit", "abc1234"],
    "record as it says": ["record", "run", "--results", "new"],
    "resume": ["train", "--resume", "begun", "--steps", "7", *HERE],
    "resume longer": ["train", "--resume", "run", "--steps", "8", *HERE],
    "figure": ["figure", "run"],
    "eval a text": ["eval", "text", "--device", "cpu"],
    "sample": ["sample", "text", "--length", "5"],
    "record a text": ["record", "text", "--results", "new", "--commit", "abc1234", "--arrays"],
    "resume a text": ["train", "--resume", "text", "--steps", "5", *HERE],
    "table": ["table", "--results", "results"],
    "table within": ["table", "--results", "results", "--within", "1000"],
    "table best": ["table", "--results", "results", "--best", "4"],
    "list": ["list", "--plain", "--results", "results"],
    "figure copying": ["figure", "copying", "--results", "results", "--out", "figures"],
    "figure recall": ["figure", "recall", "--results", "results", "--out", "figures"],
    "report": ["report", "--results", "results", "--out", "report.html"],
    "report a run": ["report", "run", "--out", "report.html"],
    "bench": ["bench", "--report", "results/bench/cpu.json"],
    "figure kernels": ["figure", "kernels", "--results", "results", "--out", "figures"],
}
ALLOWED = {"run", "begun", "text", "book.txt", "results", "new", "figures", "report.html"}
DRAWN = ("figure", "report")  # which takes a second
OFTEN = [name for name in COMMANDS for _ in range(1 if name.startswith(DRAWN) else 8)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A finished run, an interrupted one and a ledger, all small."""
    folder = tmp_path_factory.mktemp("sound")
    Trainer(override(load_recipe("copying-lstm-t200"), COPYING), quiet=True).fit(folder / "run")
    Trainer(override(load_recipe("recall-lstm-t30"), RECALL), quiet=True).fit(folder / "recall")
    (folder / "book.txt").write_bytes(small_text(2000))
    words = ["--steps", "4", "--eval_every", "2", "--model.hidden_size", "4", "--model.embedding_size", "3", *TEXT]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrum.cli.train.draw", lambda run: None)
        book = ["--data", str(folder / "book.txt"), "--out", str(folder)]
        assert main(["train", "char-rum", *book, *words, *HERE]) == 0
    (folder / "char-rum").rename(folder / "text")
    for name in ("run", "recall", "text"):
        arrays = name == "text"
        assert main(["eval", str(folder / name), "--device", "cpu"]) == 0
        record(folder / name, folder / "results", commit="abc1234", note="a note", arrays=arrays)
    shutil.rmtree(folder / "recall")
    (folder / "results" / "bench").mkdir()
    shutil.copy(ROOT / "results" / "bench" / "cpu.json", folder / "results" / "bench")
    shutil.copytree(folder / "run", folder / "begun")
    (folder / "begun" / "result.json").unlink()
    return folder


def snapshot(*folders: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
    return found


def hang(number, frame):
    raise TimeoutError(f"the command is still running after {BUSY} seconds of work, or {IDLE} of waiting")


def attempt(arguments: list[str]) -> tuple[int | None, str]:
    """Exit code of a command; None and the traceback where it broke."""
    signal.setitimer(signal.ITIMER_PROF, BUSY)
    signal.alarm(IDLE)
    try:
        return main(arguments), ""
    except BaseException:
        return None, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_are_answered_with_one_line(sound, tmp_path, monkeypatch, capsys, count):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # a damaged config may ask for a tracker
    monkeypatch.setattr("torchrum.cli.train.draw", lambda run: None)
    if count == 500:
        draw_less(monkeypatch)
    before = {number: signal.signal(number, hang) for number in (signal.SIGALRM, signal.SIGPROF)}
    work, outside, moved = (tmp_path / name for name in ("work", "outside", "moved"))
    failures, endings = [], set()
    for seed in range(count):
        choose = random.Random(seed)
        name = choose.choice(OFTEN)
        target = next((word for word in ("run", "begun", "text") if word in COMMANDS[name]), "results")
        for folder in (work, outside, moved):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound / target, work / target)
        outside.mkdir()
        (outside / "victim").write_text("{}")
        done = [mutate(work / target, outside, choose, again > 0) for again in range(choose.choice((1, 1, 1, 2)))]
        monkeypatch.chdir(work)
        kept = snapshot(outside, moved)
        code, trace = attempt(COMMANDS[name])
        error = capsys.readouterr().err
        endings.add((name, code))
        problems = {
            "broke": code not in (0, 1, 2),
            "more than one line": code and (error.count("\n") != 1 or not error.startswith("torchrum: ")),
            "wrote outside": snapshot(outside, moved) != kept,
            "wrote beside": {path.name for path in work.iterdir()} - ALLOWED,
        }
        if any(problems.values()):
            why = [text for text, found in problems.items() if found]
            failures.append(f"seed {seed}, {name}, {'; '.join(done)}: {why} {error[-300:]} {trace[-1200:]}")
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures[:20])
    harmless = {name for name, code in endings if code == 0}
    assert harmless >= {"eval", "resume", "sample", "table", "list"}  # some damage does no harm
