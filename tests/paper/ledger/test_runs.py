"""What models are called in tables, models at a matched step budget, and the notes below their table."""

from dataclasses import replace

import pytest

from paper.ledger.test_tables import entry, lines
from torchrum.lab.training.config import ModelConfig
from torchrum.layers.registry import LAYERS
from torchrum.paper.ledger.runs import (
    NAMES,
    best,
    compare,
    comparison_tables,
    model_label,
    notes,
    overfits,
    reached_goal,
    seen,
    still_learning,
    trajectories,
)
from torchrum.paper.ledger.tables import asked_table


@pytest.mark.parametrize(
    "layer, num_layers, options, expected",
    [
        ("rum", 1, {}, "RUM λ=0"),
        ("rum", 2, {"lam": 1, "eta": 0.3}, "2 × RUM λ=1, η=0.3"),
        ("rum", 1, {"eta": "sqrt"}, "RUM λ=0, η=√H"),
        ("fs", 1, {}, "FS-LSTM-2"),
        ("fs", 1, {"slow": "rum", "num_fast": 4}, "FS-RUM-4"),
        ("fs", 1, {"slow": "rum-tanh"}, "FS-RUM-2 (tanh)"),
        ("fs", 1, {"slow": "rum-tanh", "slow_size": None}, "FS-RUM-2 (tanh)"),
        ("fs", 1, {"slow": "rum-tanh", "slow_size": 1}, "FS-RUM-2 slim"),
        ("ln_lstm", 1, {}, "LN-LSTM"),
        ("ln_lstm", 1, {"zoneout": 0.05}, "LN-LSTM"),
        ("ln_lstm", 1, {"layer_norm": False, "zoneout": 0.05}, "Zoneout LSTM"),
        ("ln_lstm", 1, {"layer_norm": False}, "LSTM (TensorFlow)"),
        ("hyper_lstm", 2, {}, "2 × HyperLSTM"),
        ("unheard_of", 1, {}, "unheard_of"),
    ],
)
def test_label(layer, num_layers, options, expected):
    assert model_label(ModelConfig(layer=layer, hidden_size=4, num_layers=num_layers, options=options)) == expected


def test_every_layer_has_a_name_in_print():
    assert set(LAYERS) - set(NAMES) == {"rum", "fs"}  # they have variants
    assert set(NAMES) <= {*LAYERS, "memn2n"}  # which is a model without a layer


def run(recipe, *points, seed=0, overrides=()):
    """A copying run with validations ``(step, ratio)``."""
    steps, ratios = ([float(x) for x in column] for column in zip(*points, strict=True))
    curve = {"step": steps, "loss": ratios, "accuracy": [0.5] * len(steps), "ratio": ratios}
    final = {name: values[-1] for name, values in curve.items() if name != "step"}
    plain = entry(recipe, seed, loss=1.0)
    return replace(plain, overrides=list(overrides), steps=int(steps[-1]), final=final, curve=curve, train_curve=curve)


LSTM = run("copying-lstm-t200", (600, 1.0))
RUNS = [
    run("copying-rum-paper-t200", (500, 0.9), (1000, 0.4), (1500, 0.01)),
    run("copying-rum-paper-t200", (500, 0.2), (1000, 0.9), (1500, 0.02), seed=1),
    run("copying-rum-paper-t200", (1000, 0.001), (1500, 0.001), overrides=["optimizer.lr=0.002"]),
    LSTM,
    run("copying-rum-paper-t500", (400, 0.5), (10_000, 0.1)),
    run("copying-lstm-t500", (500, 1.0)),
    run("copying-gru-t500", (400, 1.1), (500, 1.0)),
    run("copying-rum-paper-t1000", (200, 0.7)),
]


def table(*runs):
    (found,) = comparison_tables(compare(runs, "copying", 200_000))
    return lines(found.markdown())


def rum(*runs):
    return table(*runs, LSTM)[2][1]


def test_every_model_is_read_at_the_budget_with_its_best_beside():
    header, _, ours, lstm, gru = table(*RUNS)
    names = ["loss / baseline, T = 200 (1,000 steps)", "loss / baseline, T = 500 (400 steps)"]
    assert header == ["model", *names, "settings recorded"]
    # two seeds tell more than a lucky one; the second seed's loss spiked after its best
    assert ours == ["RUM λ=0", "0.6500 (0.4000 to 0.9000), best 0.3000; 2 seeds", "0.5000", "2, 1"]
    assert lstm == ["LSTM", "1.0000; after 600", "", "1, 0"]  # at T = 500 it was not looked at by then
    assert gru == ["GRU", "", "1.1000", "0, 1"]


def test_of_settings_with_as_many_seeds_the_lowest_at_the_budget_counts():
    steady = run("copying-rum-paper-t200", (500, 0.5), (1000, 0.4), overrides=["optimizer.lr=0.002"])
    spiked = run("copying-rum-paper-t200", (500, 0.1), (1000, 0.8), overrides=["optimizer.lr=0.003"])
    assert rum(steady, spiked) == "0.4000"


def test_runs_that_differ_only_later_are_of_one_setting():
    later = ["compile=true", "optimizer.schedule=1000:0.3,2000:0.1", "steps=9000"]
    assert rum(RUNS[0], run("copying-rum-paper-t200", (1000, 0.2), overrides=later, seed=1)).endswith("2 seeds")
    sooner = ["optimizer.schedule=900:0.3,2000:0.1"]
    assert rum(RUNS[0], run("copying-rum-paper-t200", (1000, 0.2), overrides=sooner)) == "0.2000"
    assert table(RUNS[0], run("copying-rum-paper-t200", (1000, 0.2), overrides=sooner), LSTM)[2][-1] == "2"


def test_a_trajectory_that_was_recorded_twice_counts_once():
    again = run("copying-rum-paper-t200", (500, 0.9), (1000, 0.4), (1200, 0.3), overrides=["steps=1200"])
    assert rum(RUNS[0], again) == rum(RUNS[0]) == "0.4000"
    assert trajectories([again, RUNS[0]]) == [RUNS[0]]  # the longer one


def test_two_trajectories_of_one_seed_both_count():
    """The better or the longer one would be a choice."""
    other = run("copying-rum-paper-t200", (500, 0.3), (1000, 0.2), overrides=["compile=true", "steps=9000"])
    assert rum(RUNS[0], other) == "0.3000 (0.2000 to 0.4000); 2 runs of 1 seed"
    assert rum(RUNS[1], other, RUNS[0]) == "0.5000 (0.2000 to 0.9000), best 0.2667; 3 runs of 2 seeds"


def test_of_runs_that_ended_sooner_the_furthest_counts_or_those_that_were_solved():
    short, longer = run("copying-rum-paper-t200", (600, 0.2)), run("copying-rum-paper-t200", (700, 0.3), seed=1)
    assert rum(short, longer) == "0.3000; after 700"
    solved = run("copying-rum-paper-t200", (500, 0.001), seed=2)  # below the recipe's stop_at
    assert rum(short, longer, solved) == "0.0010; after 500"
    assert rum(short, RUNS[0], solved) == "0.2005 (0.0010 to 0.4000); 2 seeds; after 500 to 1,000"


def test_what_cannot_be_compared_is_left_out():
    assert asked_table("copying within 1000000", RUNS[-1:]).startswith(
        "No two models of copying were run for 1,000,000"
    )
    assert comparison_tables(compare([], "copying", 10**6)) == []
    other = replace(RUNS[0], overrides=["task.length=5"])
    assert comparison_tables(compare([other, LSTM], "copying", 200_000)) == []


def test_a_marker_asks_for_it():
    (found,) = comparison_tables(compare(RUNS, "copying", 200_000))
    assert asked_table("copying within 200000", RUNS) == found.markdown()


OWN = run("copying-rum-paper-t200", (500, 0.5))
TUNED = [run("copying-rum-t200", (1000, 0.2), seed=seed) for seed in (0, 1)]
ENDED = run("copying-lstm-t200", (1000, 1.0))


def noted(*runs, budget=200_000):
    return "\n".join(notes(compare(runs, "copying", budget)))


def falling(*losses, recipe="copying-gru-t200", **words):
    return run(recipe, *((125 * (place + 1), loss) for place, loss in enumerate(losses)), **words)


def test_the_notes_say_which_models_were_tuned_and_how_they_did_untuned():
    text = noted(OWN, *TUNED, ENDED)
    assert "Tuned, so shown with another setting than the paper's: RUM λ=0." in text
    assert "Shown untuned, with the paper's setting where it names one: LSTM." in text
    assert "RUM λ=0 untuned: 0.5000 after 500 of 10,000 steps at T = 200." in text
    assert "RUM λ=0 untuned: not run at T = 200." in noted(*TUNED, ENDED)
    assert "Tuned" not in noted(OWN, ENDED)


def test_what_makes_another_model_is_no_setting():
    eta = run("copying-rum-paper-t200", (1000, 0.3), overrides=["model.eta=1.0", "compile=true"])
    text = noted(eta, ENDED)
    assert "Tuned" not in text
    assert "where it names one: RUM λ=0, η=1; LSTM." in text


def test_sizes_are_named_where_it_is_not_all_of_them():
    others = [run("copying-rum-paper-t500", (400, 0.5)), run("copying-lstm-t500", (400, 1.0))]
    text = noted(OWN, *TUNED, ENDED, *others)
    assert "another setting than the paper's: RUM λ=0 (T = 200)." in text
    assert "where it names one: RUM λ=0 (T = 500); LSTM." in text
    assert "at T = 200, 500; the one shown" in text


def test_a_rate_that_is_not_the_authors_is_told():
    runs = [run("copying-exprnn-t200", (1000, 0.5), overrides=["model.orthogonal_map=taylor"]), ENDED]
    assert "expRNN trains the orthogonal matrix at 0.001, 50 times its authors' 2e-05." in noted(*runs)
    assert "authors'" not in noted(OWN, ENDED)


def test_models_that_were_still_learning_are_named():
    assert "Still learning at that point" in noted(falling(1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), ENDED)
    assert "quarter before): GRU." in noted(falling(1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), ENDED)
    assert "Still learning" not in noted(falling(1, 0.7, 0.4, 0.4, 0.4, 0.4, 0.4, 0.399), ENDED)


def test_learning_is_read_at_the_budget_and_survives_spikes():
    late = falling(1, 1, 1, 1, 1, 1, 1, 1, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2)
    assert still_learning(late)
    assert not still_learning(late, 1000)
    assert still_learning(falling(1, 1, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.4, 0.4, 9.0))
    assert not still_learning(falling(1, 1, 0.5, 0.001))  # solved
    assert not still_learning(run("copying-gru-t200", (500, 1.0), (1000, 0.5)))  # too few points to tell


def test_overfitting_is_validation_above_the_baseline_and_training_below_it():
    memorised = replace(falling(*[2.0] * 10), train_curve={"step": [1000, 1250], "loss": [1.9, 1.8]})
    assert overfits(memorised)
    assert not overfits(memorised, 1)  # nothing was trained by then
    assert not overfits(replace(memorised, baseline=2.1))
    assert not overfits(replace(memorised, train_curve={"step": [1000, 1250], "loss": [2.0, 1.999]}))
    assert "overfitting and not recalling: GRU." in noted(memorised, ENDED, budget=10**6)


def test_scores_are_read_up_to_a_step():
    spiked = falling(0.5, 0.3, 0.9, 0.2)
    assert seen(spiked, "ratio", 375) == [0.5, 0.3, 0.9]
    assert (best(spiked, "ratio"), best(spiked, "ratio", 375)) == (0.2, 0.3)
    accurate = replace(spiked, curve={**spiked.curve, "accuracy": [0.1, 0.9, 0.2, 0.3]})
    assert best(accurate, "accuracy") == 0.9
    assert not reached_goal(spiked)
    assert reached_goal(falling(0.5, 0.002))
