"""Tests of models/char_lm.py: drawing text from a model."""

import pytest
import torch
from torch import nn

from torchrum.lab.models import CharModel
from torchrum.lab.models.char_lm import sample

V = 6


@pytest.fixture
def model():
    return CharModel(nn.GRU(V, 12), V).eval()


def test_the_likeliest_symbols_are_those_of_the_whole_text(model):
    """The state is carried, so each symbol is the answer of the model to all that came before."""
    with torch.no_grad():
        for number, weight in enumerate(model.layer.parameters()):  # of a size at which what came before decides
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    prompt = [1, 4, 2]
    drawn = list(sample(model, prompt, 20, temperature=0))
    text = torch.tensor([prompt + drawn])
    likeliest = model(text)[0].argmax(-1)[0]
    assert drawn == likeliest[len(prompt) - 1 : -1].tolist()
    _, state = model(torch.tensor([prompt]))
    after_prompt = [int(model(torch.tensor([[symbol]]), None, state)[0].argmax()) for symbol in drawn[:-1]]
    assert drawn[1:] != after_prompt  # a state that stands still would show


def test_temperature_sharpens_and_flattens(model):
    with torch.no_grad():
        model.readout.weight.zero_()
        model.readout.bias.copy_(torch.tensor([3.0, 0, 0, 0, 0, 0]))
    share = {
        temperature: sum(symbol == 0 for symbol in sample(model, [0], 400, temperature=temperature)) / 400
        for temperature in (0.1, 1.0, 1e6)
    }
    likeliest = torch.softmax(model.readout.bias, 0)[0].item()
    assert share[0.1] == 1
    assert share[1.0] == pytest.approx(likeliest, abs=0.06)
    assert share[1e6] == pytest.approx(1 / V, abs=0.06)


def test_the_global_random_state_is_left_alone(model):
    before = torch.get_rng_state()
    assert list(sample(model, [0], 5, seed=3)) == list(sample(model, [0], 5, seed=3))
    assert torch.equal(before, torch.get_rng_state())


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="the prompt is empty; give at least one symbol"):
        next(sample(model, [], 5))


def test_a_tiny_temperature_takes_the_likeliest(model):
    likeliest = list(sample(model, [0], 8, temperature=0))
    assert list(sample(model, [0], 8, temperature=1e-320)) == likeliest


def test_logits_that_are_not_finite_are_refused(model):
    with torch.no_grad():
        model.readout.bias[2] = torch.nan
    with pytest.raises(ValueError, match="logits are not finite; its weights have diverged"):
        next(sample(model, [0], 5))
