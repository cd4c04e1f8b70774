"""The verdicts of ``torchrum.paper.ledger.tables``."""

from pathlib import Path

import pytest

from entries import make_entry
from torchrum.lab.recipes import FAMILIES, RECIPES, load_recipe
from torchrum.lab.recipes.babi import PAPER
from torchrum.paper.ledger import Entry, read_ledger
from torchrum.paper.ledger.tables import asked_table, condensed, judge, verdict_table, verdicts

ROOT = Path(__file__).parents[3]


def entry(recipe: str, seed: int, accuracy: float, steps: int = 100, **changes) -> Entry:
    curve = {"step": [steps], "loss": [1 - accuracy], "accuracy": [accuracy]}
    return make_entry(recipe, seed, curve, **changes)


@pytest.mark.parametrize(
    "recipe, score, word",
    [
        ("recall-rum-lam1-t50", 0.995, "reproduced"),
        ("recall-rum-lam1-t50", 0.98, "not reproduced"),
        ("recall-fast-weights-t50", 0.45, "better"),
        ("recall-rum-t50", 0.21, "reproduced"),  # the paper: does not learn
        ("recall-rum-t50", 0.9, "better"),
        ("copying-rum-t200", 0.002, "reproduced"),
        ("copying-rum-t200", 0.2, "not reproduced"),
        ("copying-lstm-t200", 1.0003, "reproduced"),  # stays at the baseline
        ("copying-lstm-t200", 0.3, "better"),
        ("copying-goru-t200", 0.9, "not reproduced"),  # the paper, in words: solves it
        ("char-ptb-fs-rum-2", 1.198, "reproduced"),
        ("char-ptb-fs-rum-2", 1.21, "not reproduced"),
        ("char-ptb-fs-rum-2", 1.15, "better"),
        ("babi-rum-qa1", 0.9, "better"),
        ("babi-rum-qa1", 0.788, "reproduced"),  # one point, as everywhere: 79.7% is printed
        ("babi-rum-qa1", 0.786, "not reproduced"),
        ("babi-rum-qa4", 0.99, "reproduced"),
        ("babi-lstm-qa1", 0.9, "not comparable"),
    ],
)
def test_the_rule(recipe, score, word):
    config = load_recipe(recipe)
    assert judge(config.paper, config, score) == word


def test_every_printed_number_is_judged():
    found = verdicts([])
    single = [item.recipe for item in found if item.recipe not in FAMILIES]
    assert single == [name for name, recipe in RECIPES.items() if recipe().paper]
    assert {item.recipe for item in found} - set(single) == {f"babi-{name}" for name in PAPER}  # and the means
    assert {item.word for item in found} == {"not run"}
    for item in found:  # every claim of the paper can be judged, whatever comes out
        assert judge(item.paper, item.config, 0.5) != "not run"


def test_ours_is_the_mean_over_distinct_seeds_of_the_best_setting():
    entries = [
        entry("recall-rum-lam1-t50", 0, 0.99),
        entry("recall-rum-lam1-t50", 1, 0.97),
        entry("recall-rum-lam1-t50", 0, 0.5, overrides=["optimizer.lr=0.1"]),
    ]
    (item,) = [item for item in verdicts(entries, "recall") if item.row]
    assert item.values == [0.99, 0.97]
    assert (item.source, item.settings, item.word) == ("validation", "", "not reproduced")
    assert item.difference == "-2.00 points"


def test_a_set_is_judged_by_the_mean_of_its_whole_seeds():
    """A seed that lacks a task would be a mean over easier ones."""
    offsets = {0: 0.03, 1: -0.02}
    runs = [
        entry(f"babi-rum-qa{task}", seed, accuracy / 100, test={"accuracy": min(accuracy / 100 + offset, 1.0)})
        for task, accuracy in enumerate(PAPER["rum"], 1)
        for seed, offset in offsets.items()
        if (task, seed) != (19, 1)
    ]
    found = verdicts(runs, "babi")
    names = [item.recipe for item in found]
    mean = found[names.index("babi-rum")]
    assert names.index("babi-rum-qa1") == names.index("babi-rum") + 1
    assert (mean.source, len(mean.values), mean.word) == ("test", 1, "better")
    assert mean.values[0] == pytest.approx(sum(min(a / 100 + 0.03, 1.0) for a in PAPER["rum"]) / 20)
    other = next(item for item in found if item.recipe == "babi-lstm")
    assert other.word == "not run"
    shown = {item.recipe for item in condensed(found)}
    assert "babi-rum-qa19" in shown and "babi-lstm" in shown
    assert "babi-lstm-qa1" not in shown  # one row says that none was run


def test_a_set_that_cannot_be_compared_is_one_row():
    runs = [entry(f"babi-lstm-qa{task}", 0, 0.6, test={"accuracy": 0.6}) for task in range(1, 21)]
    rows = verdict_table(verdicts(runs, "babi")).markdown().splitlines()
    own = [row for row in rows if "LSTM" in row]
    assert own == [
        "| `babi-lstm` | LSTM | 49.2% on average (1k) (bAbI table of the appendix) | 60.00% | test | 1 "
        "| not comparable |"
    ]


def test_test_scores_come_first_where_every_seed_has_one():
    tested = entry("recall-rum-lam1-t50", 0, 0.99, test={"accuracy": 0.9, "step": 100})
    plain = entry("recall-rum-lam1-t50", 1, 0.99)
    assert next(item for item in verdicts([tested], "recall") if item.row).source == "test"
    assert next(item for item in verdicts([tested], "recall") if item.row).values == [0.9]
    assert next(item for item in verdicts([tested, plain], "recall") if item.row).source == "validation"


def test_another_problem_is_not_compared():
    changed = entry("recall-rum-lam1-t50", 0, 1.0, overrides=["task.length=4"])
    assert all(item.word == "not run" for item in verdicts([changed], "recall"))


def test_what_the_recipe_has_today_is_no_change():
    lr = load_recipe("recall-rum-lam1-paper-t50").optimizer.lr
    same = entry("recall-rum-lam1-paper-t50", 0, 0.99, overrides=[f"optimizer.lr={lr}"])
    judged = next(item for item in verdicts([same], "recall") if item.row)
    assert judged.recipe == same.recipe and judged.settings == ""


def test_how_a_text_is_cut_is_a_setting():
    curve = {"step": [100], "loss": [0.9], "bpc": [1.3]}
    cut = make_entry("char-ptb-hm-lstm", 0, curve, overrides=["batch_size=128", "task.lanes=128"])
    other = make_entry("char-ptb-hm-lstm", 0, curve, overrides=["task.corpus=ptb.char"])
    assert cut.own_problem and not other.own_problem
    judged = next(item for item in verdicts([cut, other], "char") if item.row)
    assert judged.row == [cut] and judged.settings == "batch_size=128, task.lanes=128"


def test_the_table_and_its_marker():
    entries = [entry("recall-lstm-t50", 0, 0.2)]
    text = asked_table("recall paper", entries)
    assert (
        "| `recall-lstm-t50` | LSTM | 20.5% (Table 1) | 20.00% | validation | 1 | -0.50 points | reproduced |" in text
    )
    assert verdict_table(verdicts(entries, "recall")).markdown() == text


def test_verdicts_of_the_committed_ledger():
    found = {item.recipe: item for item in verdicts(read_ledger(ROOT / "results"))}
    assert found["recall-rum-lam1-t50"].word == "reproduced"
    assert found["copying-lstm-t200"].word == "reproduced"


def test_the_papers_own_setting_is_judged_without_what_was_tried_besides():
    """Else an override of the preset would reproduce the paper in its name."""
    runs = [
        entry("recall-rum-lam1-t50", 0, 0.999),
        entry("recall-rum-lam1-paper-t50", 0, 0.6, overrides=["steps=100"]),
        entry("recall-rum-lam1-paper-t50", 1, 0.99, overrides=["optimizer.lr=0.002"]),
        entry("recall-lstm-t50", 0, 0.4, overrides=["optimizer.lr=0.002"]),  # it has no preset
    ]
    found = {item.recipe: item for item in verdicts(runs, "recall")}
    assert found["recall-rum-lam1-t50"].word == "reproduced"
    assert found["recall-rum-lam1-paper-t50"].word == "not reproduced"
    assert found["recall-rum-lam1-paper-t50"].values == [0.6]
    assert found["recall-lstm-t50"].values == [0.4]
