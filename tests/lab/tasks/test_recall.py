import collections
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from torchrum.lab.tasks import Recall


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("length", [2, 8, 30])
def test_sequences_follow_the_definition(length):
    task, k = Recall(length=length), length // 2
    batch = task.batch(40, seeded(0))
    assert batch.x.shape == (40, length + 3) and batch.y.shape == (40,)
    for x, y in zip(batch.x.tolist(), batch.y.tolist(), strict=True):
        keys, values = x[0:length:2], x[1:length:2]
        assert sorted(keys) == list(range(1, k + 1))
        assert all(k + 1 <= value <= k + 10 for value in values)
        assert x[length : length + 2] == [0, 0]
        assert dict(zip(keys, values, strict=True))[x[-1]] == y + k + 1


def test_every_order_value_and_position_comes_up_alike():
    x, y, *_ = Recall(length=6).batch(12_000, seeded(0))
    orders = collections.Counter(map(tuple, x[:, 0:6:2].tolist()))
    assert len(orders) == 6 and all(abs(n / 2000 - 1) < 0.15 for n in orders.values())
    asked = (x[:, 0:6:2] == x[:, -1:]).float().mean(0)
    assert torch.allclose(asked, torch.tensor(1 / 3), atol=0.03)
    assert torch.allclose(y.bincount(minlength=10) / 12_000, torch.tensor(0.1), atol=0.015)


@pytest.mark.parametrize("length, size", [(30, 26), (50, 36)])
def test_sizes_of_the_model(length, size):
    assert (Recall(length=length).input_size, Recall(length=length).num_classes) == (size, 10)


@pytest.mark.parametrize("length, loss, accuracy", [(30, 1.948, 0.241), (50, 2.100, 0.207), (100, 2.208, 0.174)])
def test_plateau_is_the_known_one(length, loss, accuracy):
    task = Recall(length=length)
    assert task.baseline() == pytest.approx(loss, abs=5e-4)
    assert task.baseline_accuracy() == pytest.approx(accuracy, abs=5e-4)


@pytest.mark.parametrize("pairs, values", [(1, 4), (3, 2), (4, 3)])
def test_plateau_is_the_average_over_all_bags(pairs, values):
    bags = [collections.Counter(bag).values() for bag in itertools.product(range(values), repeat=pairs)]
    accuracy = sum(max(bag) / pairs for bag in bags) / len(bags)
    loss = sum(-n / pairs * math.log(n / pairs) for bag in bags for n in bag) / len(bags)
    task = Recall(length=2 * pairs, values=values)
    assert task.baseline() == pytest.approx(loss)
    assert task.baseline_accuracy() == pytest.approx(accuracy)


def test_the_bag_of_values_prediction_scores_the_plateau():
    task = Recall(length=10)
    batch = task.batch(20_000, seeded(0))
    bag = F.one_hot(batch.x[:, 1:10:2] - 6, 10).float().mean(1)
    logits = bag.log().clamp_min(-100)
    assert task.loss(logits, batch).item() == pytest.approx(task.baseline(), abs=0.015)
    assert task.metrics(logits, batch)["accuracy"].item() == pytest.approx(task.baseline_accuracy(), abs=0.015)


def test_training_walks_through_its_set_in_order_and_again():
    task = Recall(length=4, train_size=10)
    data = task.setup(torch.device("cpu"), seed=3)
    walked = torch.cat([task.train_batch(4, seeded(0), torch.tensor(step), data).x for step in range(5)])
    assert torch.equal(walked, torch.cat((data.x, data.x)))
    assert torch.equal(data.x, task.setup(torch.device("cpu"), seed=3).x)
    assert not torch.equal(data.x, task.setup(torch.device("cpu"), seed=4).x)


def test_without_a_set_every_step_is_fresh():
    task = Recall(length=4, train_size=None)
    generator, data = seeded(0), task.setup(torch.device("cpu"), seed=3)
    first, second = (task.train_batch(8, generator, torch.tensor(0), data) for _ in range(2))
    assert not torch.equal(first.x, second.x)


def test_lengths_in_training_take_turns():
    """Shorter sequences show a part of all keys; the validation set keeps the full length."""
    task = Recall(length=20, train_size=None, train_lengths=3)
    data, generator, seen = task.setup(torch.device("cpu"), seed=3), seeded(0), set()
    for step, pairs in enumerate([10, 5, 2, 10, 5, 2]):
        assert task.plan(64, step, data) == pairs
        x = task.train_batch(64, generator, torch.tensor(step), data).x
        keys = x[:, 0:-3:2]
        assert x.shape == (64, 2 * pairs + 3) and (keys.sort(-1).values.diff(dim=-1) > 0).all()
        assert (x[:, -1:] == keys).sum(-1).eq(1).all() and (x[:, 1:-3:2] > task.pairs).all()
        seen |= set(keys.flatten().tolist())
    assert seen == set(range(1, 11)) and next(task.validation(0)).x.shape[1] == 23
    with pytest.raises(ValueError, match="train_lengths=2 needs fresh examples; set train_size to none"):
        Recall(length=20, train_lengths=2)
    with pytest.raises(ValueError, match="train_lengths=5; it must be a whole number of at least 1, at most 4"):
        Recall(length=20, train_size=None, train_lengths=5)


def test_training_takes_up_longer_sequences_one_by_one():
    task = Recall(length=20, train_size=None, train_lengths=3, lengthen_every=4)
    data = task.setup(torch.device("cpu"), seed=3)
    assert [task.plan(64, step, data) for step in range(14)] == [2] * 4 + [5, 2] * 2 + [2, 10, 5, 2, 10, 5]
    with pytest.raises(ValueError, match="lengthen_every=4 has no effect with one length; raise train_lengths"):
        Recall(length=20, train_size=None, lengthen_every=4)
    with pytest.raises(ValueError, match="lengthen_every=0; it must be a whole number of at least 1"):
        Recall(length=20, train_size=None, train_lengths=3, lengthen_every=0)


def test_the_three_sets_are_apart_and_of_the_published_size():
    task = Recall(length=30)
    validation, test = list(task.validation(0)), list(task.test(0))
    train = task.setup(torch.device("cpu"), 0).x
    assert len(train) == 100_000
    assert sum(len(b.x) for b in validation) == 10_000 and sum(len(b.x) for b in test) == 20_000
    rows = [{row.tobytes() for row in part.numpy()} for part in (train, validation[0].x)]
    assert not rows[0] & rows[1]
    assert not torch.equal(validation[0].x, test[0].x)


@pytest.mark.parametrize("length", [1, 7, 51])
def test_odd_length_is_refused(length):
    with pytest.raises(ValueError, match=f"length={length} is odd, but keys and values come in pairs; take"):
        Recall(length=length)


@pytest.mark.parametrize("field", ["length", "values", "train_size", "validation_size", "test_size"])
@pytest.mark.parametrize("value", [0, -2, 2.5, 10**9, 10**12])
def test_impossible_sizes_are_refused(field, value):
    with pytest.raises(ValueError, match=f"Recall: {field}={value!r}; it must be a whole number of at least"):
        Recall(**{field: value})
