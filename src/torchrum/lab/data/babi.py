"""bAbI question answering v1.2 (Weston et al., 2015): the text of its 20 tasks, parsed.

A file is a list of stories. A line is a number, which is 1 where a story begins, and a statement, or a question with
its answer and the numbers of the statements that support it, separated by tabs. The story of a question is the
statements before it, without earlier questions. Words and punctuation are tokens, case is kept, and an answer of
several words ("milk,football") is one token.
"""

import functools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchrum.lab.data.files import BABI_TASKS, data_root, read_files

Sentence = tuple[str, ...]


class Sizes(NamedTuple):
    """Sizes of a task, known without its files; a test compares them with the files."""

    entropy: float
    """Entropy of the answers of the test questions, in nats."""
    words: int
    """Words in the longest sentence or question."""
    statements: int
    """Statements in the longest story."""


TASKS = tuple(facts["task"] for facts in BABI_TASKS)
NAMES = [facts["name"] for facts in BABI_TASKS]
"""Names of tasks 1 to 20."""
SIZES = tuple(Sizes(*(facts[name] for name in Sizes._fields)) for facts in BABI_TASKS)
"""Sizes of tasks 1 to 20."""
ALL_TASKS = Sizes(3.239074, 12, 268)
"""Sizes of the 20 tasks together, with one vocabulary."""


@functools.cache
def symbols(task: int | None) -> tuple[str, ...]:
    """Return the vocabulary of a task, or of all, in the order of its numbers; "" is the blank, number 0."""
    chosen = [facts["vocabulary"].split() for facts in BABI_TASKS if task in (None, facts["task"])]
    return ("", *sorted({word for words in chosen for word in words}))


SMALL = 1000
"""Training questions of the variant ``en``, whose files are the start of the files of ``en-10k``."""


class Question(NamedTuple):
    """A question within a story."""

    after: int
    """Number of statements before it."""
    words: Sentence
    answer: str
    supports: tuple[int, ...]
    """Statements that the answer follows from, counted from 0."""


@dataclass(frozen=True)
class Story:
    """Statements, and the questions between them."""

    statements: tuple[Sentence, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class TaskText:
    """The stories of one task."""

    train: tuple[Story, ...]
    validation: tuple[Story, ...]
    """The last tenth of the training questions, with their stories whole."""
    test: tuple[Story, ...]
    origin: str
    """Origin of the training file: official, or another."""


@functools.lru_cache(maxsize=2**16)  # a task repeats a few thousand sentences
def tokens(text: str) -> Sentence:
    """Split a text into words and punctuation: ``Where is Mary?`` is four tokens."""
    return tuple(part for piece in re.split(r"(\W)", text) if (part := piece.strip()))


def parse(text: str) -> tuple[Story, ...]:
    """Parse the stories of a file whose hash is right."""
    stories: list[tuple[list[Sentence], list[Question], dict[str, int]]] = []
    for line in text.splitlines():
        number, _, rest = line.partition(" ")
        if number == "1":
            stories.append(([], [], {}))
        statements, questions, places = stories[-1]  # places: number of a line -> number of the statement
        if "\t" in rest:
            question, answer, supports = rest.split("\t")
            found = tuple(places[number] for number in supports.split())
            questions.append(Question(len(statements), tokens(question), answer.strip(), found))
        else:
            places[number] = len(statements)
            statements.append(tokens(rest))
    return tuple(Story(tuple(statements), tuple(questions)) for statements, questions, _ in stories)


def read_task(task: int) -> TaskText:
    """Read the stories of a task; fetch them if they are not on disk."""
    return _read_task(task, str(data_root()))


@functools.lru_cache(maxsize=40)
def _read_task(task: int, root: str) -> TaskText:
    paths = [f"en-10k/qa{task}_{NAMES[task - 1]}_{split}.txt" for split in ("train", "test")]
    files = read_files("babi", paths)
    train, test = (parse(files[path].content.decode("utf-8")) for path in paths)
    cut = hold_out(train)
    return TaskText(train[:cut], train[cut:], test, files[paths[0]].origin)


def hold_out(stories: Sequence[Story]) -> int:
    """Find the story with which the last tenth of the questions begins."""
    total, found, cut = count(stories), 0, len(stories)
    while 10 * found < total:
        cut -= 1
        found += len(stories[cut].questions)
    return cut


def count(stories: Iterable[Story]) -> int:
    """Count the questions of some stories."""
    return sum(len(story.questions) for story in stories)


def small(text: TaskText) -> TaskText:
    """Cut a task to the variant ``en``: the first 1,000 training questions, the last tenth for validation."""
    kept: list[Story] = []
    for story in text.train:
        missing = SMALL - count(kept)
        if not missing:
            break
        kept.append(replace(story, questions=story.questions[:missing]))
    cut = hold_out(kept)
    return replace(text, train=tuple(kept[:cut]), validation=tuple(kept[cut:]))


ANIMALS, COLOURS = ("lion", "rhino", "swan", "frog"), ("white", "green", "gray", "yellow")


def augment_induction(stories: Iterable[Story], seed: int) -> tuple[Story, ...]:
    """Remove the shortcut of task 16 (Franke et al., 2018): each colour occurs once in a story.

    In half of the questions the commonest colour of the story is the answer, and models settle on it. In stories of
    nine statements the three that support the answer stay; in the other statements an animal or colour that has
    occurred is replaced by one that has not. Answers do not change.
    """
    choose = random.Random(seed)
    return tuple(_spread_out(story, choose) for story in stories)


def _spread_out(story: Story, choose: random.Random) -> Story:
    if len(story.statements) != 9 or len(story.questions) != 1:
        return story
    (question,) = story.questions
    support = {story.statements[place] for place in question.supports}
    used = {word for sentence in support for word in sentence}
    statements = []
    for place, sentence in enumerate(story.statements):
        for kind in (ANIMALS, COLOURS):
            word = next((word for word in sentence if word in kind), None)
            if word is None or place in question.supports:
                continue
            if word in used and (free := [other for other in kind if other not in used]):
                new = choose.choice(free)
                sentence = tuple(new if other == word else other for other in sentence)
                word = new
            used.add(word)
        statements.append(sentence)
    return replace(story, statements=tuple(statements))
