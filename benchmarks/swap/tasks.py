"""Eleven small tasks, generated or from the text beside this file; every model meets the same examples."""

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from swap.digits import draw_digits

HELD_OUT = 20_000
"""Characters at the end of the text that are never trained on."""

Measure = Literal["accuracy", "bits", "error"]
"""Share of right answers; bits per character; or mean squared error over that of the mean value."""


class Batch(NamedTuple):
    """Inputs ``(T, B)`` of symbols or ``(T, B, I)`` of values, and what to say about them.

    ``y`` is ``(B, ...)`` where the last step answers and ``(T, B, ...)`` where every step does; -1 asks for no answer.
    """

    x: Tensor
    y: Tensor


@dataclass(frozen=True, kw_only=True)
class SwapTask(ABC):
    """Data, sizes and the measure of one task."""

    name: ClassVar[str]
    about: ClassVar[str]
    measure: ClassVar[Measure]
    symbols: ClassVar[int | None] = None
    """Size of the alphabet, or None where the inputs are values."""
    inputs: ClassVar[int] = 1
    outputs: ClassVar[int] = 10
    carries_state: ClassVar[bool] = False
    every_step: ClassVar[bool] = False

    updates: int
    hidden_size: int = 64
    batch_size: int = 64

    @abstractmethod
    def train(self, step: int, generator: torch.Generator) -> Batch:
        """The examples of an update."""

    @abstractmethod
    def held_out(self) -> Batch:
        """The examples that decide the score: the same for every seed."""

    @property
    def goal(self) -> Literal["max", "min"]:
        return "max" if self.measure == "accuracy" else "min"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_rows(images: Tensor) -> Tensor:
    return images.transpose(0, 1)  # (8, B, 8)


def as_pixels(images: Tensor) -> Tensor:
    return images.flatten(1).t().unsqueeze(-1)  # (64, B, 1)


def as_permuted(images: Tensor) -> Tensor:
    return as_pixels(images)[torch.randperm(64, generator=seeded(3))]


@functools.cache
def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    return draw_digits(count, seeded(seed))


class _Digits(SwapTask):
    """1,500 digits to learn from, over and over; 1,000 others to be scored on."""

    measure = "accuracy"

    @staticmethod
    @abstractmethod
    def reading(images: Tensor) -> Tensor:
        """Images ``(B, 8, 8)`` as a sequence ``(T, B, I)``."""

    def train(self, step: int, generator: torch.Generator) -> Batch:
        images, labels = digits(1500, 1)
        some = torch.randint(len(labels), (self.batch_size,), generator=generator)
        return Batch(self.reading(images[some]), labels[some])

    def held_out(self) -> Batch:
        images, labels = digits(1000, 2)
        return Batch(self.reading(images), labels)


class Rows(_Digits):
    name, about = "rows", "digits, one row of 8 pixels per step"
    inputs, reading = 8, staticmethod(as_rows)


class Pixels(_Digits):
    name, about = "pixels", "digits, one pixel per step"
    reading = staticmethod(as_pixels)


class Permuted(_Digits):
    name, about = "permuted", "digits, one pixel per step in a fixed shuffled order"
    reading = staticmethod(as_permuted)


@functools.cache
def read_text() -> tuple[Tensor, Tensor, int]:
    """The text as symbols: to learn from, held out, and the size of the alphabet."""
    text = (Path(__file__).parent / "text.txt").read_text()
    alphabet = {letter: code for code, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[letter] for letter in text])
    return codes[:-HELD_OUT], codes[-HELD_OUT:], len(alphabet)


def windows(codes: Tensor, starts: Tensor, length: int) -> Tensor:
    """Pieces of the text, ``(length, B)``."""
    return codes[starts + torch.arange(length).unsqueeze(1)]


class _Text(SwapTask):
    measure: ClassVar[Measure] = "bits"
    every_step = True
    symbols = outputs = read_text()[2]


class Characters(_Text):
    """Windows from anywhere, the state at zero before each."""

    name, about = "characters", "next character, windows of 64, state from zero"
    length: ClassVar[int] = 64

    def train(self, step: int, generator: torch.Generator) -> Batch:
        codes, _, _ = read_text()
        starts = torch.randint(len(codes) - self.length, (self.batch_size,), generator=generator)
        piece = windows(codes, starts, self.length + 1)
        return Batch(piece[:-1], piece[1:])

    def held_out(self) -> Batch:
        _, codes, _ = read_text()
        piece = windows(codes, torch.arange(0, len(codes) - self.length - 1, self.length), self.length + 1)
        return Batch(piece[:-1], piece[1:])


class Carried(_Text):
    """Lanes of consecutive text; the state goes on from chunk to chunk and is never reset."""

    name, about = "carried", "next character, chunks of 50, state carried on and never reset"
    carries_state = True
    chunk: ClassVar[int] = 50

    def _lanes(self, codes: Tensor, count: int) -> Tensor:
        lane = len(codes) // count
        return codes[: count * lane].view(count, lane).t()  # (lane, B)

    def train(self, step: int, generator: torch.Generator) -> Batch:
        lanes = self._lanes(read_text()[0], self.batch_size)
        start = step % ((len(lanes) - 1) // self.chunk) * self.chunk
        return Batch(lanes[start : start + self.chunk], lanes[start + 1 : start + self.chunk + 1])

    def held_out(self) -> Batch:
        lanes = self._lanes(read_text()[1], 8)
        return Batch(lanes[:-1], lanes[1:])


class Cloze(_Text):
    """Which character is hidden? The answer is given after the window, so what surrounds the gap must be kept."""

    name, about = "cloze", "the hidden character in a window of 30, told at its end"
    measure, every_step = "accuracy", False
    symbols = _Text.outputs + 1  # one for the gap
    length: ClassVar[int] = 30

    def _hide(self, codes: Tensor, starts: Tensor, generator: torch.Generator) -> Batch:
        piece = windows(codes, starts, self.length)
        place = torch.randint(8, 22, (1, len(starts)), generator=generator)
        return Batch(piece.scatter(0, place, self.symbols - 1), piece.gather(0, place)[0])

    def train(self, step: int, generator: torch.Generator) -> Batch:
        codes, _, _ = read_text()
        starts = torch.randint(len(codes) - self.length, (self.batch_size,), generator=generator)
        return self._hide(codes, starts, generator)

    def held_out(self) -> Batch:
        _, codes, _ = read_text()
        return self._hide(codes, torch.arange(0, len(codes) - self.length, 10), seeded(4))


class _Fresh(SwapTask):
    """Generated tasks: new examples at every update."""

    test_size: ClassVar[int] = 1000

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Batch: ...

    def train(self, step: int, generator: torch.Generator) -> Batch:
        return self.draw(self.batch_size, generator)

    def held_out(self) -> Batch:
        return self.draw(self.test_size, seeded(5))


class Adding(_Fresh):
    name, about = "adding", "the sum of the two marked numbers among 60 (Hochreiter and Schmidhuber, 1997)"
    measure, inputs, outputs = "error", 2, 1
    length: ClassVar[int] = 60

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        values = torch.rand(self.length, count, generator=generator)
        half = self.length // 2
        marks = torch.zeros_like(values)
        for first in (0, half):
            marks.scatter_(0, first + torch.randint(half, (1, count), generator=generator), 1.0)
        return Batch(torch.stack((values, marks), -1), (values * marks).sum(0).unsqueeze(-1))


def waves(length: int, count: int, generator: torch.Generator) -> Tensor:
    """Sums of three sines with random frequencies, phases and heights, ``(length, count)``, variance about 1."""
    time = torch.arange(length).view(-1, 1, 1)
    frequency = 2 * math.pi * (0.02 + 0.1 * torch.rand(3, count, generator=generator))
    phase = 2 * math.pi * torch.rand(3, count, generator=generator)
    height = 0.5 + torch.rand(3, count, generator=generator)
    return (height * torch.sin(frequency * time + phase)).sum(1) / 1.28


class Series(_Fresh):
    name, about = "series", "a noisy series of three sines, five steps ahead"
    measure, inputs, outputs, every_step = "error", 1, 1, True
    length: ClassVar[int] = 60
    ahead: ClassVar[int] = 5
    scale: ClassVar[float] = 1.0

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        clean = waves(self.length + self.ahead, count, generator).unsqueeze(-1)
        seen = clean[: -self.ahead]
        noisy = seen + 0.3 * torch.randn(seen.shape, generator=generator)
        return Batch(self.scale * noisy, clean[self.ahead :])


class RawSeries(Series):
    """What happens to someone who did not scale the inputs, over a longer span."""

    name, about = "raw-series", "the same over 150 steps, with inputs ten times too large"
    length, scale = 150, 10.0


class Copy(_Fresh):
    name, about = "copy", "repeat 6 symbols after 60 blank steps"
    measure, every_step = "accuracy", True
    symbols, outputs = 10, 8
    length: ClassVar[int] = 6
    delay: ClassVar[int] = 60

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        copied = torch.randint(8, (self.length, count), generator=generator)
        x = torch.full((2 * self.length + self.delay, count), 8)
        y = torch.full_like(x, -1)
        x[: self.length], x[-self.length - 1], y[-self.length :] = copied, 9, copied
        return Batch(x, y)


class Lookup(_Fresh):
    """Associative recall: the value that belongs to the key asked for at the end."""

    name, about = "lookup", "the value of one of 4 keys, told pair by pair before"
    measure = "accuracy"
    symbols, outputs = 18, 10
    pairs: ClassVar[int] = 4

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        keys = torch.rand(8, count, generator=generator).argsort(0)[: self.pairs]
        values = torch.randint(10, (self.pairs, count), generator=generator)
        asked = torch.randint(self.pairs, (1, count), generator=generator)
        told = torch.stack((keys + 10, values), 1).flatten(0, 1)
        return Batch(torch.cat((told, keys.gather(0, asked) + 10)), values.gather(0, asked)[0])


TASKS: dict[str, SwapTask] = {
    task.name: task
    for task in (
        Rows(updates=1500),
        Pixels(updates=800),
        Permuted(updates=800),
        Characters(updates=600, hidden_size=128, batch_size=32),
        Carried(updates=800, hidden_size=128, batch_size=16),
        Cloze(updates=800),
        Adding(updates=1000),
        Series(updates=600),
        RawSeries(updates=300),
        Copy(updates=700),
        Lookup(updates=3000),
    )
}
