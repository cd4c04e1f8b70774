"""The copying memory task."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchrum.lab.tasks.base import Batch, Task, batches, check_sizes


@dataclass(frozen=True, kw_only=True)
class Copying(Task):
    """Repeat ``length`` symbols after ``delay`` steps (Arjovsky et al., 2016).

    A sequence is the symbols, ``delay - 1`` blanks, the cue and ``length`` blanks; the answer is blank up to the cue,
    then the symbols. Blank is 0, the symbols are 1 to ``symbols``, the cue is ``symbols + 1``. Training never sees a
    batch twice.
    """

    answers: ClassVar = "steps"
    has_test: ClassVar = True
    metric: ClassVar = "ratio"
    goal: ClassVar = "min"

    delay: int = 500
    """Steps from the last symbol to the cue; T in the paper."""
    length: int = 10
    """Symbols to copy."""
    symbols: int = 8
    """Alphabet, without blank and cue."""
    validation_size: int = 512
    """Sequences of the validation set."""

    def __post_init__(self) -> None:
        check_sizes(self, "delay", "length", "validation_size")
        check_sizes(self, "symbols", least=2, most=10**6)  # one alone needs no memory

    @property
    def input_size(self) -> int:
        """Blank, symbols and cue."""
        return self.symbols + 2

    @property
    def num_classes(self) -> int:
        """Blank and symbols; the cue is never an answer."""
        return self.symbols + 1

    @property
    def steps(self) -> int:
        """Steps in a sequence."""
        return self.delay + 2 * self.length

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Draw ``x`` and ``y``, both ``(B, delay + 2 * length)`` int64, on the generator's device."""
        device = generator.device
        copied = torch.randint(1, self.symbols + 1, (size, self.length), generator=generator, device=device)
        x = torch.zeros(size, self.steps, dtype=torch.long, device=device)
        y = torch.zeros_like(x)
        x[:, : self.length] = copied
        x[:, self.delay + self.length - 1] = self.symbols + 1
        y[:, self.delay + self.length :] = copied
        return Batch(x, y)

    def metrics(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute ``accuracy`` over the copied symbols, without the easy blanks, and ``ratio``, loss / baseline."""
        right = logits[:, -self.length :].argmax(-1) == batch.y[:, -self.length :]
        return {"accuracy": right.float().mean(), "ratio": self.loss(logits, batch) / self.baseline()}

    def validation(self, seed: int) -> Iterator[Batch]:
        """Yield the validation sequences, on the CPU."""
        return batches(self, self.validation_size, f"copying validation {seed}", size=128)

    def size_name(self) -> str:
        return f"t{self.delay}"

    def baseline(self) -> float:
        """Return the cross-entropy of the best model without memory: certain of the blanks, guessing the symbols."""
        return self.length * math.log(self.symbols) / self.steps
