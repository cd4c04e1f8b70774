"""The interface of a task (data, loss, metrics, baseline), and fixed sets of generated examples."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

Split = Literal["train", "validation", "test"]


class Batch(NamedTuple):
    """Inputs and answers; the first dimension of every tensor is the batch."""

    x: Tensor
    """Symbols, ``(B, T)`` int64."""
    y: Tensor
    """Answers, ``(B, T)`` for one at each step or ``(B,)`` for one at the end, int64."""
    lengths: Tensor | None = None
    """Steps that count in each row, ``(B,)`` int64; None: all of them."""
    group: Tensor | None = None
    """What kind of example each row is, ``(B,)`` int64, for tasks that tell kinds apart."""

    def rows(self, start: int, stop: int) -> "Batch":
        """The rows ``start`` to ``stop``: what one process of several works on."""
        return self._map(lambda part: part[start:stop])

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return self._map(lambda part: part.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        lengths, group = (None if part is None else change(part) for part in (self.lengths, self.group))
        return Batch(change(self.x), change(self.y), lengths, group)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """One problem to learn. Its fields are its sizes; equal fields and equal seeds give equal data.

    The trainer calls ``setup`` once, then for each step ``train_batch``, ``loss`` and ``metrics``, and now and then it
    scores the batches of ``validation``. A model is called ``model(x, lengths)`` and returns logits; for a task that
    carries state it is called ``model(x, lengths, state)`` and returns ``(logits, state)``, ``state`` None at first; to
    be captured in a CUDA graph it needs ``model.initial_state(batch_size, device, dtype)``, what None stands for.
    """

    answers: ClassVar[Literal["steps", "last"]] = "steps"
    """Where the model answers: at each step (logits ``(B, T, V)``) or once at the end (logits ``(B, V)``)."""
    metric: ClassVar[str] = "accuracy"
    """The entry of ``metrics`` that tells how well it goes; ``"loss"`` is allowed."""
    goal: ClassVar[Literal["max", "min"]] = "max"
    """Whether a good ``metric`` is high or low."""
    loss_unit: ClassVar[str] = "nats"
    """What the loss is counted in."""
    baseline_name: ClassVar[str] = "memoryless"
    """What the model of ``baseline`` is called."""
    carries_state: ClassVar[bool] = False
    """Whether the state after one batch is the state before the next (truncated backpropagation)."""
    capturable: ClassVar[bool] = True
    """Whether ``train_batch`` can be recorded in a CUDA graph: fixed shapes, and no value is read on the host."""
    has_test: ClassVar[bool] = False
    """Whether there is a test set that is looked at once a model is chosen; its score then belongs to the result."""
    quotable: ClassVar[bool] = True
    """Whether results may quote its sequences; a text under a licence, or of the user's own, may not be passed on."""
    from_data: ClassVar[tuple[str, ...]] = ()
    """Fields that are read from data of the user's own: a command names the data instead, and a table too."""
    batching: ClassVar[tuple[str, ...]] = ()
    """Fields that say how data become batches, such as in how many lanes: settings of a run, no other problem."""
    local: ClassVar[tuple[str, ...]] = ()
    """Fields that hold for one machine alone, such as a path: kept in the run folder, no part of what was run."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """Number of input symbols."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of answers to choose from, V."""

    @property
    def source(self) -> str:
        """What it reads, in words; empty if it makes its own data."""
        return ""

    @property
    def own_data(self) -> str:
        """Name of the user's own data, if it reads any."""
        return ""

    @abstractmethod
    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Draw ``size`` fresh examples on the device of ``generator``."""

    def setup(self, device: torch.device, seed: int) -> Any:
        """Make or load what ``train_batch`` reads (a fixed training set, say); depends on ``seed`` alone."""
        return None

    def plan(self, size: int, step: int, data: Any) -> Hashable:
        """Prepare ``data`` for the batch of ``size`` examples that follows ``step`` finished steps, on the host.

        Whatever ``train_batch`` reads keeps its place in memory: buffers are filled in place. All of it follows from
        ``size`` and ``step`` alone, so that a resumed run finds its place.

        Returns:
            What the shapes of the step depend on, such as the width of a bucket of sequences of like length; a CUDA
            graph is recorded for each value.
        """
        return None

    def train_batch(self, size: int, generator: torch.Generator, step: Tensor, data: Any) -> Batch:
        """The examples of one training step.

        Args:
            size: number of examples, over all processes.
            generator: for fresh examples; its state is in the checkpoint.
            step: steps done so far, an int64 scalar on the device: the position in a fixed training set.
            data: what ``setup`` returned.
        """
        return self.batch(size, generator)

    def starts_over(self, step: int) -> bool:
        """Whether the carried state is forgotten before this step, as at the start of an epoch."""
        return step == 0

    @abstractmethod
    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """What training makes small, a scalar; a mean over the batch."""

    @abstractmethod
    def metrics(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Numbers to report next to the loss: scalars on the device, means over the batch."""

    def details(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Further numbers for sets that are scored, which training does not report; means over the batch too."""
        return {}

    def summarise(self, scores: dict[str, float]) -> dict[str, float]:
        """The scores of a whole set, from the means over its answers of the loss, ``metrics`` and ``details``."""
        return scores

    @abstractmethod
    def validation(self, seed: int) -> Iterable[Batch]:
        """The examples that judge a run, on the CPU: the same for the same ``seed``, apart from the training data."""

    def test(self, seed: int) -> Iterable[Batch]:
        """The examples of the final score, apart from those of ``validation``."""
        return self.validation(seed + 1_000_003)

    def evaluation(self, split: Split, seed: int) -> Iterable[Batch]:
        """The examples of a final score on ``split``; a task may go through them more carefully than while training."""
        return self.validation(seed) if split == "validation" else self.test(seed)

    def summary(self, split: Split, scores: dict[str, float]) -> dict[str, float]:
        """Further numbers of a final score, made from the scores of all batches: totals, other units."""
        return {}

    def show(self, model: nn.Module) -> str:
        """Something for a person to look at after a validation, such as a drawn text; the model is in eval mode."""
        return ""

    def size_name(self) -> str:
        """The size of the problem as the names of recipes end in it, as ``t200``; empty where they name none."""
        return ""

    def provenance(self) -> str:
        """What a reader of the numbers should know of the data on this machine, where they are not the usual ones."""
        return ""

    def check_batch_size(self, size: int) -> None:
        """Refuse a ``batch_size`` that the task cannot work with, by a ValueError."""
        return None

    def weight(self, batch: Batch) -> int:
        """How much a batch counts when scores are averaged over batches: its number of answers."""
        return batch.y.numel()

    @abstractmethod
    def baseline(self) -> float:
        """Loss of the best model without memory; a run must beat it."""


MOST = 10**8
"""Largest size of a sequence or a set; more would not fit in memory."""


def check_sizes(task: Task, *names: str, least: int = 1, most: int = MOST) -> None:
    """Refuse a task whose fields ``names`` are not whole numbers from ``least`` to ``most``."""
    for name in names:
        value = getattr(task, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            kind = type(task).__name__
            allowed = f"a whole number of at least {least}, at most {most:,}"
            raise ValueError(f"{kind}: {name}={value!r}; it must be {allowed}.")


def named_generator(name: str) -> torch.Generator:
    """Make a CPU generator seeded by ``name``; its stream differs from those of other names and of training seeds."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))  # 56 bits: seeds are signed 64-bit


def fixed_set(task: Task, count: int, name: str, device: torch.device) -> Batch:
    """Draw ``count`` examples that depend only on ``name``, the same on every device."""
    return task.batch(count, named_generator(name)).to(device)


def batches(task: Task, count: int, name: str, size: int) -> Iterator[Batch]:
    """Yield the examples of ``fixed_set`` on the CPU, at most ``size`` at a time."""
    whole = fixed_set(task, count, name, torch.device("cpu"))
    for start in range(0, count, size):
        yield whole.rows(start, min(start + size, count))


def take(whole: Batch, size: int, step: Tensor) -> Batch:
    """Take batch number ``step`` (an int64 scalar on the device) of a set that is repeated in order."""
    count = whole.x.shape[0]
    index = (step * size + torch.arange(size, device=whole.x.device)) % count
    return Batch(whole.x.index_select(0, index), whole.y.index_select(0, index))
