"""The counts of tasks on docs/everyday.md, docs/where.md, docs/choosing.md and README are those of the recorded trainings."""

import json
from collections import Counter, defaultdict
from pathlib import Path

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
