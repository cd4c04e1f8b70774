"""The numbers of docs/compare.md are those of results/compare/examples.jsonl."""

import json
from pathlib import Path

import pytest

from torchrum.lab.compare.models import Finished
from torchrum.lab.compare.verdict import champion, decide, describe, in_words, standings

ROOT = Path(__file__).parents[3]
EXAMPLES = [json.loads(line) for line in (ROOT / "results/compare/examples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example['data']}-{example['run']}")
def test_verdicts_and_ranges_are_those_of_the_runs(example):
    text, metric = (ROOT / "docs/compare.md").read_text(), example["metric"]
    found = standings([Finished(**training) for training in example["trainings"]])
    verdict = decide(found, example["floor"], metric, "")
    if example["run"] in ("busy", "third"):
        assert f"{verdict.word} at {example['steps']:,}" in " ".join(text.split())
        return
    sides = [champion(found, families) for families in (["RUM"], ["GRU", "LSTM"])]
    scores = [f"{in_words(side.model)} {describe(side.test, metric)}" for side in sides]
    assert f"**{verdict.word}**, {example['steps']:,} steps: {', '.join(scores)}" in text


def test_the_table_is_that_of_the_run_on_pairs_with_idle_cores():
    text = (ROOT / "docs/compare.md").read_text()
    example = next(each for each in EXAMPLES if (each["data"], each["run"]) == ("pairs", "idle"))
    for each in standings([Finished(**training) for training in example["trainings"]]):
        mean, ends = sum(each.test) / 3, f"{min(each.test):.2%} to {max(each.test):.2%}"
        sizes = f"{each.rate:g} | {example['hidden_sizes'][each.model]} | {example['parameters'][each.model]:,}"
        assert f"| {each.model} | {mean:.2%}{'*' * each.improving} | {ends} | {sizes} |" in text
    for name, value in example["floor"].items():
        assert f"| {name} | {value:.2%} |" in text
