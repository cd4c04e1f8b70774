"""bAbI question answering v1.2 (Weston et al., 2015): the text of its 20 tasks, parsed.

A file is a row of stories. A line is a number, which is 1 where a story begins, and a statement, or a question with its
answer and the numbers of the statements that support it, separated by tabs. A question is asked of the statements
before it; the questions before it are no part of its story. Words and punctuation are tokens, case is kept, and an
answer of several words ("milk,football") is one token.
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
    """What is known of a task without its files; a test compares it with them."""

    entropy: float
    """Entropy of the answers of the test questions, in nats."""
    words: int
    """The longest sentence or question."""
    statements: int
    """The longest story."""
    story_words: int
    """Words of the longest story."""
    question_words: int
    """Words of the longest question."""


TASKS = tuple(facts["task"] for facts in BABI_TASKS)
NAMES = [facts["name"] for facts in BABI_TASKS]
"""Names of tasks 1 to 20."""
SIZES = tuple(Sizes(*(facts[name] for name in Sizes._fields)) for facts in BABI_TASKS)
"""Tasks 1 to 20."""
ALL_TASKS = Sizes(3.239074, 12, 268, 1568, 12)
"""The 20 tasks together, with one vocabulary."""


@functools.cache
def symbols(task: int | None) -> tuple[str, ...]:
    """The vocabulary of a task, or of all of them, in the order of its numbers; "" is the blank, number 0."""
    chosen = [facts["vocabulary"].split() for facts in BABI_TASKS if task in (None, facts["task"])]
    return ("", *sorted({word for words in chosen for word in words}))


SMALL = 1000
"""Training questions of the variant ``en``: its files are the start of those of ``en-10k``."""


class Question(NamedTuple):
    """A question within a story."""

    after: int
    """Statements before it."""
    words: Sentence
    answer: str
    supports: tuple[int, ...]
    """The statements that the answer follows from, counted from 0."""


@dataclass(frozen=True)
class Story:
    """Statements, and questions asked on the way."""

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
    """What the training file is: official, or another."""


@functools.lru_cache(maxsize=2**16)  # a task repeats a few thousand sentences
def tokens(text: str) -> Sentence:
    """Words and punctuation: ``Where is Mary?`` is four tokens."""
    return tuple(part for piece in re.split(r"(\W)", text) if (part := piece.strip()))


def parse(text: str) -> tuple[Story, ...]:
    """Read the stories of a file, whose hash was right."""
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
    """The stories of task 1 to 20, fetched if they are not on disk."""
    return _read_task(task, str(data_root()))


@functools.lru_cache(maxsize=40)
def _read_task(task: int, root: str) -> TaskText:
    paths = [f"en-10k/qa{task}_{NAMES[task - 1]}_{split}.txt" for split in ("train", "test")]
    files = read_files("babi", paths)
    train, test = (parse(files[path].content.decode("utf-8")) for path in paths)
    cut = hold_out(train)
    return TaskText(train[:cut], train[cut:], test, files[paths[0]].origin)


def hold_out(stories: Sequence[Story], part: int = 10) -> int:
    """Where the last ``1 / part`` of the questions begins, at the start of a story."""
    total, found, cut = count(stories), 0, len(stories)
    while found * part < total:
        cut -= 1
        found += len(stories[cut].questions)
    return cut


def count(stories: Iterable[Story]) -> int:
    """Questions in some stories."""
    return sum(len(story.questions) for story in stories)


def small(text: TaskText) -> TaskText:
    """The task as the variant ``en`` has it: the first 1,000 training questions, the last tenth for validation."""
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
    """Task 16 without its shortcut (Franke et al., 2018): each colour stands in a story once.

    In half of the questions the commonest colour of the story is the answer, and models settle on it. In stories of
    nine statements the three that support the answer stay; in the others an animal or a colour that has occurred is
    replaced by one that has not. Answers do not change.
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
