"""The native scan checks what it hands to C, mixes exactly, and takes a zero R for the identity."""

import pytest
import torch

from torchrum import RUM, RUMCell
from torchrum.ops.rum_scan import native

pytestmark = pytest.mark.skipif(native.build_obstacle(False) is not None, reason="the native scan cannot run here")


def replaced_weight(form="paper", steps=4):
    rum = RUM(3, 64, form=form)
    output = rum(torch.randn(steps, 2, 3))[0]
    rum.weight_hh_l0.data = torch.ones(3)
    output.sum().backward()


def replaced_input(form="paper", steps=4):
    x = torch.randn(steps, 2, 3, requires_grad=True)
    output = RUM(3, 64, form=form)(x)[0]
    x.data = torch.ones(1)
    output.sum().backward()


def freed_weight(form="paper", steps=4):
    rum = RUM(3, 64, form=form)
    rum.weight_hh_l0.untyped_storage().resize_(0)
    rum(torch.randn(steps, 2, 3))


def shrunk_weight(form="paper", steps=4):
    rum = RUM(3, 64, form=form)
    rum.weight_hh_l0.untyped_storage().resize_(64)
    rum(torch.randn(steps, 2, 3))


def weight_freed_before_backward(form="paper", steps=4):
    rum = RUM(3, 64, form=form)
    output = rum(torch.randn(steps, 2, 3))[0]
    rum.weight_hh_l0.untyped_storage().resize_(0)
    output.sum().backward()


def input_without_memory(form="paper", steps=4):
    RUM(3, 64, form=form)(torch._efficientzerotensor((steps, 2, 3)))


def functional_input(form="paper", steps=4):
    RUM(3, 64, form=form)(torch._to_functional_tensor(torch.randn(steps, 2, 3)))


def state_without_memory(form="paper", steps=4):
    RUM(3, 64, form=form)(torch.randn(steps, 2, 3), torch._efficientzerotensor((1, 2, 64)))


def weight_without_memory(form="paper", steps=4):
    rum = RUM(3, 64, form=form)
    rum.weight_hh_l0.data = torch._efficientzerotensor(rum.weight_hh_l0.shape)
    rum(torch.randn(steps, 2, 3))


def unpacked_in_another_dtype():
    with torch.autograd.graph.saved_tensors_hooks(lambda part: part, lambda part: part.double()):
        output = RUM(3, 64, form="paper")(torch.randn(4, 2, 3))[0]
    output.sum().backward()


@pytest.mark.parametrize(
    "misuse, message",
    [
        (replaced_weight, "weight has shape"),
        (replaced_input, "x has shape"),
        (freed_weight, "weight has no memory"),
        (shrunk_weight, "weight has no memory"),
        (weight_freed_before_backward, "weight has no memory"),
        (input_without_memory, "x has no memory"),
        (functional_input, "x has no memory"),
        (state_without_memory, "h0 has no memory"),
        (weight_without_memory, "weight has no memory"),
        (unpacked_in_another_dtype, "grad_out is torch.float32, but it must be torch.float64"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_tensor_that_c_cannot_read_is_an_error(misuse, message):
    with pytest.raises((ValueError, TypeError), match=message):
        misuse()


def saved_in_half(form, steps):
    with torch.autograd.graph.saved_tensors_hooks(lambda part: part, lambda part: part.half()):
        output = RUM(3, 64, form=form)(torch.randn(steps, 2, 3))[0]
    output.sum().backward()


@pytest.mark.parametrize(
    "misuse, message",
    [
        (replaced_weight, "weight has shape"),
        (freed_weight, "weight has no memory"),
        (shrunk_weight, "weight has no memory"),
        (weight_freed_before_backward, "weight has no memory"),
        (state_without_memory, "h0 has no memory"),
        (weight_without_memory, "weight has no memory"),
        (saved_in_half, "float16, but they must be torch.float32"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
@pytest.mark.parametrize("steps", [2, 4], ids=["projects", "is given the projected input"])
def test_a_tensor_that_the_gated_scan_cannot_read_is_an_error(misuse, message, steps):
    with pytest.raises((ValueError, TypeError), match=message):
        misuse("gated", steps)


@pytest.mark.parametrize(
    "misuse, message",
    [
        (replaced_input, "x has shape"),
        (input_without_memory, "x has no memory"),
        (functional_input, "x has no memory"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_an_input_that_the_gated_scan_cannot_project_is_an_error(misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse("gated", steps=2)


SCAN = {"xp": (4, 2, 30), "h0": (2, 10), "R0": None, "weight_hh": (20, 10), "ln_weight": None, "ln_bias": None}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    "name, shape",
    [("xp", (4, 2, 29)), ("xp", (30,)), ("h0", (3, 10)), ("h0", (10,)), ("weight_hh", (3,)), ("lengths", (1,))],
)
def test_the_operator_checks_shapes(name, shape, backend):
    shapes = {**SCAN, "lengths": None, name: shape}
    tensors = [None if shape is None else torch.ones(shape) for shape in shapes.values()]
    if tensors[-1] is not None:
        tensors[-1] = tensors[-1].long()
    options = (0.0, None, "tanh", True, False, "before", 1e-3, 0.0, False, backend)
    with pytest.raises(ValueError, match=r"torchrum::rum_scan: .* has shape"):
        torch.ops.torchrum.rum_scan(*tensors, None, *options, False)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    "norm, layer_norm, zoneout, message",
    [
        (None, True, 0.0, "ln_weight and ln_bias must be given"),
        (torch.ones(30), False, 0.0, "ln_weight and ln_bias must be given"),
        (None, False, 0.5, "zoneout in training needs a seed"),
    ],
)
def test_the_operator_checks_what_its_options_need(norm, layer_norm, zoneout, message, backend):
    """Otherwise layer norm returns zeros without its weights, and one backend normalises where another does not."""
    tensors = (torch.ones(4, 2, 30), torch.ones(2, 10), None, torch.ones(20, 10), norm, norm, None, None)
    options = (0.0, None, "tanh", True, layer_norm, "before", 1e-3, zoneout, True, backend)
    with pytest.raises(ValueError, match=message):
        torch.ops.torchrum.rum_scan(*tensors, *options, False)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
@pytest.mark.parametrize("kept", [True, False], ids=["closed", "open"])
def test_a_gate_at_its_end_is_exact(backend, kept):
    """With u = 1 the state stays as it is, bit for bit, whatever the candidate; with u = 0 the candidate is all."""
    cell = RUMCell(1, 5, form="paper", activation="relu", eta=None, backend=backend)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.zero_()
        cell.bias_ih[5:10] = 200.0 if kept else -200.0  # u
        cell.bias_ih[10:] = 1e6  # eps, with a zero tau: nothing turns
    h = torch.rand(3, 5)
    expected = h if kept else 1e6 + h
    torch.testing.assert_close(cell(torch.zeros(3, 1), h), expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_a_zero_memory_is_the_identity(backend):
    torch.manual_seed(0)
    rum, x = RUM(3, 6, lam=1, backend=backend), torch.randn(5, 2, 3)
    h = torch.randn(1, 2, 6)
    _, (_, R) = rum(x)
    given = R.detach().clone()
    given[:, 0] = 0  # this row is done, the other goes on
    given.requires_grad_()
    expected = R.detach().clone()
    expected[:, 0] = torch.eye(6)
    output, (_, R_n) = rum(x, (h, given))
    wanted, (_, wanted_R) = rum(x, (h, expected))
    torch.testing.assert_close(output, wanted, rtol=0, atol=0)
    torch.testing.assert_close(R_n, wanted_R, rtol=0, atol=0)
    output.sum().backward()
    assert given.grad[:, 0].eq(0).all() and given.grad[:, 1].ne(0).any()


def test_a_zero_memory_of_a_cell_is_the_identity():
    cell, x, h = RUMCell(3, 6, lam=1), torch.randn(2, 3), torch.randn(2, 6)
    for part, wanted in zip(cell(x, (h, torch.zeros(2, 6, 6))), cell(x, (h, None)), strict=True):
        torch.testing.assert_close(part, wanted, rtol=0, atol=0)
