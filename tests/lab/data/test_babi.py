"""The text of bAbI: stories, questions, what is refused, and what is known without the files."""

import collections
import math

import pytest

from stories import REAL, needs_babi, task1
from torchrum.lab.data.babi import (
    ALL_TASKS,
    ANIMALS,
    COLOURS,
    SIZES,
    TASKS,
    Question,
    Sizes,
    augment_induction,
    count,
    hold_out,
    parse,
    read_task,
    small,
    symbols,
    tokens,
)
from torchrum.lab.data.files import COMPOSITE

TEXT = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Mary took the milk, there.
5 What does Mary carry?\tmilk,football\t4 1
1 Lily is a frog.
2 What is Lily?\tfrog\t1
"""


def test_a_question_is_asked_of_the_statements_before_it():
    first, second = parse(TEXT)
    assert first.statements[0] == ("Mary", "moved", "to", "the", "bathroom", ".")
    assert first.statements[2] == ("Mary", "took", "the", "milk", ",", "there", ".")
    assert first.questions == (
        Question(2, ("Where", "is", "Mary", "?"), "bathroom", (0,)),
        Question(3, ("What", "does", "Mary", "carry", "?"), "milk,football", (2, 0)),
    )
    assert (len(second.statements), second.questions[0].answer) == (1, "frog")


def test_a_file_without_its_last_newline_or_with_windows_ones():
    assert parse(TEXT.rstrip("\n")) == parse(TEXT) == parse(TEXT.replace("\n", "\r\n"))


def test_words_and_punctuation_are_tokens():
    assert tokens("Is the box, there?") == ("Is", "the", "box", ",", "there", "?")


def test_validation_is_the_last_tenth_with_stories_whole():
    stories = parse(task1(30, seed=0))
    assert hold_out(stories) == 27 and count(stories[27:]) == 15
    assert hold_out(stories[:11]) == 9  # 5.5 of 55 questions: two stories of five


def test_task_16_is_augmented_without_changing_an_answer():
    text = "".join(
        f"{i} {s}\n"
        for i, s in enumerate(
            ["Lily is a frog.", "Bernhard is a frog.", "Bernhard is green.", "Brian is a lion.", "Brian is white.",
             "Julius is a swan.", "Julius is green.", "Lily is green.", "Greg is a swan.",
             "What color is Greg?\tgreen\t9 6 7"], 1)
    )  # fmt: skip
    (story,) = parse(text)
    (changed,) = augment_induction([story], seed=0)
    assert changed.questions == story.questions
    assert all(changed.statements[place] == story.statements[place] for place in (8, 5, 6))
    words = collections.Counter(word for sentence in changed.statements for word in sentence)
    assert [words[colour] for colour in COLOURS] == [1, 1, 1, 1]
    assert words["swan"] == 2 and sum(words[animal] for animal in ANIMALS) == 5
    assert (
        changed.statements[0] == story.statements[0] and changed.statements[4] == story.statements[4]
    )  # no repetition
    assert augment_induction([story], seed=0) == (changed,)
    shorter = parse("1 Lily is a frog.\n2 Lily is green.\n3 What color is Lily?\tgreen\t1 2\n")
    assert augment_induction(shorter, seed=0) == shorter


def entropy(stories) -> float:
    counts = collections.Counter(question.answer for story in stories for question in story.questions)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def sizes(texts, tests) -> Sizes:
    stories = [story for text in texts for story in (*text.train, *text.validation, *text.test)]
    sentences = (s for story in stories for s in (*story.statements, *(q.words for q in story.questions)))
    longest = max(question.after for story in stories for question in story.questions)
    return Sizes(round(entropy(tests), 6), max(map(len, sentences)), longest)


def vocabulary(texts) -> tuple[str, ...]:
    """The blank, then every word and answer in training, validation and test, sorted."""
    words = set()
    for story in (story for text in texts for story in (*text.train, *text.validation, *text.test)):
        words.update(*story.statements)
        for question in story.questions:
            words.update(question.words, (question.answer,))
    return ("", *sorted(words))


@needs_babi
@pytest.mark.parametrize("task", [1, 15, 16, 17])
def test_what_is_known_without_the_files_is_true(task, monkeypatch):
    monkeypatch.setenv("TORCHRUM_DATA", str(REAL))
    text = read_task(task)
    assert sizes([text], text.test) == SIZES[task - 1]
    assert vocabulary([text]) == symbols(task)
    assert (count(text.train), count(text.validation), count(text.test)) == (9000, 1000, 1000)
    assert text.origin == "official"


@needs_babi
@pytest.mark.slow
def test_what_is_known_of_all_tasks_is_true(monkeypatch):
    monkeypatch.setenv("TORCHRUM_DATA", str(REAL))
    texts = [read_task(task) for task in TASKS]
    for task, text, known in zip(TASKS, texts, SIZES, strict=True):
        assert sizes([text], text.test) == known
        assert vocabulary([text]) == symbols(task)
        assert count((*text.train, *text.validation)) == 10_000 and 1000 <= count(text.validation) <= 1010
    assert sizes(texts, [story for text in texts for story in text.test]) == ALL_TASKS
    assert vocabulary(texts) == symbols(None)
    assert {text.origin for task, text in enumerate(texts, 1) if task != 3} == {"official"}
    assert texts[2].origin in ("official", COMPOSITE)


@needs_babi
def test_the_small_variant_is_the_start_of_the_large_one(monkeypatch):
    monkeypatch.setenv("TORCHRUM_DATA", str(REAL))
    large = read_task(1)
    text = small(large)
    assert (count(text.train), count(text.validation)) == (900, 100)
    assert text.train + text.validation == large.train[:200] and text.test == large.test
