"""What the notes below a comparison say, and when."""

from dataclasses import replace

from paper.ledger.test_budget import run
from torchrum.paper.ledger.comparison import compare, notes
from torchrum.paper.ledger.runs import best, overfits, reached_goal, seen, still_learning

OWN = run("copying-rum-paper-t200", (500, 0.5))
TUNED = [run("copying-rum-t200", (1000, 0.2), seed=seed) for seed in (0, 1)]
LSTM = run("copying-lstm-t200", (1000, 1.0))


def noted(*runs, budget=200_000):
    return "\n".join(notes(compare(runs, "copying", budget)))


def falling(*losses, recipe="copying-gru-t200", **words):
    return run(recipe, *((125 * (place + 1), loss) for place, loss in enumerate(losses)), **words)


def test_the_notes_say_which_models_were_tuned_and_how_they_did_untuned():
    text = noted(OWN, *TUNED, LSTM)
    assert "Tuned, so shown with another setting than the paper's: RUM λ=0." in text
    assert "Shown untuned, with the paper's setting where it names one: LSTM." in text
    assert "RUM λ=0 untuned: 0.5000 after 500 of 10,000 steps at T = 200." in text
    assert "RUM λ=0 untuned: not run at T = 200." in noted(*TUNED, LSTM)
    assert "Tuned" not in noted(OWN, LSTM)


def test_what_makes_another_model_is_no_setting():
    eta = run("copying-rum-paper-t200", (1000, 0.3), overrides=["model.eta=1.0", "compile=true"])
    text = noted(eta, LSTM)
    assert "Tuned" not in text
    assert "where it names one: RUM λ=0, η=1; LSTM." in text


def test_sizes_are_named_where_it_is_not_all_of_them():
    others = [run("copying-rum-paper-t500", (400, 0.5)), run("copying-lstm-t500", (400, 1.0))]
    text = noted(OWN, *TUNED, LSTM, *others)
    assert "another setting than the paper's: RUM λ=0 (T = 200)." in text
    assert "where it names one: RUM λ=0 (T = 500); LSTM." in text
    assert "at T = 200, 500; the one shown" in text


def test_a_rate_that_is_not_the_authors_is_told():
    runs = [run("copying-exprnn-t200", (1000, 0.5), overrides=["model.orthogonal_map=taylor"]), LSTM]
    assert "expRNN trains the orthogonal matrix at 0.001, 50 times its authors' 2e-05." in noted(*runs)
    assert "authors'" not in noted(OWN, LSTM)


def test_models_that_were_still_learning_are_named():
    assert "Still learning at that point" in noted(falling(1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), LSTM)
    assert "quarter before): GRU." in noted(falling(1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), LSTM)
    assert "Still learning" not in noted(falling(1, 0.7, 0.4, 0.4, 0.4, 0.4, 0.4, 0.399), LSTM)


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
    assert "overfitting and not recalling: GRU." in noted(memorised, LSTM, budget=10**6)


def test_scores_are_read_up_to_a_step():
    spiked = falling(0.5, 0.3, 0.9, 0.2)
    assert seen(spiked, "ratio", 375) == [0.5, 0.3, 0.9]
    assert (best(spiked, "ratio"), best(spiked, "ratio", 375)) == (0.2, 0.3)
    accurate = replace(spiked, curve={**spiked.curve, "accuracy": [0.1, 0.9, 0.2, 0.3]})
    assert best(accurate, "accuracy") == 0.9
    assert not reached_goal(spiked)
    assert reached_goal(falling(0.5, 0.002))
