"""RUM in its default form: nn.GRU where nothing rotates; else its own equations, start and options."""

import copy
import io
from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from torchrum import RUM, RUMCell, rotation_matrix

SHAPES = [dict(), dict(num_layers=2, bidirectional=True), dict(batch_first=True), dict(bias=False)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def twins(**shape) -> tuple[RUM, nn.GRU]:
    """A RUM that rotates nothing, and the nn.GRU whose weights it has loaded."""
    torch.manual_seed(0)
    gru = nn.GRU(3, 12, dtype=torch.float64, **shape)
    rum = RUM(3, 12, rotated=0, dtype=torch.float64, **shape)
    assert list(rum.state_dict()) == list(gru.state_dict())
    rum.load_state_dict(gru.state_dict())
    return rum, gru


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def leaves(results) -> list[Tensor]:
    output, h_n = results
    return [output.data if isinstance(output, nn.utils.rnn.PackedSequence) else output, h_n]


def assert_same_as_a_gru(rum: RUM, gru: nn.GRU, *given) -> None:
    """Outputs, last states and all gradients."""
    floats = [part for part in given if isinstance(part, Tensor)]
    found, wanted = leaves(rum(*given)), leaves(gru(*given))
    torch.testing.assert_close(found, wanted)
    grads = (
        torch.autograd.grad(sum(part.sin().sum() for part in results), [*floats, *module.parameters()])
        for module, results in ((rum, found), (gru, wanted))
    )
    torch.testing.assert_close(*grads)


@shapes
def test_without_rotated_units_it_is_an_nn_gru(shape):
    rum, gru = twins(**shape)
    count = rum.num_layers * rum.num_directions
    x, h0 = draw(5, 4, 3).requires_grad_(), draw(count, 5 if rum.batch_first else 4, 12).requires_grad_()
    assert_same_as_a_gru(rum, gru, x)
    assert_same_as_a_gru(rum, gru, x, h0)
    row, state = draw(5, 3).requires_grad_(), draw(count, 12).requires_grad_()
    assert_same_as_a_gru(rum, gru, row)
    assert_same_as_a_gru(rum, gru, row, state)
    for lengths in ([5, 4, 1], [2, 5, 3]):
        packed = pack_sequence([draw(length, 3) for length in lengths], enforce_sorted=lengths[0] == 5)
        assert_same_as_a_gru(rum, gru, packed)
        assert_same_as_a_gru(rum, gru, packed, draw(count, 3, 12).requires_grad_())


@shapes
def test_lengths_are_those_of_packed_sequences(shape):
    rum, gru = twins(**shape)
    lengths = torch.tensor([2, 5, 3])
    packed = pack_sequence([draw(int(length), 3) for length in lengths], enforce_sorted=False)
    padded, _ = pad_packed_sequence(packed, batch_first=rum.batch_first)
    output, h_n = gru(packed)
    expected = pad_packed_sequence(output, batch_first=rum.batch_first)[0], h_n
    torch.testing.assert_close(rum(padded, lengths=lengths), expected)


def test_without_rotated_units_the_cell_is_an_nn_gru_cell():
    theirs = nn.GRUCell(3, 12, dtype=torch.float64)
    cell = RUMCell(3, 12, rotated=0, dtype=torch.float64)
    cell.load_state_dict(theirs.state_dict())
    x, h = draw(4, 3), draw(4, 12)
    for given in ((x,), (x, h), (x[0],), (x[0], h[0])):
        torch.testing.assert_close(cell(*given), theirs(*given))
        with torch.no_grad():
            torch.testing.assert_close(cell(*given), theirs(*given))


@shapes
def test_a_saved_gru_loads_and_the_weights_go_back(shape):
    gru, buffer = nn.GRU(3, 12, **shape), io.BytesIO()
    torch.save(gru.state_dict(), buffer)
    buffer.seek(0)
    rum = RUM(3, 12, **shape)
    assert str(rum.load_state_dict(torch.load(buffer, weights_only=True))) == "<All keys matched successfully>"
    again = nn.GRU(3, 12, **shape)
    again.load_state_dict(rum.state_dict())
    x = torch.randn(5, 4, 3)
    assert torch.equal(again(x)[0], gru(x)[0])
    assert not torch.allclose(rum(x)[0], gru(x)[0], atol=1e-3)  # half of the units rotate


@shapes
def test_it_starts_as_a_gru_but_for_the_reset_bias(shape):
    torch.manual_seed(0)
    gru = nn.GRU(3, 12, **shape)
    torch.manual_seed(0)
    rum = RUM(3, 12, reset_bias_init=-0.25, update_bias_init=0.75, **shape)
    for name, start in gru.named_parameters():
        if name.startswith("bias_ih"):
            shift = torch.tensor([-0.25, 0.75, 0.0]).repeat_interleave(12)
            torch.testing.assert_close(rum.get_parameter(name), start + shift)
        else:
            assert torch.equal(rum.get_parameter(name), start)
    assert repr(rum).endswith("reset_bias_init=-0.25, update_bias_init=0.75)")
    torch.manual_seed(0)
    assert all(map(torch.equal, RUM(3, 12, reset_bias_init=0, **shape).parameters(), gru.parameters()))


@pytest.mark.parametrize("hidden_size", [16, 64, 128])
@pytest.mark.parametrize("rotated", [0.5, 1.0])
def test_its_outputs_start_as_large_as_those_of_a_gru(hidden_size, rotated):
    torch.manual_seed(0)
    x = torch.randn(60, 16, 10)
    with torch.no_grad():
        mine = RUM(10, hidden_size, rotated=rotated)(x)[0][30:].square().mean().sqrt()
        theirs = nn.GRU(10, hidden_size)(x)[0][30:].square().mean().sqrt()
    assert 0.5 < mine / theirs < 2


def by_hand(rum: RUM, x: Tensor, heads: list[slice]) -> Tensor:
    """The equations with dense rotation matrices."""
    H, T, B = rum.hidden_size, *x.shape[:2]
    h, states = x.new_zeros(B, H), []
    for t in range(T):
        x_r, x_u, eps = (x[t] @ rum.weight_ih_l0.T + rum.bias_ih_l0).chunk(3, -1)
        h_r, h_u, tau = (h @ rum.weight_hh_l0.T + rum.bias_hh_l0).chunk(3, -1)
        r, u = torch.sigmoid(x_r + h_r), torch.sigmoid(x_u + h_u)
        rotated = torch.zeros_like(h)
        for head in heads:
            R = rotation_matrix(eps[:, head], tau[:, head])
            rotated[:, head] = (R @ h[:, head].unsqueeze(-1)).squeeze(-1)
        h = u * h + (1 - u) * torch.tanh(eps + r * (tau + rotated))
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize(
    "options, heads",
    [
        (dict(), [slice(0, 8), slice(8, 16)]),  # half of 28 units: 1.75 heads of 8, rounded to two
        (dict(rotated=0.01), [slice(0, 8)]),
        (dict(rotated=0), []),
        (dict(rotated=1), [slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 28)]),
        (dict(rotated=0.5, head_size=100), [slice(0, 28)]),
        (dict(rotated=0.25, head_size=2), [slice(2 * i, 2 * i + 2) for i in range(4)]),
        (dict(rotated=1.0, head_size=1), [slice(i, i + 1) for i in range(28)]),  # a line has no rotation but 1
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_equations_with_dense_rotations(options, heads):
    torch.manual_seed(0)
    rum, x = RUM(3, 28, dtype=torch.float64, **options), draw(6, 2, 3)
    output, h_n = rum(x)
    torch.testing.assert_close(output, by_hand(rum, x, heads))
    torch.testing.assert_close(h_n[0], output[-1])
    with torch.no_grad():
        torch.testing.assert_close(rum(x)[0], output)


@pytest.mark.parametrize(
    "change",
    [dict(rotated=1.0), dict(head_size=4), dict(reset_bias_init=1.0), dict(update_bias_init=1.0), dict(zoneout=0.5)],
    ids=str,
)
def test_every_option_changes_the_output(change):
    def output(**options) -> Tensor:
        torch.manual_seed(1)
        rum = RUM(4, 16, dtype=torch.float64, **options)
        return rum(torch.linspace(-1, 1, 6 * 2 * 4, dtype=torch.float64).view(6, 2, 4))[0]

    assert not torch.allclose(output(**change), output(), atol=1e-4)
    torch.testing.assert_close(output(**change), output(**change, backend="reference"))


def test_the_form_follows_from_lam():
    assert [RUM(3, 4, **words).settings.form for words in ({}, {"lam": 1}, {"learn_lam": True}, {"form": "paper"})] == [
        "gated",
        "paper",
        "paper",
        "paper",
    ]
    assert repr(RUM(3, 4)) == "RUM(3, 4)"
    assert repr(RUM(3, 4, form="gated", rotated=0.25, head_size=2)) == "RUM(3, 4, head_size=2, rotated=0.25)"
    assert repr(RUM(3, 4, lam=1, form="paper")) == "RUM(3, 4, lam=1)"
    assert repr(RUMCell(3, 4, form="paper", update_bias_init=0.5)) == "RUMCell(3, 4, form=paper, update_bias_init=0.5)"
    assert RUM(3, 4, form="paper").settings.update_bias_init == 1
    assert RUM(3, 4).settings.update_bias_init == 0


@pytest.mark.parametrize("shape", [dict(), dict(num_layers=2, bidirectional=True)], ids=str)
def test_gradients_by_differences(shape):
    torch.manual_seed(0)
    rum, x = RUM(2, 5, head_size=3, rotated=1.0, dtype=torch.float64, **shape), draw(2, 2, 2).requires_grad_()
    h0 = draw(rum.num_layers * rum.num_directions, 2, 5).requires_grad_()
    names, weights = zip(*rum.named_parameters(), strict=True)

    def run(x: Tensor, h0: Tensor, *weights: Tensor):
        return functional_call(rum, dict(zip(names, weights, strict=True)), (x, h0))

    assert torch.autograd.gradcheck(run, (x, h0, *weights), fast_mode=bool(shape))
    if not shape:
        assert torch.autograd.gradgradcheck(run, (x, h0, *weights), fast_mode=True)


def test_resets_zoneout_and_dropout():
    """A reset starts a row again; zoneout and dropout act in training only."""
    rum, x = RUM(3, 16, zoneout=0.4, dropout=0.5, num_layers=2).eval(), torch.randn(6, 2, 3)
    reset = torch.zeros(6, 2, dtype=torch.bool)
    reset[4, 1] = True
    output, h_n = rum(x, reset=reset)
    torch.testing.assert_close(output[:, 0], rum(x)[0][:, 0])
    torch.testing.assert_close(output[:4, 1], rum(x)[0][:4, 1])
    torch.testing.assert_close(output[4:, 1], rum(x[4:])[0][:, 1])
    torch.testing.assert_close(h_n[:, 1], rum(x[4:])[1][:, 1])
    torch.manual_seed(3)
    first = rum.train()(x)[0]
    assert not torch.equal(rum(x)[0], first)
    torch.manual_seed(3)
    assert torch.equal(rum(x)[0], first)


def test_per_sample_gradients_of_an_ensemble():
    rum, x = RUM(3, 16, dtype=torch.float64), draw(5, 4, 3)
    weights = {name: part.detach() for name, part in rum.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(rum, weights, (x,))[0].sin().sum()

    samples = vmap(grad(loss), in_dims=(None, 1))(weights, x)
    for name, alone in grad(loss)(weights, x[:, 2]).items():
        torch.testing.assert_close(samples[name][2], alone)


def test_the_whole_layer_is_saved_and_copied():
    rum, x, buffer = RUM(3, 16, 2, bidirectional=True, rotated=0.75), torch.randn(5, 4, 3), io.BytesIO()
    expected = rum(x)[0]
    torch.save(rum, buffer)
    buffer.seek(0)
    for same in (copy.deepcopy(rum), torch.load(buffer, weights_only=False)):
        assert torch.equal(same(x)[0], expected)


@pytest.mark.parametrize("module", [RUM(3, 16, 2), RUM(3, 4, lam=1, eta="sqrt"), RUMCell(3, 16)], ids=repr)
def test_one_safe_global_loads_a_module_as_with_nn_gru(module):
    x, buffer = torch.randn(4, 3), io.BytesIO()
    torch.save(module.eval(), buffer)
    buffer.seek(0)
    assert len(torch.serialization.get_unsafe_globals_in_checkpoint(buffer)) == 1
    buffer.seek(0)
    with torch.serialization.safe_globals([type(module)]):
        same = torch.load(buffer, weights_only=True)
    assert same.settings == module.settings and repr(same) == repr(module)
    assert same.options is not module.options and same.options == module.options
    torch.testing.assert_close(same(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("given", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotated", [0, 0.5])
def test_dtypes_under_autocast_on_the_cpu_are_those_of_nn_gru(own, given, rotated):
    x, hx = torch.randn(5, 4, 3).to(own), None if given is None else torch.randn(2, 4, 16).to(given)
    gru, rum = nn.GRU(3, 16, 2), RUM(3, 16, 2, rotated=rotated)
    cells = nn.GRUCell(3, 16), RUMCell(3, 16, rotated=rotated)
    rum.load_state_dict(gru.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = rum(x, hx), gru(x, hx)
        steps = [cell(x[0], None if hx is None else hx[0]) for cell in cells]
    assert [part.dtype for part in found] == [part.dtype for part in wanted]
    assert steps[0].dtype == steps[1].dtype
    if rotated == 0:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.03)  # both round to bfloat16 inside
    sum(part.float().sum() for part in found).backward()
    assert all(part.grad.dtype == torch.float32 for part in rum.parameters())


@shapes
def test_attributes_that_code_for_nn_gru_reads(shape):
    rum, gru = RUM(3, 12, **shape), nn.GRU(3, 12, **shape)
    for name in ("proj_size", "_all_weights", "_flat_weights_names", "input_size", "bias", "dropout"):
        assert getattr(rum, name) == getattr(gru, name)
    assert rum.mode == "RUM"
    assert all(map(torch.equal, rum._flat_weights, rum.parameters()))
    assert len(rum._flat_weights) == len(gru._flat_weights)
    for names in rum._all_weights:  # raises the bias of the update gate
        for name in (name for name in names if "bias" in name):
            rum.get_parameter(name).data[12:24].fill_(1.0)
    assert all((part[12:24] == 1).all() for name, part in rum.named_parameters() if "bias" in name)
    with pytest.raises(AttributeError):
        rum._flat_weights = []  # would change nothing


class RNN(ABC, nn.RNNBase):
    """The base of recurrent layers in pytorch-forecasting, in short."""

    @abstractmethod
    def init_hidden(self, x: Tensor) -> Tensor: ...

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, self.init_hidden(x))


class Encoder(RNN, RUM):
    def init_hidden(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.num_layers, x.shape[1], self.hidden_size)


def test_it_is_an_rnnbase_for_code_that_asks_by_type():
    rum, x = Encoder(3, 8, num_layers=2), torch.randn(5, 4, 3)
    for layer in (rum, copy.deepcopy(rum), RUM(3, 8), RUM(3, 8, lam=1)):
        assert isinstance(layer, nn.RNNBase)
        assert not isinstance(layer, nn.GRU)  # torch.compile and quantization treat that one as a kernel of its own
    torch.testing.assert_close(rum.encode(x), rum(x))
    torch.testing.assert_close(copy.deepcopy(rum).double().encode(x.double())[0].float(), rum(x)[0])
    rum.weight_hh_l0 = nn.Parameter(torch.zeros(24, 8))
    assert not rum._flat_weights[1].any()
    assert not rum.all_weights[0][1].any()


def test_loops_over_the_three_blocks_reach_all_gates():
    rum = RUM(3, 8)
    with torch.no_grad():
        for name, part in rum.named_parameters():
            for block in part.chunk(3, 0):
                assert block.shape[0] == 8
                nn.init.orthogonal_(block) if name.startswith("weight_hh") else block.fill_(0.5)
    for block in rum.weight_hh_l0.view(3, 8, 8):
        torch.testing.assert_close(block @ block.T, torch.eye(8))
    assert all((part == 0.5).all() for name, part in rum.named_parameters() if not name.startswith("weight_hh"))


@pytest.mark.filterwarnings("ignore:.*(torch.ao.quantization is deprecated|quantized tensor)")
@pytest.mark.parametrize("rnn", [RUM(3, 16), RUMCell(3, 16)], ids=["layer", "cell"])
def test_dynamic_quantization_is_not_silent_about_it(rnn):
    model = nn.ModuleList([nn.Linear(4, 3), rnn])
    with pytest.warns(UserWarning, match=r"RUM.*: torch.ao.quantization has no int8 version of it"):
        small = torch.ao.quantization.quantize_dynamic(model)
    assert not isinstance(small[0], nn.Linear)  # the other layers are quantized
    x = torch.randn(5, 3)
    torch.testing.assert_close(small[1](x), rnn(x))
    assert not hasattr(rnn, "qconfig")


def test_explain_backend_speaks_of_its_own_scan():
    x = torch.randn(5, 4, 3)
    assert RUM(3, 16, backend="reference").explain_backend(x) == ("reference", "it was asked for")
    for rum in (RUM(3, 16), RUM(3, 16, bidirectional=True)):
        choice = rum.explain_backend(x)
        assert choice.backend in ("native", "torch", "reference")
        assert choice.reason
