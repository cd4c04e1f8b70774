"""The ranges on docs/where.md are those of the recorded runs."""

from collections import defaultdict
from pathlib import Path

import pytest

from torchrum.paper.ledger.entries import read_ledger

ROOT = Path(__file__).parents[1]
PLAIN = ["average=none", "model.embedding_std=none"]


def spread(values, digits):
    low, high = (f"{edge:.{digits}f}" for edge in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def test_a_verdict_of_the_paper_s_tasks_names_equal_steps_and_settings():
    """A row of unequal budgets, or of fewer than three seeds of RUM, is open, level or only probable."""
    text = (ROOT / "docs/where.md").read_text(encoding="utf-8")
    table = text.partition("## Tasks of the paper")[2].partition("\n\n- ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for task, ours, _, steps, settings, verdict in rows:
        assert steps and settings, task
        if "**" in verdict:
            assert "each" in steps or "at most" in steps, task
            assert "1 seed" not in ours and "2 seeds" not in ours, task


@pytest.mark.parametrize(
    "family, overrides",
    [
        ("babi-rum", []),
        ("babi-gru", []),
        ("babi-lstm", []),
        ("babi-memn2n", []),
        ("babi-rum-tanh", PLAIN),
        ("babi-rum", PLAIN),
        ("babi-gru", PLAIN),
        ("babi-lstm", PLAIN),
        ("babi-joint-rum-deep", []),
        ("babi-joint-rum-gated-deep", ["optimizer.lr=0.002"]),
        ("babi-joint-gru-deep", ["optimizer.lr=0.002"]),
        ("babi-joint-lstm-deep", ["optimizer.lr=0.004"]),
    ],
    ids=str,
)
def test_babi(family, overrides):
    by_seed = defaultdict(list)
    for entry in read_ledger(ROOT / "results", "babi"):
        if entry.recipe.partition("-qa")[0] == family and entry.overrides == overrides:
            by_seed[entry.seed].append(100 * entry.test["accuracy"])
    means = [sum(values) / len(values) for values in by_seed.values()]
    assert f"{spread(means, 1)} %" in (ROOT / "docs/where.md").read_text()


@pytest.mark.parametrize(
    "recipe, digits",
    [
        ("char-ptb-fs-rum-2-tuned", 4),
        ("char-ptb-fs-lstm-2-tuned", 4),
        ("char-ptb-fs-rum-2-slim", 4),
        ("char-ptb-rum-2x1500-tanh", 4),
        ("char-ptb-rum-2000", 4),
        ("char-ptb-zoneout-lstm-tuned", 4),
        ("char-rum", 3),
    ],
)
def test_penn_treebank(recipe, digits):
    text = (ROOT / "docs/where.md").read_text()
    for entry in read_ledger(ROOT / "results", "char"):
        if entry.recipe == recipe:
            assert f"{entry.test['bpc']:.{digits}f}" in text


@pytest.mark.parametrize("length", [30, 50, 100])
@pytest.mark.parametrize("kind", ["fresh", "window"])
def test_recall_at_equal_settings(length, kind):
    """Every range is on the page; where one run of three failed, their scores are."""
    text, scores = (ROOT / "docs/where.md").read_text(), defaultdict(list)
    for run in read_ledger(ROOT / "results", "recall"):
        if run.recipe.endswith(f"-{kind}-t{length}"):
            assert run.steps <= 20_000 and not run.overrides
            scores[run.recipe].append((run.seed, 100 * run.test["accuracy"]))
    assert len(scores) == 5
    for recipe, found in scores.items():
        assert sorted(seed for seed, _ in found) == [1, 2, 3]
        values = [value for _, value in sorted(found)]
        each = "{:.1f}, {:.1f} and {:.1f} %".format(*values)
        assert f"{spread(values, 1)} %" in text or each in text, recipe


def curriculum(length):
    runs = [
        run for run in read_ledger(ROOT / "results", "recall") if run.recipe == f"recall-rum-lam1-curriculum-t{length}"
    ]
    return runs, [100 * run.test["accuracy"] for run in runs], [run.steps for run in runs]


def twice_right(run):
    """The step of the second validation in a row with 99 %."""
    steps, known = run.curve["step"], run.curve["accuracy"]
    return next(steps[i] for i in range(1, len(steps)) if min(known[i - 1 : i + 1]) >= 0.99)


def whole(values):
    low, high = (f"{edge:,.0f}" for edge in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


@pytest.mark.parametrize("length", [100, 200])
def test_recall_with_a_curriculum(length):
    runs, scores, ends = curriculum(length)
    assert sorted(run.seed for run in runs) == [1, 2, 3]
    firsts = [twice_right(run) for run in runs]
    text = f"{spread(scores, 1)} % after {whole(ends)} steps, 99 % twice in a row after {whole(firsts)} (λ=1, 3 seeds)"
    assert text in (ROOT / "docs/where.md").read_text()


def test_recall_of_200_pairs():
    text = (ROOT / "docs/where.md").read_text()
    _, scores, ends = curriculum(400)
    for score, end in zip(scores, ends, strict=True):
        assert f"{score:.1f} % after {end:,}" in text or (f"cut at {end:,} steps" in text and f"{score:.1f} %" in text)


@pytest.mark.parametrize("recipe", ["copying-rum-lam1-eta-t200", "copying-rum-lam1-eta-t500", "copying-eunn-t500"])
def test_copying(recipe):
    steps = [run.steps for run in read_ledger(ROOT / "results", "copying") if run.recipe == recipe]
    edges = [f"{edge:,}" for edge in dict.fromkeys((min(steps), max(steps)))]
    assert " to ".join(edges) in (ROOT / "docs/where.md").read_text()
