import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchrum.lab.models import OneHotModel, build_model
from torchrum.lab.tasks import Babi, Copying, Recall
from torchrum.lab.training.config import ModelConfig
from torchrum.lab.training.errors import ConfigError

I, H, V = 6, 5, 4


def gru() -> nn.GRU:
    return nn.GRU(I, H, batch_first=True)


def test_tagging_is_one_hot_layer_and_readout():
    model, x = OneHotModel(gru(), I, V, "steps"), torch.randint(I, (3, 7))
    states = torch.stack([model.layer(torch.eye(I)[row][None])[0][0] for row in x])
    torch.testing.assert_close(model(x), states @ model.readout.weight.T + model.readout.bias)


def test_answering_reads_the_last_step():
    model, x = OneHotModel(gru(), I, V), torch.randint(I, (3, 7))
    _, last = model.layer(F.one_hot(x, I).float())
    torch.testing.assert_close(model(x), model.readout(last[0]))


def test_answering_reads_the_last_real_step():
    model, x, lengths = OneHotModel(gru(), I, V), torch.randint(I, (3, 7)), torch.tensor([7, 1, 4])
    alone = torch.cat([model(x[i : i + 1, :n]) for i, n in enumerate(lengths.tolist())])
    torch.testing.assert_close(model(x, lengths), alone)


@pytest.mark.parametrize("answers", ["steps", "last"])
def test_models_follow_the_dtype_of_their_parameters(answers):
    model = OneHotModel(gru(), I, V, answers).double()
    assert model(torch.randint(I, (2, 3))).dtype == torch.float64


@pytest.mark.parametrize("answers", ["steps", "last"])
def test_every_parameter_learns(answers):
    model = OneHotModel(gru(), I, V, answers)
    model(torch.randint(I, (2, 30))).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("answers", ["steps", "last"])
def test_readout_starts_as_the_authors_do(answers):
    model = OneHotModel(nn.GRU(10, 500, batch_first=True), 10, 9, answers)
    bound = math.sqrt(6 / 19)
    assert 0.98 * bound < model.readout.weight.abs().max() <= bound
    assert torch.all(model.readout.bias == 0.01)


def test_tagging_refuses_lengths():
    with pytest.raises(ValueError, match="lengths"):
        OneHotModel(gru(), I, V, "steps")(torch.randint(I, (2, 3)), torch.tensor([3, 2]))


def test_an_unknown_layer_is_named_as_the_user_gave_it():
    with pytest.raises(ValueError, match=r"model: layer='rmu' is not known; it must be one of .* Did you mean 'rum'\?"):
        build_model(ModelConfig(layer="rmu"), Copying())


@pytest.mark.parametrize("layer", ["rum", "lstm", "gru", "fast_weights", "ntm"])
def test_a_window_gives_the_layer_the_symbols_before_each_one(layer):
    task = Recall(length=6)
    model = build_model(ModelConfig(layer=layer, hidden_size=H, window=3), task)
    x = task.batch(2, torch.Generator()).x
    symbols = torch.eye(task.input_size)[x]  # (B, T, I)
    before = [F.pad(symbols, (0, 0, back, 0))[:, : x.shape[1]] for back in range(3)]
    expected = model.readout(model.layer(torch.cat(before, -1))[0][:, -1])
    torch.testing.assert_close(model(x), expected)


def test_a_window_is_refused_where_symbols_are_not_one_hot():
    with pytest.raises(ValueError, match=r"model\.window=2 is for models of one-hot symbols; Babi has none, leave it"):
        build_model(ModelConfig(hidden_size=H, window=2, embedding_size=4), Babi())
    with pytest.raises(ConfigError, match="window"):
        ModelConfig(window=0)
