"""The networks of a comparison, their scores and their training."""

import math

import pytest
import torch
from torch import nn

from torchrum.lab.compare.models import (
    BATCH_SIZE,
    MODELS,
    Examples,
    Finished,
    Network,
    Sizes,
    choose_hidden_sizes,
    count_parameters,
    draw_batches,
    is_improving,
    score,
    shorten,
    time_steps,
    time_training,
    train,
)
from torchrum.lab.compare.problem import Part, Problem

CPU = torch.device("cpu")
SYMBOLS = 7


def part(kind: str, count: int, lengths: tuple[int, int] = (3, 7)) -> Part:
    """Sequences of unequal lengths with targets that depend on them."""
    generator = torch.Generator().manual_seed(count)
    steps = torch.randint(*lengths, (count,), generator=generator).tolist()
    if kind == "symbols":
        inputs = [torch.randint(SYMBOLS, (T,), generator=generator) for T in steps]
    else:
        inputs = [torch.randn(T, 3, generator=generator) for T in steps]
    targets = {
        "classification": lambda x: (x[0, 0] > 0).long(),
        "regression": lambda x: x[0, :2],
        "forecasting": lambda x: x[:, :2].cumsum(0),
        "tagging": lambda x: (x[:, 0] > 0).long(),
        "symbols": lambda x: x.roll(1),
    }[kind]
    return Part(inputs=inputs, targets=[targets(x) for x in inputs])


SCALE = torch.tensor([2.0, 5.0])
METRICS = {"symbols": "bits per symbol", "regression": "RMSE", "forecasting": "RMSE"}


def problem(kind: str = "classification") -> Problem:
    parts = (part(kind, 40), part(kind, 20), part(kind, 21))
    return Problem(
        kind=kind, train=parts[0], validation=parts[1], test=parts[2], symbols=SYMBOLS if kind == "symbols" else None,
        features=1 if kind == "symbols" else 3, outputs=SYMBOLS if kind == "symbols" else 2,
        metric=METRICS.get(kind, "error rate"), target_scale=SCALE if METRICS.get(kind) == "RMSE" else None,
        floor={"majority class": 0.5}, guesses=(), reading={},
    )  # fmt: skip


KINDS = ("classification", "regression", "forecasting", "tagging", "symbols")


@pytest.mark.parametrize("kind", ["classification", "symbols"])
def test_all_models_have_about_as_many_parameters(kind):
    sizes = Sizes.of(problem(kind))
    chosen = choose_hidden_sizes(sizes)
    counts = {name: count_parameters(Network(name, sizes, units)) for name, units in chosen.items()}
    assert counts.keys() == MODELS.keys()
    assert max(counts.values()) / min(counts.values()) < 1.15, counts


def test_the_choice_of_sizes_leaves_the_random_numbers_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    choose_hidden_sizes(Sizes.of(problem()))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_baselines_are_those_of_torch():
    sizes = Sizes.of(problem())
    assert type(Network("GRU", sizes, 8).layer) is nn.GRU
    assert type(Network("LSTM, window", sizes, 8).layer) is nn.LSTM
    assert Network("LSTM, window", sizes, 8).layer.input_size == 2 * sizes.features
    assert Network("RUM lam=1", sizes, 8).layer.state_names == ("h", "R")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["GRU", "RUM lam=1, window"])
def test_what_follows_a_sequence_has_no_effect(kind, name):
    given = problem(kind)
    network, examples = Network(name, Sizes.of(given), 8), Examples(given, given.test, CPU)
    batch = examples.batch(torch.arange(len(examples)))
    answers, _ = network(batch.x, batch.lengths)
    assert batch.known.sum() == (sum(map(len, given.test.inputs)) if network.every_step else len(examples))
    for row, (x, y) in enumerate(zip(given.test.inputs, given.test.targets, strict=True)):
        alone, _ = network(x.unsqueeze(1), torch.tensor([len(x)]))
        together = answers[: len(x), row] if network.every_step else answers[row]
        torch.testing.assert_close(together, alone.squeeze(-2))
        assert torch.equal(batch.y[: len(x), row] if network.every_step else batch.y[row], y)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_follow_their_definitions(kind):
    given = problem(kind)
    network = Network("RUM", Sizes.of(given), 8)
    found = []
    for x, y in zip(given.test.inputs, given.test.targets, strict=True):
        answers = network(x.unsqueeze(1), torch.tensor([len(x)]))[0].squeeze(-2).detach()
        if given.metric == "RMSE":
            found.append(((answers - y) * given.target_scale).square().reshape(-1, 2))
        elif given.metric == "error rate":
            found.append((answers.argmax(-1) != y).float().reshape(-1, 1))
        else:
            found.append(-answers.log_softmax(-1).gather(-1, y.unsqueeze(-1)) / math.log(2))
    mean = torch.cat(found).mean().item()
    examples = Examples(given, given.test, CPU)
    value = score(network, given, examples, torch.arange(len(examples)))
    assert value == pytest.approx(math.sqrt(mean) if given.metric == "RMSE" else mean, rel=1e-5)


def test_an_epoch_has_each_sequence_once():
    batches = draw_batches(3 * BATCH_SIZE, seed=4)
    first, second = (torch.cat([next(batches) for _ in range(3)]) for _ in range(2))
    assert torch.equal(first.sort()[0], torch.arange(3 * BATCH_SIZE))
    assert not torch.equal(first, second)
    assert torch.equal(next(draw_batches(50, seed=1)), next(draw_batches(50, seed=1)))
    assert len(next(draw_batches(5, seed=1))) == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["LSTM", "RUM, window"])
def test_training_keeps_the_best_weights(kind, name):
    given, count = problem(kind), []
    trained, weights = train(given, name, 8, 1e-2, 3, 45, True, CPU, lambda: count.append(1))
    assert len(count) == trained.curve[-1][0] == 45
    assert [step for step, *_ in trained.curve[:2]] == [0, 3]
    assert trained.validation == min(value for *_, value in trained.curve)
    assert trained.validation < 0.98 * trained.curve[0][2]
    assert trained.test is not None and not trained.diverged
    network = Network(name, Sizes.of(given), 8)
    assert max(weights) == trained.best_step
    network.load_state_dict(weights[trained.best_step])
    for wanted, part in ((trained.validation, given.validation), (trained.test, given.test)):
        examples = Examples(given, part, CPU)
        assert score(network, given, examples, torch.arange(len(examples))) == pytest.approx(wanted, rel=1e-6)


def test_a_training_repeats():
    runs = (train(problem(), "RUM", 8, 1e-2, seed, 20, True, CPU, lambda: None) for seed in (3, 3, 4))
    first, second, other = (weights[run.best_step] for run, weights in runs)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["readout.weight"], other["readout.weight"])


def test_a_training_contains_those_of_fewer_steps():
    runs = [train(problem(), "GRU", 8, 1e-2, 3, 45, True, CPU, lambda: None, lambda end=end: end) for end in (45, 18)]
    (full, weights), (ended, ended_weights) = runs
    assert [step for step, *_ in ended.curve] == [0, 3, 6, 9, 12, 15, 18]
    cut = shorten(full, 18)
    assert [point[::2] for point in cut.curve] == [point[::2] for point in ended.curve]
    assert (cut.validation, cut.best_step) == (ended.validation, ended.best_step)
    assert cut.test == (ended.test if full.best_step <= 18 else None)
    assert cut.seconds == cut.curve[-1][1] < full.seconds
    assert torch.equal(weights[cut.best_step]["readout.weight"], ended_weights[cut.best_step]["readout.weight"])
    assert shorten(full, 45) == full


def test_a_shortened_training_has_not_diverged_yet():
    curve = [(0, 0.0, 5.0), (3, 1.0, 4.0), (6, 2.0, 3.0)]
    run = Finished("GRU", 0.01, 1, 3.0, 0.5, 2.5, True, curve)  # it diverged before step 9
    assert shorten(run, 9) == run
    assert shorten(run, 6) == run._replace(diverged=False)
    assert shorten(run, 3) == Finished("GRU", 0.01, 1, 4.0, None, 1.0, False, curve[:2])


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_a_training_that_diverges_ends_with_its_best_weights(kind):
    trained, _ = train(problem(kind), "RUM", 8, 1e38, 3, 40, True, CPU, lambda: None)
    assert trained.diverged and len(trained.curve) < 15
    assert trained.validation == trained.curve[0][2]
    assert trained.test is not None and math.isfinite(trained.test)


@pytest.mark.parametrize(
    "scores, wanted", [((5, 4, 3, 2, 1.0), True), ((5, 4, 1, 1, 0.995), False), ((5, 1, 2, 3, 4.0), False)]
)
def test_improving_is_a_better_score_in_the_last_fifth(scores, wanted):
    assert is_improving([(25 * place, 0.0, value) for place, value in enumerate(scores)]) is wanted


def test_timings_are_positive():
    given = problem()
    step, scores = time_training(given, "RUM", 8, CPU)
    assert step > 0 and scores > 0
    times = time_steps({"RUM": Network("RUM", Sizes.of(given), 8)}, given, rounds=3)
    assert times.keys() == {"RUM"} and times["RUM"] > 0
