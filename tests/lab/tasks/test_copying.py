import math

import pytest
import torch
import torch.nn.functional as F

from torchrum.lab.tasks import Copying


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def copy_by_hand(symbols: list[int], delay: int) -> tuple[list[int], list[int]]:
    """Arjovsky et al.'s definition, written out for ten of eight symbols: blank 0, cue 9."""
    x = symbols + [0] * (delay - 1) + [9] + [0] * 10
    y = [0] * (delay + 10) + symbols
    return x, y


@pytest.mark.parametrize("delay", [1, 2, 7, 200])
def test_sequences_follow_the_definition(delay):
    batch = Copying(delay=delay).batch(5, seeded(0))
    assert batch.x.shape == batch.y.shape == (5, delay + 20)
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        assert (x, y) == copy_by_hand(x[:10], delay)
        assert all(1 <= symbol <= 8 for symbol in x[:10])


def test_symbols_are_uniform():
    counts = Copying(delay=1).batch(4000, seeded(0)).x[:, :10].flatten().bincount(minlength=9)[1:]
    assert torch.allclose(counts / 40_000, torch.tensor(1 / 8), atol=0.01)  # six standard deviations


def test_equal_seeds_give_equal_data():
    task = Copying(delay=3)
    assert torch.equal(task.batch(4, seeded(1)).x, task.batch(4, seeded(1)).x)
    assert not torch.equal(task.batch(4, seeded(1)).x, task.batch(4, seeded(2)).x)


@pytest.mark.parametrize(
    "delay, loss", [(100, 0.17329), (200, 0.09452), (500, 0.03999), (1000, 0.02039), (2000, 0.01029)]
)
def test_baseline_is_the_published_one(delay, loss):
    assert Copying(delay=delay).baseline() == pytest.approx(loss, abs=5e-6)


def memoryless_logits(task: Copying, y: torch.Tensor) -> torch.Tensor:
    """The best prediction without memory: blank up to the cue, then every symbol alike."""
    logits = torch.full((*y.shape, task.num_classes), -100.0)
    logits[:, : -task.length, 0] = 0
    logits[:, -task.length :, 1:] = 0
    return logits


def test_the_memoryless_prediction_scores_the_baseline():
    task = Copying(delay=20)
    batch = task.batch(64, seeded(0))
    logits = memoryless_logits(task, batch.y)
    assert task.loss(logits, batch).item() == pytest.approx(task.baseline(), rel=1e-5)
    assert task.metrics(logits, batch)["ratio"].item() == pytest.approx(1, rel=1e-5)
    assert task.metrics(logits, batch)["accuracy"].item() < 0.25  # argmax takes one symbol: 1/8 on average


def test_accuracy_counts_the_copied_symbols_alone():
    task = Copying(delay=5)
    batch = task.batch(6, seeded(0))
    logits = 10.0 * F.one_hot(batch.y, task.num_classes)
    assert task.metrics(logits, batch)["accuracy"] == 1
    logits[:, :-10] = 0  # wrong on the blanks
    assert task.metrics(logits, batch)["accuracy"] == 1
    logits[:3, -1] = 10.0 * F.one_hot(torch.tensor(0), task.num_classes)  # 3 of 60 symbols wrong
    assert task.metrics(logits, batch)["accuracy"].item() == pytest.approx(57 / 60)


def test_validation_is_fixed_and_apart_from_training():
    task = Copying(delay=4, validation_size=150)
    first, again = list(task.validation(0)), list(task.validation(0))
    assert [len(batch.x) for batch in first] == [128, 22]
    assert all(torch.equal(a.x, b.x) for a, b in zip(first, again, strict=True))
    others = (task.batch(128, seeded(0)), next(iter(task.validation(1))), next(iter(task.test(0))))
    assert not any(torch.equal(first[0].x, other.x) for other in others)


@pytest.mark.parametrize("field", ["delay", "length", "symbols", "validation_size"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True, 10**9, 10**12])
def test_impossible_sizes_are_refused(field, value):
    with pytest.raises(ValueError, match=f"Copying: {field}={value!r}; it must be a whole number of at least"):
        Copying(**{field: value})


def test_sizes_of_the_model():
    assert (Copying().input_size, Copying().num_classes) == (10, 9)
    assert Copying(symbols=3).baseline() == pytest.approx(10 * math.log(3) / 520)
