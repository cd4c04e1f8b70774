"""The interface of a task (data, loss, metrics, baseline), and fixed sets of generated examples."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Split = Literal["train", "validation", "test"]


class Batch(NamedTuple):
    """Inputs and answers; the first dimension of every tensor is the batch."""

    x: Tensor
    """Symbols, ``(B, T)`` int64."""
    y: Tensor
    """Answers, ``(B, T)`` for one at each step or ``(B,)`` for one at the end, int64."""
    lengths: Tensor | None = None
    """Valid steps of each row, ``(B,)`` int64; None: all of them."""
    group: Tensor | None = None
    """Kind of example of each row, ``(B,)`` int64, for tasks with several kinds."""

    def rows(self, start: int, stop: int) -> "Batch":
        """Take the rows ``start`` to ``stop``, such as the share of one process."""
        return tree_map_only(Tensor, lambda part: part[start:stop], self)

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the batch to another device."""
        return tree_map_only(Tensor, lambda part: part.to(device), self)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """One problem to learn. Its fields are its sizes; equal fields and equal seeds give equal data.

    The trainer calls ``setup`` once, ``train_batch``, ``loss`` and ``metrics`` at each step, and scores the batches of
    ``validation`` at intervals. A model is called ``model(x, lengths)`` and returns logits. For a task that carries
    state it is called ``model(x, lengths, state)`` and returns ``(logits, state)``, with ``state`` None at first; for
    CUDA graphs it needs ``model.initial_state(batch_size, device, dtype)``, the state for None.
    """

    answers: ClassVar[Literal["steps", "last"]] = "steps"
    """Where the model answers: at each step (logits ``(B, T, V)``) or once at the end (logits ``(B, V)``)."""
    metric: ClassVar[str] = "accuracy"
    """The entry of ``metrics`` that selects the best checkpoint; ``"loss"`` is allowed."""
    goal: ClassVar[Literal["max", "min"]] = "max"
    """Whether a good ``metric`` is high or low."""
    loss_unit: ClassVar[str] = "nats"
    """Unit of the loss."""
    baseline_name: ClassVar[str] = "memoryless"
    """Name of the model of ``baseline``."""
    carries_state: ClassVar[bool] = False
    """Whether the state after one batch is the state before the next (truncated backpropagation)."""
    capturable: ClassVar[bool] = True
    """Whether ``train_batch`` can be recorded in a CUDA graph: fixed shapes, and no value is read on the host."""
    has_test: ClassVar[bool] = False
    """Whether there is a test set; the chosen model's score on it is part of the result."""
    quotable: ClassVar[bool] = True
    """Whether results may quote its sequences; False for licensed texts and the user's own."""
    from_data: ClassVar[tuple[str, ...]] = ()
    """Fields that are read from the user's own data; commands and tables name the data instead."""
    batching: ClassVar[tuple[str, ...]] = ()
    """Fields that define how data become batches, such as the number of lanes: settings of a run, not the problem."""
    local: ClassVar[tuple[str, ...]] = ()
    """Fields that are valid only on one machine, such as a path: kept in the run folder, not recorded."""

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
        """Description of the data; empty for generated data."""
        return ""

    @property
    def own_data(self) -> str:
        """Name of the user's own data; empty if the task reads none."""
        return ""

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Draw ``size`` fresh examples on the device of ``generator``; a task that reads a data set has none."""
        raise NotImplementedError(f"{type(self).__name__} draws no examples; train_batch reads its data set.")

    def setup(self, device: torch.device, seed: int) -> Any:
        """Make or load the data of ``train_batch``, such as a fixed training set; depends only on ``seed``."""
        return None

    def plan(self, size: int, step: int, data: Any) -> Hashable:
        """Prepare ``data`` for the batch of ``size`` examples that follows ``step`` finished steps, on the host.

        The buffers that ``train_batch`` reads are filled in place. Their content depends only on ``size`` and
        ``step``, so that a run can be resumed.

        Returns:
            A key for the shapes of the step, such as the length of a bucket of sequences; a CUDA graph is recorded
            for each key.
        """
        return None

    def train_batch(self, size: int, generator: torch.Generator, step: Tensor, data: Any) -> Batch:
        """Return the examples of one training step.

        Args:
            size: number of examples, over all processes.
            generator: generator of fresh examples; its state is in the checkpoint.
            step: steps done so far, an int64 scalar on the device: the position in a fixed training set.
            data: the result of ``setup``.
        """
        return self.batch(size, generator)

    def starts_over(self, step: int) -> bool:
        """Whether the carried state is reset before this step, as at the start of an epoch."""
        return step == 0

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Compute the training loss, a scalar: cross-entropy, the mean over all answers."""
        return F.cross_entropy(logits.flatten(0, -2), batch.y.flatten())

    def metrics(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute numbers to report next to the loss: scalars on the device, means over the batch.

        By default ``accuracy``, the share of answers that are right.
        """
        return {"accuracy": (logits.argmax(-1) == batch.y).float().mean()}

    def details(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute further numbers for evaluation only; means over the batch."""
        return {}

    def summarise(self, scores: dict[str, float]) -> dict[str, float]:
        """Compute the scores of a whole set from its mean loss, ``metrics`` and ``details``."""
        return scores

    @abstractmethod
    def validation(self, seed: int) -> Iterable[Batch]:
        """Return the validation examples, on the CPU; they depend on ``seed`` only and are disjoint from training."""

    def test(self, seed: int) -> Iterable[Batch]:
        """Return the examples of the final score, disjoint from those of ``validation``."""
        return self.validation(seed + 1_000_003)

    def evaluation(self, split: Split, seed: int) -> Iterable[Batch]:
        """Return the examples of a final score on ``split``; a task may batch them differently than in training."""
        return self.validation(seed) if split == "validation" else self.test(seed)

    def summary(self, split: Split, scores: dict[str, float]) -> dict[str, float]:
        """Compute further numbers of a final score from the scores of all batches: totals, other units."""
        return {}

    def show(self, model: nn.Module) -> str:
        """Return a sample to print after a validation, such as generated text; the model is in eval mode."""
        return ""

    def size_name(self) -> str:
        """Return the size suffix of recipe names, such as ``t200``; empty if there is none."""
        return ""

    def provenance(self) -> str:
        """Return a note on the data of this machine, if they differ from the official ones."""
        return ""

    def check_batch_size(self, size: int) -> None:
        """Raise ValueError for a ``batch_size`` that the task does not support."""
        return None

    def weight(self, batch: Batch) -> int:
        """Return the weight of a batch when scores are averaged over batches: its number of answers."""
        return batch.y.numel()

    @abstractmethod
    def baseline(self) -> float:
        """Return the loss of the best model without memory; a run must beat it."""


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
