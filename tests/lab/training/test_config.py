import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from lab.training.tiny import First, tiny
from torchrum.cells.rum import RELU_OPTIONS, TANH_OPTIONS
from torchrum.lab.recipes import RECIPES, load_recipe
from torchrum.lab.training import ConfigError, ModelConfig, OptimizerConfig, Paper, TrainConfig, override
from torchrum.lab.training.config import (
    FORMAT,
    FORMER_OPTIONS,
    differences,
    from_json,
    plain_differences,
    to_json,
    upgraded,
)
from torchrum.lab.training.files import convert, guess
from torchrum.layers.registry import build_layer


def test_override_sets_fields_with_their_types():
    config = override(tiny(), ["steps=1e3", "task.length=7", "optimizer.clip=0.5", "optimizer.betas=0.8,0.99"])
    assert config.steps == 1000
    assert isinstance(config.steps, int)
    assert config.task == First(length=7)
    assert config.optimizer.clip == 0.5
    assert config.optimizer.betas == (0.8, 0.99)
    assert override(config, ["optimizer.clip=none", "graph=false"]) == replace(
        config, graph=False, optimizer=replace(config.optimizer, clip=None)
    )


def test_a_field_that_the_model_lacks_is_an_option_of_its_layer():
    config = override(replace(tiny(), model=ModelConfig(layer="rum")), ["model.lam=1", "model.eta=none"])
    assert config.model.options == {"lam": 1, "eta": None}
    assert override(config, ["model.options.lam=0"]).model.options["lam"] == 0


@pytest.mark.parametrize(
    "layer, assignment, message",
    [
        ("lstm", "forget_bias=x", "model.forget_bias is 'x', but it must be a number"),
        ("gru", "dropout=none", "model.dropout is 'none', but it must be a number"),
        ("lstm", "forget_bias=nan", "forget_bias is nan"),
        ("memn2n", "memory_size=1.5", "model.memory_size is '1.5', but it must be a whole number"),
    ],
)
def test_a_number_of_a_layer_is_a_number(layer, assignment, message):
    config = replace(tiny(), model=ModelConfig(layer=layer))
    with pytest.raises(ConfigError, match=message):
        override(config, [f"model.{assignment}"])


def test_a_whole_number_of_a_layer_stays_one():
    """As recorded runs have it, whose settings are compared as text."""
    config = replace(tiny(), model=ModelConfig(layer="lstm"))
    assert str(override(config, ["model.forget_bias=2"]).model.options) == "{'forget_bias': 2}"
    assert str(override(config, ["model.forget_bias=1e-3"]).model.options) == "{'forget_bias': 0.001}"


@pytest.mark.parametrize("layer, option", [("lstm", "bidirectional"), ("hyper_lstm", "layer_norm"), ("memn2n", "relu")])
def test_a_switch_of_a_layer_is_true_or_false(layer, option):
    config = replace(tiny(), model=ModelConfig(layer=layer))
    assert override(config, [f"model.{option}=yes"]).model.options == {option: True}
    assert override(config, [f"model.{option}=False"]).model.options == {option: False}
    with pytest.raises(ConfigError, match=f"model.{option} is 'maybe', but it must be true or false"):
        override(config, [f"model.{option}=maybe"])


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("stpes=3", "no field 'stpes'; did you mean 'steps'"),
        ("lr=3", "did you mean 'optimizer.lr'"),
        ("task.lenght=3", "did you mean 'task.length'"),
        ("model.hiden_size=3", "did you mean 'model.hidden_size'"),
        ("steps=1.5", "steps is '1.5', but it must be a whole number"),
        ("steps=many", "must be a whole number"),
        ("optimizer.lr=fast", "must be a number"),
        ("graph=maybe", "must be true or false"),
        ("precision=8", "must be one of '32-true'"),
        ("task.length=0", "First: length=0"),
        ("steps=0", "steps is 0, but it must be greater than 0"),
        ("steps.x=3", "has no fields"),
        ("task=copying", "'task' is a group; set one of its fields: task.length"),
        ("steps", "is not an assignment"),
        ("devices=3", "batch_size 8 cannot be divided among 3 processes"),
        ("seed=-1", "seed is -1"),
        ("optimizer.schedule=9:1,3:1", "must be constant, linear, cosine, steps in rising order"),
        ("optimizer.schedule=cosinus", "schedule is 'cosinus'"),
        ("optimizer.schedule=100", "schedule is '100'"),
        ("optimizer.schedule=100:-1", "schedule is '100:-1'"),
        ("optimizer.clip=0", "clip is 0"),
        ("model.options.x.y=1", "no field"),
        ("model.options=3", "'model.options' is a group; set an option of the layer by its name, such as model.lam"),
        ("optimizer.name=sgd", "must be one of 'adam'"),
        ("model.embedding_std=0", "embedding_std is 0"),
    ],
)
def test_a_wrong_override_says_what_is_right(assignment, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        override(tiny(), [assignment])


def test_another_layer_leaves_the_options_of_the_old_one_behind():
    config = replace(tiny(), model=ModelConfig(layer="rum", options={"lam": 1, "layer_norm": True}))
    for order in (1, -1):
        changed = override(config, ["model.layer=ln_lstm", "model.zoneout=0.1"][::order])
        assert changed.model == replace(config.model, layer="ln_lstm", options={"zoneout": 0.1})
    assert override(config, ["model.layer=rum", "model.eta=1"]).model.options == {**config.model.options, "eta": 1}


def test_an_embedding_starts_in_one_way():
    with pytest.raises(ConfigError, match=r"embedding_std is 2.0, but .* set embedding_std to none"):
        override(tiny(), ["model.embedding_std=2", "model.original_embedding=true"])


def test_fields_that_must_fit_each_other_may_come_in_any_order():
    for order in (1, -1):
        config = override(tiny(), ["devices=3", "batch_size=9"][::order])
        assert (config.devices, config.batch_size) == (3, 9)
        config = override(tiny(), ["model.lam=1", "model.layer=rum"][::order])
        assert (config.model.layer, config.model.options) == ("rum", {"lam": 1})
    assert override(tiny(), ["steps=3", "task.length=5", "steps=4", "task.symbols=2"]) == replace(
        tiny(), steps=4, task=First(length=5, symbols=2)
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "1000:0.3", "1000:0.3,2_000:0.1"])
def test_a_schedule_is_one_override_and_survives_json(schedule):
    config = override(tiny(), [f"optimizer.schedule={schedule}", "optimizer.name=rmsprop_tf"])
    assert (config.optimizer.schedule, config.optimizer.name) == (schedule, "rmsprop_tf")
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_override_says_what_it_takes():
    with pytest.raises(ConfigError, match="config is 'copying-rum', but it must be a TrainConfig; load_recipe makes"):
        override("copying-rum", [])
    with pytest.raises(ConfigError, match="assignments is 'steps=3'; pass a list, such as"):
        override(tiny(), "steps=3")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: replace(tiny(), steps="3"), "config: steps is '3', but it must be a whole number."),
        (lambda: replace(tiny(), seed=True), "config: seed is True, but it must be a whole number."),
        (lambda: replace(tiny(), steps=torch.tensor(3)), "config: steps is tensor(3), but it must be a whole number."),
        (lambda: replace(tiny(), name=None), "config: name is None, but it must be text."),
        (lambda: replace(tiny(), graph="no"), "config: graph is 'no', but it must be true or false."),
        (
            lambda: replace(tiny(), precision=32),
            "config: precision is 32, but it must be one of '32-true', 'bf16-mixed',",
        ),
        (lambda: replace(tiny(), task="copying"), "config: task is 'copying', but it must be a Task."),
        (
            lambda: replace(tiny(), model={"layer": "rum"}),
            "config: model is {'layer': 'rum'}, but it must be a ModelConfig.",
        ),
        (lambda: ModelConfig(hidden_size=[8]), "model: hidden_size is [8], but it must be a whole number."),
        (lambda: ModelConfig(options=[]), "model: options is [], but it must be a dict with text as keys."),
        (lambda: ModelConfig(options={1: 2}), "model: options is {1: 2}, but it must be a dict with text as keys."),
        (lambda: OptimizerConfig(lr="1e-3"), "optimizer: lr is '1e-3', but it must be a number."),
        (lambda: OptimizerConfig(betas=(0.9, "x")), "optimizer: betas[1] is 'x', but it must be a number."),
        (lambda: Paper(text="1 %", where="Table 1", value="1"), "paper: value is '1', but it must be a number."),
    ],
)
def test_a_field_of_a_wrong_type_is_named(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_a_config_keeps_values_of_the_types_that_it_declares():
    options = {"lam": 1}
    model, optimizer = ModelConfig(options=options), OptimizerConfig(betas=[0.9, 0.99], clip=1)
    options["lam"] = 0
    assert (model.options, optimizer.betas, optimizer.clip) == ({"lam": 1}, (0.9, 0.99), 1)


def test_an_unknown_layer_option_names_the_nearest():
    config = replace(tiny(), model=ModelConfig(layer="rum"))
    with pytest.raises(ConfigError, match=r"no field 'model.lamb'; did you mean 'model.lam'"):
        override(config, ["model.lamb=1"])


def test_values_of_undeclared_type_are_read_as_json_or_text():
    values = [1, 1.5, None, True, False, "relu"]
    assert [guess(text) for text in ("1", "1.5", "none", "true", "False", "relu")] == values
    assert convert("x", "1_000", int) == 1000
    assert convert("x", "", float | None) is None


def test_json_round_trip():
    config = replace(tiny(), model=ModelConfig(layer="rum", options={"lam": 1}), stop_at=0.9)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_json_of_another_program_is_refused():
    data = to_json(tiny())
    with pytest.raises(ConfigError, match="the config: task is None, but it must be an object"):
        from_json({"name": "x"})
    with pytest.raises(ConfigError, match="the config: 'stepz' is not a field of it; there are: name, task"):
        from_json({**data, "stepz": 1})
    with pytest.raises(ConfigError, match="the config: steps is '3', but it must be a whole number"):
        from_json({**data, "steps": "3"})
    with pytest.raises(ConfigError, match=r"the config: optimizer.betas is \[0.9\], but it must be a list of 2"):
        from_json({**data, "optimizer": {**data["optimizer"], "betas": [0.9]}})
    with pytest.raises(ConfigError, match="not part of torchrum"):
        from_json({**data, "task": {"type": "torchrum.lab.training.config:ModelConfig"}})


@pytest.mark.parametrize("module", ["antigravity", "torchrum.paper.bench.report"])
def test_a_file_does_not_choose_what_is_imported(module, monkeypatch):
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match="not part of torchrum"):
        from_json({**to_json(tiny()), "task": {"type": f"{module}:Task"}})
    assert module not in sys.modules


def test_identity_ignores_length_and_place_only():
    config = tiny()
    assert not differences(config, replace(config, steps=99, devices=2, log_every=3))
    changed = replace(config, optimizer=OptimizerConfig(lr=0.5), seed=3)
    lines = differences(config, changed)
    assert "optimizer.lr 0.01 -> 0.5" in lines
    assert "seed 0 -> 3" in lines


def test_every_field_has_a_meaning():
    from torchrum.cli.list import field_help
    from torchrum.lab.training.config import field_names

    for cls in (TrainConfig, ModelConfig, OptimizerConfig):
        assert set(field_names(cls)) <= set(field_help(cls))


def test_a_field_that_a_task_had_once_is_left_out():
    """Its recorded value was the only one in use; another one is an unknown field."""
    old = to_json(load_recipe("babi-rum-qa1"))
    old["task"] |= {"blanks": 0, "authors_readout": False}
    assert from_json(old) == load_recipe("babi-rum-qa1")
    assert differences(old, load_recipe("babi-rum-qa1")) == []
    old["task"]["blanks"] = 2
    with pytest.raises(ConfigError, match=r"'task\.blanks' is not a field of it"):
        from_json(old)


def test_a_field_that_an_older_run_did_not_know_may_be_off():
    """A checkpoint of an earlier version goes on as long as what came since is not used."""
    config = tiny()
    old = to_json(config)
    for name in ("groups", "weight_decay"):
        del old["optimizer"][name]
    assert differences(old, config) == []
    changed = replace(config, optimizer=replace(config.optimizer, groups="weight_hh:0.1"))
    assert differences(old, changed) == ["optimizer.groups None -> 'weight_hh:0.1'"]


def test_a_config_of_an_older_format_means_the_papers_rum():
    """Before the defaults of RUM were its own, what a config left out was the paper's choice."""
    data = {name: value for name, value in to_json(tiny()).items() if name != "format"}
    data["model"] = {**data["model"], "layer": "rum", "options": {"lam": 1}}
    assert from_json(data).model.options == {**RELU_OPTIONS, "lam": 1}
    data["format"] = 2
    data["model"]["options"] = {"lam": 1, "eta": 0.5}
    assert from_json(data).model.options == {**RELU_OPTIONS, "lam": 1, "eta": 0.5}
    assert from_json({**data, "format": FORMAT}).model.options == {"lam": 1, "eta": 0.5}
    assert upgraded(data) == to_json(from_json(data))
    data["model"] = {**data["model"], "layer": "gru", "options": {}}
    assert from_json(data).model.options == {}


def test_a_config_of_an_older_format_means_the_former_baselines():
    data = {**to_json(tiny()), "format": 4}
    for layer, options in (("fast_weights", {"rate": 0.25}), ("ntm", {})):
        data["model"] = {**data["model"], "layer": layer, "options": options}
        (former,) = FORMER_OPTIONS[layer].values()
        assert from_json(data).model.options == {**former, **options}
        assert from_json({**data, "format": FORMAT}).model.options == options
        build_layer(layer, 3, 4, **former)
    data["model"] = {**data["model"], "layer": "rum", "options": {"lam": 1}}
    for found in (4, 5):  # its defaults changed twice, before and after
        assert from_json({**data, "format": found}).model.options == {**TANH_OPTIONS, "lam": 1}
    assert from_json({**data, "format": FORMAT}).model.options == {"lam": 1}
    data["model"]["layer"] = "rum-gated"
    assert from_json(data).model.options == {"lam": 1}


def test_a_config_of_a_newer_format_is_refused():
    with pytest.raises(ConfigError, match="the format is 7, written by a newer torchrum; this one reads up to 6"):
        from_json({**to_json(tiny()), "format": 7})


def test_a_run_is_named_by_the_sizes_that_it_has():
    assert all(recipe().label == name for name, recipe in RECIPES.items())
    labels = {
        ("copying-rum-t200", "task.delay=20"): "copying-rum-t20",
        ("char-ptb-rum-2000-dropout", "model.hidden_size=100"): "char-ptb-rum-100-dropout",
        ("char-ptb-rum-2x1500", "model.num_layers=3"): "char-ptb-rum-3x1500",
        ("char-ptb-fs-rum-2", "model.hidden_size=100"): "char-ptb-fs-rum-2",  # the number of its fast cells
    }
    assert {key: override(RECIPES[key[0]](), [key[1]]).label for key in labels} == labels


def test_an_option_of_another_name_is_a_difference_though_it_is_none():
    saved = to_json(RECIPES["copying-rum-t200"]())
    options = dict(saved["model"]["options"])
    assert options.pop("embed_scale") is None
    changed = {**saved, "model": {**saved["model"], "options": {**options, "embed_rcale": None}}}
    assert plain_differences(saved, changed) == ["model.options.embed_scale is missing"]
    assert plain_differences(saved, saved) == []
