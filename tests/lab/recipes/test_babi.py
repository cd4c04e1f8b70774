"""The recipes of bAbI: the paper's setting, and the numbers that stand beside ours."""

import pytest
import torch

from torchrum.cells.rum import RELU_OPTIONS, TANH_OPTIONS
from torchrum.lab.models import build_model
from torchrum.lab.recipes import FAMILIES, RECIPES, load_recipe
from torchrum.lab.recipes.babi import BATCH, EPOCH, JOINT, JOINT_BATCH, JOINT_EPOCH, MODELS, PAPER
from torchrum.lab.tasks import Babi

MEANS = {"rum": 73.2, "lstm": 49, "goru": 60, "memn2n": 86}
"""What the paper prints below its columns, cut to as many digits."""


@pytest.mark.parametrize("model", PAPER)
def test_the_papers_columns_have_the_papers_means(model):
    assert len(PAPER[model]) == 20
    mean = sum(PAPER[model]) / 20
    assert mean == pytest.approx(MEANS[model], abs=0.05 if model == "rum" else 0.7)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", [1, 7, 20])
def test_the_papers_setting(model, task):
    config = load_recipe(f"babi-{model}-qa{task}")
    assert config.task == Babi(task=task)
    options = {"rum": RELU_OPTIONS, "rum-tanh": TANH_OPTIONS}.get(model, {})
    assert (config.model.hidden_size, config.model.embedding_size, config.model.options) == (256, 64, options)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.clip) == ("adam", 1e-3, None)
    assert (config.batch_size, config.steps, config.eval_every) == (32, 20 * 282, 282)
    assert config.stop_at is None
    if model in PAPER:
        assert config.paper.value == pytest.approx(PAPER[model][task - 1] / 100)
        assert ("1k" in config.paper.text) is (model == "lstm")


@pytest.mark.parametrize("name", ["babi-memn2n-qa7", "babi-joint-memn2n"])
def test_memn2n_is_the_published_one_for_10k(name):
    """Three hops with ReLU, position and temporal encoding, linear start, random noise."""
    config = load_recipe(name)
    model = build_model(config.model, config.task)
    assert (model.hops, model.relu) == (3, True)
    assert 0 < model.linear_steps < config.steps and model.noise > 0
    assert len(model.ages) == 4 and not torch.equal(model.place_weight, torch.ones_like(model.place_weight))


def test_every_set_has_a_recipe_for_each_task():
    assert set(FAMILIES) == {f"babi-{model}" for model in (*MODELS, "memn2n")}
    for name, members in FAMILIES.items():
        assert [load_recipe(member).task.task for member in members] == list(range(1, 21))
        assert name not in RECIPES


@pytest.mark.parametrize("name", ["babi-rum-qa2", "babi-memn2n-qa2", *(f"babi-joint-{model}" for model in JOINT)])
def test_every_model_answers_without_the_files(name):
    """Reading the ledger builds configs, models and baselines, and must not need the data."""
    config = load_recipe(name)
    task = config.task
    x = torch.randint(1, task.input_size, (2, 5) if task.sentence_size is None else (2, 5, task.sentence_size))
    logits = build_model(config.model, task)(x, torch.tensor([5, 3]))
    assert logits.shape == (2, task.num_classes) and torch.isfinite(logits).all()
    assert task.baseline() > 0


def test_the_readers_have_the_counted_parameters():
    config = load_recipe("babi-rum-qa1")
    count = sum(parameter.numel() for parameter in build_model(config.model, config.task).parameters())
    cell = 2 * 256 * (64 + 256 + 1) + 256 * (64 + 1)
    assert count == 22 * 64 + cell + 22 * 257


def test_the_epochs_are_those_of_the_tasks():
    assert Babi(task=1).steps_per_epoch(BATCH) == EPOCH
    assert Babi().steps_per_epoch(JOINT_BATCH) == JOINT_EPOCH
