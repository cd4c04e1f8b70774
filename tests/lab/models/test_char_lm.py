import pytest
import torch
from torch import nn

from tolerances import CARRIED, ORTHOGONAL
from torchrum.lab.models import CharModel, build_model
from torchrum.lab.models.char_lm import sample
from torchrum.lab.tasks import CharLM, Copying
from torchrum.lab.training.config import ModelConfig
from torchrum.lab.training.errors import ConfigError
from torchrum.layers.registry import build_layer

V, E, H, B = 7, 6, 8, 3

LAYERS = {
    "rum": {"eta": 1.0, "layer_norm": True},
    "rum-lam1": {"lam": 1},
    "lstm": {},
    "gru": {},
    "ln_lstm": {},
    "fs": {"slow": "rum", "slow_size": 5, "eta": 1.0},
}


def model_of(name: str, **options) -> CharModel:
    layer = build_layer(name.removesuffix("-lam1"), E, H, **LAYERS.get(name, {}))
    return CharModel(layer, V, embedding_size=E, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_carried_state_equals_an_uncut_pass(name):
    model, x = model_of(name).eval(), torch.randint(V, (B, 20))
    whole, last = model(x)
    state, pieces = model.initial_state(B, "cpu", torch.float32), []
    for piece in x.split(6, 1):
        logits, state = model(piece, None, state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CARRIED)
    for part, wanted in zip(state, last, strict=True):
        torch.testing.assert_close(part, wanted, **CARRIED)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_state_keeps_its_form_and_dtype(name, autocast):
    """A captured step copies it into buffers that were made for the first one."""
    model, x = model_of(name), torch.randint(V, (B, 4))
    first = model.initial_state(B, "cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, state = model(x, None, first)
        logits, state = model(x, None, state)
    assert [(part.shape, part.dtype) for part in state] == [(part.shape, part.dtype) for part in first]
    assert logits.shape == (B, 4, V) and logits.dtype == torch.float32


def test_embedding_and_readout_start_orthogonal():
    model = CharModel(nn.GRU(128, 200), 50, embedding_size=128)
    for weight in (model.embedding.weight, model.readout.weight):  # (50, 128) and (50, 200): rows are orthonormal
        torch.testing.assert_close(weight @ weight.T, torch.eye(50), **ORTHOGONAL[torch.float32])
    assert 0.008 < model.readout.bias.abs().max() <= 0.01


def test_one_hot_input_where_there_is_no_embedding():
    model, x = CharModel(nn.GRU(V, H), V), torch.randint(V, (B, 5))
    output, _ = model.layer(torch.eye(V)[x.t()])
    torch.testing.assert_close(model(x)[0], model.readout(output).transpose(0, 1))


@pytest.mark.parametrize("name", ["rum", "lstm", "ln_lstm", "fs", "rhn", "hm_lstm", "hyper_lstm", "nas"])
def test_weight_drop_zeroes_recurrent_weights_for_a_whole_call(name):
    """With nearly all of them gone, the layer works as one whose recurrent weights are zero."""
    model, x = model_of(name, weight_drop=1 - 1e-9), torch.randint(V, (B, 9))
    dropped = model.train()(x)[0]
    plain = model.eval()(x)[0]
    with torch.no_grad():
        for weight in model.dropped:
            model.layer.get_parameter(weight).zero_()
    model.weight_drop = 0.0
    torch.testing.assert_close(dropped, model.train()(x)[0])
    assert not torch.allclose(dropped, plain)


def test_dropped_weights_learn_where_they_are_kept():
    model = model_of("rum", weight_drop=0.5)
    model(torch.randint(V, (B, 9)))[0].square().sum().backward()
    grad = model.layer.weight_hh_l0.grad
    assert 0.2 < (grad == 0).float().mean() < 0.8


@pytest.mark.parametrize("locked", [False, True])
def test_dropout_before_and_after_the_layer(locked):
    model = model_of("gru", input_dropout=0.5, output_dropout=0.5, locked_dropout=locked)
    seen = []
    model.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randint(V, (B, 12))
    model(x)
    zeros = seen[0] == 0  # (T, B, E)
    assert 0.2 < zeros.float().mean() < 0.8
    assert bool((zeros == zeros[0]).all()) == locked
    assert not torch.equal(model(x)[0], model(x)[0])
    assert torch.equal(model.eval()(x)[0], model(x)[0])


def test_tied_weights_are_one_matrix():
    model = CharModel(nn.GRU(E, E), V, embedding_size=E, tied=True)
    assert model.readout.weight is model.embedding.weight
    with pytest.raises(ValueError, match="tied=True needs an embedding as wide as the layer"):
        model_of("gru", tied=True)
    with pytest.raises(ValueError, match="embedding_size is None"):
        CharModel(nn.GRU(V, V), V, tied=True)


def test_a_layer_without_recurrent_weights_cannot_drop_them():
    with pytest.raises(ValueError, match="has no weight_hh to drop"):
        CharModel(build_layer("eunn", E, H), V, embedding_size=E, weight_drop=0.5)


@pytest.mark.parametrize("name", ["input_dropout", "output_dropout", "weight_drop"])
def test_a_chance_is_from_0_to_1(name):
    with pytest.raises(ValueError, match=rf"CharModel: {name}=-0\.1 is not allowed; it must be a number from 0 to 1"):
        CharModel(nn.GRU(E, H), V, embedding_size=E, **{name: -0.1})


def test_a_model_says_what_it_is_made_of():
    for layer in (3, nn.Linear(3, 4), nn.GRU):
        with pytest.raises(TypeError, match=r"layer is of type \w+; it must be a recurrent layer with a hidden_size"):
            CharModel(layer, V)
    with pytest.raises(
        ValueError, match="CharModel: num_symbols='7' is not allowed; it must be an integer of at least 1"
    ):
        CharModel(nn.GRU(E, H), "7", embedding_size=E)


@pytest.mark.parametrize("name", ["locked_dropout", "tied", "calibrated"])
def test_a_switch_is_true_or_false(name):
    with pytest.raises(TypeError, match=f"CharModel: {name}='no'; it must be True or False"):
        CharModel(nn.GRU(E, H), V, embedding_size=E, **{name: "no"})


def test_the_temperature_divides_logits_in_evaluation_alone():
    model, x = model_of("gru", calibrated=True), torch.randint(V, (B, 4))
    trained = model(x)[0]
    model.temperature.fill_(2.0)
    assert torch.equal(model(x)[0], trained)
    torch.testing.assert_close(model.eval()(x)[0], trained / 2)


def test_lengths_are_refused():
    with pytest.raises(ValueError, match="lengths is given"):
        model_of("gru")(torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 2]))


def test_models_of_text_are_built_for_tasks_that_carry_state():
    config = ModelConfig(layer="rum", hidden_size=H, embedding_size=E, weight_drop=0.2)
    model = build_model(config, CharLM())
    assert isinstance(model, CharModel)
    assert (model.embedding.weight.shape, model.weight_drop) == ((50, E), 0.2)
    with pytest.raises(ValueError, match=r"model\.embedding_size=6 is for models of text; Copying has none"):
        build_model(config, Copying(delay=2))
    with pytest.raises(ConfigError, match=r"input_dropout is 1\.5"):
        ModelConfig(input_dropout=1.5)


@pytest.fixture
def model():
    return CharModel(nn.GRU(E, 12), E).eval()


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
    assert share[1e6] == pytest.approx(1 / E, abs=0.06)


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
