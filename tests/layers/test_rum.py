"""RUM as a layer: the paper's numbers, nn.GRU's contract, and every argument's effect."""

import copy
import inspect
import io
import itertools
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from grids import form_of, thinned
from torchrum import RUM, RUMCell
from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.ops.rum_scan.options import DEFAULTS, option_names

GOLDEN = {  # h_1 ... h_4 of a small recurrence, worked out apart from this package
    (0, None): [
        [0.09072879, 0, 0.14429345],
        [0.07255283, 0.11766983, 0.1706519],
        [0.08059423, 0.19384847, 0.27106556],
        [0.16552602, 0.14862405, 0.27577552],
    ],
    (0, 1.0): [
        [0.53229789, 0, 0.84655712],
        [0.50237794, 0, 0.86464814],
        [0.50083209, 0.1117617, 0.85829863],
        [0.4658005, 0.12245188, 0.87637631],
    ],
    (1, None): [
        [0.09072879, 0, 0.14429345],
        [0.07255283, 0.15336811, 0.1736036],
        [0.09100864, 0.20212703, 0.24752221],
        [0.24444885, 0.15548724, 0.19400371],
    ],
    (1, 1.0): [
        [0.53229789, 0, 0.84655712],
        [0.51953074, 0.21108333, 0.82796838],
        [0.57549503, 0.25385553, 0.77740776],
        [0.73748866, 0.2529632, 0.62619494],
    ],
    (2, None): [
        [0.09072879, 0, 0.14429345],
        [0.07255283, 0.18381526, 0.15814278],
        [0.07300073, 0.17476707, 0.24010452],
        [0.17721922, 0.13391515, 0.22880104],
    ],
}


@pytest.mark.filterwarnings("ignore:.*likely to diverge")
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("lam, eta", GOLDEN)
def test_golden_recurrence(lam, eta, backend):
    rum = RUM(2, 3, lam=lam, **{**PAPER_OPTIONS, "eta": eta}, backend=backend, dtype=torch.float64)
    W_h = torch.tensor(
        [[-0.3, 0.1, 0.5, -0.1, 0.3, -0.3], [-0.1, 0.3, -0.3, 0.1, 0.5, -0.1], [0.1, 0.5, -0.1, 0.3, -0.3, 0.1]],
        dtype=torch.float64,
    )
    W_e = torch.tensor([[0.3, -0.2, 0.5], [-0.4, 0.6, 0.1]], dtype=torch.float64)
    W_x = torch.tensor([[0.1, -0.05, 0.2, 0.05, 0.3, 0.15], [-0.2, 0.25, -0.1, 0.35, 0, 0.45]], dtype=torch.float64)
    with torch.no_grad():
        rum.weight_ih_l0.copy_(torch.cat([W_x.T, W_e.T]))
        rum.weight_hh_l0.copy_(W_h.T)
        rum.bias_ih_l0.copy_(torch.tensor([1.0] * 6 + [0.05, -0.05, 0.1], dtype=torch.float64))
    x = torch.tensor([[1, 0], [0, 1], [1, 1], [0.5, -1]], dtype=torch.float64)
    output, _ = rum(x)
    torch.testing.assert_close(output, torch.tensor(GOLDEN[lam, eta], dtype=torch.float64), rtol=0, atol=1e-7)


def test_parameter_counts():
    """Cells of the paper's models, counted from real modules; V = 50, E = 128 for Penn Treebank."""

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    embedding, softmax = 50 * 128, lambda h: 50 * h + 50

    def rum(*sizes: int, **options: object) -> int:
        return count(RUM(*sizes, form="paper", **options))

    with torch.device("meta"):
        assert rum(128, 2000, layer_norm=True) + embedding + softmax(2000) == 8_892_450
        assert rum(128, 2000) + embedding + softmax(2000) == 8_880_450
        assert rum(128, 2000, layer_norm=True, embed_bias=False) + embedding + softmax(2000) == 8_890_450
        assert rum(128, 1500, num_layers=2, layer_norm=True) + embedding + softmax(1500) == 16_434_450
        assert rum(128, 1000, layer_norm=True, embed_bias=False) + embedding + softmax(1000) == 2_448_450
    assert rum(36, 50) == 10_550
    assert rum(36, 50) + 50 * 10 + 10 == 11_060
    assert rum(10, 100) + 9 * 100 + 9 == 24_209
    assert rum(10, 250) + 9 * 250 + 9 == 135_509
    assert rum(10, 20, update_gate=False) == 20 * (10 + 20 + 1) + 20 * (10 + 1)
    assert count(RUM(36, 50, num_layers=2)) == count(nn.GRU(36, 50, num_layers=2))


OPTIONS = list(itertools.product((None, 0.8), (False, True), (True, False)))  # eta, layer norm, update gate
CHECKED = [  # a power of R takes ten times as long to check
    *((lam, *options) for lam in (0, 1) for options in OPTIONS),
    *thinned(((lam, *options) for lam in (2, 0.5) for options in OPTIONS), 5),
]


@pytest.mark.filterwarnings("ignore:.*likely to diverge")
@pytest.mark.parametrize("lam, eta, layer_norm, update_gate", CHECKED)
def test_gradcheck(lam, eta, layer_norm, update_gate):
    options = form_of(lam, eta=eta, layer_norm=layer_norm, update_gate=update_gate, activation="tanh")
    rum = RUM(2, 3, **options, dtype=torch.float64)
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*rum.named_parameters(), strict=True)

    def run(x, h0, *weights):
        output, state = functional_call(rum, dict(zip(names, weights, strict=True)), (x, h0 if not lam else (h0, None)))
        return output if not lam else (output, state[1])

    assert torch.autograd.gradcheck(run, (x, h0, *weights))


def test_gradcheck_of_a_learnable_lam():
    rum = RUM(2, 3, lam=0.6, learn_lam=True, activation="tanh", dtype=torch.float64)
    x = torch.randn(3, 2, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda lam: functional_call(rum, {"lam_l0": lam}, (x,))[0], rum.lam_l0)


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_double_backward(lam):
    rum = RUM(2, 3, **form_of(lam, eta=1.0, activation="tanh"), dtype=torch.float64)
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: rum(x)[0], x)


LAYERS = [dict(), dict(num_layers=2), dict(bidirectional=True), dict(num_layers=2, bidirectional=True)]


@pytest.mark.parametrize("lam", [None, 0, 1, 0.5])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_calls_of_a_gru(shape, lam):
    """Shapes of every call pattern are those of nn.GRU; the values of the patterns agree with each other."""
    rum, gru = RUM(4, 5, **form_of(lam), **shape).eval(), nn.GRU(4, 5, **shape)
    x = torch.randn(6, 3, 4)
    output, state = rum(x)
    gru_output, gru_h = gru(x)
    h_n = state if not lam else state[0]
    assert output.shape == gru_output.shape
    assert h_n.shape == gru_h.shape
    if lam:
        assert state[1].shape == (h_n.shape[0], 3, 5, 5)
    first = copy.deepcopy(rum)
    first.batch_first = True
    again, _ = first(x.transpose(0, 1))
    torch.testing.assert_close(again.transpose(0, 1), output)
    alone, alone_state = rum(x[:, 1])
    assert alone.shape == gru(x[:, 1])[0].shape
    torch.testing.assert_close(alone, output[:, 1])
    torch.testing.assert_close(alone_state if not lam else alone_state[0], h_n[:, 1])
    assert rum(x[:, :0])[0].shape == (6, 0, output.shape[-1])


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("lam", [None, 0, 1])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_packed_equals_one_by_one(shape, lam, sort):
    rum = RUM(4, 5, **form_of(lam, eta=1.0), dtype=torch.float64, **shape)
    lengths = [6, 4, 1] if sort else [4, 1, 6]
    sequences = [torch.randn(length, 4, dtype=torch.float64) for length in lengths]
    layers = rum.num_layers * rum.num_directions
    h0 = torch.randn(layers, 3, 5, dtype=torch.float64)
    R0 = torch.linalg.qr(torch.randn(layers, 3, 5, 5, dtype=torch.float64))[0]
    packed = pack_sequence(sequences, enforce_sorted=sort)
    output, state = rum(packed, h0 if not lam else (h0, R0))
    gru_output, _ = nn.GRU(4, 5, dtype=torch.float64, **shape)(packed)
    for mine, theirs in zip(output[1:], gru_output[1:], strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    padded, sizes = pad_packed_sequence(output)
    assert sizes.tolist() == lengths
    with_lengths, state2 = rum(
        nn.utils.rnn.pad_sequence(sequences), h0 if not lam else (h0, R0), lengths=torch.tensor(lengths)
    )
    torch.testing.assert_close(with_lengths, padded)
    for i, sequence in enumerate(sequences):
        hx = h0[:, i] if not lam else (h0[:, i], R0[:, i])
        alone, last = rum(sequence, hx)
        torch.testing.assert_close(padded[: lengths[i], i], alone)
        assert (padded[lengths[i] :, i] == 0).all()
        for part, part2, expected in zip(*((s,) if not lam else s for s in (state, state2, last)), strict=True):
            torch.testing.assert_close(part[:, i], expected)
            torch.testing.assert_close(part2[:, i], expected)


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_gradients_through_packing(lam):
    rum = RUM(3, 4, **form_of(lam), bidirectional=True, dtype=torch.float64)
    sequences = [torch.randn(length, 3, dtype=torch.float64) for length in (2, 5)]
    rum(pack_sequence(sequences, enforce_sorted=False))[0].data.sin().sum().backward()
    packed = {name: p.grad.clone() for name, p in rum.named_parameters()}
    rum.zero_grad()
    sum(rum(sequence)[0].sin().sum() for sequence in sequences).backward()
    for name, p in rum.named_parameters():
        torch.testing.assert_close(packed[name], p.grad)


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_state_carries_over_a_split(lam):
    rum = RUM(4, 5, num_layers=2, **form_of(lam))
    x = torch.randn(7, 2, 4)
    whole, last = rum(x)
    start, state = rum(x[:3])
    end, state = rum(x[3:], state)
    torch.testing.assert_close(torch.cat([start, end]), whole)
    torch.testing.assert_close(state, last)


def test_no_memory_means_the_identity():
    rum = RUM(4, 5, lam=1)
    x, h0 = torch.randn(3, 2, 4), torch.randn(1, 2, 5)
    eye = torch.eye(5).expand(1, 2, 5, 5)
    assert torch.equal(rum(x, (h0, None))[0], rum(x, (h0, eye))[0])
    assert not torch.allclose(rum(x, (h0, eye.flip(-1)))[0], rum(x, (h0, eye))[0])


@pytest.mark.parametrize(
    "change",
    [
        dict(lam=1),
        dict(lam=0.5),
        dict(lam=-1),
        dict(eta=1.0),
        dict(eta=0.5),
        dict(activation="tanh"),
        dict(activation="sigmoid"),
        dict(activation="softsign"),
        dict(activation=torch.sin),
        dict(target_activation="tanh"),
        dict(target_activation=torch.sin),
        dict(update_gate=False),
        dict(layer_norm=True),
        dict(layer_norm=True, ln_order="authors"),
        dict(zoneout=0.5),
        dict(embed_bias=False),
        dict(bias=False),
        dict(target_bias_init=0.0),
        dict(update_bias_init=-1.0),
        dict(gate_scale=0.25),
        dict(embed_scale=2.0),
    ],
    ids=lambda change: "-".join(f"{name}={getattr(value, '__name__', value)}" for name, value in change.items()),
)
def test_every_option_changes_the_output(change):
    def output(**options):
        torch.manual_seed(1)
        rum = RUM(4, 5, dtype=torch.float64, **{**PAPER_OPTIONS, **options})
        with torch.no_grad():
            if rum.bias and rum.bias_ih_l0.shape[0] == 15:
                rum.bias_ih_l0[-5:] = 0.3  # so that leaving it out shows
        x = torch.linspace(-1, 1, 6 * 2 * 4, dtype=torch.float64).view(6, 2, 4)
        return rum(x)[0]

    base = dict(layer_norm=True) if "ln_order" in change else {}
    assert not torch.allclose(output(**change), output(**base), atol=1e-4)
    torch.testing.assert_close(output(**change), output(**change, backend="reference"))


def test_dropout_acts_between_layers_in_training_only():
    rum = RUM(4, 5, num_layers=2, dropout=0.5)
    x = torch.randn(3, 2, 4)
    assert not torch.equal(rum(x)[0], rum(x)[0])
    assert torch.equal(rum.eval()(x)[0], rum(x)[0])


def test_zoneout_keeps_units_in_training_and_mixes_in_evaluation():
    rum = RUM(4, 200, zoneout=0.3, dtype=torch.float64)
    x, h0 = torch.randn(1, 1, 4, dtype=torch.float64), torch.randn(1, 1, 200, dtype=torch.float64)
    kept = (rum(x, h0)[0] == h0).double().mean()
    assert 0.15 < kept < 0.45
    plain = RUM(4, 200, dtype=torch.float64)
    plain.load_state_dict(rum.state_dict())
    torch.testing.assert_close(rum.eval()(x, h0)[0], 0.7 * plain(x, h0)[0] + 0.3 * h0)


def test_eta_fixes_the_norm_and_relu_stays_in_the_positive_orthant():
    output, _ = RUM(4, 8, form="paper", eta=0.3)(torch.randn(9, 5, 4))
    torch.testing.assert_close(output.norm(dim=-1), torch.full((9, 5), 0.3))
    for lam in (0, 1):
        assert (RUM(4, 8, **form_of(lam, layer_norm=True))(torch.randn(9, 5, 4))[0] >= 0).all()


def test_initialisation_is_orthogonal_over_input_and_state_together():
    rum = RUM(7, 5, **PAPER_OPTIONS)
    for gate in range(2):
        rows = slice(5 * gate, 5 * gate + 5)
        block = torch.cat([rum.weight_ih_l0[rows], rum.weight_hh_l0[rows]], 1)
        torch.testing.assert_close(block @ block.T, torch.eye(5))
    W_e = rum.weight_ih_l0[10:]
    torch.testing.assert_close(W_e @ W_e.T, torch.eye(5))
    assert rum.bias_ih_l0.tolist() == [1.0] * 10 + [0.0] * 5


def test_names_repr_and_flatten():
    rum = RUM(4, 5, num_layers=2, bidirectional=True, form="paper", layer_norm=True)
    names = [name for name, _ in rum.named_parameters()]
    gru_names = [name for name, _ in nn.GRU(4, 5, num_layers=2, bidirectional=True).named_parameters()]
    gated = RUM(4, 5, num_layers=2, bidirectional=True)
    assert [name for name, _ in gated.named_parameters()] == gru_names
    assert [len(weights) for weights in gated.all_weights] == [4] * 4
    assert {name for name in names if not name.startswith("ln")} == {
        n for n in gru_names if not n.startswith("bias_hh")
    }
    assert rum.weight_ih_l1_reverse.shape == (15, 10)
    assert rum.weight_hh_l0.shape == (10, 5)
    assert rum.flatten_parameters() is None
    assert [len(weights) for weights in rum.all_weights] == [5] * 4
    assert repr(RUM(4, 5, 2, lam=1, eta=1.0)) == "RUM(4, 5, num_layers=2, lam=1, eta=1.0)"
    assert "lam=0.5 (learnable)" in repr(RUM(4, 5, lam=0.5, learn_lam=True))
    assert repr(RUMCell(4, 5, zoneout=0.1, backend="torch")) == "RUMCell(4, 5, zoneout=0.1, backend=torch)"


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_save_load_copy_pickle(lam):
    rum = RUM(4, 5, 2, **form_of(lam, layer_norm=True))
    x = torch.randn(3, 2, 4)
    expected = rum(x)[0]
    buffer = io.BytesIO()
    torch.save(rum.state_dict(), buffer)
    buffer.seek(0)
    other = RUM(4, 5, 2, **form_of(lam, layer_norm=True))
    assert not torch.equal(other(x)[0], expected)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for same in (other, copy.deepcopy(rum), pickle.loads(pickle.dumps(rum))):
        assert torch.equal(same(x)[0], expected)
    assigned = RUM(4, 5, 2, **form_of(lam, layer_norm=True), device="meta")
    assigned.load_state_dict(rum.state_dict(), assign=True)
    assert torch.equal(assigned(x)[0], expected)


@pytest.mark.parametrize("backend, lam", [("reference", 1), ("reference", 0.5), ("torch", 1), ("auto", 1)])
@pytest.mark.parametrize("given, own", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_memory_of_another_dtype_takes_that_of_the_layer(backend, lam, given, own):
    rum, x = RUM(3, 4, lam=lam, backend=backend, dtype=own), torch.randn(5, 2, 3, dtype=own)
    R = torch.linalg.qr(torch.randn(1, 2, 4, 4, dtype=torch.float64)).Q
    R[..., 0] *= R.det().unsqueeze(-1)  # a rotation: others have no real power
    R = R.to(given)
    output, (h_n, R_n) = rum(x, (None, R))
    wanted, (wanted_h, wanted_R) = rum(x, (None, R.to(own)))
    assert R_n.dtype == own
    assert all(map(torch.equal, (output, h_n, R_n), (wanted, wanted_h, wanted_R)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("lam", [None, 0, 1])
def test_dtypes(dtype, lam):
    rum = RUM(4, 5, **form_of(lam), dtype=dtype)
    output, state = rum(torch.randn(3, 2, 4, dtype=dtype))
    assert output.dtype == dtype
    if lam == 1:
        assert state[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    output.sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in rum.parameters())


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_autocast(lam):
    rum = RUM(4, 8, 2, **form_of(lam, layer_norm=True, eta=1.0))
    x = torch.randn(3, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = rum(x)
    assert output.dtype == torch.float32  # as nn.GRU's on the CPU
    torch.testing.assert_close(output, rum(x)[0], rtol=0.1, atol=0.05)
    output.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in rum.parameters())


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_compile_fullgraph(lam):
    rum = RUM(4, 5, 2, **form_of(lam, eta=1.0), zoneout=0.1).eval()
    x = torch.randn(3, 2, 4, requires_grad=True)  # the compiler unrolls the reference
    compiled = torch.compile(rum, fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(x)[0].sum(), x)
    torch.testing.assert_close(compiled(x)[0], rum(x)[0])
    torch.testing.assert_close(gradient, torch.autograd.grad(rum(x)[0].sum(), x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("lam", [None, 0, 1])
def test_compile_fullgraph_with_inductor(lam):
    rum = RUM(4, 5, **form_of(lam))
    x = torch.randn(6, 3, 4)
    torch.testing.assert_close(torch.compile(rum, fullgraph=True)(x)[0], rum(x)[0])


SAMPLED = [(0, {}), (1, {}), (0, {"layer_norm": True}), (0, {"update_gate": False})]


@pytest.mark.parametrize("options", [dict(), *(form_of(lam, eta=1.0, **words) for lam, words in SAMPLED)], ids=str)
def test_per_sample_gradients(options):
    rum = RUM(4, 5, **options).double()
    weights = {name: p.detach() for name, p in rum.named_parameters()}
    x = torch.randn(6, 3, 4, dtype=torch.float64)

    def loss(weights, x):
        return functional_call(rum, weights, (x,))[0].sin().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = vmap(grad(loss), in_dims=(None, 1))(weights, x)
    for i in range(3):
        for name, alone in grad(loss)(weights, x[:, i]).items():
            torch.testing.assert_close(samples[name][i], alone)
    ensemble = {name: torch.stack([p, 1.1 * p]) for name, p in weights.items()}
    torch.testing.assert_close(vmap(loss, in_dims=(0, None))(ensemble, x)[0], loss(weights, x))


@pytest.mark.parametrize("lam", [None, 0])
def test_jacobian_and_hessian(lam):
    rum = RUM(2, 3, **form_of(lam, activation="tanh"), dtype=torch.float64)
    x = torch.randn(3, 2, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda x: rum(x)[0][-1])(x)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(lambda x: rum(x)[0][-1], x))
    hessian = torch.autograd.functional.hessian(lambda x: rum(x)[0].sum(), x)
    torch.testing.assert_close(hessian, hessian.permute(2, 3, 0, 1))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: RUM(0, 5), "input_size=0 is not allowed; it must be an integer of at least 1"),
        (lambda: RUM(4, 5.0), r"hidden_size=5.0"),
        (lambda: RUM(4, 5, True), "num_layers=True"),
        (lambda: RUM(4, 5, bias=1), "bias=1; it must be True or False"),
        (lambda: RUM(4, 5, dropout=1.5), "RUM: dropout=1.5 is not allowed; it must be a number from 0 to 1"),
        (lambda: RUM(4, 5, lam=float("nan")), "lam=nan is not allowed; it must be a finite number"),
        (lambda: RUM(4, 5, eta=0), "eta=0 is not allowed; it must be above 0, or None"),
        (lambda: RUM(4, 5, eta=float("inf")), "eta=inf"),
        (lambda: RUM(4, 5, activation="rleu"), "Did you mean 'relu'"),
        (
            lambda: RUM(4, 5, activation="gelu"),
            "activation='gelu' is not among .*; pass the function itself, activation=torch.nn.functional.gelu",
        ),
        (
            lambda: RUM(4, 5, activation=torch.nn.ReLU),
            r"activation is the class ReLU; pass one of its instances, as ReLU",
        ),
        (lambda: RUM(4, 5, target_activation=torch.nn.Tanh), "target_activation is the class Tanh"),
        (lambda: RUM(4, 5, activation=None), "pass torch.nn.Identity"),
        (lambda: RUM(4, 5, target_activation="tahn"), "Did you mean 'tanh'"),
        (lambda: RUM(4, 5, ln_order="authors"), "only with layer_norm=True and update_gate=True"),
        (lambda: RUM(4, 5, layer_norm=True, ln_order="after"), "ln_order='after' is not known"),
        (
            lambda: RUM(4, 5, zoneout=1),
            "zoneout=1 is not allowed; it must be at least 0 and below 1, since 1 would keep",
        ),
        (lambda: RUM(4, 5, zoneout=-0.1), "zoneout=-0.1 is not allowed; it must be at least 0 and below 1"),
        (lambda: RUMCell(4, 5, zoneout=True), "RUMCell: zoneout=True is not allowed; it must be a finite number"),
        (
            lambda: RUM(4, 5, dtype=torch.complex64),
            "RUM: dtype=torch.complex64 is not allowed; it must be torch.float64",
        ),
        (lambda: RUM(4, 5, dtype="float32"), "dtype='float32' is not allowed"),
        (lambda: RUMCell(4, 5, dtype=torch.int64), "RUMCell: dtype=torch.int64 is not allowed"),
        (lambda: RUM(4, 5, backend="cuda"), "backend='cuda' is not known"),
        (lambda: RUM(4, 5, update_gate=0), "update_gate=0; it must be True or False"),
        (lambda: RUM(4, 5, target_bias_init=float("nan")), "target_bias_init=nan"),
        (lambda: RUM(4, 5, embed_bias_init=-1.0), "embed_bias_init=-1.0 is a standard deviation; it must be 0 or"),
        (lambda: RUM(4, 5, embed_scale=0), "embed_scale=0 is not allowed; it must be above 0, or None"),
        (lambda: RUM(4, 5, gate_scale=0), "gate_scale=0 is not allowed; it must be above 0"),
        (lambda: RUM(4, 5, gate_scale=None), "gate_scale=None is not allowed; it must be a finite number"),
        (lambda: RUM(4, 5, embed_scale="1"), "embed_scale='1' is not allowed; it must be a finite number"),
        (lambda: RUM(4, 5, eta="root"), "eta='root' is not known; it must be a number above 0, 'sqrt' or None"),
        (lambda: RUMCell(4, 5, embed_scale=-1.0), "RUMCell: embed_scale=-1.0"),
        (lambda: RUM(4, 5, backend="fused")(torch.randn(3, 2, 4)), "backend='fused' cannot run: "),
        (lambda: RUM(4, 5, backend="lam1")(torch.randn(3, 2, 4)), "lam1 does not run this recurrence, or not with its"),
        (lambda: RUM(4, 5, backend="persistent")(torch.randn(3, 2, 4)), "persistent does not run this recurrence"),
        (
            lambda: RUM(4, 5, form="paper", backend="fused")(torch.randn(3, 2, 4)),
            "backend='fused' cannot run: the input is on cpu",
        ),
        (lambda: RUM(4, 5, form="papr"), "form='papr' is not known; it must be one of .* Did you mean 'paper'"),
        (lambda: RUM(4, 5, head_size=0), "head_size=0 is not allowed; it must be an integer of at least 1"),
        (lambda: RUM(4, 5, rotated=1.5), "rotated=1.5 is not allowed; it must be a number from 0 to 1"),
        (lambda: RUM(4, 5, rotated=True), "rotated=True is not allowed; it must be a number from 0 to 1"),
        (lambda: RUM(4, 5, reset_bias_init=float("inf")), "reset_bias_init=inf is not allowed; it must be a finite"),
        (lambda: RUM(4, 5, update_bias_init="1"), "update_bias_init='1' is not allowed; it must be a finite number"),
        (
            lambda: RUM(4, 5, eta=1.0),
            r"RUM: eta=1\.0 belongs to form='paper'; pass form='paper', or leave eta out\.",
        ),
        (
            lambda: RUMCell(4, 5, form="gated", lam=1),
            "RUMCell: lam=1 belongs to form='paper'; pass form='paper', or leave lam out",
        ),
        (
            lambda: RUM(4, 5, form="paper", rotated=0.1),
            "rotated=0.1 belongs to form='gated'; pass form='gated', or leave rotated out",
        ),
        (
            lambda: RUM(4, 5, lam=1, head_size=4),
            "head_size=4 belongs to form='gated', and lam=1 to form='paper'; leave one of them out",
        ),
        (
            lambda: RUM(4, 5, learn_lam=True, reset_bias_init=0.0),
            "reset_bias_init=0.0 belongs to form='gated', and learn_lam=True to form='paper'; leave one",
        ),
        (lambda: RUM(4, 5)(torch.randn(3, 2, 6)), "Expected 4, got 6"),
        (lambda: RUM(4, 5)(torch.randn(4)), r"input has shape \(4,\); it must be \(T, B, I\)"),
        (lambda: RUM(4, 5, batch_first=True)(torch.randn(1, 2, 3, 4)), r"it must be \(B, T, I\)"),
        (lambda: RUM(4, 5)(torch.randn(0, 2, 4)), "no time step; it needs at least one"),
        (lambda: RUM(4, 5)(torch.zeros(3, 2, 4, dtype=torch.long)), "it must be floating-point. Embed or one-hot"),
        (lambda: RUM(4, 5)(torch.randn(3, 2, 4).double()), "input is torch.float64, the weights torch.float32"),
        (lambda: RUM(4, 5, device="meta")(torch.randn(3, 2, 4)), "input is on cpu, the weights on meta"),
        (lambda: RUM(4, 5)([1.0]), "input is a list; it must be a Tensor or a PackedSequence"),
        (
            lambda: RUM(4, 5)(torch.randn(3, 2, 4), torch.randn(1, 3, 5)),
            r"h in hx has shape \(1, 3, 5\); expected \(1, 2, 5\)",
        ),
        (lambda: RUM(4, 5)(torch.randn(3, 4), torch.randn(2, 5)), r"h in hx has shape \(2, 5\); expected \(1, 5\)"),
        (lambda: RUM(4, 5)(torch.randn(3, 2, 4), (torch.randn(1, 2, 5),)), "hx is a tuple of 1; it must be a tensor"),
        (
            lambda: RUM(4, 5, lam=1)(torch.randn(3, 2, 4), torch.randn(1, 2, 5)),
            r"hx is a Tensor; it must be a tuple \(h, R\)",
        ),
        (
            lambda: RUM(4, 5, lam=1)(torch.randn(3, 2, 4), (torch.randn(1, 2, 5), torch.randn(1, 2, 5))),
            r"R in hx has shape \(1, 2, 5\); expected \(1, 2, 5, 5\)",
        ),
        (
            lambda: RUM(4, 5)(torch.randn(3, 2, 4), lengths=torch.tensor([3, 4])),
            "lengths range from 3 to 4; allowed are 1 to T=3",
        ),
        (lambda: RUM(4, 5)(torch.randn(3, 2, 4), lengths=torch.tensor([3])), r"expected \(2,\) integers"),
        (lambda: RUM(4, 5)(torch.randn(3, 4), lengths=torch.tensor([3])), "lengths needs batched input"),
        (
            lambda: RUM(4, 5)(pack_padded_sequence(torch.randn(3, 1, 4), [3]), lengths=torch.tensor([3])),
            "a PackedSequence carries its own lengths",
        ),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_warnings():
    with pytest.warns(UserWarning, match="dropout=0.5 has no effect: it acts between layers, and num_layers is 1"):
        RUM(4, 5, dropout=0.5)
    for kind in (RUM, RUMCell):
        with pytest.warns(UserWarning, match="likely to diverge; take a lam from 0 to 1") as told:
            kind(4, 5, lam=2)
        assert told[0].filename == __file__  # the line that made the mistake


def test_the_embedding_starts_with_the_scale_asked_for():
    torch.manual_seed(0)
    starts = {"embed_bias_init": 0.5, "target_bias_init": 0.5, "embed_scale": 3.0, "gate_scale": 0.5}
    rum = RUM(4, 400, num_layers=2, bidirectional=True, form="paper", **starts)
    for name, part in rum.named_parameters():
        if name.startswith("bias"):
            assert part[-400:].std().item() == pytest.approx(0.5, rel=0.2)
            assert part[:400].unique().item() == 0.5
        if name.startswith("weight_ih"):
            eps = torch.randn(2000, part.shape[1]) @ part[-400:].t()
            assert eps.std().item() == pytest.approx(3.0, rel=0.05), name  # from fewer inputs and from more
    plain = RUM(4, 400, form="paper")
    assert plain.bias_ih_l0[-400:].count_nonzero() == 0
    nothing = RUM(4, 400, form="paper", embed_bias_init=2.0, embed_bias=False)
    assert nothing.bias_ih_l0.shape == (800,)  # no bias, nothing to draw
    cell = RUMCell(4, 400, form="paper", embed_bias_init=2.0)
    assert cell.bias_ih[-400:].std().item() == pytest.approx(2.0, rel=0.2)
    rows = torch.cat((rum.weight_ih_l1[:400], rum.weight_hh_l1[:400]), 1)
    torch.testing.assert_close(rows @ rows.t(), 0.5**2 * torch.eye(400))
    columns = plain.weight_ih_l0[-400:]
    torch.testing.assert_close(columns.t() @ columns, torch.eye(4))


def test_eta_sqrt_is_the_root_of_the_hidden_size():
    output, _ = RUM(4, 25, form="paper", eta="sqrt")(torch.randn(6, 3, 4))
    torch.testing.assert_close(output.norm(dim=-1), torch.full((6, 3), 5.0))
    cell = RUMCell(4, 25, form="paper", eta="sqrt")
    assert cell.options.eta == 5.0
    assert repr(cell) == "RUMCell(4, 25, form=paper, eta=sqrt)"


@pytest.mark.parametrize("kind", [RUM, RUMCell])
def test_help_documents_every_argument_with_its_default(kind):
    for name, parameter in inspect.signature(kind).parameters.items():
        (entry,) = re.findall(rf"^    {name}: (.*(?:\n {{8}}.*)*)", kind.__doc__, re.MULTILINE)
        if parameter.default is not inspect.Parameter.empty:
            assert f"Default: ``{parameter.default!r}``" in " ".join(entry.split()), name


def test_cell_and_layer_share_their_options():
    cell, layer = (inspect.signature(kind).parameters for kind in (RUMCell, RUM))
    for name in option_names():
        assert cell[name].default == layer[name].default == getattr(DEFAULTS, name), name
        assert cell[name].annotation == layer[name].annotation, name
    RUM(3, 4, **PAPER_OPTIONS), RUMCell(3, 4, **PAPER_OPTIONS)


@pytest.mark.parametrize(
    "words", [{"lam": 1}, {"lam": 0.5}, {"lam": 1, "learn_lam": True}, {"lam": 1, "bidirectional": True}], ids=str
)
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("with_reset", [False, True])
def test_no_state_is_zeros_and_the_identity(words, backend, with_reset):
    if backend == "torch" and (words["lam"] != 1 or "learn_lam" in words):
        pytest.skip("only the reference runs this lam")
    rum, T, B, H = RUM(3, 4, backend=backend, **words), 5, 2, 4
    x, reset = torch.randn(T, B, 3), torch.zeros(T, B, dtype=torch.bool)
    reset[2, 1] = True
    h, R = torch.zeros(rum.num_directions, B, H), torch.eye(H).expand(rum.num_directions, B, H, H)
    found, wanted = (rum(x, hx, reset=reset if with_reset else None) for hx in (None, (h, R)))
    torch.testing.assert_close(found, wanted)
    grads = (torch.autograd.grad(output.sin().sum(), list(rum.parameters())) for output, _ in (found, wanted))
    torch.testing.assert_close(*grads)
