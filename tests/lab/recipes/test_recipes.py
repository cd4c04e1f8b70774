import sys
from dataclasses import replace

import pytest
import torch

from torchrum import RUM, RUMCell
from torchrum.cells.rum import PAPER_OPTIONS, RELU_OPTIONS, TANH_OPTIONS
from torchrum.lab.models import build_model
from torchrum.lab.recipes import RECIPES, copying, load_recipe, paper_preset, recall
from torchrum.lab.recipes.recall import demo
from torchrum.lab.tasks import Copying, Recall
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError
from torchrum.layers.registry import build_layer


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_config_of_its_name(name):
    config = load_recipe(name)
    assert isinstance(config, TrainConfig)
    assert config.name == name
    assert config.about


@pytest.mark.parametrize("config", [*(make() for make in RECIPES.values()), demo("rum")], ids=lambda c: c.name)
def test_recipes_do_not_lean_on_the_defaults_of_rum(config):
    """The defaults are chosen for everyday data; the paper's models must not follow them."""
    if config.model.layer == "rum":
        stated = {name: config.model.options[name] for name in RELU_OPTIONS}  # each of them, by name
        if "-tanh" in config.name or config.name in ("char-rum", "char-ptb-rum-awd"):  # bounded states, not the paper
            eta = 7.0 if config.name == "char-rum" else 12.0 if config.name.startswith("char") else "sqrt"
            assert stated == {**TANH_OPTIONS, "eta": eta}
            return
        assert {**stated, "eta": None} == RELU_OPTIONS  # some of the paper's models have an eta, none has "sqrt"
        assert not isinstance(stated["eta"], str)


def test_the_papers_options_are_the_papers():
    """relu, gate biases of 1, an orthogonal embedding without bias: tables of the paper depend on it."""
    starts = {"target_bias_init": 1.0, "update_bias_init": 1.0, "embed_bias_init": 0.0}
    scales = {"eta": None, "embed_scale": None, "gate_scale": 1.0}
    assert {"activation": "relu", **starts, **scales} == RELU_OPTIONS
    assert {"form": "paper", **RELU_OPTIONS} == PAPER_OPTIONS
    layer = build_layer("rum", 3, 8, **RELU_OPTIONS)
    plain = build_layer("rum", 3, 8)
    assert layer.settings == plain.settings == RUM(3, 8, form="paper").settings == RUM(3, 8, **PAPER_OPTIONS).settings
    assert layer.options.activation == "relu"
    assert layer.bias_ih_l0.tolist() == [1.0] * 16 + [0.0] * 8
    slow = build_layer("fs", 3, 8, slow="rum").cells[0].slow
    assert slow.options.activation == "relu" and slow.bias_ih.tolist() == [1.0] * 16 + [0.0] * 8


@pytest.mark.parametrize("model", ["rum-2000", "rum-2x1500", "fs-rum-2"])
def test_a_recipe_with_tanh_differs_from_the_tuned_one_in_the_options_of_rum_alone(model):
    tuned, changed = load_recipe(f"char-ptb-{model}-tuned"), load_recipe(f"char-ptb-{model}-tanh")
    assert replace(changed, name=tuned.name, about=tuned.about, model=tuned.model) == tuned
    assert replace(changed.model, options=tuned.model.options) == tuned.model
    names = {"slow", "eta"} if model == "fs-rum-2" else set(RELU_OPTIONS)
    kept = [{n: v for n, v in config.model.options.items() if n not in names} for config in (tuned, changed)]
    assert kept[0] == kept[1]
    sizes = {"hidden_size": 8, "options": {**changed.model.options, **({"slow_size": 16} if "slow" in names else {})}}
    cells = build_model(replace(changed.model, **sizes), changed.task).modules()
    found = [cell.options for cell in cells if isinstance(cell, RUM | RUMCell)]
    assert {(options.activation, options.eta) for options in found} == {("tanh", 4.0 if "slow" in names else 12.0)}


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("copying", "recall"))])
def test_generated_tasks_share_the_batch_and_the_papers_rate(name):
    length = int(name.rpartition("-t")[2]) if "-curriculum-" in name else 100
    assert load_recipe(name).batch_size == {200: 64, 400: 64}.get(length, 128)
    own = any(f"-{model}-t" in name for model in copying.OWN_OPTIMIZER)
    own = own or any(kind in name for kind in ("-window-", "-fresh-", "-curriculum-"))
    if not own and not name.endswith(("-t2000", "-t100")):  # beyond the paper's sizes there is no preset
        assert load_recipe(paper_preset(name)).optimizer.lr == 1e-3


def test_a_tuned_recipe_has_the_papers_beside_it():
    tuned = [name for name in RECIPES if paper_preset(name) != name and not name.startswith("char")]
    assert {"copying-rum-t500", "copying-rum-lam1-eta-t1000", "copying-goru-t200", "recall-rum-lam1-t50"} < set(tuned)
    for name in tuned:
        config, preset = load_recipe(name), load_recipe(paper_preset(name))
        assert (config.task, config.paper, config.steps) == (preset.task, preset.paper, preset.steps)
        assert config.optimizer != preset.optimizer
        assert preset.about == f"{config.about}, the paper's optimizer"
    assert paper_preset("copying-lstm-t200") == "copying-lstm-t200"
    for end in ("tuned", "cosine", "tanh"):
        assert paper_preset(f"char-ptb-fs-rum-2-{end}") == "char-ptb-fs-rum-2"
    assert load_recipe("copying-rum-paper").name == "copying-rum-paper-t200"


@pytest.mark.parametrize("delay", [200, 500, 1000])
@pytest.mark.parametrize(
    "model, hidden_size, options",
    [
        ("rum", 250, RELU_OPTIONS),
        ("rum-eta", 250, {**RELU_OPTIONS, "eta": 1.0}),
        ("rum-lam1", 100, {**RELU_OPTIONS, "lam": 1}),
        ("rum-lam1-eta", 100, {**RELU_OPTIONS, "lam": 1, "eta": 1.0}),
        ("lstm", 250, {}),
        ("gru", 250, {}),
    ],
)
def test_copying_is_set_up_as_figure_2_says(model, hidden_size, options, delay):
    config = load_recipe(paper_preset(f"copying-{model}-t{delay}"))
    assert config.task == Copying(delay=delay)
    assert (config.model.hidden_size, config.model.options) == (hidden_size, options)
    assert (config.optimizer.name, config.optimizer.decay, config.optimizer.clip) == ("rmsprop_tf", 0.9, None)
    assert config.paper is not None
    assert config.paper.value == (1.0 if model in ("lstm", "gru") else 0.0)


@pytest.mark.parametrize(
    "model, length, accuracy",
    [
        ("lstm", 30, 0.256),
        ("lstm", 50, 0.205),
        ("fast-weights", 30, 1.0),
        ("fast-weights", 50, 0.208),
        ("rum-lam1", 30, 1.0),
        ("rum-lam1", 50, 1.0),
    ],
)
def test_recall_stands_beside_table_1(model, length, accuracy):
    config = load_recipe(paper_preset(f"recall-{model}-t{length}"))
    assert config.task == Recall(length=length)
    assert config.model.hidden_size == 50
    assert config.paper is not None
    assert config.paper.value == pytest.approx(accuracy)


def test_what_goes_beyond_the_paper_claims_no_number_of_it():
    for name in ("copying-rum-lam1-eta-t2000", "recall-rum-lam1-t100"):
        assert load_recipe(name).paper is None


def test_baseline_models_have_equal_budgets():
    for task in ("copying", "recall"):
        configs = [load_recipe(name) for name in RECIPES if name.startswith(task + "-")]
        budgets = {(c.model.window, c.steps, c.batch_size) for c in configs}
        assert budgets == {
            (1, configs[0].steps, 128),
            *([(1, 20_000, 128), (2, 20_000, 128), (2, 5_000, 128)] if task == "recall" else []),
            *([(2, 6_000, 64), (2, 9_000, 64)] if task == "recall" else []),
        }


@pytest.mark.parametrize("model", recall.COMPARED)
@pytest.mark.parametrize("length", recall.COMPARED_LENGTHS)
def test_models_of_the_recall_comparison_differ_in_layer_window_and_rate_only(model, length):
    fresh, window = (load_recipe(f"recall-{model}-{kind}-t{length}") for kind in ("fresh", "window"))
    assert fresh.task == Recall(length=length, train_size=None)
    assert fresh.model.window == 1
    rates = [config.optimizer.lr for config in (fresh, window)]
    assert set(rates) <= {3e-4, 1e-3, 3e-3, 1e-2, 3e-2}
    window = replace(window, model=replace(window.model, window=1), optimizer=fresh.optimizer)
    assert replace(window, name=fresh.name, about=fresh.about) == fresh
    lstm = load_recipe(f"recall-lstm-fresh-t{length}")
    layer = {"layer": lstm.model.layer, "options": lstm.model.options}
    fresh = replace(fresh, model=replace(fresh.model, **layer), optimizer=lstm.optimizer)
    assert replace(fresh, name=lstm.name, about=lstm.about) == lstm


@pytest.mark.parametrize("length", recall.CURRICULUM)
def test_models_of_the_recall_curriculum_differ_in_layer_and_rate_only(length):
    configs = [load_recipe(f"recall-{model}-curriculum-t{length}") for model in recall.CURRICULUM_MODELS]
    assert len({config.model.layer for config in configs}) == len(configs)
    budgets = {(c.task, c.model.hidden_size, c.model.window, c.steps, c.batch_size) for c in configs}
    assert len(budgets) == 1 and configs[0].task.train_lengths > 1


def test_fast_slow_models_at_a_constant_rate_differ_in_cells_only():
    names = ("char-ptb-fs-lstm-2-constant", "char-ptb-fs-rum-2-constant", "char-ptb-fs-rum-2-slim")
    configs = [load_recipe(name) for name in names]
    first = configs[0]
    assert all(replace(c, name=first.name, about=first.about, model=first.model) == first for c in configs)
    shared = ("cell_dropout", "zoneout", "zoneout_cell")
    assert len({tuple(c.model.options[key] for key in shared) for c in configs}) == 1
    assert [c.model.options["slow_size"] for c in configs] == [400, 1000, 448]


def test_a_name_without_its_size_takes_the_smallest():
    assert load_recipe("copying-rum").name == "copying-rum-t200"
    assert load_recipe("copying-rum-lam1").name == "copying-rum-lam1-t200"
    assert load_recipe("recall-lstm").name == "recall-lstm-t30"


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="no recipe 'copying-rumm-t200'; did you mean 'copying-rum-t200'"):
        load_recipe("copying-rumm-t200")


def own() -> TrainConfig:
    return TrainConfig(name="own", task=Copying(delay=3))


def not_a_recipe() -> int:
    return 3


def test_a_recipe_of_ones_own():
    assert load_recipe(f"{__name__}:own") == own()
    with pytest.raises(ConfigError, match="returned int, but it must return a TrainConfig"):
        load_recipe(f"{__name__}:not_a_recipe")
    with pytest.raises(
        ConfigError, match="No module named 'no_such_module'; the current folder and Python's path were"
    ):
        load_recipe("no_such_module:own")


def test_a_recipe_of_ones_own_lies_in_the_current_folder(tmp_path, monkeypatch):
    """Where an installed command does not look by itself."""
    text = "from torchrum.lab.recipes import load_recipe\n\n\ndef short():\n    return load_recipe('recall-lstm-t30')\n"
    (tmp_path / "recipe_of_this_folder.py").write_text(text)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipe_of_this_folder:short").name == "recall-lstm-t30"


@pytest.mark.parametrize(
    "name, parameters",
    [("copying-rum-t200", 135_509), ("copying-rum-lam1-t200", 24_209), ("recall-rum-lam1-t50", 11_060)],
)
def test_models_have_the_counted_parameters(name, parameters):
    config = load_recipe(name)
    model = build_model(config.model, config.task)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith(("-t200", "-t30"))])
def test_every_model_answers_its_task(name):
    config = load_recipe(name)
    task = type(config.task)(**({"delay": 2} if isinstance(config.task, Copying) else {"length": 4}))
    batch = task.batch(2, torch.Generator())
    logits = build_model(config.model, task)(batch.x, batch.lengths)
    assert logits.shape == (*batch.y.shape, task.num_classes)
    assert torch.isfinite(task.loss(logits, batch))
