"""Asking a small trained reader about stories that it has not seen."""

import io
import json
import random
from pathlib import Path

import pytest

from stories import MOVES, PEOPLE, PLACES, use_made_up_task1
from torchrum.cli import main
from torchrum.lab.tasks import Babi
from torchrum.lab.training import ModelConfig, OptimizerConfig, TrainConfig, Trainer, load_model

from lab.training.tiny import tiny, tiny_model  # isort: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A RUM with associative memory that has learnt task 1 on made-up files."""
    folder = tmp_path_factory.mktemp("ask")
    config = TrainConfig(
        name="task1",
        task=Babi(task=1, reading="sentences"),
        model=ModelConfig(layer="rum", hidden_size=32, embedding_size=32, options={"lam": 1}),
        optimizer=OptimizerConfig(lr=5e-3, clip=1.0, schedule="cosine"),
        batch_size=32,
        steps=1200,
        log_every=400,
        eval_every=400,
        checkpoint_every=1200,
        device="cpu",
    )
    with pytest.MonkeyPatch.context() as patch:
        use_made_up_task1(patch, folder / "data", stories=600)
        result = Trainer(config, quiet=True).fit(folder / "run")
    assert result.best is not None and result.best >= 0.95
    return folder / "run"


def stories(count: int):
    """Stories of which each person's last place is known, and who is asked for."""
    draw = random.Random(20)
    for _ in range(count):
        told = [(draw.choice(PEOPLE), draw.choice(PLACES)) for _ in range(draw.randint(1, 8))]
        text = " ".join(f"{person} {draw.choice(MOVES)} the {place}." for person, place in told)
        person = draw.choice(told)[0]
        yield text, f"Where is {person}?", dict(told)[person]


def test_unseen_stories_are_answered(run, capsys):
    right = 0
    for story, question, expected in stories(20):
        assert main(["ask", str(run), "--story", story, "--question", question, "--json"]) == 0
        reply = json.loads(capsys.readouterr().out)
        chances = list(reply["answers"].values())
        assert len(chances) == 3 and chances == sorted(chances, reverse=True) and 0 < sum(chances) <= 1.0001
        assert reply["unknown"] == []
        right += next(iter(reply["answers"])) == expected
    assert right >= 18


def test_the_checkpoint_is_the_one_that_was_asked_for(run, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "torchrum.cli.trained.load_model", lambda _, which: asked.append(which) or load_model(run, which)
    )
    for words in ([], ["--checkpoint", "last"]):
        assert main(["ask", str(run), "--story", "Mary moved.", "--question", "Where is Mary?", *words]) == 0
    assert asked == ["best", "last"]


def test_unknown_words_are_named_and_case_is_forgiven(run, capsys):
    story = "mary went to the garden. Bob went to the garage"
    assert main(["ask", str(run), "--story", story, "--question", "where is Mary", "--top", "1"]) == 0
    answer, unknown = capsys.readouterr().out.splitlines()
    assert answer.startswith("garden  ") and answer.endswith("%")
    assert unknown == "not known to the model, read as blanks: Bob, garage"


def test_a_dialogue(run, monkeypatch, capsys):
    lines = "Where is Mary?\nMary went to the garden.\nWhere is Mary?\n\nJohn moved to the office. Where is John?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["ask", str(run), "--top", "1"]) == 0
    answers = capsys.readouterr()
    first, second = answers.out.splitlines()
    assert first.startswith("garden") and second.startswith("office")
    assert "a story of at least one sentence" in answers.err  # the first question has none


def test_what_is_asked_by_a_program_is_answered_in_json_alone(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is Mary?\nMary went to the garden.\nWhere is Mary?\n"))
    assert main(["ask", str(run), "--json"]) == 0
    assert [next(iter(json.loads(line)["answers"])) for line in capsys.readouterr().out.splitlines()] == ["garden"]


def test_a_byte_that_is_no_text_is_an_unknown_word(run, monkeypatch, capsys):
    lines = b"Mary went to the garden.\nWhere is \xff Mary?\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", errors="strict"))
    assert main(["ask", str(run)]) == 0
    assert "not known to the model, read as blanks: \N{REPLACEMENT CHARACTER}" in capsys.readouterr().out


@pytest.mark.parametrize("lines", ["", "Mary went to the garden.\nWhere is Mary\n", "Where is Mary?\n"])
def test_input_without_a_question(run, lines, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["ask", str(run)]) == 2
    assert "no question was answered: a question ends with ?; or pass it with --question." in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--question", "Where is Mary?"], "a story of at least one sentence and a question are needed"),
        (["--story", "Mary went to the garden.", "--question", "?"], "a story of at least one sentence"),
        (["--story", "Mary " * 9, "--question", "Where is Mary?"], "a sentence has 10 words, but the model reads 7"),
        (["--story", "Mary moved.", "--question", "Where?", "--top", "0"], "--top is 0"),
    ],
)
def test_mistakes_have_a_message(run, arguments, message, capsys):
    assert main(["ask", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_run_of_another_task_has_no_answers(tmp_path, capsys):
    config = tiny()
    Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run")
    assert main(["ask", str(tmp_path / "run"), "--question", "Where?"]) == 2
    assert "was trained on First, not on bAbI" in capsys.readouterr().err
    assert main(["ask", str(tmp_path / "nowhere"), "--question", "Where?"]) == 1


def test_every_layout_can_be_asked():
    for fields in ({}, {"question": "twice"}, {"task": None}):
        task = Babi(**{"task": 1, **fields})
        batch, unknown = task.ask("Mary went to the garden.", "Where is Mary?")
        words = [task.words()[number] for number in batch.x[0].tolist() if number]
        question = ["Where", "is", "Mary", "?"]
        told = ["Mary", "went", "to", "the", "garden", "."]
        assert words == (question if fields.get("question") else []) + told + question
        assert not unknown
