"""The associative recall task."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchrum.lab.tasks.base import Batch, Task, batches, check_sizes, fixed_set, take

LONGEST = 2000
"""Keys and values of a sequence: with more, the numbers of the bag of values leave the range of floats."""


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Name the value that stood behind a key (Ba et al., 2016).

    A sequence is ``length / 2`` pairs of a key and its value, two marks "?" and one of the keys; the answer is that
    key's value, read after the last step. Every key occurs once, in random order. "?" is 0, the keys come next, then
    the values.
    """

    answers: ClassVar = "last"
    has_test: ClassVar = True
    metric: ClassVar = "accuracy"
    baseline_name: ClassVar = "bag-of-values"

    length: int = 50
    """Keys and values together, so twice the number of pairs; T in the paper."""
    values: int = 10
    """Values to choose from, the classes of the answer."""
    train_size: int | None = 100_000
    """Examples of the training set, generated once and read in order; None: fresh ones at every step."""
    validation_size: int = 10_000
    """Examples of the validation set."""
    test_size: int = 20_000
    """Examples of the test set."""
    train_lengths: int = 1
    """Number of lengths in training: ``length``, a half of it, a quarter and so on, one per step in turn."""
    lengthen_every: int | None = None
    """Steps after which training takes up the next longer length, beginning with the shortest only; None: all lengths
    from the first step."""

    def __post_init__(self) -> None:
        check_sizes(self, "validation_size", "test_size")
        check_sizes(self, "values", least=2, most=10**6)  # one alone needs no memory
        check_sizes(self, "length", most=LONGEST)
        if self.length % 2:
            raise ValueError(
                f"Recall: length={self.length} is odd, but keys and values come in pairs; "
                f"take {self.length - 1 or 2} or {self.length + 1}."
            )
        if self.train_size is not None:
            check_sizes(self, "train_size")
        check_sizes(self, "train_lengths", most=self.pairs.bit_length())
        if self.train_lengths > 1 and self.train_size is not None:
            raise ValueError(
                f"Recall: train_lengths={self.train_lengths} needs fresh examples; set train_size to none."
            )
        if self.lengthen_every is not None:
            check_sizes(self, "lengthen_every")
            if self.train_lengths == 1:
                raise ValueError(
                    f"Recall: lengthen_every={self.lengthen_every} has no effect with one length; raise train_lengths."
                )

    @property
    def pairs(self) -> int:
        """Pairs of a key and a value in a sequence."""
        return self.length // 2

    @property
    def input_size(self) -> int:
        """The mark, the keys and the values."""
        return 1 + self.pairs + self.values

    @property
    def num_classes(self) -> int:
        """The values."""
        return self.values

    def batch(self, size: int, generator: torch.Generator, shown: int | None = None) -> Batch:
        """Draw ``x`` ``(B, length + 3)`` and ``y`` ``(B,)``, int64, on the generator's device.

        With ``shown`` the sequences have that many pairs, whose keys are a random part of all keys.
        """
        device, shown = generator.device, shown or self.pairs
        keys = 1 + torch.rand(size, self.pairs, generator=generator, device=device).argsort(-1)[:, :shown]
        values = torch.randint(self.values, (size, shown), generator=generator, device=device)
        asked = torch.randint(shown, (size, 1), generator=generator, device=device)
        pairs = torch.stack((keys, values + self.pairs + 1), -1).flatten(1)  # (B, 2 * shown)
        marks = torch.zeros(size, 2, dtype=torch.long, device=device)
        x = torch.cat((pairs, marks, keys.gather(1, asked)), 1)
        return Batch(x, values.gather(1, asked).squeeze(1))

    def setup(self, device: torch.device, seed: int) -> Batch | dict[str, int]:
        """Make the training set on ``device``; for fresh examples, a place for the number of pairs of each step."""
        if self.train_size is None:
            return {"pairs": self.pairs}
        return fixed_set(self, self.train_size, f"recall train {seed}", device)

    def plan(self, size: int, step: int, data: Batch | dict[str, int]) -> int:
        """Choose the number of pairs of the next step."""
        taken_up = self.train_lengths
        if self.lengthen_every is not None:
            taken_up = min(taken_up, 1 + step // self.lengthen_every)
        shown = self.pairs >> (self.train_lengths - taken_up + step % taken_up)
        if isinstance(data, dict):
            data["pairs"] = shown
        return shown

    def train_batch(self, size: int, generator: torch.Generator, step: Tensor, data: Batch | dict[str, int]) -> Batch:
        """Return the next ``size`` examples of the training set, or fresh ones without a training set."""
        return self.batch(size, generator, data["pairs"]) if isinstance(data, dict) else take(data, size, step)

    def validation(self, seed: int) -> Iterator[Batch]:
        """Yield the validation examples, on the CPU."""
        return batches(self, self.validation_size, f"recall validation {seed}", size=1000)

    def test(self, seed: int) -> Iterator[Batch]:
        """Yield the examples of the final score, on the CPU."""
        return batches(self, self.test_size, f"recall test {seed}", size=1000)

    def size_name(self) -> str:
        return f"t{self.length}"

    def baseline(self) -> float:
        """Return the cross-entropy of the best model that knows the count of each value, but not the places.

        Every model first reaches this "bag of values" plateau; below it, a model has begun to pair.
        """
        k, p = self.pairs, 1 / self.values
        # a value that occurs c times is the answer with probability c / k, and c is binomial
        return -self.values * sum(
            math.comb(k, c) * p**c * (1 - p) ** (k - c) * (c / k) * math.log(c / k) for c in range(1, k + 1)
        )

    def baseline_accuracy(self) -> float:
        """Return the accuracy on that plateau: always the commonest value of the sequence."""
        return expected_largest_count(self.pairs, self.values) / self.pairs


@functools.cache
def expected_largest_count(draws: int, sides: int) -> float:
    """Compute the expected count of the commonest outcome of ``draws`` throws of a fair die, exactly."""
    return sum(1 - _chance_no_count_above(limit, draws, sides) for limit in range(draws))


def _chance_no_count_above(limit: int, draws: int, sides: int) -> float:
    # counts as independent Poisson numbers, given that they make ``draws``: no term leaves the range of floats
    rate = draws / sides
    counts = torch.arange(limit + 1, dtype=torch.float64)
    weights = torch.exp(counts * math.log(rate) - rate - torch.lgamma(counts + 1))
    size = sides * limit + draws + 1
    series = torch.fft.irfft(torch.fft.rfft(weights, n=size) ** sides, n=size)  # the polynomial's power
    return float(series[draws]) / math.exp(draws * math.log(draws) - draws - math.lgamma(draws + 1))
