"""Runs of the ledger by model and setting: labels, groups of seeds, and the reading of curves."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, median

from torchrum.lab.recipes import RECIPES, paper_preset
from torchrum.lab.training.config import ModelConfig
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
    return changed_settings(entry, paper_preset(entry.recipe, RECIPES))


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
