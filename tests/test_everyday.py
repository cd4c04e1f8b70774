"""The counts of everyday tasks in the docs and in README are those of the recorded trainings."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEFAULTS = ROOT / "benchmarks/defaults"
CHOSE = {
    "trend", "season", "rawar", "mackey", "parens", "words-sgd", "words-adamw", "chars", "pixels", "rows-long",
    "product", "copying", "segment", "automaton", "bf16-chars",
}  # fmt: skip
"""The tasks that chose the default form; the others of its trainings judged it."""


def judged(ours: list[float], other: list[float]) -> str:
    """Compare errors over seeds by the rule of docs/protocol.md: ahead or behind if the ranges do not overlap."""
    return "ahead" if max(ours) < min(other) else "behind" if min(ours) > max(other) else "level"


def text(page: str) -> str:
    """Read a page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_the_default_on_the_tasks_that_did_not_choose_it() -> None:
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in (DEFAULTS / "results.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["factor"] == 1.0 and row["variant"] in ("gru", "half-r.5"):
            scores[row["task"]][row["variant"]].append(row["score"])
    both = {task: found for task, found in scores.items() if len(found) == 2 and task not in CHOSE}
    assert all(len(values) == 5 for found in both.values() for values in found.values())
    count = Counter(judged(found["half-r.5"], found["gru"]) for found in both.values())
    assert sum(count.values()) == 39
    numbers = f"ahead on {count['ahead']}, behind on {count['behind']}"
    for page in ("docs/everyday.md", "docs/where.md", "docs/choosing.md"):
        assert numbers in text(page), page
    assert f"ahead of `nn.GRU` on {count['ahead']}, behind on {count['behind']}" in text("README.md")


def finished(rows: list[dict[str, Any]], task: str, budget: float) -> dict[str, list[float]]:
    """Scores of seeds 1 to 5 of each model at the rate that is best on validation with seed 0; empty where any lack."""
    found = {}
    for model in ("gru", "rum", "lstm"):
        mine = [row for row in rows if (row["task"], row["variant"], row["share"]) == (task, model, budget)]
        tried = {row["factor"]: row["validation"] for row in mine if row["seed"] == 0}
        if len(tried) < 4:
            return {}
        best = min(tried, key=lambda factor: (tried[factor], factor))
        scores = [row["score"] for row in mine if row["seed"] > 0 and row["factor"] == best]
        if len(scores) < 5:
            return {}
        found[model] = scores
    return found


def test_rum_and_lstm_against_the_gru_at_the_best_rate_of_each() -> None:
    rows = [json.loads(line) for line in (DEFAULTS / "rates.jsonl").read_text(encoding="utf-8").splitlines()]
    page = (ROOT / "docs/everyday.md").read_text(encoding="utf-8").partition("## At the best rate of each model")[2]
    page = page.partition("\n## ")[0]
    count: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    done = set()
    for task, budget in sorted({(row["task"], row["share"]) for row in rows}):
        found = finished(rows, task, budget)
        if not found:
            continue
        done.add((task, budget))
        group = "old" if task in CHOSE else "new"
        cells = []
        for model, scores in found.items():
            says = "" if model == "gru" else judged(scores, found["gru"])
            count[group, f"{budget:g}", model][says] += 1
            mark = {"ahead": " +", "behind": " −"}.get(says, "")
            cells.append(f"{sum(scores) / 5:.3f} ({min(scores):.3f} to {max(scores):.3f}){mark}")
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {task} | {budget:g} |")]
        assert [part for part in cells if part not in line] == []
    for (group, budget, model), says in count.items():
        if model != "gru":
            (line,) = [line for line in page.splitlines() if line.startswith(f"| {group} | {budget} |")]
            part = ", ".join(f"{says[word]} {word}" for word in ("ahead", "level", "behind"))
            assert line.split(" | ")[3 if model == "rum" else 4].strip("| ") == part
    assert len(done) == len([line for line in page.splitlines() if ", x" in line])
