"""The reader of stories: what it reads where, both ways, at every length. Tests of models/answering.py."""

import math

import pytest
import torch
from torch import nn

from tolerances import TOL
from torchrum.lab.models import StoryReader, build_model
from torchrum.lab.models.answering import BothWays, position_encoding
from torchrum.lab.tasks import Babi, Copying
from torchrum.lab.training import ModelConfig
from torchrum.layers.registry import LAYERS

V, E, H = 22, 6, 4
TASK = Babi(task=1)
STORIES = Babi(task=1, reading="sentences")
SMALL = {"ntm": {"num_slots": 6, "slot_size": 3}}
LENGTHS = torch.tensor([7, 1, 4])


def reader(layer="rum", task=TASK, num_layers=1, **options):
    torch.manual_seed(0)
    config = ModelConfig(
        layer=layer, hidden_size=H, num_layers=num_layers, embedding_size=E, options={**SMALL.get(layer, {}), **options}
    )
    return build_model(config, task).double().eval()


def words(B=3, T=7, J=None):
    shape = (B, T) if J is None else (B, T, J)
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_padding_does_not_matter(layer, both):
    model, x = reader(layer, bidirectional=both), words()
    alone = torch.cat([model(x[i : i + 1, :n]) for i, n in enumerate(LENGTHS.tolist())])
    torch.testing.assert_close(model(x, LENGTHS), alone, **TOL[torch.float64])


@pytest.mark.parametrize("layer", ["rum", "lstm", "gru"])
def test_two_directions_of_two_layers_match_torch_packing(layer):
    """The reader of torch's layers against torch's own two directions over packed sequences, weight by weight."""
    model, x = reader(layer, num_layers=2, bidirectional=True), words()
    assert model.readout.in_features == 2 * H
    if layer == "rum":
        assert not isinstance(model.layer, BothWays)
        return
    own = {"lstm": nn.LSTM, "gru": nn.GRU}[layer](E, H, 2, bidirectional=True).double()
    with torch.no_grad():
        for level in range(2):
            for part, end in ((model.layer.forwards, ""), (model.layer.backwards, "_reverse")):
                for name, weight in part[level].named_parameters():
                    getattr(own, name.replace("_l0", f"_l{level}{end}")).copy_(weight)
    packed = nn.utils.rnn.pack_padded_sequence(model.embedding(x).transpose(0, 1), LENGTHS, enforce_sorted=False)
    output, _ = nn.utils.rnn.pad_packed_sequence(own(packed)[0])
    state = torch.cat((output[LENGTHS - 1, torch.arange(3), :H], output[0, :, H:]), -1)
    torch.testing.assert_close(model(x, LENGTHS), model.readout(state), **TOL[torch.float64])


def test_one_direction_reads_the_last_word_and_two_read_the_first_too():
    one, two, x = reader("gru"), reader("gru", bidirectional=True), words()
    changed = x.clone()
    changed[:, -1] = 0
    for model in (one, two):
        assert not torch.allclose(model(x), model(changed))
    output = two.layer(two.embedding(x).transpose(0, 1), None)
    torch.testing.assert_close(two(x), two.readout(torch.cat((output[-1, :, :H], output[0, :, H:]), -1)))


def test_a_sentence_is_the_weighted_sum_of_its_words():
    task = Babi(task=1, reading="sentences")
    model, x = reader("gru", task), words(J=task.sentence_size)
    x[:, :, 4:] = 0
    expected = torch.zeros(7, 3, E, dtype=torch.float64)
    for j in range(4):
        expected += model.embedding.weight[x[:, :, j]].transpose(0, 1) * model.place_weight[j]
    torch.testing.assert_close(model.embed(x), expected)
    order = x[:, :, [1, 0, *range(2, task.sentence_size)]]
    assert not torch.allclose(model(x, LENGTHS), model(order, LENGTHS))


def test_the_position_encoding_is_the_published_one():
    paper = [[0.5833, 0.5, 0.4167, 0.3333], [0.4167, 0.5, 0.5833, 0.6667], [0.25, 0.5, 0.75, 1]]
    code = [[1.5, 1.1667, 0.8333, 0.5], [1, 1, 1, 1], [0.5, 0.8333, 1.1667, 1.5]]
    torch.testing.assert_close(position_encoding(3, 4, "paper"), torch.tensor(paper), atol=1e-4, rtol=0)
    torch.testing.assert_close(position_encoding(3, 4, "code"), torch.tensor(code), atol=1e-4, rtol=0)


def test_weights_start_as_in_the_original_implementation():
    torch.manual_seed(0)
    model = StoryReader(nn.GRU(64, 256), 36, 36, 64, original_embedding=True)
    scale, bound = math.sqrt(6 / 36), math.sqrt(6 / (256 + 64))
    assert model.embedding.weight.mean().item() == pytest.approx(-scale, rel=0.05)
    assert model.embedding.weight.std().item() == pytest.approx(scale, rel=0.05)
    assert 0.98 * bound < model.readout.weight.abs().max() <= bound
    assert torch.all(model.readout.bias == 0.01)


@pytest.mark.parametrize("std", [None, 1.0, 2.0, 0.3])
def test_the_embedding_starts_around_zero(std):
    weight = StoryReader(nn.GRU(64, 256), 36, 36, 64, embedding_std=std).embedding.weight
    deviation = 1 if std is None else std
    assert weight.mean().item() == pytest.approx(0, abs=0.1 * deviation)
    assert weight.std().item() == pytest.approx(deviation, rel=0.1)


def test_dropout_acts_in_training_alone():
    places = [{"input_dropout": 0.5}, {"output_dropout": 0.5}, {"options": {"bidirectional": True, "dropout": 0.5}}]
    for place in places:
        model = build_model(ModelConfig(layer="gru", hidden_size=H, num_layers=2, embedding_size=E, **place), TASK)
        x = words()
        assert not torch.allclose(model(x), model(x))
        model.eval()
        torch.testing.assert_close(model(x), model(x))


def test_every_parameter_learns():
    for options in ({"bidirectional": True}, {}):
        model = reader("lstm", num_layers=2, **options).train()
        model(words(T=30), torch.tensor([30, 3, 9])).square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    "model, task, message",
    [
        ({"hidden_size": 4}, Babi(task=1, reading="sentences"), "a sentence needs an embedding"),
        ({"embedding_size": 4}, Copying(delay=3), "embedding_size=4 is for models of text; Copying has none"),
        ({"embedding_size": 4, "tied": True}, TASK, "tied=True is for models of text; Babi has none"),
        ({"original_embedding": True}, Copying(delay=3), "original_embedding=True is for readers of stories; Copying"),
        ({"embedding_std": 2.0}, Copying(delay=3), "embedding_std=2.0 is for readers of stories; Copying"),
        ({"layer": "memn2n", "embedding_std": 2.0}, STORIES, "embedding_std=2.0 is for readers of stories; memn2n"),
        ({"layer": "memn2n"}, TASK, "set task.reading to sentences"),
        ({"layer": "memn2n"}, Babi(task=1, reading="sentences", question="twice"), "needs the question last"),
        ({"layer": "memn2n"}, Copying(delay=3), "memn2n reads stories sentence by sentence"),
        ({"layer": "memn2n", "embedding_size": 4}, STORIES, "embedding_size=4 is for .*; memn2n has none"),
        (
            {"layer": "gru", "num_layers": 2, "embedding_size": 4, "options": {"bidirectional": True, "dropout": 1.5}},
            STORIES,
            "BothWays: dropout=1.5 is not allowed; it must be a number from 0 to 1",
        ),
        ({"layer": "memn2n", "input_dropout": 0.5}, STORIES, "input_dropout=0.5 is for .*; memn2n has none"),
        ({"layer": "memn2n", "tied": True}, STORIES, "tied=True is for models of text; memn2n has none"),
        ({"layer": "memn2n", "options": {"memory_size": "all"}}, STORIES, "memory_size='all' is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused(model, task, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build_model(ModelConfig(**model), task)
