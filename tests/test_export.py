"""The scan form, torch.export and ONNX Runtime against the layer itself, at lengths and batches not traced."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

from grids import form_of
from torchrum import RUM
from torchrum.export import exportable, to_onnx, to_onnx_step, to_program

LIMIT = 1e-5  # largest difference allowed; the formats reorder a few float32 sums
SIZES = [(1, 1), (4, 3), (9, 2)]  # (T, B); (5, 3) is traced

OPTIONS = {
    "plain": {},
    "short_head": {"rotated": 1.0, "head_size": 2, "zoneout": 0.2},
    "no_bias": {"bias": False},
    "paper": {"form": "paper"},
    "lam1": {"lam": 1},
    "eta_tanh_before": form_of(0, eta=1.5, activation="tanh", layer_norm=True, zoneout=0.2),
    "authors_softsign": form_of(0, activation="softsign", layer_norm=True, ln_order="authors", zoneout=0.1),
    "no_gate_sigmoid": form_of(0, update_gate=False, activation="sigmoid", embed_bias=False),
    "no_gate_norm_lam1": form_of(1, update_gate=False, layer_norm=True, eta=1.0),
    "callable_target": form_of(0, activation=torch.sin, target_activation="tanh", bias=False),
}


def make(*sizes: int, **options) -> RUM:
    torch.manual_seed(0)
    rum = RUM(*sizes, **options)
    with torch.no_grad():
        for parameter in rum.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and gains off their starts
    return rum.eval()


def draw(rum: RUM, T: int, B: int) -> dict[str, Tensor]:
    count, H, dtype = rum.num_layers * rum.num_directions, rum.hidden_size, rum.weight_ih_l0.dtype
    shape = (B, T, rum.input_size) if rum.batch_first else (T, B, rum.input_size)
    inputs = {"input": torch.randn(shape, dtype=dtype), "h0": torch.randn(count, B, H, dtype=dtype)}
    if rum.options.keeps_rotation:
        inputs["R0"] = torch.linalg.qr(torch.randn(count, B, H, H, dtype=dtype)).Q
    inputs["lengths"] = torch.randint(1, T + 1, (B,))
    return inputs


@torch.no_grad()
def expected(rum: RUM, input: Tensor, h0=None, R0=None, lengths=None) -> list[Tensor]:
    hx = (h0, R0) if rum.options.keeps_rotation else h0
    output, last = rum(input, hx, lengths=lengths)
    return [output, *(last if isinstance(last, tuple) else (last,))]


def assert_near(got, want: list[Tensor], limit: float = LIMIT) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(g), w, rtol=0, atol=limit)


def assert_onnx_near(rum: RUM, path, inputs: tuple[str, ...] | None = None) -> None:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for T, B in SIZES:
        given = {name: value for name, value in draw(rum, T, B).items() if inputs is None or name in inputs}
        assert [part.name for part in session.get_inputs()] == list(given)
        got = session.run(None, {name: value.numpy() for name, value in given.items()})
        assert_near(got, expected(rum, **given))


@pytest.mark.parametrize("name", OPTIONS)
def test_scan_form_matches_layer(name):
    rum = make(4, 3, bidirectional=True, dtype=torch.float64, **OPTIONS[name])
    for T, B in SIZES[:2]:
        inputs = draw(rum, T, B)
        assert_near(exportable(rum)(**inputs), expected(rum, **inputs), 1e-9)
        only = {"input": inputs["input"]}
        assert_near(exportable(rum)(**only), expected(rum, **only), 1e-9)


def test_scan_form_is_a_frozen_copy():
    rum = make(4, 3, dropout=0.5, num_layers=2).train()
    form = exportable(rum)
    assert rum.training
    assert all(parameter.requires_grad for parameter in rum.parameters())
    assert not any(parameter.requires_grad for parameter in form.parameters())
    x = torch.randn(4, 2, 4)
    assert_near(form(x), expected(rum.eval(), x))  # no dropout in the copy


@pytest.mark.parametrize("lam", [None, pytest.param(0, marks=pytest.mark.slow), 1])
def test_program_runs_other_lengths(lam):
    rum = make(5, 3, 2, bidirectional=True, **form_of(lam))  # sizes that equal the traced T and B
    module = to_program(rum).module()
    for T, B in SIZES:
        inputs = draw(rum, T, B)
        assert_near(module(**inputs), expected(rum, **inputs))


def test_program_without_state_and_lengths():
    rum = make(4, 6, batch_first=True)
    module = to_program(rum, initial_state=False, lengths=False).module()
    for T, B in SIZES:
        x = torch.randn(B, T, 4)
        assert_near(module(input=x), expected(rum, x))


@pytest.mark.parametrize(
    "layers, options",
    [
        (1, {}),
        (1, {"lam": 1, "eta": 1.5, "activation": "tanh"}),
        pytest.param(2, {"zoneout": 0.1}, marks=pytest.mark.slow),
        pytest.param(2, {"form": "paper"}, marks=pytest.mark.slow),
        pytest.param(2, {"lam": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_onnx_both_directions_with_lengths(layers, options, tmp_path):
    """Every scan takes seconds to export; two layers are one program in ``test_program_runs_other_lengths``."""
    rum = make(4, 6, layers, bidirectional=True, **options)
    path = to_onnx(rum, tmp_path / "rum.onnx")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rum.onnx"]  # one file, weights inside
    assert_onnx_near(rum, path)


@pytest.mark.slow  # by default: eta and tanh above, layer norm below and with zoneout in test_export_models.py
@pytest.mark.parametrize("name", ["short_head", "no_bias", "eta_tanh_before", *list(OPTIONS)[7:]])
def test_onnx_options(name, tmp_path):
    rum = make(4, 8, **OPTIONS[name])
    assert_onnx_near(rum, to_onnx(rum, tmp_path / "rum.onnx"))


def test_onnx_without_state_and_lengths(tmp_path):
    rum = make(4, 8, batch_first=True, **OPTIONS["authors_softsign"])
    path = to_onnx(rum, str(tmp_path / "rum.onnx"), initial_state=False, lengths=False)
    assert_onnx_near(rum, path, ("input",))


def test_other_powers_are_refused():
    with pytest.raises(ValueError, match=r"lam is 0\.5; allowed are 0 and 1"):
        exportable(RUM(2, 3, lam=0.5))
    with pytest.raises(ValueError, match="lam is learnable; allowed are 0 and 1"):
        exportable(RUM(2, 3, lam=1, learn_lam=True))


def test_other_layers_are_refused():
    with pytest.raises(ValueError, match=r"rum is a GRU; only a torchrum\.RUM"):
        exportable(torch.nn.GRU(2, 3))


def test_half_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"bfloat16; allowed are float32 and float64"):
        to_onnx(RUM(2, 3).bfloat16(), tmp_path / "rum.onnx")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnxscript" else found(name))
    with pytest.raises(ImportError, match=r"onnxscript not installed\. Run: pip install \"torchrum\[export\]\""):
        to_onnx(RUM(2, 3), tmp_path / "rum.onnx")


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_the_layer_itself_exports_with_trainable_weights(lam: int) -> None:
    """Without the scan form the operator stands in the program, which runs it while its weights ask for gradients."""
    layer = RUM(3, 4, **form_of(lam))
    x = torch.randn(5, 2, 3)
    program = torch.export.export(layer, (x,))
    operator = "gated_scan" if lam is None else "rum_scan"
    assert any(operator in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x)[0], layer(x)[0])


@torch.no_grad()
def stream(rum: RUM, path, steps: int = 4, B: int = 3) -> None:
    """Feed a step graph its own state and compare each output with the layer's."""
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(to_onnx_step(rum, path), providers=["CPUExecutionProvider"])
    x = torch.randn(steps, B, rum.input_size)
    state = [np.zeros([B if n == "B" else n for n in part.shape], "f") for part in session.get_inputs()[1:]]
    whole, last = rum(x.transpose(0, 1) if rum.batch_first else x)
    for x_t, want in zip(x, whole.transpose(0, 1) if rum.batch_first else whole, strict=True):
        given = dict(zip(["input", "h0", "R0"], [x_t.numpy(), *state], strict=False))
        output, *state = session.run(None, given)
        assert_near([output], [want])
    assert_near(state, list(last) if isinstance(last, tuple) else [last])


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2, "batch_first": True, "zoneout": 0.2},
        pytest.param({"lam": 1, "num_layers": 2}, marks=pytest.mark.slow),
        pytest.param(form_of(0, layer_norm=True, eta=1.5), marks=pytest.mark.slow),
        pytest.param({"rotated": 0.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_step_graph_streams(options, tmp_path):
    onnx = pytest.importorskip("onnx")
    stream(make(4, 12, **options), tmp_path / "step.onnx")
    assert not {"Scan", "Loop"} & {node.op_type for node in onnx.load(tmp_path / "step.onnx").graph.node}


def test_step_graph_of_two_directions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rum is bidirectional, which needs whole sequences; take to_onnx"):
        to_onnx_step(RUM(2, 3, bidirectional=True), tmp_path / "step.onnx")


@pytest.mark.parametrize("lam", [None, 0, pytest.param(1, marks=pytest.mark.slow)])
@torch.no_grad()
def test_onnx_of_vectors_without_a_direction(lam, tmp_path):
    """Zero, tiny and opposite vectors in one batch; tau is W_n h or W_tau h, and eps is the input."""
    ort = pytest.importorskip("onnxruntime")
    H = 8
    rum = RUM(H, H, **({"rotated": 1.0, "head_size": 4} if lam is None else form_of(lam, target_bias_init=0.0)))
    blocks = {None: (2, 2), 0: (2, 0), 1: (2, 0)}[lam]  # where eps and tau are
    for weight, block in zip((rum.weight_ih_l0, rum.weight_hh_l0), blocks, strict=True):
        weight.zero_()
        weight[block * H : (block + 1) * H] = torch.eye(H)
    if lam is None:
        rum.bias_ih_l0.zero_(), rum.bias_hh_l0.zero_()
    h = torch.tensor([[1.0, 2, -3, 0.5, 0.3, -1, 2, 1]]).expand(6, H).clone()
    x = torch.stack([h[0], -3 * h[0], 0 * h[0], 1e-13 * h[0], -h[0] + 1e-6 * h[0].flip(0), h[0].flip(0)])
    h[0] = 0
    want, _ = rum.eval()(x.unsqueeze(0), h.unsqueeze(0) if lam != 1 else (h.unsqueeze(0), None))
    session = ort.InferenceSession(to_onnx_step(rum, tmp_path / "step.onnx"), providers=["CPUExecutionProvider"])
    memory = {"R0": np.zeros((1, 6, H, H), "f")} if lam == 1 else {}
    assert_near(session.run(None, {"input": x.numpy(), "h0": h.unsqueeze(0).numpy(), **memory})[:1], [want[0]])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"lam": 1, "bidirectional": True}], ids=str)
@torch.no_grad()
def test_openvino_reads_the_same_file(options, tmp_path):
    openvino = pytest.importorskip("openvino")
    rum = make(4, 16, **options)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(to_onnx(rum, tmp_path / "rum.onnx"), "CPU", exact)
    for T, B in SIZES:
        given = draw(rum, T, B)
        results = compiled({name: part.numpy() for name, part in given.items()})
        assert_near([results[part] for part in compiled.outputs], expected(rum, **given))
