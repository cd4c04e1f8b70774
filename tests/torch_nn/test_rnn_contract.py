"""What the RNN part of torch's ``test_nn.py`` checks of nn.GRU and nn.GRUCell, written for RUM.

By design RUM differs in these points: sizes must be at least 1 (an nn cell may have a hidden size of 0), there is no
cuDNN, so nothing is flattened, and no ``proj_size`` (nor has nn.GRU). The paper's form has one bias for each gate.
"""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from grids import form_of
from torchrum import RUM, RUMCell

every = pytest.mark.parametrize("lam", [None, 0, 1])


def make(lam: float | None = None, **options) -> RUM:
    torch.manual_seed(0)
    smooth = {} if lam is None else {"activation": "tanh"}
    return RUM(3, 4, **form_of(lam), **smooth, dtype=torch.float64, **options)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_cells_step_on_and_their_states_have_the_batch_of_the_input():
    cell, theirs = RUMCell(10, 20), nn.GRUCell(10, 20)
    for bias in (True, False):
        hx = torch.randn(3, 20)
        for kind in (RUMCell(10, 20, bias=bias), nn.GRUCell(10, 20, bias=bias)):
            state = hx
            for x in torch.randn(6, 3, 10):
                state = kind(x, state)
            assert state.shape == hx.shape
    assert repr(cell).startswith("RUMCell(10, 20") and repr(theirs).startswith("GRUCell(10, 20")


def test_sizes_below_one_are_refused():
    for words in (
        dict(input_size=0, hidden_size=4),
        dict(input_size=3, hidden_size=0),
        dict(input_size=3, hidden_size=-1),
    ):
        for kind in (RUM, RUMCell, nn.GRU):
            with pytest.raises(ValueError, match=r"at least 1|greater than zero"):
                kind(**words)
    with pytest.raises(TypeError):
        RUM(3, 4, proj_size=2)


@every
def test_no_initial_state_is_a_zero_state(lam):
    rum, x = make(lam, num_layers=2, bidirectional=True), draw(5, 2, 3)
    zero = torch.zeros(4, 2, 4, dtype=torch.float64)
    torch.testing.assert_close(rum(x, (zero, None) if lam else zero), rum(x))


@pytest.mark.parametrize("p", [0.0, 0.276, 0.731, 1.0])
def test_dropout_acts_on_what_the_second_layer_reads(p):
    """With weights that pass one number on, the second layer sees it zeroed or divided by 1 - p."""
    rum = RUM(10, 500, 2, dropout=p, bias=False, form="paper", update_gate=False)
    with torch.no_grad():
        for weight in rum.parameters():
            weight.zero_()
        rum.weight_ih_l0[500:] = 1  # eps of the first layer: the sum of the input
        rum.weight_ih_l1[500:] = torch.eye(500)  # and of the second: what it is given
    output, h_n = rum(torch.ones(1, 2, 10))
    expected = {0.0: [10.0], 1.0: [0.0]}.get(p) or [0.0, 10 / (1 - p)]
    assert output.unique().tolist() == pytest.approx(expected)
    assert (h_n[0] == 10).all()
    if 0 < p < 1:
        assert abs((output == 0).double().mean().item() - p) < 0.06


def test_dropout_follows_the_generator_and_can_be_changed():
    rum, x = make(num_layers=2, dropout=0.5), draw(5, 2, 3)
    torch.manual_seed(7)
    first = rum(x)[0]
    assert not torch.equal(rum(x)[0], first)
    torch.manual_seed(7)
    assert torch.equal(rum(x)[0], first)
    rum.dropout = 0.0
    assert torch.equal(rum(x)[0], rum.eval()(x)[0])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_of_a_wrong_size_are_refused(bidirectional, batch_first):
    """Number of layers, batch and width, each one too small and too large; and the input's width."""
    rum = make(num_layers=2, bidirectional=bidirectional, batch_first=batch_first)
    x, right = draw(2, 5, 3) if batch_first else draw(5, 2, 3), (2 * rum.num_directions, 2, 4)
    rum(x, draw(*right))
    for place in range(3):
        for by in (-1, 1):
            wrong = [size + by * (place == i) for i, size in enumerate(right)]
            with pytest.raises(RuntimeError, match=rf"h in hx has shape \({', '.join(map(str, wrong))}\); expected"):
                rum(x, draw(*wrong))
    with pytest.raises(RuntimeError, match="Expected 3, got 4"):
        rum(draw(5, 2, 4))
    with pytest.raises(RuntimeError, match=r"h in hx has shape \(2, 4\)"):
        rum(x, draw(2, 4))  # no batch in the state of a batch


def test_states_on_another_device_are_refused():
    with pytest.raises(RuntimeError, match=r"h in hx is torch\.float64 on meta; it must be floating-point, on cpu"):
        make()(draw(5, 2, 3), torch.zeros(1, 2, 4, dtype=torch.float64, device="meta"))
    with pytest.raises(RuntimeError, match="input is on meta, the weights on cpu"):
        make()(draw(5, 2, 3).to("meta"))


@every
def test_a_graph_can_be_kept_and_is_freed_otherwise(lam):
    rum, x = make(lam, num_layers=2), draw(5, 2, 3)
    total = rum(x)[0].sum()
    total.backward(retain_graph=True)
    once = [part.grad.clone() for part in rum.parameters()]
    for times in (2, 3):
        total.backward(retain_graph=True)
        torch.testing.assert_close([part.grad for part in rum.parameters()], [times * part for part in once])
    total.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        total.backward()


@every
def test_gradients_reach_the_input_of_frozen_weights(lam):
    rum, x = make(lam), draw(5, 2, 3).requires_grad_()
    expected = torch.autograd.grad(rum(x)[0].sum(), x)[0]
    rum.requires_grad_(False)
    rum(x)[0].sum().backward()
    torch.testing.assert_close(x.grad, expected)
    rum.weight_hh_l0.requires_grad_()  # and one weight alone can be trained
    rum(x.detach())[0].sum().backward()
    assert rum.weight_hh_l0.grad.any()
    assert rum.weight_ih_l0.grad is None


@every
def test_variable_lengths_pack_and_unpack(lam):
    """Sorted and not, batch_first or not: outputs, states and the input's gradient are those of each row alone."""
    rum, lengths = make(lam, num_layers=2, bidirectional=True), [3, 5, 1]
    x = draw(5, 3, 3).requires_grad_()
    for batch_first in (False, True):
        given = x.transpose(0, 1) if batch_first else x
        packed = pack_padded_sequence(given, lengths, batch_first=batch_first, enforce_sorted=False)
        output, back = pad_packed_sequence(rum(packed)[0], batch_first=batch_first, total_length=5)
        assert back.tolist() == lengths
        output = output.transpose(0, 1) if batch_first else output
        grad = torch.autograd.grad(output.sin().sum(), x)[0]
        for row, length in enumerate(lengths):
            alone = rum(x[:length, row])[0]
            torch.testing.assert_close(output[:length, row], alone)
            torch.testing.assert_close(grad[:, row], torch.autograd.grad(alone.sin().sum(), x)[0][:, row])
            assert not grad[length:, row].any()


def test_weights_can_be_tied():
    rum, x = make(num_layers=2), draw(5, 2, 3)
    rum.weight_hh_l1 = rum.weight_hh_l0
    assert len(list(rum.parameters())) == 7
    apart = copy.deepcopy(rum)
    apart.weight_hh_l1 = nn.Parameter(apart.weight_hh_l1.detach().clone())
    rum(x)[0].sin().sum().backward()
    apart(x)[0].sin().sum().backward()
    torch.testing.assert_close(rum.weight_hh_l0.grad, apart.weight_hh_l0.grad + apart.weight_hh_l1.grad)


def test_weights_can_be_replaced():
    rum, x = make(), draw(5, 2, 3)
    weight = rum.weight_hh_l0
    del rum.weight_hh_l0
    rum.weight_hh_l0 = nn.Parameter(2 * weight.detach())
    other = make()
    with torch.no_grad():
        other.weight_hh_l0.mul_(2)
    torch.testing.assert_close(rum(x), other(x))


@every
def test_parametrised_and_pruned_weights_train(lam):
    x = draw(5, 2, 3)
    for change, leaf in (
        (lambda rum: parametrizations.weight_norm(rum, "weight_hh_l0"), "parametrizations.weight_hh_l0.original1"),
        (lambda rum: parametrizations.spectral_norm(rum, "weight_ih_l0"), "parametrizations.weight_ih_l0.original"),
        (lambda rum: prune.l1_unstructured(rum, "weight_hh_l0", 0.5), "weight_hh_l0_orig"),
    ):
        rum = make(lam)
        change(rum)
        output, _ = rum(x)
        output.sin().sum().backward()
        assert rum.get_parameter(leaf).grad.any(), leaf
    norm, plain = make(lam), make(lam)
    parametrizations.weight_norm(norm, "weight_hh_l0")
    torch.testing.assert_close(norm(x), plain(x))  # it starts where it was
    parametrize.remove_parametrizations(norm, "weight_hh_l0")
    torch.testing.assert_close(norm(x), plain(x))


def test_old_style_weight_norm():
    rum, x = make(), draw(5, 2, 3)
    expected = rum(x)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(rum, "weight_hh_l0")
    torch.testing.assert_close(rum(x)[0], expected)
    rum(x)[0].sum().backward()
    assert rum.weight_hh_l0_v.grad.any()


def test_conversions_keep_the_parameters_and_flattening_does_nothing():
    rum = make(num_layers=2)
    before = list(rum.parameters())
    rum.flatten_parameters()
    rum.float().flatten_parameters()
    assert all(a is b for a, b in zip(rum.parameters(), before, strict=True))
    copied = copy.deepcopy(rum)
    copied.flatten_parameters()
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(copied(x), rum(x))
    assert [name for name, _ in rum.named_parameters()] == list(rum.state_dict())


@every
def test_gradients_by_differences(lam):
    rum = make(lam, num_layers=2, bidirectional=True)
    x = draw(3, 2, 3).requires_grad_()
    leaves = [x, *rum.parameters()]
    assert torch.autograd.gradcheck(lambda *_: rum(x)[0], leaves, fast_mode=True)
    one = make(lam, bidirectional=True)
    assert torch.autograd.gradgradcheck(lambda *_: one(x)[0], [x, *one.parameters()], fast_mode=True)


def test_vectors_of_parameters_and_clipped_gradients():
    rum, x = make(), draw(5, 2, 3)
    vector = nn.utils.parameters_to_vector(rum.parameters())
    nn.utils.vector_to_parameters(2 * vector, rum.parameters())
    torch.testing.assert_close(nn.utils.parameters_to_vector(rum.parameters()), 2 * vector)
    rum(x)[0].sum().backward()
    total = nn.utils.clip_grad_norm_(rum.parameters(), 1e-3)
    assert total > 1e-3
    norms = torch.stack([part.grad.norm() for part in rum.parameters()])
    torch.testing.assert_close(norms.norm(), norms.new_tensor(1e-3), rtol=1e-3, atol=0)
