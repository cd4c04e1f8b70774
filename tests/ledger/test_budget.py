from dataclasses import replace

from torchrum.ledger.budget import budget_table
from torchrum.ledger.markers import fill_tables

from .test_table import entry, lines


def run(recipe, *points, seed=0, overrides=()):
    """A copying run with validations ``(step, ratio)``."""
    steps, ratios = ([float(x) for x in column] for column in zip(*points, strict=True))
    curve = {"step": steps, "loss": ratios, "accuracy": [0.5] * len(steps), "ratio": ratios}
    final = {name: values[-1] for name, values in curve.items() if name != "step"}
    plain = entry(recipe, seed, loss=1.0)
    return replace(plain, overrides=list(overrides), steps=int(steps[-1]), final=final, curve=curve, train_curve=curve)


LSTM = run("copying-lstm-t200", (600, 1.0))
RUNS = [
    run("copying-rum-t200", (500, 0.9), (1000, 0.4), (1500, 0.01)),
    run("copying-rum-t200", (500, 0.2), (1000, 0.9), (1500, 0.02), seed=1),
    run("copying-rum-t200", (1000, 0.001), (1500, 0.001), overrides=["optimizer.lr=0.002"]),
    LSTM,
    run("copying-rum-t500", (400, 0.5), (10_000, 0.1)),
    run("copying-lstm-t500", (500, 1.0)),
    run("copying-gru-t500", (400, 1.1), (500, 1.0)),
    run("copying-rum-t1000", (200, 0.7)),
]


def rum(*runs):
    return lines(budget_table([*runs, LSTM], "copying", 200_000))[2][1]


def test_every_model_is_read_at_its_best_by_the_same_work():
    header, _, ours, lstm, gru = lines(budget_table(RUNS, "copying", 200_000))
    assert header[1:] == ["loss / baseline, T = 200 (1,000 steps)", "loss / baseline, T = 500 (400 steps)"]
    assert ours == ["RUM λ=0", "0.3000 (0.2000 to 0.4000), 2 runs", "0.5000"]  # two runs tell more than a lucky one
    assert lstm == ["LSTM", "1.0000 after 600", ""]  # at T = 500 it was not looked at by then
    assert gru == ["GRU", "", "1.1000"]


def test_runs_that_differ_only_later_are_of_one_setting():
    later = ["compile=true", "optimizer.schedule=1000:0.3,2000:0.1", "steps=9000"]
    assert rum(RUNS[0], run("copying-rum-t200", (1000, 0.2), overrides=later)).endswith("2 runs")
    sooner = ["optimizer.schedule=900:0.3,2000:0.1"]
    assert rum(RUNS[0], run("copying-rum-t200", (1000, 0.2), overrides=sooner)) == "0.2000"


def test_of_runs_that_ended_sooner_the_furthest_counts_or_those_that_were_solved():
    short, longer = run("copying-rum-t200", (600, 0.2)), run("copying-rum-t200", (700, 0.3), seed=1)
    assert rum(short, longer) == "0.3000 after 700"
    solved = run("copying-rum-t200", (500, 0.001), seed=2)  # below the recipe's stop_at
    assert rum(short, longer, solved) == "0.0010 after 500"
    assert rum(short, RUNS[0], solved) == "0.2005 (0.0010 to 0.4000), 2 runs after 500 to 1,000"


def test_what_cannot_be_compared_is_left_out():
    assert "No two models" in budget_table(RUNS[-1:], "copying", 10**6)
    assert "No two models" in budget_table([], "copying", 10**6)
    other = replace(RUNS[0], overrides=["task.length=5"])
    assert "No two models" in budget_table([other, LSTM], "copying", 200_000)


def test_a_marker_asks_for_it():
    text = "<!-- torchrum:table copying within 200000 -->\nold\n<!-- /torchrum:table -->\n"
    assert budget_table(RUNS, "copying", 200_000) in fill_tables(text, RUNS)
