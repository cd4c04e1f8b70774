"""The numbers in the table of arguments of docs/findings.md are those of the recorded runs."""

from pathlib import Path

import pytest

from torchrum.paper.ledger.entries import Entry, read_ledger

ROOT = Path(__file__).parents[1]
COPYING = read_ledger(ROOT / "results", "copying")


def row(start: str) -> str:
    """Find the one row of the page that begins so."""
    lines = (ROOT / "docs/findings.md").read_text(encoding="utf-8").splitlines()
    (found,) = [line for line in lines if line.startswith(f"| {start}")]
    return found


def runs(recipe: str, overrides: tuple[str, ...] = ()) -> list[Entry]:
    """Find the runs of a recipe with these overrides, the number of steps aside."""
    return [
        run
        for run in COPYING
        if run.recipe == recipe and tuple(o for o in run.overrides if not o.startswith("steps=")) == overrides
    ]


def share_at(run: Entry, step: int) -> float:
    """Read the validation loss at ``step``, as a share of the baseline's."""
    return run.curve["loss"][run.curve["step"].index(step)] / run.baseline


def span(values: list[float], form: str) -> str:
    """Write the range of ``values`` as the page does."""
    return " to ".join(form.format(edge) for edge in (min(values), max(values)))


@pytest.mark.parametrize("recipe", ["copying-rum-t500", "copying-rum-eta-t500"])
def test_eta_slows_learning_and_steadies_it(recipe: str) -> None:
    found, text = runs(recipe), row("section 4.1: without η")
    assert sorted(run.seed for run in found) == [0, 1, 2]
    assert span([share_at(run, 2000) for run in found], "{:.2f}") in text
    assert span([run.steps for run in found], "{:,}") in text
    jumps = []
    for run in found:
        losses = run.curve["loss"]
        jumps.append(sum(loss > 2 * min(losses[:k]) for k, loss in enumerate(losses) if k))
    assert span(jumps, "{}") in text or f"{jumps[0]} with it" in text


@pytest.mark.parametrize("length", [200, 500])
@pytest.mark.parametrize("model", ["rum-lam1-eta", "rum-eta"])
def test_lam_1_learns_faster_than_lam_0(model: str, length: int) -> None:
    found, text = runs(f"copying-{model}-t{length}"), row("section 4.1: λ = 1 learns")
    assert sorted(run.seed for run in found) == [0, 1, 2]
    assert span([share_at(run, 2000) for run in found], "{:.2f}") in text
    assert span([run.steps for run in found], "{:,}") in text


def test_lam_1_and_lam_0_at_the_paper_s_rate() -> None:
    text = row("section 4.1: λ = 1 learns")
    assert span([share_at(run, 4000) for run in runs("copying-rum-lam1-t200")], "{:.2f}") in text
    (only,) = [run for run in runs("copying-rum-paper-t200") if run.steps == 4000]
    assert f"λ = 0 at {share_at(only, 4000):.2f}, with one seed" in text
