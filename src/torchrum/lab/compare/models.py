"""The models of a comparison, and how one of them is trained and scored."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum import RUM, InputWindow
from torchrum.lab.compare.problem import Part, Problem
from torchrum.lab.training.distributed import threads

EMBEDDING = 32
"""Numbers per embedded symbol."""
REFERENCE_SIZE = 56
"""Hidden units of the GRU, whose number of parameters the other models match."""
BATCH_SIZE, SCORE_BATCH_SIZE = 32, 256
CLIP = 1.0
"""Largest norm of a gradient."""
CHECKS = 15
"""Scores on the validation part during a training; its best weights are kept."""
CHECKED = 500
"""Sequences of the validation part that are scored, chosen at random, the same for every training."""
IMPROVING = 0.01
"""A training whose last fifth makes the best score better by more than this share is still improving."""
WARMUP, TIMING_SECONDS = 3, 0.5
"""Steps before a timing, and its length."""


class Model(NamedTuple):
    """A recurrent layer that is compared, with or without a window over its inputs."""

    family: Literal["GRU", "LSTM", "RUM"]
    layer: Callable[[int, int], nn.Module]
    width: int = 1
    """Inputs that each step reads: its own and the ones before it."""


def _rum_lam1(input_size: int, hidden_size: int) -> RUM:
    return RUM(input_size, hidden_size, lam=1)


MODELS: dict[str, Model] = {
    "GRU": Model("GRU", nn.GRU),
    "LSTM": Model("LSTM", nn.LSTM),
    "RUM": Model("RUM", RUM),
    "RUM lam=1": Model("RUM", _rum_lam1),
    "GRU, window": Model("GRU", nn.GRU, 2),
    "LSTM, window": Model("LSTM", nn.LSTM, 2),
    "RUM, window": Model("RUM", RUM, 2),
    "RUM lam=1, window": Model("RUM", _rum_lam1, 2),
}


class Sizes(NamedTuple):
    """What a network needs to know of a problem."""

    symbols: int | None
    features: int
    outputs: int
    every_step: bool

    @classmethod
    def of(cls, problem: Problem) -> "Sizes":
        every_step = problem.kind in ("forecasting", "tagging", "symbols")
        return cls(problem.symbols, problem.features, problem.outputs, every_step)


class Network(nn.Module):
    """An embedding where the inputs are symbols, a recurrent layer, and a linear read-out.

    Args:
        name: one of ``MODELS``.
        sizes: of the problem.
        hidden_size: units of the layer.
    """

    def __init__(self, name: str, sizes: Sizes, hidden_size: int) -> None:
        super().__init__()
        model, features = MODELS[name], sizes.features if sizes.symbols is None else EMBEDDING
        self.every_step = sizes.every_step
        self.embed = nn.Identity() if sizes.symbols is None else nn.Embedding(sizes.symbols, features)
        self.window = InputWindow(features, model.width) if model.width > 1 else None
        self.layer = model.layer(model.width * features, hidden_size)
        self.readout = nn.Linear(hidden_size, sizes.outputs)

    def forward(self, x: Tensor, lengths: Tensor, state: Any = (None, None)) -> tuple[Tensor, Any]:
        """Answer for padded sequences.

        Args:
            x: ``(T, B, F)``, or ``(T, B)`` symbols.
            lengths: ``(B,)``; what lies behind the end of a sequence has no effect on the answers before it.
            state: from an earlier call, to go on from.

        Returns:
            The answers, ``(T, B, outputs)`` or after the last step ``(B, outputs)``, and the state.
        """
        x, before = self.embed(x), None
        if self.window is not None:
            x, before = self.window(x, state[0])
        output, hidden = self.layer(x, state[1])
        if not self.every_step:
            output = output[lengths - 1, torch.arange(len(lengths), device=lengths.device)]
        return self.readout(output), (before, hidden)


def count_parameters(network: nn.Module) -> int:
    """Number of trained numbers."""
    return sum(weight.numel() for weight in network.parameters())


def choose_hidden_sizes(sizes: Sizes) -> dict[str, int]:
    """Choose the hidden size of each model so that all have about as many parameters as the GRU."""

    def count(name: str, hidden_size: int) -> int:
        return count_parameters(Network(name, sizes, hidden_size))

    with torch.random.fork_rng(devices=[]):
        wanted = count("GRU", REFERENCE_SIZE)
        # multiples of 4 suit the vector units of processors
        return {name: min(range(8, 97, 4), key=lambda size: abs(count(name, size) - wanted)) for name in MODELS}


class Batch(NamedTuple):
    """Padded sequences with their targets."""

    x: Tensor
    """``(T, B, F)``, or ``(T, B)`` symbols."""
    y: Tensor
    """``(B, ...)``, or ``(T, B, ...)`` if every step has a target."""
    lengths: Tensor
    """``(B,)``"""
    known: Tensor
    """Which targets are none of the padding, ``(B,)`` or ``(T, B)``."""


class Examples:
    """A part of a problem as one long tensor on a device, from which batches are gathered."""

    def __init__(self, problem: Problem, part: Part, device: torch.device) -> None:
        self._every_step = Sizes.of(problem).every_step
        self._lengths = torch.tensor([len(sequence) for sequence in part.inputs], device=device)
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._x = torch.cat(part.inputs).to(device)
        self._y = (torch.cat(part.targets) if self._every_step else torch.stack(part.targets)).to(device)

    def __len__(self) -> int:
        return len(self._lengths)

    def batch(self, rows: Tensor) -> Batch:
        """Pad some sequences to the longest of them, with their last steps."""
        rows = rows.to(self._lengths.device)
        lengths = self._lengths[rows]
        steps = torch.arange(int(lengths.max()), device=rows.device).unsqueeze(1)
        places = self._starts[rows] + torch.minimum(steps, lengths - 1)  # (T, B)
        if self._every_step:
            return Batch(self._x[places], self._y[places], lengths, steps < lengths)
        return Batch(self._x[places], self._y[rows], lengths, torch.ones_like(rows, dtype=torch.bool))


def draw_batches(count: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of one batch after another, in a new order in each epoch: the same for every model."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randperm(count, generator=generator).split(BATCH_SIZE)
        yield from rows[: max(1, count // BATCH_SIZE)]  # without the smaller rest


def sum_of_errors(problem: Problem, answers: Tensor, batch: Batch) -> Tensor:
    """Sum up the cross-entropy, or the squared errors of scaled targets, without the padding."""
    if problem.metric == "RMSE":
        return ((answers - batch.y).square().mean(-1) * batch.known).sum()
    entropy = F.cross_entropy(answers.flatten(0, -2), batch.y.flatten(), reduction="none")
    return (entropy * batch.known.flatten()).sum()


@torch.no_grad()
def score(network: Network, problem: Problem, examples: Examples, rows: Tensor) -> float:
    """Score the answers for some rows of a part in the metric of the problem."""
    total, count = 0.0, 0.0
    for some in rows.split(SCORE_BATCH_SIZE):
        batch = examples.batch(some)
        answers, _ = network(batch.x, batch.lengths)
        if problem.metric == "error rate":
            wrong = ((answers.argmax(-1) != batch.y) & batch.known).sum()
        else:
            if problem.target_scale is not None:
                scale = problem.target_scale.to(answers)
                answers, batch = answers * scale, batch._replace(y=batch.y * scale)
            wrong = sum_of_errors(problem, answers, batch)
        total, count = total + wrong.item(), count + batch.known.sum().item()
    mean = total / count
    return math.sqrt(mean) if problem.metric == "RMSE" else mean / (math.log(2) if "bits" in problem.metric else 1)


class Learner:
    """A network with its optimizer and its batches."""

    def __init__(
        self, problem: Problem, name: str, hidden_size: int, rate: float, seed: int, device: torch.device
    ) -> None:
        self.network = Network(name, Sizes.of(problem), hidden_size).to(device)
        self._problem, self._device = problem, device
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=rate, fused=True)
        self._examples = Examples(problem, problem.train, device)
        self._batches = draw_batches(len(self._examples), seed)
        self._validation = Examples(problem, problem.validation, device)
        count = len(self._validation)
        self._checked = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:CHECKED]

    def step(self) -> None:
        """Do one update."""
        batch = self._examples.batch(next(self._batches))
        answers, _ = self.network(batch.x, batch.lengths)
        loss = sum_of_errors(self._problem, answers, batch) / batch.known.sum()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        self._optimizer.step()

    def wait(self) -> None:
        """Wait for what was started on a GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def validate(self) -> float:
        """Score the validation part."""
        return score(self.network, self._problem, self._validation, self._checked)

    def test(self) -> float:
        """Score the test part."""
        examples = Examples(self._problem, self._problem.test, self._device)
        return score(self.network, self._problem, examples, torch.arange(len(examples)))


class Finished(NamedTuple):
    """A finished training, one line of ``trainings.jsonl``."""

    model: str
    rate: float
    seed: int
    validation: float
    """Best score on the validation part."""
    test: float | None
    """Score of the same weights on the test part; None in the search of the rates."""
    seconds: float
    """Time of the training without the scores."""
    diverged: bool
    """Whether the weights stopped being finite, which ended the training."""
    curve: Sequence[tuple[int, float, float]]
    """Step, seconds of training so far, and score on the validation part."""

    @property
    def best_step(self) -> int:
        """Step of the weights that count."""
        return next(step for step, _, found in self.curve if found == self.validation)


def check_steps(steps: int) -> list[int]:
    """Steps after which a training scores the validation part."""
    return sorted({round(steps * check / CHECKS) for check in range(1, CHECKS + 1)})


def shorten(run: Finished, steps: int) -> Finished:
    """Return a training as it was after fewer steps; its rate is constant, so it is the same training.

    Args:
        run: a finished training.
        steps: one of its ``check_steps``, or more than it has.

    Returns:
        The shorter training, without a score on the test part if that is of later weights.
    """
    curve = [point for point in run.curve if point[0] <= steps]
    best = min(found for *_, found in curve)
    return run._replace(
        validation=best,
        test=run.test if best == run.validation else None,
        seconds=run.seconds if len(curve) == len(run.curve) else curve[-1][1],
        diverged=run.diverged and curve[-1][0] < steps,
        curve=curve,
    )


def is_improving(curve: Sequence[Sequence[float]]) -> bool:
    """Whether the last fifth of a training made the best score better by more than ``IMPROVING``."""
    before = [score for step, _, score in curve if step <= 0.8 * curve[-1][0]]
    return min(score for *_, score in curve) < min(before) * (1 - IMPROVING)


def train(
    problem: Problem,
    name: str,
    hidden_size: int,
    rate: float,
    seed: int,
    steps: int,
    test: bool,
    device: torch.device,
    tick: Callable[[], None],
    limit: Callable[[], int] | None = None,
) -> tuple[Finished, dict[int, dict[str, Tensor]]]:
    """Train one model with Adam at a constant rate, and keep its best weights on the validation part.

    Args:
        problem: what to learn.
        name: one of ``MODELS``.
        hidden_size: units of its layer.
        rate: learning rate.
        seed: of the initial weights and of the order of the examples.
        steps: number of updates.
        test: whether to score the best weights on the test part.
        device: where to train.
        tick: called after every step.
        limit: says after which of its ``check_steps`` to end; None ends after ``steps``.

    Returns:
        The scores, and by its step each of the weights that were better on the validation part than all before.
    """
    torch.manual_seed(seed)
    learner = Learner(problem, name, hidden_size, rate, seed, device)
    network = learner.network
    curve = [(0, 0.0, learner.validate())]
    weights = {0: _copy(network)}
    checks = set(check_steps(steps))
    seconds, begin, diverged = 0.0, time.perf_counter(), False
    for step in range(1, steps + 1):
        learner.step()
        tick()
        if step not in checks:
            continue
        learner.wait()
        seconds += time.perf_counter() - begin
        found = learner.validate()
        # an error rate stays finite
        diverged = not (math.isfinite(found) and network.readout.weight.isfinite().all())
        if diverged:
            break
        if found < min(earlier for *_, earlier in curve):
            weights[step] = _copy(network)
        curve.append((step, round(seconds, 3), found))
        if limit is not None and step >= limit():
            break
        begin = time.perf_counter()
    network.load_state_dict(weights[max(weights)])
    best = min(found for *_, found in curve)
    tested = learner.test() if test else None
    return Finished(name, rate, seed, best, tested, round(seconds, 3), diverged, curve), weights


def _copy(network: Network) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}


def time_training(problem: Problem, name: str, hidden_size: int, device: torch.device) -> tuple[float, float]:
    """Measure the seconds of one step of training, and of all scores of a training together."""
    learner, times = Learner(problem, name, hidden_size, 1e-3, 0, device), list[float]()
    begin = time.perf_counter()
    for _ in range(WARMUP):  # a kernel may be compiled
        learner.step()
        if time.perf_counter() - begin > TIMING_SECONDS:  # sequences of thousands of steps
            break
    while not times or (len(times) < 100 and sum(times) < TIMING_SECONDS):
        begin = time.perf_counter()
        learner.step()
        learner.wait()
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    learner.validate()
    return sum(times) / len(times), (CHECKS + 2) * (time.perf_counter() - begin)


@torch.no_grad()
def time_steps(networks: dict[str, Network], problem: Problem, rounds: int = 50) -> dict[str, float]:
    """Median seconds of one step at batch 1 with the state carried on, on one thread, measured in turns."""
    one = torch.ones(1, dtype=torch.int64)
    x = problem.train.inputs[0][:1].unsqueeze(1)  # (1, 1, F) or (1, 1)
    states: dict[str, Any] = dict.fromkeys(networks, (None, None))
    times: dict[str, list[float]] = {name: [] for name in networks}
    with threads(1):  # nn.LSTM waits for all threads, which a busy machine may run late
        for _ in range(rounds):
            for name, network in networks.items():
                begin = time.perf_counter()
                _, states[name] = network(x, one, states[name])
                times[name].append(time.perf_counter() - begin)
    return {name: sorted(seconds)[len(seconds) // 2] for name, seconds in times.items()}
