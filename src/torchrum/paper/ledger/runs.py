"""Runs of the ledger by model and setting: labels, groups of seeds, curves, and the models at a matched step budget."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

from torchrum.lab.recipes import RECIPES, paper_preset
from torchrum.lab.tables import Table, span, spread, with_best
from torchrum.lab.training.config import ModelConfig, rate_factors
from torchrum.paper.ledger.entries import SAME, Entry, changes

Row = list[Entry]
"""The runs of one setting, one per seed."""

NAMES = {
    "rum-gated": "gated RUM",
    "lstm": "LSTM",
    "rotational_lstm": "rotational LSTM",
    "gru": "GRU",
    "ln_lstm": "LN-LSTM",
    "gru_tf": "GRU (TensorFlow)",
    "urnn": "uRNN",
    "full_urnn": "full-capacity uRNN",
    "soft_orthogonal": "soft orthogonality",
    "eunn": "EUNN",
    "goru": "GORU",
    "fast_weights": "FW-LN",
    "delta_net": "DeltaNet",
    "ntm": "NTM",
    "exprnn": "expRNN",
    "hyper_lstm": "HyperLSTM",
    "hm_lstm": "HM-LSTM",
    "nas": "NASCell",
    "rhn": "RHN",
    "memn2n": "MemN2N",
}
"""Layer to its name in tables and figures."""
METRIC_NAMES = {"ratio": "loss / baseline", "accuracy": "accuracy", "bpc": "bits per character"}
"""Metric of a task to its name in a table."""

EQUAL = re.compile(r"-(fresh|window|curriculum)-t\d+$")
"""Recipes of the comparisons of recall at equal settings."""
EQUAL_SETTINGS = {
    "fresh": "equal settings",
    "window": "equal settings, with the previous input",
    "curriculum": "equal settings, with the previous input and a curriculum",
}

FALLING = 0.99
"""Still learning: the median validation loss of the last quarter of a run is below this share of the quarter before."""
APART = 0.995
"""Overfitting: the training loss of the last fifth of a run is below this share of its validation loss."""


def model_label(model: ModelConfig) -> str:
    """Name a model in tables and figures: its layer with the options that tell variants apart, and several layers."""
    if model.layer == "memn2n":  # its layers are hops over one memory
        return NAMES[model.layer]
    window = f", window {model.window}" if model.window > 1 else ""
    return (f"{model.num_layers} × " if model.num_layers > 1 else "") + _layer_label(model) + window


def _layer_label(model: ModelConfig) -> str:
    options = model.options
    if model.layer == "rum":
        norm = options.get("eta")
        eta = [] if norm is None else ["η=√H" if norm == "sqrt" else f"η={norm:g}"]
        return ", ".join([f"RUM λ={options.get('lam', 0):g}", *eta])
    if model.layer == "fs":
        slow, _, activation = options.get("slow", "lstm").partition("-")
        name = f"FS-{slow.upper()}-{options.get('num_fast', 2)}"
        if not activation:
            return name
        slim = (options.get("slow_size") or model.hidden_size) < model.hidden_size
        return f"{name} slim" if slim else f"{name} ({activation})"
    if model.layer == "ln_lstm" and not options.get("layer_norm", True):
        return "Zoneout LSTM" if options.get("zoneout") or options.get("zoneout_cell") else "LSTM (TensorFlow)"
    if model.layer == "goru" and options.get("style") == "fft":
        return "GORU (FFT)"
    if model.layer == "exprnn" and options.get("input_init") == "kaiming":
        return "expRNN (two rates)"
    return NAMES.get(model.layer, model.layer)


def score_names(entry: Entry) -> dict[str, str]:
    """Map the names of a task's scores in a table to their keys in an entry."""
    metric = entry.config().task.metric
    return {"loss / baseline": "ratio", "accuracy": "accuracy"} if metric == "ratio" else {metric: metric}


def table_rows(entries: Iterable[Entry], task: str) -> list[Row]:
    """Group the runs of one task by setting: ordered by size, then as the recipes are."""
    groups: dict[tuple[str, ...], Row] = defaultdict(list)
    for entry in entries:
        if entry.task == task:
            groups[entry.recipe, *entry.overrides].append(entry)
    order = {name: number for number, name in enumerate(RECIPES)}
    return sorted(groups.values(), key=lambda row: (*place(row), order[row[0].recipe], row[0].overrides))


def place(row: Row) -> tuple[int, list[str]]:
    """Find the table of a row: the size in its recipe's name, or 0, and the changes that make another problem."""
    entry = row[0]
    match = re.search(r"-t(\d+)$", entry.recipe)
    same = entry.config().task.baseline() == RECIPES[entry.recipe]().task.baseline()
    changes = [] if same else [text for text in entry.overrides if text.startswith("task.")]
    if own := entry.config().task.own_data:
        digest = next((text.partition("=")[2] for text in entry.overrides if text.startswith("task.sha256=")), "")
        changes = [f"{own} (sha256 {digest[:8]})"]  # how it is cut into lanes is a setting
    if found := EQUAL.search(entry.recipe):
        changes = [EQUAL_SETTINGS[found[1]]]
    return int(match[1]) if match else 0, changes


def model_and_place(row: Row) -> tuple[object, ...]:
    """Return the problem and the model of a row."""
    size, changes = place(row)
    return size, *changes, model_label(row[0].config().model)


def final_loss(row: Iterable[Entry]) -> float:
    """Mean validation loss after the last step; infinite for runs that diverged."""
    return fmean(math.inf if entry.diverged else entry.final["loss"] for entry in row)


def best_settings(rows: Iterable[Row]) -> list[Row]:
    """Keep the setting with the lowest final loss of each model on each problem."""
    lowest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        which = model_and_place(row)
        if which not in lowest or final_loss(row) < final_loss(lowest[which]):
            lowest[which] = row
    return list(lowest.values())


def settings_tried(rows: Iterable[Row]) -> dict[tuple[object, ...], int]:
    """Count the recorded settings of each model on each problem; the length of a run is no setting."""
    found: dict[tuple[object, ...], set[tuple[str, ...]]] = defaultdict(set)
    for row in rows:
        found[model_and_place(row)].add(setting(row[0]))
    return {which: len(settings) for which, settings in found.items()}


def changed_settings(entry: Entry, recipe: str = "") -> tuple[str, ...]:
    """List where a run differs from a recipe, by default its own, as ``field=value``; its length is no difference."""
    name = recipe or entry.recipe
    if name == entry.recipe and all(text.partition("=")[0] in SAME for text in entry.overrides):
        return ()  # as for most runs: no need to compare two configs
    return tuple(text for text in changes(entry.config(), name) if text.partition("=")[0] not in SAME)


def setting(entry: Entry) -> tuple[str, ...]:
    """List where a run differs from the paper's form of its recipe."""
    return changed_settings(entry, paper_preset(entry.recipe))


def seen(entry: Entry, key: str, steps: int | None = None) -> list[float]:
    """Return the validation scores of a run, up to ``steps`` if given."""
    points = zip(entry.curve["step"], entry.curve[key], strict=True)
    return [value for step, value in points if steps is None or step <= steps]


def best(entry: Entry, key: str, steps: int | None = None) -> float:
    """Return the best validation score, by ``steps`` if given: the highest accuracy, the lowest of other scores."""
    return (max if key == "accuracy" else min)(seen(entry, key, steps))


def reached_goal(entry: Entry) -> bool:
    """Whether a run ended because it had solved its task."""
    config = entry.config()
    if config.stop_at is None:
        return False
    score = entry.final[config.task.metric]
    return score <= config.stop_at if config.task.goal == "min" else score >= config.stop_at


def still_learning(entry: Entry, steps: int | None = None) -> bool:
    """Whether the validation loss was still falling at the end, or after ``steps``: medians of the last two quarters.

    Medians, because a loss that spikes says little at any one point.
    """
    losses = seen(entry, "loss", steps)
    quarter = len(losses) // 4
    if quarter == 0 or (reached_goal(entry) and (steps is None or entry.steps <= steps)):
        return False
    return median(losses[-quarter:]) < FALLING * median(losses[-2 * quarter : -quarter])


def overfits(entry: Entry, steps: int | None = None) -> bool:
    """Whether validation is above the loss of the best model without memory, and training below validation."""
    points = zip(entry.train_curve["step"], entry.train_curve["loss"], strict=True)
    training = [loss for step, loss in points if steps is None or step <= steps]
    validation = seen(entry, "loss", steps)
    if not training or not validation or validation[-1] <= entry.baseline:
        return False
    return fmean(training[-max(1, len(training) // 5) :]) < APART * validation[-1]


Setting = tuple[str, ...]
"""Tuned fields that matter up to the budget; empty for the setting of the paper."""

LABELLED = ("model.lam", "model.eta")
"""Fields that make another model, with a label of its own."""
AUTHORS_RATES = {"exprnn": ("the orthogonal matrix", 2e-5)}
"""Layer to the part that its authors train at another rate, and that rate (Lezcano & Martinez-Rubio, 2019)."""


@dataclass(frozen=True)
class Standing:
    """Runs of one setting after ``steps``, one per trajectory; shorter runs count at their end."""

    runs: list[Entry]
    steps: int

    @property
    def ends(self) -> list[int]:
        """Step at which each run is read."""
        return [min(run.steps, self.steps) for run in self.runs]

    @property
    def loss(self) -> float:
        """Mean validation loss; infinite if a run has diverged."""
        return math.inf if any(run.diverged for run in self.runs) else fmean(self.values("loss"))

    @property
    def seeds(self) -> int:
        """Number of distinct seeds."""
        return len({run.seed for run in self.runs})

    def values(self, key: str) -> list[float]:
        """Last validation score of each run by then."""
        return [seen(run, key, self.steps)[-1] for run in self.runs]

    def cell(self, key: str) -> str:
        """Format the scores, the number of runs and, for shorter runs, their length."""
        shown = with_best(self.values(key), [best(run, key, self.steps) for run in self.runs], key)
        if self.seeds < len(self.runs):
            shown += f"; {len(self.runs)} runs of {self.seeds} seed{'s' * (self.seeds > 1)}"
        elif self.seeds > 1:
            shown += f"; {self.seeds} seeds"
        if any(run.diverged for run in self.runs):
            shown += "; diverged later"
        return shown + (f"; after {span(self.ends, '{:,}')}" if min(self.ends) < self.steps else "")


@dataclass(frozen=True)
class Comparison:
    """All settings of every model, at every size T that several models were run at, after budget / T steps."""

    task: str
    budget: int
    sizes: list[int]
    tried: dict[str, dict[int, dict[Setting, Standing]]]
    """By model and size: every setting with its runs."""

    def shown(self, model: str, size: int) -> tuple[Setting, Standing] | None:
        """Choose the setting to show for a model: the most seeds, then the lowest loss at the budget."""
        found = self.tried[model].get(size)
        return min(found.items(), key=lambda item: (-item[1].seeds, item[1].loss)) if found else None

    def cells(self) -> list[tuple[str, int, Setting, Standing]]:
        """List model, size and chosen setting of every cell that is not empty."""
        places = [(model, size) for model in self.tried for size in self.sizes]
        return [(*place, *shown) for place in places if (shown := self.shown(*place))]

    def score(self) -> tuple[str, str]:
        """Return the name of the score in a table and its key in an entry."""
        *_, standing = self.cells()[0]
        return next(iter(score_names(standing.runs[0]).items()))


def compare(entries: Iterable[Entry], task: str, budget: int) -> Comparison:
    """Sort the runs of a task by model, size and setting; leave out sizes with a single model.

    Runs that differ only after the budget have the same setting.
    """
    groups: dict[tuple[str, int, Setting], list[Entry]] = defaultdict(list)
    for row in table_rows(entries, task):
        size, changes = place(row)
        if size and not changes and budget >= size:
            groups[model_label(row[0].config().model), size, setting_by(row[0], budget // size)] += row
    tried: dict[str, dict[int, dict[Setting, Standing]]] = defaultdict(lambda: defaultdict(dict))
    for (model, size, found), runs in groups.items():
        if standing := standing_at(runs, budget // size):
            tried[model][size][found] = standing
    sizes = sorted({size for found in tried.values() for size in found})
    sizes = [size for size in sizes if sum(size in found for found in tried.values()) > 1]
    tried = {model: found for model, found in tried.items() if any(size in found for size in sizes)}
    return Comparison(task, budget, sizes, tried)


def standing_at(runs: Iterable[Entry], steps: int) -> Standing | None:
    """Keep the runs that reached ``steps`` or solved the task; if there are none, the longest ones."""
    runs = [run for run in runs if run.curve["step"][0] <= steps]
    there = [run for run in runs if run.steps >= steps or reached_goal(run)]
    furthest = max((run.steps for run in runs), default=0)
    kept = trajectories(there or [run for run in runs if run.steps == furthest])
    return Standing(kept, steps) if kept else None


def trajectories(runs: Iterable[Entry]) -> list[Entry]:
    """Keep the longest run of each trajectory: runs of one seed with the same losses wherever both were validated.

    The same seed on another backend rounds differently and soon is another trajectory.
    """
    kept: list[Entry] = []
    for run in sorted(runs, key=lambda run: (run.seed, -run.steps)):
        points = list(zip(run.curve["step"], run.curve["loss"], strict=True))
        for other in (other for other in kept if other.seed == run.seed):
            losses = dict(zip(other.curve["step"], other.curve["loss"], strict=True))
            if all(losses.get(step, loss) == loss for step, loss in points):
                break
        else:
            kept.append(run)
    return kept


def setting_by(entry: Entry, steps: int) -> Setting:
    """List the tuned fields of a run that matter up to ``steps``."""
    kept = []
    for text in setting(entry):
        field, _, value = text.partition("=")
        if field == "optimizer.schedule" and ":" in value:
            begun = [part for part in value.split(",") if int(part.partition(":")[0]) < steps]
            text = f"{field}={','.join(begun)}" if begun else ""
        if text and field not in LABELLED:
            kept.append(text)
    return tuple(kept)


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Make the table of a comparison, one line per model and one column per size; no table without two models.

    A cell has the last validation by ``budget / T`` steps, its mean and range over the runs, and beside it the mean of
    each run's best validation by then.
    """
    budget, sizes = comparison.budget, comparison.sizes
    if not sizes:
        return []
    name, key = comparison.score()
    header = ["model", *(f"{name}, T = {size} ({budget // size:,} steps)" for size in sizes), "settings recorded"]
    rows = []
    for model, found in comparison.tried.items():
        shown = [comparison.shown(model, size) for size in sizes]
        counts = ", ".join(str(len(found.get(size, ()))) for size in sizes)
        rows.append([model, *("" if item is None else item[1].cell(key) for item in shown), counts])
    return [Table(header, rows, notes=notes(comparison))]


def notes(comparison: Comparison) -> list[str]:
    """Write the notes below the table of a comparison."""
    lines = [
        "A cell is the validation at the budget, mean and range over the runs; best is the mean of each run's best "
        "validation by then. Runs of one seed differ in rounding only, and soon in everything. Settings recorded are "
        f"those in the ledger that differ by then, at {_sizes(comparison.sizes)}; the one shown has the most seeds "
        "and, of those, the lowest loss at the budget.",
        *_settings(comparison),
        *_rates(comparison),
    ]
    if learning := _where(comparison, still_learning):
        lines.append(
            f"Still learning at that point (median validation loss of the last quarter {1 - FALLING:.0%} or more below "
            f"that of the quarter before): {learning}."
        )
    if memorising := _where(comparison, overfits):
        lines.append(
            "Validation loss above that of the best model without memory, training loss lower, so overfitting and not "
            f"recalling: {memorising}."
        )
    return lines


def _settings(comparison: Comparison) -> Iterator[str]:
    """Say which models were tuned, and give their scores without tuning."""
    tuned: dict[str, list[int]] = {}
    own: dict[str, list[int]] = {}
    for model, size, chosen, _ in comparison.cells():
        (tuned if chosen else own).setdefault(model, []).append(size)
    if tuned:
        yield f"Tuned, so shown with another setting than the paper's: {_places(comparison, tuned)}."
    if own:
        yield f"Shown untuned, with the paper's setting where it names one: {_places(comparison, own)}."
    for model, sizes in tuned.items():
        results, missing = [], []
        for size in sizes:
            standing = comparison.tried[model][size].get(())
            if standing is None:
                missing.append(size)
                continue
            key, last = comparison.score()[1], max(standing.ends)
            planned = RECIPES[standing.runs[0].recipe]().steps
            short = f" after {span(standing.ends, '{:,}')} of {planned:,} steps" if last < standing.steps else ""
            results.append(f"{spread(standing.values(key), key)}{short} at T = {size}")
        results += [f"not run at {_sizes(missing)}"] if missing else []
        yield f"{model} untuned: {'; '.join(results)}."


def _rates(comparison: Comparison) -> Iterator[str]:
    """Name the models with a part that their authors trained at another rate."""
    found = {model: standing.runs[0].config() for model, _, _, standing in comparison.cells()}
    for model, config in found.items():
        part, rate = AUTHORS_RATES.get(config.model.layer, ("", 0.0))
        own = config.optimizer.lr * rate_factors(config.optimizer.groups).get("weight_hh", 1.0)
        if part and not math.isclose(own, rate):
            yield f"{model} trains {part} at {own:g}, {own / rate:g} times its authors' {rate:g}."


def _where(comparison: Comparison, holds: Callable[[Entry, int], bool]) -> str:
    """Name the models and sizes where something holds for most of the runs shown."""
    found: dict[str, list[int]] = {}
    for model, size, _, standing in comparison.cells():
        if 2 * sum(holds(run, standing.steps) for run in standing.runs) > len(standing.runs):
            found.setdefault(model, []).append(size)
    return _places(comparison, found)


def _places(comparison: Comparison, found: dict[str, list[int]]) -> str:
    """Name models, with their sizes if the model was run at others too."""
    parts = []
    for model, sizes in found.items():
        everywhere = sizes == [size for size in comparison.sizes if size in comparison.tried[model]]
        parts.append(model if everywhere else f"{model} ({_sizes(sizes)})")
    return "; ".join(parts)


def _sizes(sizes: Iterable[int]) -> str:
    return "T = " + ", ".join(map(str, sizes))
