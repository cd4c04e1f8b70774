"""Stories and questions as tensors: a buffer of words or sentences, rows that point into it, batches by length."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrum.lab.data.babi import Sentence, Story
from torchrum.lab.tasks.base import Batch, named_generator

Place = Literal["last", "first", "twice"]
ORDERS: dict[Place, tuple[str, ...]] = {
    "last": ("story", "question"),
    "first": ("question", "story"),
    "twice": ("question", "story", "question"),
}
"""What is read in which order, by the place of the question."""
WASTE = 0.12  # padding that is accepted, as a share of the real steps; more buckets would mean more CUDA graphs
SCORED_STEPS = 2**18  # rows times steps of a batch that is only scored


class Span(NamedTuple):
    """For each question, where something begins in the buffer and how long it is; both ``(Q,)`` int64."""

    start: Tensor
    length: Tensor


class Rows(NamedTuple):
    """Questions with their stories, Q of them.

    ``units`` ``(N,)`` are words, or ``(N, J)`` sentences of J words, padded; unit 0 is the blank. The statements of a
    story stand one after another, so the story of a question is a span of them, and stories are not repeated for each
    of their questions.
    """

    units: Tensor
    story: Span
    question: Span
    answer: Tensor
    """Number of the answer in the vocabulary, ``(Q,)`` int64."""
    group: Tensor
    """Number of the task, ``(Q,)`` int64."""

    def to(self, device: torch.device) -> "Rows":
        """The same rows on another device."""
        story, question = (Span(*(part.to(device) for part in span)) for span in (self.story, self.question))
        return Rows(self.units.to(device), story, question, self.answer.to(device), self.group.to(device))


@dataclass(frozen=True)
class Layout:
    """How a question and its story are laid out along time."""

    place: Place = "last"
    """Where the question stands."""
    blanks: int = 0
    """Blank steps at the end."""
    padded: tuple[int, int] | None = None
    """Longest story and question: pad the story at its front and the question at its end, as the paper's code does."""

    def lengths(self, rows: Rows) -> Tensor:
        """Steps of each row, ``(Q,)``."""
        if self.padded is not None:
            return torch.full_like(rows.answer, sum(self.padded))
        parts = [getattr(rows, part).length for part in ORDERS[self.place]]
        return torch.stack(parts).sum(0) + self.blanks

    def gather(self, rows: Rows, chosen: Tensor, width: int) -> Batch:
        """Lay out the rows ``chosen`` ``(B,)`` over ``width`` steps; nothing is read on the host.

        Returns:
            ``x`` ``(B, T)`` or ``(B, T, J)`` int64, ``y`` ``(B,)``, the lengths unless all steps count, and the groups.
        """
        step = torch.arange(width, device=chosen.device)
        source = torch.zeros(len(chosen), width, dtype=torch.long, device=chosen.device)
        parts = [
            Span(*(part.index_select(0, chosen).unsqueeze(1) for part in getattr(rows, name)))
            for name in ORDERS[self.place]
        ]
        begin = torch.zeros_like(parts[0].start) if self.padded is None else self.padded[0] - parts[0].length
        for start, length in parts:
            inside = (step >= begin) & (step < begin + length)
            source = torch.where(inside, start + step - begin, source)
            begin = begin + length
        x = rows.units.index_select(0, source.flatten()).unflatten(0, source.shape).long()
        lengths = None if self.padded is not None else begin.squeeze(1) + self.blanks
        return Batch(x, rows.answer.index_select(0, chosen), lengths, rows.group.index_select(0, chosen))


def encode(groups: Iterable[tuple[int, Sequence[Story]]], vocabulary: Sequence[str], sentence_size: int | None) -> Rows:
    """Turn stories into rows.

    Args:
        groups: number of a task and its stories.
        vocabulary: the words in the order of their numbers; the first, the blank, is "".
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


def scored_batches(rows: Rows, layout: Layout) -> list[Batch]:
    """All rows in large batches of like length, for scoring."""
    lengths = layout.lengths(rows)
    order = lengths.argsort(stable=True, descending=True)
    batches, start = [], 0
    while start < len(order):
        width = int(lengths[order[start]])
        chosen = order[start : start + max(1, SCORED_STEPS // width)]
        batches.append(layout.gather(rows, chosen, width))
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
    """The training questions on the device, and the order of one epoch of them.

    Each epoch shows every question once, in batches of like length; the last batch of a bucket is filled up from the
    same bucket. Order and batches follow from the seed and the number of the epoch.
    """

    rows: Rows
    layout: Layout
    seed: int
    most_buckets: int
    width: int = 0
    """Steps of the batch that comes next."""

    def __post_init__(self) -> None:
        self._lengths = self.layout.lengths(self.rows).cpu()
        self._size: int | None = None
        self._epoch: int | None = None

    def plan(self, size: int, step: int) -> int:
        """Prepare the batch of ``size`` rows after ``step`` of them; returns its width."""
        if size != self._size:
            self._divide(size)
        epoch, place = divmod(step, len(self.order))
        if epoch != self._epoch:
            self._shuffle(size, epoch)
        self.width = self._widths[place]
        return self.width

    def batch(self, step: Tensor) -> Batch:
        """The batch after ``step`` of them, a scalar on the device; ``plan`` came before."""
        chosen = self.order.index_select(0, (step % len(self.order)).view(1)).squeeze(0)
        return self.layout.gather(self.rows, chosen, self.width)

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
