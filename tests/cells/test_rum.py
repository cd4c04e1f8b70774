"""RUMCell: one step, and the same numbers as the layer."""

import pytest
import torch
from torch import nn

from grids import form_of
from torchrum import RUM, RUMCell, rotation_matrix


@pytest.mark.parametrize("lam", [None, 0, 1, 0.5])
def test_steps_equal_the_layer(lam):
    cell, rum = RUMCell(4, 5, **form_of(lam, eta=1.0)), RUM(4, 5, **form_of(lam, eta=1.0))
    rum.load_state_dict({f"{name}_l0": p for name, p in cell.named_parameters()})
    x = torch.randn(6, 3, 4)
    outputs, state = [], None
    for x_t in x:
        state = cell(x_t, state)
        outputs.append(state if not lam else state[0])
    expected, last = rum(x)
    torch.testing.assert_close(torch.stack(outputs), expected)
    torch.testing.assert_close(state, last[0] if not lam else tuple(part[0] for part in last))
    scanned, _ = cell.scan(x, cell.initial_state(3, device=x.device, dtype=x.dtype))
    torch.testing.assert_close(scanned, expected)


def test_it_is_called_as_the_cells_of_torch_nn():
    x, h = torch.randn(3, 4), torch.randn(3, 5)
    cell, theirs = RUMCell(4, 5), nn.GRUCell(4, 5)
    for input, hx in ((x, h), (x, None), (x[0], h[0]), (x[0], None), (x[:0], h[:0])):
        assert cell(input, hx).shape == theirs(input, hx).shape
    torch.testing.assert_close(cell(input=x, hx=h)[1], cell(x[1], h[1]))
    torch.testing.assert_close(cell(x), cell(x, torch.zeros(3, 5)))
    names, paper = ([name for name, _ in kind.named_parameters()] for kind in (cell, RUMCell(4, 5, form="paper")))
    assert names == [name for name, _ in theirs.named_parameters()] == [*paper, "bias_hh"]


def test_with_a_memory_it_is_called_as_an_lstm_cell():
    cell, x, h = RUMCell(4, 5, lam=1), torch.randn(3, 4), torch.randn(3, 5)
    R = torch.linalg.qr(torch.randn(3, 5, 5)).Q
    new_h, new_R = cell(x, (h, R))
    assert new_h.shape == (3, 5)
    assert new_R.shape == (3, 5, 5)
    alone = cell(x[1], (h[1], R[1]))
    torch.testing.assert_close(alone, (new_h[1], new_R[1]))
    torch.testing.assert_close(cell(x, (h, None)), cell(x, (h, torch.eye(5).expand(3, 5, 5))))
    assert [part.shape for part in cell(x[0])] == [(5,), (5, 5)]


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize(
    "lam, input, hx, message",
    [
        (0, (3, 7), (3, 5), r"input has shape \(3, 7\); expected \(B, 4\) or \(4,\)"),
        (0, (2, 3, 4), (3, 5), r"input has shape \(2, 3, 4\); expected"),
        (0, (3, 4), (1, 5), r"h in hx has shape \(1, 5\); expected \(3, 5\) for this input"),
        (0, (3, 4), (5,), r"h in hx has shape \(5,\); expected \(3, 5\)"),
        (0, (4,), (1, 5), r"h in hx has shape \(1, 5\); expected \(5,\)"),
        (0, (3, 4), (3, 6), r"h in hx has shape \(3, 6\); expected \(3, 5\)"),
        (1, (3, 4), ((3, 5), (1, 5, 5)), r"R in hx has shape \(1, 5, 5\); expected \(3, 5, 5\)"),
    ],
)
def test_wrong_shapes_are_refused_by_every_backend(lam, input, hx, message, backend):
    cell = RUMCell(4, 5, **form_of(lam), backend=backend)
    state = torch.randn(hx) if not lam else tuple(torch.randn(shape) for shape in hx)
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match=message):
            cell(torch.randn(input), state)


@pytest.mark.parametrize("name", ["activation", "target_activation"])
@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: x.mean(-1, keepdim=True), r"\(x\) has shape \(3, 1\), but x has \(3, 5\); {} must be elementwise\."),
        (lambda x: x.mean(), r"\(x\) has shape \(\), but x has \(3, 5\); {} must be elementwise"),
        (lambda x: x[0], r"\(x\) has shape \(5,\), but x has \(3, 5\)"),
        (lambda x: x.unsqueeze(0), r"\(x\) has shape \(1, 3, 5\), but x has \(3, 5\)"),
        (lambda x: x > 0, r"\(x\) has dtype torch.bool; it must be float64"),
        (lambda x: None, r"\(x\) is a NoneType; it must be a torch.Tensor"),
    ],
    ids=["(3, 1)", "()", "(5,)", "(1, 3, 5)", "bool", "None"],
)
def test_an_activation_that_is_not_elementwise_is_refused(name, function, message):
    """Such shapes were broadcast."""
    for model, x in (
        (RUMCell(4, 5, form="paper", **{name: function}), torch.randn(3, 4)),
        (RUM(4, 5, lam=1, **{name: function}), torch.randn(2, 3, 4)),
    ):
        with pytest.raises(ValueError, match=f"RUM: {name}{message.format(name)}"):
            model(x)


def test_wrong_types_are_refused():
    cell, x = RUMCell(4, 5), torch.randn(3, 4)
    with pytest.raises(TypeError, match="input is a list; it must be a Tensor"):
        cell([1.0])
    with pytest.raises(TypeError, match="hx is a tuple of 1; it must be a tensor, or None"):
        cell(x, (torch.zeros(3, 5),))
    with pytest.raises(TypeError, match=r"hx is a Tensor; it must be a tuple \(h, R\), or None"):
        RUMCell(4, 5, lam=1)(x, torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"input is torch\.float64, the weights torch\.float32"):
        cell(x.double())
    with pytest.raises(ValueError, match="input is on cpu, the weights on meta"):
        RUMCell(4, 5, device="meta")(x)
    with pytest.raises(TypeError, match="bias=1; it must be True or False"):
        RUMCell(4, 5, bias=1)


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_the_state_may_be_changed_in_place(lam):
    cell, x = RUMCell(4, 5, **form_of(lam, activation="tanh")), torch.randn(3, 4)

    def gradient(triple) -> tuple[torch.Tensor, ...]:
        h = cell(x) if not lam else cell(x)[0]
        return torch.autograd.grad(triple(h).sin().sum(), list(cell.parameters()))

    torch.testing.assert_close(gradient(lambda h: h.mul_(3)), gradient(lambda h: 3 * h))


def test_equations_with_the_dense_rotation():
    """One step of lam = 1 written out with matrices."""
    cell = RUMCell(4, 5, lam=1, eta=2.0, activation="relu", dtype=torch.float64)
    x, h = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    R = torch.linalg.qr(torch.randn(3, 5, 5, dtype=torch.float64))[0]
    W, U, b = cell.weight_ih, cell.weight_hh, cell.bias_ih
    tau = x @ W[:5].T + h @ U[:5].T + b[:5]
    u = torch.sigmoid(x @ W[5:10].T + h @ U[5:].T + b[5:10])
    eps = x @ W[10:].T + b[10:]
    new_R = R @ rotation_matrix(eps, tau)
    candidate = torch.relu(eps + torch.einsum("bij,bj->bi", new_R, h))
    mixed = u * h + (1 - u) * candidate
    expected = 2 * mixed / mixed.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(cell(x, (h, R)), (expected, new_R))


def test_a_step_can_be_traced_by_finite_differences():
    cell = RUMCell(2, 3, lam=1, layer_norm=True, activation="tanh", dtype=torch.float64)
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: cell(x)[0], x)


@pytest.mark.parametrize(
    "options", [{}, form_of(0), {"lam": 1}, form_of(0, layer_norm=True, eta=1.0), {"lam": 0.5}], ids=str
)
def test_a_call_without_gradients_gives_the_same_state(options):
    """It takes a shorter way, past the operator where it can."""
    cell, x = RUMCell(4, 6, **options), torch.randn(3, 4)
    h = torch.randn(3, 6)
    hx = (h, None) if cell.state_names == ("h", "R") else h
    wanted = cell(x, hx)
    with torch.no_grad():
        torch.testing.assert_close(cell(x, hx), wanted)
        single = cell(x[1], (h[1], None) if isinstance(hx, tuple) else h[1])
    expected = tuple(part[1] for part in wanted) if isinstance(wanted, tuple) else wanted[1]
    torch.testing.assert_close(single, expected)


def replaced(cell):
    cell.weight_hh.data = torch.ones(3)


def cut(cell):
    cell.weight_ih.data = cell.weight_ih.data[:5]


def freed(cell):
    cell.weight_hh.untyped_storage().resize_(0)


def shrunk(cell):
    cell.weight_hh.untyped_storage().resize_(64)


@pytest.mark.parametrize("form", ["gated", "paper"])
@pytest.mark.parametrize("misuse", [replaced, cut, freed, shrunk])
def test_a_weight_that_was_replaced_or_freed_between_steps_is_an_error(form, misuse):
    cell, x, h = RUMCell(8, 8, form=form), torch.randn(2, 8), torch.zeros(2, 8)
    with torch.no_grad():
        cell(x, h)
        misuse(cell)
        with pytest.raises((ValueError, RuntimeError), match=r"shape|memory"):
            cell(x, h)


@pytest.mark.parametrize("form", ["gated", "paper"])
@pytest.mark.parametrize("B", [1, 4, 5, 16, 33])
def test_steps_without_gradients_follow_the_weights(form, B):
    torch.manual_seed(0)
    cell, x, h = RUMCell(6, 11, form=form), torch.randn(B, 6), torch.randn(B, 11)
    others = [torch.randn_like(part) for part in cell.parameters()]

    def change_in_place():
        for part, other in zip(cell.parameters(), others, strict=True):
            part.detach().copy_(other)

    def change_memory():
        for part, other in zip(cell.parameters(), others, strict=True):
            part.data = -other

    def change_parameter():
        cell.weight_hh = torch.nn.Parameter(cell.weight_hh.detach() * 0.5)

    for change in (lambda: None, change_in_place, change_memory, change_parameter):
        change()
        with torch.no_grad():
            found = cell(x, h)
        torch.testing.assert_close(found, cell(x, h).detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("part", ["x", "h"])
def test_a_step_without_gradients_reads_only_memory_that_is_there(part):
    cell, given = RUMCell(8, 8), {"x": torch.randn(2, 8), "h": torch.zeros(2, 8)}
    with torch.no_grad():
        cell(given["x"], given["h"])
        given[part].untyped_storage().resize_(0)
        with pytest.raises((ValueError, RuntimeError), match=r"memory|storage"):
            cell(given["x"], given["h"])
