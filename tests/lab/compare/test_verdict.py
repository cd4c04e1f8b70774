"""The rules of the verdict, on scores that are made up."""

import pytest

from torchrum.lab.compare.models import MODELS, Finished
from torchrum.lab.compare.verdict import RATES, SEEDS, choose_rates, decide, describe, form, score_table, standings

Scores = tuple[float, float, float]
FLOOR = {"majority class": 0.9, "bag of inputs": 0.6}
FACTS = {name: {"hidden_size": 8, "parameters": 1000, "step_seconds": 1e-4} for name in MODELS}


def run(model: str, seed: int, validation: float, test: float | None = None, rate: float = 1e-3) -> Finished:
    return Finished(
        model, rate, seed, validation, test, 1.0, False, [(0, 0.0, 1.0), (50, 1.0, validation), (100, 1.1, 1.0)]
    )


def finished(best: dict[str, tuple[float, Scores]]) -> list[Finished]:
    """All trainings; ``best`` has validation and test scores of some models, the others are worse."""
    rows = [run(model, 0, rate, rate=rate) for model in MODELS for rate in RATES]
    for model in MODELS:
        validation, tests = best.get(model, (0.59, (0.57, 0.58, 0.59)))
        rows += [run(model, seed, validation, test) for seed, test in zip(SEEDS, tests, strict=True)]
    return rows


def verdict(best: dict[str, tuple[float, Scores]], floor=FLOOR):
    return decide(standings(finished(best)), floor, "error rate", "torchrum compare --resume runs/x")


def test_rum_is_ahead_if_the_ranges_do_not_overlap():
    found = verdict({"RUM lam=1, window": (0.1, (0.1, 0.12, 0.29)), "LSTM": (0.2, (0.3, 0.31, 0.32))})
    assert found.word == "ahead"
    assert found.sentence == (
        "Take RUM lam=1 with the window: it is ahead of LSTM, error rate 17.00% (10.00% to 29.00%) against 31.00% "
        "(30.00% to 32.00%)."
    )


def test_equal_ends_are_an_overlap():
    found = verdict({"RUM": (0.1, (0.1, 0.12, 0.3)), "LSTM": (0.2, (0.3, 0.31, 0.32))})
    assert found.word == "level"
    assert found.sentence.startswith("Keep your LSTM: RUM is level with LSTM,")


def test_numbers_have_four_digits():
    assert [form(value, "RMSE") for value in (2.48, 0.0123456, 1234.4)] == ["2.480", "0.01235", "1234"]


def test_the_verdict_says_who_still_improved():
    rows = [
        row._replace(curve=[(0, 0.0, 1.0), (100, 1.0, row.validation)]) if row.model == "LSTM" else row
        for row in finished({"RUM": (0.1, (0.1, 0.12, 0.3)), "LSTM": (0.2, (0.3, 0.31, 0.32))})
    ]
    sentence = decide(standings(rows), FLOOR, "error rate", "").sentence
    assert sentence.endswith("(30.00% to 32.00%). At the end LSTM still improved: more minutes may change this.")


def test_rum_may_lose():
    found = verdict({"RUM": (0.5, (0.4, 0.41, 0.42)), "GRU, window": (0.1, (0.1, 0.2, 0.3))})
    assert found.word == "behind"
    assert found.sentence.startswith("Keep your GRU: RUM is behind GRU with the window, error rate 41.00%")


def test_the_variants_are_chosen_on_validation_only():
    """The best RUM and the best LSTM of the test part are not those of the validation part."""
    models = {"RUM": (0.1, (0.4, 0.41, 0.42)), "RUM lam=1": (0.2, (0.01, 0.01, 0.01)), "GRU": (0.1, (0.2, 0.2, 0.2))}
    assert verdict(models).sentence.startswith("Keep your GRU: RUM is behind GRU,")


def test_a_model_without_memory_may_be_enough():
    found = verdict({"RUM": (0.1, (0.3, 0.4, 0.6)), "LSTM": (0.2, (0.7, 0.71, 0.72))})
    assert found.word == "no memory"
    assert found.sentence == "No recurrent model beats the bag of inputs; none is worth it here."
    assert verdict({"RUM": (0.1, (0.3, 0.4, 0.59)), "LSTM": (0.2, (0.7, 0.71, 0.72))}).word == "ahead"


def test_fewer_than_three_seeds_decide_nothing():
    rows = finished({"RUM": (0.1, (0.1, 0.12, 0.29))})[:-1]
    found = decide(standings(rows), FLOOR, "error rate", "torchrum compare --resume runs/x --minutes 10")
    assert found.word == "undecided"
    assert found.sentence == (
        "Undecided: 23 of 24 trainings with fresh seeds are finished. Give it more time: "
        "torchrum compare --resume runs/x --minutes 10"
    )


def test_rates_are_chosen_on_validation_by_the_search_only():
    rows = [run("GRU", 0, score, rate=rate) for rate, score in zip(RATES, (0.3, 0.1, 0.2), strict=True)]
    late = [run("GRU", 1, 0.0, 0.0, rate=RATES[0]), run("LSTM", 0, 0.1, rate=RATES[0])]
    assert choose_rates([*rows, *late]) == {"GRU": RATES[1]}


def test_of_equal_scores_the_rate_that_was_there_first_is_chosen():
    rows = [run("GRU", 0, 0.0, rate=rate) for rate in RATES]
    rows[2] = rows[2]._replace(curve=[(0, 0.0, 1.0), (10, 0.1, 0.0), (100, 1.0, 0.5)])
    assert choose_rates(rows) == {"GRU": RATES[2]}


def test_the_choice_does_not_depend_on_which_training_ended_first():
    rows = [run("GRU", 0, 0.0, rate=rate) for rate in RATES]
    assert choose_rates(rows) == choose_rates(rows[::-1]) == {"GRU": RATES[0]}


def test_fresh_seeds_at_another_rate_do_not_count():
    rows = [run("GRU", 0, rate, rate=rate) for rate in RATES]
    rows += [run("GRU", seed, 0.1, 0.2, rate=RATES[seed == 2]) for seed in SEEDS]
    assert [row.seed for row in standings(rows)[0].runs] == [1, 3]


def test_the_table_sorts_by_score_and_has_the_models_without_memory():
    rows = finished({"RUM lam=1": (0.1, (0.1, 0.12, 0.29)), "LSTM": (0.2, (0.3, 0.31, 0.32))})
    table = score_table(standings(rows), FLOOR, "error rate", 100, FACTS)
    assert [row[0] for row in table.rows][:2] == ["RUM lam=1", "LSTM"]
    assert [row[0] for row in table.rows][-2:] == ["bag of inputs", "majority class"]
    assert list(table.rows[0]) == [
        "RUM lam=1",
        "17.00%",
        "10.00% to 29.00%",
        "3",
        "0.001",
        "8",
        "1,000",
        "100",
        "1.0",
        "100",
    ]
    assert table.notes == ["The verdict compares RUM lam=1 and LSTM, the best of their kind on the validation part."]


def test_the_table_marks_models_that_improve_and_counts_what_diverged():
    rows = finished({})
    rows[-1] = rows[-1]._replace(diverged=True)
    rows = [
        row._replace(curve=[(0, 0.0, 1.0), (100, 1.0, row.validation)]) if row.model == "GRU" else row for row in rows
    ]
    table = score_table(standings(rows), FLOOR, "error rate", 100, FACTS)
    assert next(row[1] for row in table.rows if row[0] == "GRU") == "58.00%*"
    assert table.notes[1].startswith("* still improving") and table.notes[2].startswith("1 of the trainings diverged")


def test_a_table_can_have_models_without_scores():
    table = score_table(standings(finished({})[:30]), FLOOR, "error rate", 100, FACTS)
    assert [row[1] for row in table.rows].count("not finished") == 6
    assert not table.notes


@pytest.mark.parametrize(
    "metric, text",
    [
        ("RMSE", "0.2000 (0.1000 to 0.3000)"),
        ("bits per symbol", "0.200 (0.100 to 0.300)"),
        ("error rate", "20.00% (10.00% to 30.00%)"),
    ],
)
def test_scores_have_the_form_of_their_metric(metric, text):
    assert describe([0.1, 0.2, 0.3], metric) == text
