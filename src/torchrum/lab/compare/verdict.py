"""From finished trainings to a choice of rates, a table and one sentence."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from torchrum.lab.compare.models import MODELS, Finished, is_improving
from torchrum.lab.tables import Table

RATES = (1e-3, 3e-3, 1e-2)
"""Learning rates that every model tries."""
SEARCH_SEED, SEEDS = 0, (1, 2, 3)
"""The seed of the search, and the fresh seeds that are compared."""

RULE = (
    "Every model tries the same learning rates with one seed, and trains with three fresh seeds at the rate that is "
    "best on the validation part; every training has the same number of steps. Of the RUMs the best on the validation "
    "part is compared with the best of the GRUs and LSTMs, on the test part: one is ahead if all its seeds are better "
    "than all seeds of the other. If neither is better than the best model without memory with all its seeds, none is "
    "worth it."
)


class Standing(NamedTuple):
    """How one model did."""

    model: str
    rate: float | None
    """The chosen rate; None before the search of this model is complete."""
    runs: Sequence[Finished]
    """Its trainings with fresh seeds."""

    @property
    def test(self) -> list[float]:
        return [run.test for run in self.runs if run.test is not None]

    @property
    def validation(self) -> float:
        """Mean over the seeds."""
        return sum(run.validation for run in self.runs) / len(self.runs)

    @property
    def improving(self) -> bool:
        """Whether most of its trainings were still improving at the end."""
        return 2 * sum(is_improving(run.curve) for run in self.runs) > len(self.runs)


def choose_rates(finished: Sequence[Finished]) -> dict[str, float]:
    """Choose for each model whose search is complete the rate that is best on the validation part."""
    chosen = {}
    for model in MODELS:
        found = [run for run in finished if run.model == model and run.seed == SEARCH_SEED]
        if {run.rate for run in found} >= set(RATES):
            # of equal scores the one that was reached first; then the lowest rate, whichever training ended first
            chosen[model] = min(found, key=lambda run: (run.validation, run.best_step, run.rate)).rate
    return chosen


def standings(finished: Sequence[Finished]) -> list[Standing]:
    """Gather the trainings with fresh seeds at the chosen rates, by model."""
    rates = choose_rates(finished)
    fresh = [run for run in finished if run.seed in SEEDS and run.rate == rates.get(run.model)]
    return [Standing(model, rates.get(model), [run for run in fresh if run.model == model]) for model in MODELS]


def champion(found: Sequence[Standing], families: Sequence[str]) -> Standing:
    """Choose the model of these families that is best on the validation part."""
    return min((each for each in found if MODELS[each.model].family in families), key=lambda each: each.validation)


class Verdict(NamedTuple):
    """The outcome of a comparison."""

    word: Literal["ahead", "level", "behind", "no memory", "undecided"]
    """What RUM is, or why nothing is."""
    sentence: str


def decide(found: Sequence[Standing], floor: Mapping[str, float], metric: str, more: str) -> Verdict:
    """Decide by ``RULE``.

    Args:
        found: the models.
        floor: scores of models without memory.
        metric: what the scores are.
        more: how to go on if trainings are missing.
    """
    wanted, done = len(found) * len(SEEDS), sum(len(each.runs) for each in found)
    if done < wanted:
        text = f"Undecided: {done} of {wanted} trainings with fresh seeds are finished. Give it more time: {more}"
        return Verdict("undecided", text)
    rum, other = champion(found, ["RUM"]), champion(found, ["GRU", "LSTM"])
    without = min(floor, key=lambda name: floor[name])
    if max(rum.test) >= floor[without] and max(other.test) >= floor[without]:
        return Verdict("no memory", f"No recurrent model beats the {without}; none is worth it here.")
    scores = f"{metric} {describe(rum.test, metric)} against {describe(other.test, metric)}"
    mine, keep = in_words(rum.model), f"Keep your {MODELS[other.model].family}"
    late = [in_words(each.model) for each in (rum, other) if each.improving]
    later = f" At the end {' and '.join(late)} still improved: more minutes may change this." if late else ""
    if max(rum.test) < min(other.test):
        return Verdict("ahead", f"Take {mine}: it is ahead of {in_words(other.model)}, {scores}.{later}")
    if min(rum.test) > max(other.test):
        return Verdict("behind", f"{keep}: {mine} is behind {in_words(other.model)}, {scores}.{later}")
    return Verdict("level", f"{keep}: {mine} is level with {in_words(other.model)}, {scores}.{later}")


def in_words(model: str) -> str:
    """Name a model in a sentence."""
    return model.replace(", window", " with the window")


def form(value: float, metric: str) -> str:
    """Format a score."""
    if metric == "error rate":
        return f"{value:.2%}"
    return f"{value:.3f}" if "bits" in metric else f"{value:#.4g}".rstrip(".")


def describe(values: Sequence[float], metric: str) -> str:
    """Format the mean of some scores and their range."""
    mean, low, high = (form(value, metric) for value in (sum(values) / len(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def score_table(
    found: Sequence[Standing],
    floor: Mapping[str, float],
    metric: str,
    steps: int,
    facts: Mapping[str, Mapping[str, float]],
) -> Table:
    """Show all models, the best on the test part first.

    Args:
        found: the models.
        floor: scores of models without memory.
        metric: what the scores are.
        steps: of a training.
        facts: hidden units, parameters and seconds of one step at batch 1, by model.
    """
    scored = []
    for each in found:
        own, mark = facts[each.model], "*" if each.runs and each.improving else ""
        rate = "" if each.rate is None else f"{each.rate:g}"
        seconds = f"{sum(run.seconds for run in each.runs) / len(each.runs):.1f}" if each.runs else ""
        mean = sum(each.test) / len(each.test) if each.test else float("inf")
        score = form(mean, metric) + mark if each.test else "not finished"
        ends = f"{form(min(each.test), metric)} to {form(max(each.test), metric)}" if each.test else ""
        step = f"{1e6 * own['step_seconds']:.0f}" if "step_seconds" in own else ""
        sizes = [f"{own['hidden_size']:.0f}", f"{own['parameters']:,.0f}"]
        scored.append((mean, [each.model, score, ends, str(len(each.runs)), rate, *sizes, f"{steps:,}", seconds, step]))
    scored += [(value, [name, form(value, metric), *[""] * 8]) for name, value in floor.items()]
    header = ("model", metric, "range", "seeds", "rate", "units", "parameters", "steps", "seconds", "one step, µs")
    notes = []
    if all(each.runs for each in found):
        compared = [champion(found, families) for families in (["RUM"], ["GRU", "LSTM"])]
        names = " and ".join(in_words(each.model) for each in compared)
        notes.append(f"The verdict compares {names}, the best of their kind on the validation part.")
    if any(each.runs and each.improving for each in found):
        notes.append("* still improving at the end; a longer run may change its place.")
    if lost := [run for each in found for run in each.runs if run.diverged]:
        notes.append(f"{len(lost)} of the trainings diverged; their best weights before that count.")
    return Table(header, [row for _, row in sorted(scored, key=lambda row: row[0])], notes=notes, right=range(1, 10))
