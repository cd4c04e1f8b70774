"""Inputs at the edge: vectors without a usable direction, padding that is not a number, dtypes, very long sequences."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import torchrum
from grids import form_of
from torchrum import RUM, RUMCell
from torchrum.cells import rum as rum_cell
from torchrum.layers.registry import LAYERS, build_layer
from torchrum.ops.rum_scan import RumOptions, ScanInputs, rum_scan

both = pytest.mark.parametrize("lam", [None, 0, 1])


def one_step_gradient(eps: Tensor, tau: Tensor, h: Tensor, lam: float, backend: str) -> Tensor:
    """Of the sum of new states in the projected input, for rows of ``eps``, ``tau``, ``h`` ``(B, H)``."""
    H = eps.shape[-1]
    xp = torch.cat([tau, torch.zeros_like(tau), eps], -1).unsqueeze(0).requires_grad_()
    options = RumOptions(lam=lam, activation="tanh")
    out, _ = rum_scan(ScanInputs(xp, h, None, eps.new_zeros(2 * H, H)), options, backend=backend)
    return torch.autograd.grad(out.sum(), xp)[0]


@pytest.mark.parametrize("lam", [0, 1])
def test_short_tau_against_eps_has_a_finite_gradient(lam):
    eps, tau = torch.tensor([[1.2106, -0.52136]]), torch.tensor([[-2.3396e-12, 9.2294e-13]])
    h = torch.tensor([[0.3, 0.7]])
    got = one_step_gradient(eps, tau, h, lam, "torch")
    expected = one_step_gradient(eps, tau, h, lam, "reference")
    assert got.isfinite().all()
    # with lam 0 the gradient is a sum of terms that cancel to s.s = 1e-3 of their size, twice
    torch.testing.assert_close(got, expected, rtol=5e-2 if lam == 0 else 1e-3, atol=1e-4)


@pytest.mark.parametrize("lam", [0, 1])
def test_gradients_are_finite_where_the_reference_is(lam):
    """Norms from 1e-14 to 1e14, angles from nothing to a half turn."""
    generator = torch.Generator().manual_seed(3)
    B, H = 4000, 3
    eps = torch.randn(B, H, generator=generator)
    away = torch.randn(B, H, generator=generator) * 10 ** torch.empty(B, 1).uniform_(-7, 1, generator=generator)
    tau = eps * torch.randn(B, 1, generator=generator).sign() + away
    eps, tau = (x * 10 ** torch.empty(B, 1).uniform_(-14, 14, generator=generator) for x in (eps, tau))
    h = torch.randn(B, H, generator=generator)
    expected = one_step_gradient(eps, tau, h, lam, "reference")
    got = one_step_gradient(eps, tau, h, lam, "torch")
    assert expected.isfinite().all()
    assert got.isfinite().all()


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [dict(), dict(num_layers=2, bidirectional=True), dict(batch_first=True)], ids=str)
def test_padding_touches_nothing(shape, value, lam):
    rum = RUM(3, 4, **form_of(lam), dtype=torch.float64, **shape)
    lengths = torch.tensor([5, 2, 3])
    x = torch.randn(3, 5, 3, dtype=torch.float64) if rum.batch_first else torch.randn(5, 3, 3, dtype=torch.float64)
    ended = torch.arange(5).unsqueeze(1) >= lengths  # (T, B)
    ended = (ended.T if rum.batch_first else ended).unsqueeze(-1)
    results = []
    for filling in (0.0, value):
        padded = torch.where(ended, filling, x).requires_grad_()
        output, hidden = rum(padded, lengths=lengths)
        parts = [output, *(hidden if lam else (hidden,))]
        grads = torch.autograd.grad([part.sin().sum() for part in parts], [padded, *rum.parameters()])
        results.append([*parts, *grads])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert not results[0][3 if lam else 2][ended.expand_as(x)].any()  # the padding's own gradient


@pytest.fixture
def sixteen_bits():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("sixteen_bits")
@pytest.mark.parametrize("lam", [None, 0, 1, 0.5])
def test_a_default_dtype_of_sixteen_bits(lam):
    rum = RUM(3, 4, 2, **form_of(lam, layer_norm=True, learn_lam=lam == 0.5))
    assert {parameter.dtype for parameter in rum.parameters()} == {torch.bfloat16}
    output, _ = rum(torch.randn(5, 2, 3))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert rum.weight_hh_l0.grad.isfinite().all()


def test_orthogonal_weights_are_the_same_in_a_default_dtype_of_sixteen_bits(sixteen_bits):
    torch.manual_seed(0)
    low = RUM(3, 4)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    torch.testing.assert_close(low.weight_ih_l0, RUM(3, 4).weight_ih_l0.bfloat16())


def watched_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of steps of every scan to come."""
    steps, scan, plain = [], rum_cell.scan_rum, rum_cell.plain_scan

    def watched_plain(inputs, *rest):
        results = plain(inputs, *rest)
        steps.extend([] if results is None else [len(inputs.x)])
        return results

    monkeypatch.setattr(rum_cell, "scan_rum", lambda xp, *rest: [steps.append(len(xp)), scan(xp, *rest)][1])
    monkeypatch.setattr(rum_cell, "plain_scan", watched_plain)
    return steps


@both
@pytest.mark.parametrize("shape", [dict(), dict(num_layers=2, bidirectional=True)], ids=str)
def test_parts_of_a_long_sequence_are_the_whole(shape, lam, monkeypatch):
    """Without gradients the layer projects and scans a part at a time; the results are those of one scan."""
    monkeypatch.setattr(rum_cell, "PART_STEPS", 16)
    monkeypatch.setattr(rum_cell, "PART_NUMBERS", 100)
    steps = watched_steps(monkeypatch)
    rum = RUM(3, 4, **form_of(lam), dtype=torch.float64, backend="torch", **shape)  # the native scan needs no parts
    x = torch.randn(70, 2, 3, dtype=torch.float64)
    for lengths in (None, torch.tensor([70, 1]), torch.tensor([40, 33])):
        steps.clear()
        whole = rum(x, lengths=lengths)
        assert set(steps) == {70}
        steps.clear()
        with torch.no_grad():
            in_parts = rum(x, lengths=lengths)
        assert steps[:5] == [16, 16, 16, 16, 6]
        torch.testing.assert_close(in_parts, whole)


def test_what_cannot_run_in_parts_runs_whole(monkeypatch):
    monkeypatch.setattr(rum_cell, "PART_STEPS", 4)
    monkeypatch.setattr(rum_cell, "PART_NUMBERS", 1)
    steps = watched_steps(monkeypatch)
    x = torch.randn(20, 2, 3)
    with torch.no_grad():
        RUM(3, 4, zoneout=0.1)(x)  # its masks belong to the sequence
        RUM(3, 4).bfloat16()(x.bfloat16())  # its carried state would be rounded
        with torch.autocast("cpu", torch.bfloat16):
            RUM(3, 4)(x)
    assert steps == [20, 20, 20]


PEAK = """
import resource, torch
from torchrum import RUM, RUMCell
torch.set_num_threads(1)
T, H = {T}, 64
rum, x = RUM(8, H, **{form}, backend={backend!r}), torch.randn(T, 1, 8)
with torch.no_grad():
    rum(x[:9000])  # a part or two: the workspace, and whatever is loaded once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output, _ = rum(x)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / (output.numel() * 4))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit there")
@both
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_memory_of_inference_is_a_few_outputs(lam, backend):
    """At T = 100,000, H = 64, B = 1 the peak is at most three times the output; one pass took 18 times."""
    code, here = PEAK.format(T=100_000, form=form_of(lam), backend=backend), Path(torchrum.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 3


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("lstm", "gru")])
def test_wrong_types_are_refused_in_words_by_every_layer(name):
    layer, x = build_layer(name, 3, 4), torch.randn(5, 2, 3)
    with pytest.raises(TypeError, match=r"lengths is a list; it must be a Tensor \(2,\) of integers\. Pass torch\.as_"):
        layer(x, lengths=[5, 2])
    with pytest.raises(TypeError, match="hx is a str; it must be"):
        layer(x, "state")
    with pytest.raises(TypeError, match="hx is a float; it must be"):
        layer(x[:, 0], 0.0)


def test_parts_of_hx_of_a_wrong_type():
    x = torch.randn(5, 2, 3)
    with pytest.raises(TypeError, match="R in hx is a float; it must be a Tensor, or None"):
        RUM(3, 4, lam=1)(x, (torch.zeros(1, 2, 4), 1.0))
    with pytest.raises(TypeError, match="hx is a list of 1; it must be a tensor, or None"):
        RUM(3, 4)(x, [torch.zeros(1, 2, 4)])
    with pytest.raises(RuntimeError, match=r"h in hx is torch\.int64 on cpu; it must be floating"):
        RUM(3, 4)(x, torch.zeros(1, 2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda rum, x: rum(x[..., :2]), "Expected 3, got 2"),
        (lambda rum, x: rum(x[None]), r"it must be \(T, B, I\)"),
        (lambda rum, x: rum(x[:0]), "no time step; it needs at least one"),
        (lambda rum, x: rum(x, torch.zeros(1, 5, 4)), r"h in hx has shape \(1, 5, 4\); expected \(1, 2, 4\)"),
        (lambda rum, x: rum(x.double()), r"input is torch\.float64, the weights torch\.float32"),
        (lambda rum, x: rum(x, lengths=torch.tensor([5])), r"lengths has shape \(1,\)"),
        (lambda rum, x: rum(pack_padded_sequence(x[..., :2], [5, 4])), "Expected 3, got 2"),
        (lambda rum, x: rum(pack_padded_sequence(x.double(), [5, 4])), r"input is torch\.float64, the weights"),
        (lambda rum, x: rum(pack_padded_sequence(x.long(), [5, 4])), r"input is torch\.int64; it must be floating"),
        (lambda rum, x: rum(PackedSequence(x, torch.tensor([5]))), r"data of shape \(5, 2, 3\); it must be \(sum of"),
    ],
)
def test_shape_errors_are_of_both_classes_that_torch_nn_raises(call, message):
    rum, x = RUM(3, 4), torch.randn(5, 2, 3)
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match=message):
            call(rum, x)


@pytest.mark.parametrize("change", [lambda x: x.to("meta"), lambda x: x[:-3].clone()], ids=["device", "shape"])
@pytest.mark.parametrize("name", ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "ln_weight", "ln_bias"])
def test_a_parameter_that_was_replaced_by_one_that_does_not_fit(name, change):
    """As after ``load_state_dict(..., strict=False, assign=True)`` into a layer on the meta device: kernels are given
    addresses, and would read whatever is there."""
    options = {} if name == "bias_hh" else {"form": "paper", "layer_norm": True}
    layer, cell = RUM(3, 4, num_layers=2, **options), RUMCell(3, 4, **options)
    for module, full, x in ((layer, f"{name}_l1", torch.randn(5, 2, 3)), (cell, name, torch.randn(2, 3))):
        setattr(module, full, nn.Parameter(change(getattr(module, full).detach())))
        words = f"{full} has shape .*; it must be|input is on cpu, the weights on meta"
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match=words):
                module(x)


@pytest.mark.parametrize("module, x", [(RUM(3, 4), torch.zeros(5, 2, 3)), (RUMCell(3, 4), torch.zeros(2, 3))])
def test_a_hidden_size_that_was_changed_is_an_error(module, x):
    module.hidden_size = 2
    with pytest.raises(ValueError, match=r"hidden_size was changed to 2|it must be"):
        module(x)


@both
def test_a_bias_may_be_taken_away(lam):
    layer, cell, x = RUM(3, 4, **form_of(lam)), RUMCell(3, 4, **form_of(lam)), torch.randn(5, 2, 3)
    with torch.no_grad():
        layer.bias_ih_l0.zero_()
        cell.bias_ih.zero_()
        if lam is None:
            layer.bias_hh_l0.zero_()
            cell.bias_hh.zero_()
    wanted = layer(x)[0], cell.scan(x, ())[0]
    layer.bias_ih_l0 = cell.bias_ih = None
    if lam is None:
        layer.bias_hh_l0 = cell.bias_hh = None
    torch.testing.assert_close((layer(x)[0], cell.scan(x, ())[0]), wanted)


@pytest.mark.parametrize("words", [dict(bias=1), dict(batch_first="yes"), dict(bidirectional=None), dict(embed_bias=0)])
def test_flags_and_sizes_of_a_wrong_type_are_type_errors(words):
    for error in (TypeError, ValueError):
        with pytest.raises(error, match="it must be True or False"):
            RUM(3, 4, **words)
        with pytest.raises(error, match="it must be an integer"):
            RUM(3, 4.0)
    with pytest.raises(TypeError):
        nn.GRU(3, 4.0)  # as there
    with pytest.raises(ValueError, match="hidden_size=0"):
        RUM(3, 0)


def nested(part):
    return torch.nested.nested_tensor([part[:1, 0], part[:, 0]])


DENSE = "layout torch.sparse_coo; it must be dense. Convert it with .to_dense()"
ONEDNN = "layout torch._mkldnn; it must be dense"
NESTED = "is a nested tensor; it must be a dense one. Pad it with torch.nested.to_padded_tensor"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda rum, cell, x, h: rum(x.to_sparse()), f"input has {DENSE}"),
        (lambda rum, cell, x, h: rum(x[:, 0].to_sparse_csr()), "input has layout torch.sparse_csr; it must be dense"),
        (lambda rum, cell, x, h: rum(x.to_mkldnn()), f"input has {ONEDNN}"),
        (lambda rum, cell, x, h: rum(nested(x)), f"input {NESTED}"),
        (lambda rum, cell, x, h: rum(x, h.to_sparse()), f"h in hx has {DENSE}"),
        (lambda rum, cell, x, h: rum(x, h.to_mkldnn()), f"h in hx has {ONEDNN}"),
        (lambda rum, cell, x, h: rum(x, nested(h)), f"h in hx {NESTED}"),
        (
            lambda rum, cell, x, h: rum(x, lengths=torch.tensor([5, 2, 1]).to(torch.uint64)),
            "torch.uint64; expected (3,) int",
        ),
        (
            lambda rum, cell, x, h: rum(x, lengths=torch.ones(3, dtype=torch.long, device="meta")),
            "lengths is on meta and has",
        ),
        (lambda rum, cell, x, h: rum(x, lengths=torch.tensor([5, 2, 1]).to_sparse()), f"lengths has {DENSE}"),
        (lambda rum, cell, x, h: rum(x, reset=x[..., 0].gt(0).to("meta")), "reset is on meta and has no values"),
        (lambda rum, cell, x, h: rum(x, reset=x[..., 0].gt(0).to_sparse()), f"reset has {DENSE}"),
        (lambda rum, cell, x, h: cell(x[0].to_sparse()), f"input has {DENSE}"),
        (lambda rum, cell, x, h: cell(x[0], h[0].to_mkldnn()), f"h in hx has {ONEDNN}"),
    ],
)
def test_tensors_that_are_not_dense_are_refused(call, message, backend):
    modules = RUM(4, 6, backend=backend), RUMCell(4, 6, backend=backend)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*modules, torch.randn(5, 3, 4), torch.randn(1, 3, 6))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_lengths_of_small_integers(dtype):
    rum, x, lengths = RUM(4, 6), torch.randn(5, 3, 4), torch.tensor([5, 2, 1])
    assert torch.equal(rum(x, lengths=lengths.to(dtype))[0], rum(x, lengths=lengths)[0])
