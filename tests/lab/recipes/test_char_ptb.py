import math
from dataclasses import replace

import pytest

from torchrum.cells.lstm_variants import HMLSTMCell
from torchrum.lab.models import build_model
from torchrum.lab.recipes import RECIPES, load_recipe
from torchrum.lab.recipes.char_ptb import CONSTANT, EPOCH, HM_EPOCH, MODELS, OTHERS, TANH, TUNED
from torchrum.lab.tasks import CharLM

COUNTS = {
    "zoneout-lstm": 4_254_050,
    "ln-lstm": 4_582_450,
    "rum-2000": 8_892_450,
    "rum-2000-dropout": 8_892_450,
    "rum-2x1500": 16_434_450,
    "fs-lstm-2": 7_225_050,
    "fs-lstm-4": 6_561_050,
    "fs-rum-2": 11_248_450,
    "fs-rum-2-cosine": 11_248_450,
    "fs-rum-2-slim": 6_999_922,
    "rum-awd": 12_687_050,
    "hyper-lstm": 14_407_714,
    "nas": 16_225_650,
    "hm-lstm": 8_434_100 + 15_360,  # and layer norm
    "rhn": 13_919_150,
}
"""Counted by hand from the equations, every trainable number."""


@pytest.mark.parametrize("name", COUNTS)
def test_models_have_the_counted_parameters(name, monkeypatch):
    for start in ("orthogonal_", "uniform_"):  # drawing millions of numbers takes longer than counting them
        monkeypatch.setattr(f"torch.nn.init.{start}", lambda tensor, *_: tensor)
    config = load_recipe(f"char-ptb-{name}")
    model = build_model(config.model, config.task)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]


def test_fs_rum_2_is_trained_as_the_paper_says():
    config = load_recipe("char-ptb-fs-rum-2")
    assert CharLM().segments == EPOCH
    assert CharLM(lanes=64, segment=100).segments == HM_EPOCH
    assert config.steps == 360 * EPOCH
    assert config.optimizer.schedule == f"{180 * EPOCH}:0.05,{240 * EPOCH}:0.005"  # 2e-3, 1e-4, 1e-5
    assert (config.optimizer.name, config.optimizer.lr) == ("adam", 2e-3)
    assert config.optimizer.clip == pytest.approx(1 / 150)
    options = config.model.options
    assert (options["ln_order"], options["eta"], options["cell_dropout"]) == ("authors", 1.0, 0.35)
    assert (options["zoneout"], options["zoneout_cell"]) == (0.1, 0.5)
    assert config.paper is not None and config.paper.value == 1.189


def test_plain_rum_has_no_dropout_but_in_the_labelled_recipe():
    plain, printed = load_recipe("char-ptb-rum-2000"), load_recipe("char-ptb-rum-2000-dropout")
    assert (plain.model.input_dropout, plain.model.output_dropout) == (0, 0)
    assert (printed.model.input_dropout, printed.model.output_dropout) == (0.35, 0.35)
    assert "0.35" in printed.about


@pytest.mark.parametrize("name", [name for name in MODELS if "rum" in name])
def test_rums_are_normalised_as_the_published_ones(name):
    assert load_recipe(f"char-ptb-{name}").model.options["ln_order"] == "authors"


def test_the_slope_of_hm_lstm_rises_by_the_papers_share_per_epoch():
    config = load_recipe("char-ptb-hm-lstm")
    cell = HMLSTMCell(2, 2, **config.model.options)
    for epoch, slope in ((0, 1.0), (10, 1.4), (100, 5.0), (200, 5.0)):
        cell.at_step(epoch * config.task.segments)
        assert cell.slope.item() == pytest.approx(slope)


@pytest.mark.parametrize("name", OTHERS)
def test_baseline_models_without_a_full_run_say_so(name):
    config = load_recipe(f"char-ptb-{name}")
    assert config.steps == 20 * config.task.segments
    assert config.about.endswith("20 epochs")
    assert config.precision == "32-true"
    assert config.optimizer.schedule == ("plateau/0.02/1" if name == "hm-lstm" else "constant")


@pytest.mark.parametrize("name", [name for name in COUNTS if name not in OTHERS])
def test_rows_of_the_table_share_text_and_batch(name):
    config = load_recipe(f"char-ptb-{name}")
    assert (config.task.corpus, config.task.lanes, config.task.segment) == ("ptb", 128, 150)
    assert config.steps % EPOCH == 0 == config.eval_every % EPOCH
    assert math.isclose(config.task.baseline(), 2.3154111, rel_tol=1e-7)


def test_every_recipe_has_its_count():
    kinds = {"tuned": TUNED, "tanh": TANH, "constant": CONSTANT}  # of the same sizes as the plain ones
    alike = {f"{name}-{kind}" for kind, names in kinds.items() for name in names}
    assert {f"char-ptb-{name}" for name in {*COUNTS, *alike}} == {
        name for name in RECIPES if name.startswith("char-ptb")
    }


@pytest.mark.parametrize("name", TUNED)
def test_a_tuned_recipe_has_the_model_of_the_table_and_one_setting_for_all(name):
    plain, tuned = load_recipe(f"char-ptb-{name}"), load_recipe(f"char-ptb-{name}-tuned")
    dropped = {"input_dropout": 0.35, "output_dropout": 0.35, "options": {**plain.model.options, "dropout": 0.35}}
    added = dropped if name == "rum-2x1500" else {}
    assert tuned.model == replace(plain.model, calibrated=True, **added)
    assert tuned.optimizer == replace(plain.optimizer, schedule="cosine", weight_decay=0.05)
    assert (tuned.average, tuned.steps) == (0.999, (240 if name.startswith("fs") else 100) * EPOCH)
