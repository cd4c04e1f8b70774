"""Problems: nothing leaks between the parts, scaling is of the training part, and floors are what hand counts give."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrum.lab.compare.data import read_problem
from torchrum.lab.compare.problem import Part, Problem

DRAW = np.random.default_rng(1)
SERIES = DRAW.normal(size=(400, 2))
GROUPS = {"who": np.repeat(np.arange(20), 30), "ax": np.arange(0.0, 1200, 2), "does": np.tile(["a", "b", "b"], 200)}
SHARED_TIMES = {
    "date": np.repeat(np.arange("2020-01-01", "2020-04-10", dtype="datetime64[D]"), 3),
    "shop": np.tile(["a", "b", "c"], 100),
    "name": DRAW.permutation(300),  # of each row
    "sales": DRAW.normal(size=300),
}


def parts(problem: Problem) -> list[Part]:
    return [problem.train, problem.validation, problem.test]


def raw_inputs(problem: Problem, column: int = 0) -> list[set[float]]:
    """Values of an input column in each part, in the units of the data."""
    mean, scale = problem.reading["means"][column], problem.reading["scales"][column]
    return [{round(float(v) * scale + mean, 1) for x in part.inputs for v in x[:, column]} for part in parts(problem)]


def raw_targets(problem: Problem, part: Part) -> np.ndarray:
    reading = problem.reading
    return torch.cat(part.targets).double().numpy() * reading["target_scales"] + reading["target_means"]


def assert_apart(sets: list[set[float]]) -> None:
    assert all(sets) and not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])


def test_a_series_is_cut_by_time():
    x = np.stack([np.arange(400) % 240 + np.arange(400) / 1000, SERIES[:, 0]], 1)
    x[:, 0] = DRAW.permutation(400)  # each row has a number of its own
    problem = read_problem(x)
    assert_apart(raw_inputs(problem))
    assert [len(rows) for rows in raw_inputs(problem)] == [279, 59, 59]  # the last row of a part is a target only
    assert raw_inputs(problem)[2] == {round(float(v), 1) for v in x[340:399, 0]}


def test_series_side_by_side_are_cut_at_the_same_times():
    problem = read_problem(SHARED_TIMES, target="sales", group="shop", inputs=["name"])
    names = SHARED_TIMES["name"].tolist()
    days = [{names.index(round(name)) // 3 for name in part} for part in raw_inputs(problem)]
    assert days == [set(range(69)), set(range(70, 84)), set(range(85, 99))]  # the last day of a part is a target only


def test_groups_stay_whole():
    problem = read_problem(GROUPS, target="does", group="who", kind="tagging")
    assert_apart([{value // 60 for value in rows} for rows in raw_inputs(problem)])
    assert [len(part.inputs) for part in parts(problem)] == [14, 3, 3]
    assert all(len(x) == 30 for part in parts(problem) for x in part.inputs)


def test_examples_with_a_time_are_cut_by_time():
    columns = {"when": DRAW.permutation(100), "a": np.zeros(100), "b": DRAW.normal(size=100), "y": np.arange(100) % 2}
    columns["a"] = columns["when"] * 2.0
    problem = read_problem(columns, time="when", target="y", kind="classification")
    assert problem.features == 1
    values = [{round(float(x[0, 0]), 4) for x in part.inputs} for part in parts(problem)]
    assert max(values[0]) < min(values[1]) and max(values[1]) < min(values[2])
    assert list(map(len, values)) == [70, 15, 15]


def test_classes_are_dealt_to_every_part():
    y = np.repeat([0, 1, 2], [60, 30, 10])
    problem = read_problem((DRAW.normal(size=(100, 5, 1)), y))
    counts = [torch.bincount(torch.stack(part.targets)).tolist() for part in parts(problem)]
    assert counts == [[42, 22, 6], [9, 4, 2], [9, 4, 2]]


def test_each_sequence_is_in_one_part():
    x = np.arange(40.0)[:, None, None] + np.zeros((40, 6, 1))
    problem = read_problem((x, np.arange(40) % 2))
    assert_apart(raw_inputs(problem))
    assert sum(map(len, raw_inputs(problem))) == 40


@pytest.mark.parametrize("kind", ["forecasting", "tagging", "classification"])
def test_statistics_are_of_the_training_part(kind):
    """Other values in the test part change neither scales nor training data."""
    if kind == "classification":
        data = (DRAW.normal(size=(40, 6, 2)), np.arange(40) % 2)
        x = read_problem(data)
        held_out = [i for i in range(40) if not any(np.allclose(raw, data[0][i]) for raw in unscaled(x, x.train))]
        held_out = [i for i in held_out if not any(np.allclose(raw, data[0][i]) for raw in unscaled(x, x.validation))]
        assert len(held_out) == 6
        changed = data[0].copy()
        changed[held_out] *= 100
        before, after = x, read_problem((changed, data[1]))
    else:
        columns = {"v": SERIES[:, 0].copy(), "w": SERIES[:, 1], "tag": np.tile(["a", "b"], 200)}
        options = {"target": "v" if kind == "forecasting" else "tag", "inputs": ["v", "w"], "kind": kind}
        before = read_problem(columns, **options)
        columns["v"][340:] *= 100
        after = read_problem(columns, **options)
    assert before.reading == after.reading
    assert all(torch.equal(a, b) for a, b in zip(before.train.inputs, after.train.inputs, strict=True))
    assert max(x.abs().max() for x in after.test.inputs) > 50
    if kind == "classification":
        together = torch.cat(before.train.inputs)
        torch.testing.assert_close(together.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
        torch.testing.assert_close(together.std(0, correction=0), torch.ones(2))


def unscaled(problem: Problem, part: Part) -> list[np.ndarray]:
    return [x.numpy() * problem.reading["scales"] + problem.reading["means"] for x in part.inputs]


def test_the_alphabet_is_of_the_training_part(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 400 + "z" + "ac" * 100)
    problem = read_problem(tmp_path / "a.txt")
    assert problem.reading["alphabet"] == ["a", "b"]  # z and c are the one symbol for all others
    assert torch.cat(problem.test.inputs).max() == 2


def test_windows_follow_each_other(tmp_path):
    """Targets are the next inputs; windows of the training part overlap, those of the other parts tile it."""
    series = DRAW.permutation(1000).astype(float)
    problem = read_problem(series)
    assert problem.reading["target_changes"] == [False]
    for part, start, stop in zip(parts(problem), (0, 700, 850), (700, 850, 1000), strict=True):
        rows = [np.abs(series - value).argmin() for x in unscaled(problem, part) for value in x]
        assert set(rows) == set(range(start, stop - 1))
    assert {len(x) for x in problem.train.inputs} == {87}
    assert sum(map(len, problem.test.inputs)) == 149
    together = [torch.cat(part.inputs) for part in parts(problem)]
    assert len(together[0]) > 1.7 * 699
    x, y = problem.test.inputs[0][:, 0], raw_targets(problem, problem.test)
    np.testing.assert_allclose(y[: len(x), 0], series[851 : 851 + len(x)], rtol=1e-5)


def test_text_windows_tile_the_text(tmp_path):
    text = "".join(DRAW.choice(list("abcd"), 3000))
    (tmp_path / "a.txt").write_text(text)
    problem = read_problem(tmp_path / "a.txt")
    names = [*problem.reading["alphabet"], "?"]
    for part, start, stop in zip(parts(problem), (0, 2100, 2550), (2100, 2550, 3000), strict=True):
        assert "".join(names[i] for x in part.inputs for i in x) == text[start : stop - 1]
        assert "".join(names[i] for y in part.targets for i in y) == text[start + 1 : stop]


def test_long_whole_sequences_are_cut():
    problem = read_problem(DRAW.normal(size=(10, 1201, 1)))
    assert [len(x) for x in problem.test.inputs] == [400] * 6
    assert any("up to 512 steps" in text for text in problem.guesses)


def test_a_trend_is_read_as_changes():
    """Later values leave the range of training, so that inputs and target are changes; errors are of the values."""
    trend = np.arange(400) + SERIES[:, 0]
    problem = read_problem({"v": trend}, target="v")
    assert problem.reading["changes"] == problem.reading["target_changes"] == [True]
    steps = np.diff(trend)
    np.testing.assert_allclose(raw_targets(problem, problem.test)[:, 0], steps[340:], atol=1e-5)
    np.testing.assert_allclose(unscaled(problem, problem.test)[0][:3, 0], [0, *steps[340:342]], atol=1e-5)
    assert max(x.abs().max() for x in problem.test.inputs) < 6
    assert problem.floor["last value"] == pytest.approx(math.sqrt((steps[340:] ** 2).mean()))
    assert problem.floor["training mean"] == pytest.approx(math.sqrt(((trend[341:] - trend[1:280].mean()) ** 2).mean()))


def test_noise_is_read_as_values():
    problem = read_problem(SERIES[:, :1])
    assert problem.reading["changes"] == problem.reading["target_changes"] == [False]
    assert problem.floor["training mean"] < problem.floor["last value"]


def test_errors_are_in_the_units_of_the_data():
    """The RMSE of a prediction of zero, by the formula of ``target_scale``, is that of the training mean."""
    problem = read_problem((DRAW.normal(size=(40, 6, 1)), DRAW.normal(size=(40, 2)) * (1, 1000)))
    assert problem.target_scale is not None
    error = (torch.stack(problem.test.targets) * problem.target_scale).double().square().mean().sqrt()
    assert problem.floor == {"training mean": pytest.approx(error.item())}
    assert problem.floor["training mean"] > 100


def test_floor_of_classes():
    """Class 1 has larger inputs: the mean of a sequence tells it, and the commonest class is wrong in 4 of 15."""
    y = np.repeat([0, 1], [73, 27])
    problem = read_problem((DRAW.normal(size=(100, 6, 1)) * 0.1 + y[:, None, None], y))
    assert problem.floor == {"majority class": pytest.approx(4 / 15), "bag of inputs": 0}


def test_floor_of_symbols_by_class():
    texts = ["aab" if i % 4 else "abb" for i in range(80)]
    problem = read_problem((texts, [text == "aab" for text in texts]))
    assert problem.floor == {"majority class": 0.25, "bag of inputs": 0}


def test_floor_of_tags():
    """The tag is b after a and c: of three steps with input 0 the tags are 0, 0, 1, and input 1 always has 1."""
    x, y = np.tile([0, 0, 0, 1], (20, 1)), np.tile([0, 0, 1, 1], (20, 1))
    assert read_problem((x, y)).floor == {"majority tag": 0.5, "tag of the symbol": 0.25}
    numbers = read_problem((x[..., None].astype(float), y)).floor
    assert numbers == {"majority tag": 0.5, "nearest mean input": 0.25}


def test_floor_of_symbols():
    """Counts by hand: 14 training sequences a b a c, 3 of the test part the same."""
    problem = read_problem(np.tile([0, 1, 0, 2], (20, 1)))
    assert problem.outputs == 4
    bits = lambda *chances: -sum(map(math.log2, chances)) / len(chances)  # noqa: E731
    unigram = bits(15 / 46, 15 / 46, 15 / 46)  # of 42 targets each of b, a and c is a third; add one to each of four
    bigram = bits(15 / 32, 15 / 18, 15 / 32)  # after a come b and c, 14 times each; after b comes a
    trigram = bits(15 / 32, 15 / 18, 15 / 18)  # the first step has one symbol of context
    found = problem.floor
    assert (found["unigram"], found["bigram"], found["trigram"]) == pytest.approx((unigram, bigram, trigram))


def test_reading_is_json_and_problems_repeat(tmp_path):
    first, second = (read_problem(SHARED_TIMES, target="sales") for _ in range(2))
    assert json.loads(json.dumps(first.reading)) == first.reading == second.reading
    assert all(torch.equal(a, b) for a, b in zip(first.train.inputs, second.train.inputs, strict=True))
    (Path(tmp_path) / "a.txt").write_text("some text " * 50)
    for problem in (
        read_problem(tmp_path / "a.txt"),
        read_problem((np.ones((40, 3, 1)) * DRAW.normal(size=(40, 1, 1)), ["a", "b"] * 20)),
    ):
        assert json.loads(json.dumps(problem.reading)) == problem.reading
