"""bAbI question answering: read a story and a question, name the answer."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torchrum.lab.data import babi
from torchrum.lab.data.babi import Sentence, Story
from torchrum.lab.data.files import OFFICIAL
from torchrum.lab.tasks.base import Batch, Split, Task, named_generator
from torchrum.ops._checks import check_flags

SOLVED = 0.95
"""Accuracy from which a task counts as solved."""
NUM_TRAIN, NUM_TRAIN_SMALL = 9000, 900  # questions to learn from, of each task


def split_sentences(line: str) -> list[str]:
    """Split a line into sentences, each with its final punctuation."""
    return re.split(r"(?<=[.!?])\s+", line.strip())


Place = Literal["last", "first", "twice"]
ORDERS: dict[Place, tuple[str, ...]] = {
    "last": ("story", "question"),
    "first": ("question", "story"),
    "twice": ("question", "story", "question"),
}
"""Place of the question to the parts in reading order."""
WASTE = 0.12  # accepted padding, as a share of the valid steps; more buckets would mean more CUDA graphs
SCORED_STEPS = 2**18  # rows times steps of a batch in evaluation


class Span(NamedTuple):
    """Start and length of a part of each question in the buffer; both ``(Q,)`` int64."""

    start: Tensor
    length: Tensor


class Rows(NamedTuple):
    """Questions with their stories, Q of them.

    ``units`` ``(N,)`` are words, or ``(N, J)`` sentences of J words, padded; unit 0 is the blank. The statements of a
    story are consecutive, so the story of a question is a span, and stories are not repeated for each question.
    """

    units: Tensor
    story: Span
    question: Span
    answer: Tensor
    """Number of the answer in the vocabulary, ``(Q,)`` int64."""
    group: Tensor
    """Number of the task, ``(Q,)`` int64."""

    def to(self, device: torch.device) -> "Rows":
        """Copy the rows to another device."""
        return tree_map_only(Tensor, lambda part: part.to(device), self)


def count_steps(rows: Rows, place: Place) -> Tensor:
    """Compute the number of steps of each row, ``(Q,)``."""
    return torch.stack([getattr(rows, part).length for part in ORDERS[place]]).sum(0)


def lay_out(rows: Rows, place: Place, chosen: Tensor, width: int) -> Batch:
    """Lay out the rows ``chosen`` ``(B,)`` over ``width`` steps; nothing is read on the host.

    Returns:
        ``x`` ``(B, T)`` or ``(B, T, J)`` int64, ``y`` ``(B,)``, the lengths and the groups.
    """
    step = torch.arange(width, device=chosen.device)
    source = torch.zeros(len(chosen), width, dtype=torch.long, device=chosen.device)
    begin = torch.zeros(len(chosen), 1, dtype=torch.long, device=chosen.device)
    for name in ORDERS[place]:
        start, length = (part.index_select(0, chosen).unsqueeze(1) for part in getattr(rows, name))
        inside = (step >= begin) & (step < begin + length)
        source = torch.where(inside, start + step - begin, source)
        begin = begin + length
    x = rows.units.index_select(0, source.flatten()).unflatten(0, source.shape).long()
    return Batch(x, rows.answer.index_select(0, chosen), begin.squeeze(1), rows.group.index_select(0, chosen))


def encode(groups: Iterable[tuple[int, Sequence[Story]]], vocabulary: Sequence[str], sentence_size: int | None) -> Rows:
    """Turn stories into rows.

    Args:
        groups: number of a task and its stories.
        vocabulary: the words in the order of their numbers; the first is the blank, "".
        sentence_size: J, the words of a sentence, to read sentence by sentence; None reads word by word.
    """
    J = sentence_size or 1
    numbers = {word: number for number, word in enumerate(vocabulary)}
    words = [0] * J
    known: dict[Sentence, list[int]] = {}  # few sentences, repeated often

    def add(sentence: Sentence) -> int:
        if sentence not in known:
            found = [numbers[word] for word in sentence]
            known[sentence] = found + [0] * (-len(found) % J)
        words.extend(known[sentence])
        return len(words) // J  # units so far

    table: list[tuple[int, ...]] = []
    for group, stories in groups:
        for story in stories:
            ends = [len(words) // J, *(add(statement) for statement in story.statements)]
            for question in story.questions:
                at = len(words) // J
                length = add(question.words) - at
                table.append((ends[0], ends[question.after] - ends[0], at, length, numbers[question.answer], group))
    columns = torch.tensor(table, dtype=torch.long).t().contiguous()
    units = torch.tensor(words, dtype=torch.int16)
    return Rows(
        units if sentence_size is None else units.view(-1, J),
        Span(columns[0], columns[1]),
        Span(columns[2], columns[3]),
        columns[4],
        columns[5],
    )


def scored_batches(rows: Rows, place: Place) -> list[Batch]:
    """All rows in large batches of like length, for scoring."""
    lengths = count_steps(rows, place)
    order = lengths.argsort(stable=True, descending=True)
    batches, start = [], 0
    while start < len(order):
        width = int(lengths[order[start]])
        chosen = order[start : start + max(1, SCORED_STEPS // width)]
        batches.append(lay_out(rows, place, chosen, width))
        start += len(chosen)
    return batches


def choose_widths(lengths: Tensor, batch_size: int, most: int) -> list[int]:
    """Widths of the buckets: the fewest that keep padding below ``WASTE``, at most ``most``.

    A bucket of n sequences costs its width times the rows of its batches, the last of which is filled up; dynamic
    programming over the lengths that occur finds the cheapest division into k buckets, for each k.
    """
    widths, counts = lengths.unique(return_counts=True)
    U = len(widths)
    before = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0)))  # sequences in the first i lengths
    size = before[1:].unsqueeze(0) - before[:-1].unsqueeze(1)  # (U, U): sequences of lengths i to j
    rows = (size + batch_size - 1).div(batch_size, rounding_mode="floor") * batch_size
    cost = (rows * widths).double()
    cost[size <= 0] = torch.inf
    best = cost[0]  # cheapest way for the lengths up to j, with one bucket
    chosen: list[Tensor] = []
    limit = float(lengths.double().sum()) * (1 + WASTE)
    while best[-1] > limit and len(chosen) + 1 < min(most, U):
        total, first = (best[:-1].unsqueeze(1) + cost[1:]).min(0)  # the last bucket begins at length first + 1
        if total[-1] >= best[-1]:
            break
        best, chosen = total, [*chosen, first + 1]
    edges, end = [], U - 1
    for first in reversed(chosen):
        edges.append(int(widths[end]))
        end = int(first[end]) - 1
    return sorted([*edges, int(widths[end])])


@dataclass
class TrainingStories:
    """The training questions on the device, and their order in one epoch.

    Each epoch shows every question once, in batches of similar length; the last batch of a bucket is filled up from the
    same bucket. Order and batches depend on the seed and the number of the epoch.
    """

    rows: Rows
    place: Place
    seed: int
    most_buckets: int
    width: int = 0
    """Steps of the next batch."""

    def __post_init__(self) -> None:
        self._lengths = count_steps(self.rows, self.place).cpu()
        self._size: int | None = None
        self._epoch: int | None = None

    def plan(self, size: int, step: int) -> int:
        """Prepare the batch of ``size`` rows that follows ``step`` batches; returns its width."""
        if size != self._size:
            self._divide(size)
        epoch, place = divmod(step, len(self.order))
        if epoch != self._epoch:
            self._shuffle(size, epoch)
        self.width = self._widths[place]
        return self.width

    def batch(self, step: Tensor) -> Batch:
        """Return the batch that follows ``step`` batches, a scalar on the device; call ``plan`` first."""
        chosen = self.order.index_select(0, (step % len(self.order)).view(1)).squeeze(0)
        return lay_out(self.rows, self.place, chosen, self.width)

    def _divide(self, size: int) -> None:
        widths = choose_widths(self._lengths, size, self.most_buckets)
        which = torch.bucketize(self._lengths, torch.tensor(widths))
        self.buckets = [(width, (which == number).nonzero().squeeze(1)) for number, width in enumerate(widths)]
        batches = sum(-(-len(members) // size) for _, members in self.buckets)
        self.order = torch.zeros(batches, size, dtype=torch.long, device=self.rows.answer.device)
        self._size, self._epoch = size, None

    def _shuffle(self, size: int, epoch: int) -> None:
        generator = named_generator(f"babi order {self.seed} {epoch}")
        batches: list[tuple[int, Tensor]] = []
        for width, members in self.buckets:
            mixed = members[torch.randperm(len(members), generator=generator)]
            full = -(-len(mixed) // size) * size
            mixed = mixed.repeat(-(-full // len(mixed)))[:full]
            batches += [(width, chosen) for chosen in mixed.split(size)]
        order = torch.randperm(len(batches), generator=generator).tolist()
        self._widths = [batches[number][0] for number in order]
        self.order.copy_(torch.stack([batches[number][1] for number in order]))  # in place: CUDA graphs read it
        self._epoch = epoch


@dataclass(frozen=True, kw_only=True)
class Babi(Task):
    """Answer questions about short stories (Weston et al., 2015), v1.2 in English.

    The input is the words of the story and of the question, or their sentences; the answer is one word of the
    vocabulary, read at the last step. A model learns one of the 20 tasks, or all of them with one vocabulary. The last
    tenth of the training questions is the validation set, the test files give the result.
    """

    answers: ClassVar = "last"
    metric: ClassVar = "accuracy"
    has_test: ClassVar = True
    baseline_name: ClassVar = "answers-only"

    task: int | None = None
    """Number of the task, 1 to 20; None: all of them, jointly."""
    variant: Literal["en-10k", "en"] = "en-10k"
    """en-10k: 10,000 training questions for each task; en: the first 1,000 of them."""
    reading: Literal["words", "sentences"] = "words"
    """Input of a step: a word, or a sentence as the bag of its words."""
    question: Place = "last"
    """Place of the question: after the story, before it, or at both ends."""
    augment16: bool = False
    """Train task 16 on stories without their shortcut, each colour once; report such results separately."""

    extra: tuple[int, ...] = ()
    """Tasks of a joint run to show once more in each epoch; a task may be named several times."""

    def __post_init__(self) -> None:
        if self.task is not None and (type(self.task) is not int or self.task not in babi.TASKS):
            raise ValueError(f"Babi: task={self.task!r}; it must be a number from 1 to 20, or None for all of them.")
        choices = {"variant": ("en-10k", "en"), "reading": ("words", "sentences"), "question": get_args(Place)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"Babi: {name}={getattr(self, name)!r}; it must be one of {', '.join(allowed)}.")
        check_flags("Babi", augment16=self.augment16)
        if not isinstance(self.extra, tuple):
            raise ValueError(f"Babi: extra={self.extra!r}; it must be a tuple of tasks, such as (3, 16).")
        if self.extra and (self.task is not None or not set(self.extra) <= set(babi.TASKS)):
            raise ValueError(f"Babi: extra={self.extra} must be tasks from 1 to 20, of a joint run; set task to None.")
        if self.augment16 and self.task not in (None, 16):
            raise ValueError(f"Babi: augment16 changes task 16, but task is {self.task}.")

    @property
    def tasks(self) -> tuple[int, ...]:
        """Numbers of the tasks to learn."""
        return babi.TASKS if self.task is None else (self.task,)

    @property
    def sizes(self) -> babi.Sizes:
        """Sizes of the data, known without its files."""
        return babi.ALL_TASKS if self.task is None else babi.SIZES[self.task - 1]

    @property
    def input_size(self) -> int:
        """The blank, words, punctuation and answers."""
        return len(self.words())

    @property
    def num_classes(self) -> int:
        """Every symbol may be an answer, as in the paper."""
        return len(self.words())

    @property
    def sentence_size(self) -> int | None:
        """Words of a sentence, J; None if a step is a word."""
        return self.sizes.words if self.reading == "sentences" else None

    @property
    def memory_size(self) -> int:
        """Statements of the longest story."""
        return self.sizes.statements

    def steps_per_epoch(self, batch_size: int) -> int:
        """Count the steps that show every training question once, without the rows that fill up buckets."""
        each = NUM_TRAIN if self.variant == "en-10k" else NUM_TRAIN_SMALL
        return -(-each * (len(self.tasks) + len(self.extra)) // batch_size)

    def texts(self) -> dict[int, babi.TaskText]:
        """Read the stories of each task from disk."""
        texts = {task: babi.read_task(task) for task in self.tasks}
        return texts if self.variant == "en-10k" else {task: babi.small(text) for task, text in texts.items()}

    def words(self) -> tuple[str, ...]:
        """Return the vocabulary, in the order of its numbers; "" is the blank."""
        return babi.symbols(self.task)

    def provenance(self) -> str:
        """Name the tasks whose training text is not the official one, and the text in use."""
        origins = {task: text.origin for task, text in self.texts().items()}
        return "; ".join(f"task {task}'s training text is {text}" for task, text in origins.items() if text != OFFICIAL)

    def rows(self, split: Split, seed: int = 0) -> Rows:
        """Read the questions of a split; the seed affects only the augmentation of training stories."""
        texts, groups = self.texts(), []
        for number, task in enumerate((*self.tasks, *(self.extra if split == "train" else ()))):
            stories = getattr(texts[task], split)
            if self.augment16 and task == 16 and split == "train":
                stories = babi.augment_induction(stories, seed + 1000 * number)  # each copy in its own way
            groups.append((task, stories))
        return encode(groups, self.words(), self.sentence_size)

    def ask(self, story: str, question: str) -> tuple[Batch, list[str]]:
        """Turn the user's own question into a batch of one row; also return its words that the vocabulary lacks.

        Args:
            story: sentences, each with its full stop or on a line of its own.
            question: one sentence.
        """
        sentences = [sentence for line in story.splitlines() for sentence in split_sentences(line)]
        statements = [babi.tokens(sentence.rstrip(" .") + ".") for sentence in sentences if sentence.strip(" .")]
        asked = babi.tokens(question.rstrip(" .?") + "?")
        if not statements or len(asked) < 2:
            raise ValueError("a story of at least one sentence and a question are needed.")
        longest, most = max(map(len, (*statements, asked))), self.sentence_size
        if most is not None and longest > most:
            raise ValueError(f"a sentence has {longest} words, but the model reads {most} of them at most.")
        known = {word.casefold(): word for word in self.words()} | {word: word for word in self.words()}

        def look_up(sentence: Sentence) -> Sentence:
            return tuple(known.get(word, known.get(word.casefold(), "")) for word in sentence)

        words = dict.fromkeys(word for sentence in (*statements, asked) for word in sentence)
        unknown = [word for word in words if look_up((word,)) == ("",)]
        facts = tuple(map(look_up, statements))
        row = babi.Question(len(facts), look_up(asked), "", ())
        rows = encode([(self.task or 1, [babi.Story(facts, (row,))])], self.words(), self.sentence_size)
        width = int(count_steps(rows, self.question))
        return lay_out(rows, self.question, torch.zeros(1, dtype=torch.long), width), unknown

    def setup(self, device: torch.device, seed: int) -> TrainingStories:
        """Put the training questions on ``device``."""
        most = 20 if self.task is None else 10
        return TrainingStories(self.rows("train", seed).to(device), self.question, seed, most)

    def plan(self, size: int, step: int, data: TrainingStories) -> int:
        """Shuffle at the start of an epoch; returns the width of the next batch."""
        return data.plan(size, step)

    def train_batch(self, size: int, generator: torch.Generator, step: Tensor, data: TrainingStories) -> Batch:
        """Return the next batch of the epoch, laid out over the width that ``plan`` returned."""
        return data.batch(step)

    def details(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute for a joint model, as shares of all questions, each task's questions and its right answers."""
        if self.task is not None:
            return {}
        assert batch.group is not None
        right = logits.argmax(-1) == batch.y
        found = {}
        for task in self.tasks:
            of_task = batch.group == task
            found[f"share{task:02d}"] = of_task.float().mean()
            found[f"right{task:02d}"] = (of_task & right).float().mean()
        return found

    def summarise(self, scores: dict[str, float]) -> dict[str, float]:
        """Compute for a joint model ``task01`` to ``task20``, ``accuracy`` as their mean, and the number ``solved``."""
        if self.task is not None:
            return scores
        each = {f"task{task:02d}": scores[f"right{task:02d}"] / scores[f"share{task:02d}"] for task in self.tasks}
        kept = {name: value for name, value in scores.items() if not name.startswith(("share", "right"))}
        solved = sum(value >= SOLVED for value in each.values())
        return {**kept, "accuracy": sum(each.values()) / len(each), "solved": float(solved), **each}

    def validation(self, seed: int) -> Iterator[Batch]:
        """Yield the last tenth of the training questions."""
        yield from scored_batches(self.rows("validation"), self.question)

    def test(self, seed: int) -> Iterator[Batch]:
        """Yield the questions of the test files."""
        yield from scored_batches(self.rows("test"), self.question)

    def size_name(self) -> str:
        return "" if self.task is None else f"qa{self.task}"

    def baseline(self) -> float:
        """Return the cross-entropy of the best model that does not read: the entropy of the answers."""
        return self.sizes.entropy
