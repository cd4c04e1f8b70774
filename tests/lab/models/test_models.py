import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchrum.lab.models import AnsweringModel, TaggingModel, build_model
from torchrum.lab.tasks import Copying
from torchrum.lab.training.config import ModelConfig

I, H, V = 6, 5, 4


def gru() -> nn.GRU:
    return nn.GRU(I, H, batch_first=True)


def test_tagging_is_one_hot_layer_and_readout():
    model, x = TaggingModel(gru(), I, V), torch.randint(I, (3, 7))
    states = torch.stack([model.layer(torch.eye(I)[row][None])[0][0] for row in x])
    torch.testing.assert_close(model(x), states @ model.readout.weight.T + model.readout.bias)


def test_answering_reads_the_last_step():
    model, x = AnsweringModel(gru(), I, V), torch.randint(I, (3, 7))
    _, last = model.layer(F.one_hot(x, I).float())
    torch.testing.assert_close(model(x), model.readout(last[0]))


def test_answering_reads_the_last_real_step():
    model, x, lengths = AnsweringModel(gru(), I, V), torch.randint(I, (3, 7)), torch.tensor([7, 1, 4])
    alone = torch.cat([model(x[i : i + 1, :n]) for i, n in enumerate(lengths.tolist())])
    torch.testing.assert_close(model(x, lengths), alone)


@pytest.mark.parametrize("kind", [TaggingModel, AnsweringModel])
def test_models_follow_the_dtype_of_their_parameters(kind):
    model = kind(gru(), I, V).double()
    assert model(torch.randint(I, (2, 3))).dtype == torch.float64


@pytest.mark.parametrize("kind", [TaggingModel, AnsweringModel])
def test_every_parameter_learns(kind):
    model = kind(gru(), I, V)
    model(torch.randint(I, (2, 30))).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("kind", [TaggingModel, AnsweringModel])
def test_readout_starts_as_the_authors_do(kind):
    model = kind(nn.GRU(10, 500, batch_first=True), 10, 9)
    bound = math.sqrt(6 / 19)
    assert 0.98 * bound < model.readout.weight.abs().max() <= bound
    assert torch.all(model.readout.bias == 0.01)


def test_tagging_refuses_lengths():
    with pytest.raises(ValueError, match="lengths"):
        TaggingModel(gru(), I, V)(torch.randint(I, (2, 3)), torch.tensor([3, 2]))


def test_an_unknown_layer_is_named_as_the_user_gave_it():
    with pytest.raises(ValueError, match=r"model: layer='rmu' is not known; it must be one of .* Did you mean 'rum'\?"):
        build_model(ModelConfig(layer="rmu"), Copying())
