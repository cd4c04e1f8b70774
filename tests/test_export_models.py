"""Whole models that hold a RUM, by torch's own calls: torch.export, ONNX and AOTInductor."""

import functools
import io
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from grids import form_of
from torchrum import RUM
from torchrum.export import decompositions, exportable, to_program
from torchrum.ops.rum_scan import ScanInputs, rum_scan_form

SIZES = [(1, 1), (9, 2), (20, 4)]  # (T, B); (5, 3) is traced
STACKED = dict(num_layers=2, bidirectional=True)
slow = pytest.mark.slow


class Tagger(nn.Module):
    """Linear, RUM, linear, as a user writes it."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.first, self.rum = nn.Linear(3, 4), RUM(4, 5, **options)
        self.last = nn.Linear(5 * self.rum.num_directions, 2)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.last(self.rum(self.first(x), lengths=lengths)[0])


def inputs(T: int, B: int, lengths: bool) -> tuple[Tensor, ...]:
    return (torch.randn(T, B, 3), *((torch.randint(1, T + 1, (B,)),) if lengths else ()))


def dynamic(lengths: bool) -> tuple[dict[int, Dim], ...]:
    time, batch = Dim("T"), Dim("B")
    return ({0: time, 1: batch}, *(({0: batch},) if lengths else ()))


@pytest.mark.parametrize(
    "options, lengths, training",
    [
        (dict(zoneout=0.3), True, False),
        (form_of(0, zoneout=0.3, layer_norm=True), True, False),
        pytest.param(dict(), False, True, marks=slow),
        pytest.param(dict(rotated=1.0, head_size=4, **STACKED), True, True, marks=slow),
        pytest.param(form_of(0), False, True, marks=slow),
        pytest.param(dict(lam=1), False, True, marks=slow),
        pytest.param(dict(lam=1), True, True, marks=slow),
        pytest.param(form_of(0, **STACKED), False, False, marks=slow),
        pytest.param(form_of(0, **STACKED), True, True, marks=slow),
        pytest.param(dict(lam=1, **STACKED), True, False, marks=slow),
        pytest.param(form_of(0, activation=torch.sin, target_activation="tanh"), True, False, marks=slow),
    ],
    ids=str,
)
def test_onnx_of_a_model_with_trainable_weights(options, lengths, training):
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = Tagger(**options).train(training)
    program = torch.onnx.export(
        model, inputs(5, 3, lengths), dynamo=True, dynamic_shapes=dynamic(lengths), verbose=False
    )
    assert all(parameter.requires_grad for parameter in model.parameters())
    scans = [node.op_type for node in program.model_proto.graph.node].count("Scan")
    assert scans == model.rum.num_layers * model.rum.num_directions
    session = ort.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [part.name for part in session.get_inputs()]
    for T, B in SIZES:
        given = inputs(T, B, lengths)
        (got,) = session.run(None, {name: part.numpy() for name, part in zip(names, given, strict=True)})
        with torch.no_grad():
            torch.testing.assert_close(torch.as_tensor(got), model.eval()(*given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_a_saved_program_loads_and_trains(lam):
    model, buffer = Tagger(**form_of(lam)), io.BytesIO()
    torch.export.save(torch.export.export(model, inputs(5, 3, True), dynamic_shapes=dynamic(True)), buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for T, B in SIZES:
        given = inputs(T, B, True)
        for name, module in {"model": model, "loaded": loaded}.items():
            module.zero_grad()
            module(*given).sin().sum().backward()
            assert all(parameter.grad is not None for parameter in module.parameters()), name
        grads = [{name: p.grad for name, p in module.named_parameters()} for module in (model, loaded)]
        torch.testing.assert_close(*grads)


def test_other_powers_are_refused_in_words():
    options = RUM(3, 4, lam=0.5).options
    with pytest.raises(ValueError, match=r"lam is 0\.5; ONNX holds 0 and 1 only"):
        rum_scan_form(ScanInputs(torch.randn(5, 2, 12), torch.zeros(2, 4), None, torch.zeros(8, 4)), options)


def test_packed_input_is_refused_in_words():
    class Packed(Tagger):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            packed, _ = self.rum(pack_padded_sequence(self.first(x), lengths, enforce_sorted=False))
            return self.last(pad_packed_sequence(packed)[0])

    with pytest.raises(
        RuntimeError, match=r"torch cannot export a PackedSequence\. Pass the padded input and lengths="
    ):
        torch.export.export(Packed(), inputs(5, 3, True))


@functools.cache  # an export takes seconds
def programs() -> dict[str, object]:
    rum, x = RUM(3, 4), torch.randn(5, 2, 3)
    layer = torch.export.export(
        rum, (), {"input": x, "lengths": torch.tensor([5, 2])}, dynamic_shapes={"input": {0: Dim("T")}, "lengths": None}
    )
    return {
        "layer": layer.module(),
        "scan form": to_program(rum, initial_state=False).module(),
        "exportable": exportable(rum),
    }


@pytest.mark.parametrize("kind", ["layer", "scan form", "exportable"])
def test_no_steps_and_too_long_rows_are_refused_in_words(kind):
    module, x, lengths = programs()[kind], torch.randn(5, 2, 3), torch.tensor([5, 2])
    assert module(input=x, lengths=lengths)[0].shape == (5, 2, 4)
    with pytest.raises(RuntimeError, match=r"no time step; it needs at least one"):
        module(input=x[:0], lengths=lengths)
    for wrong in ([6, 2], [0, 2]):
        with pytest.raises((RuntimeError, ValueError), match=r"lengths (must run from 1 to T|range from)"):
            module(input=x, lengths=torch.tensor(wrong))


@slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++")
@pytest.mark.parametrize("lam", [None, 0, 1])
@pytest.mark.parametrize("kind", ["scan form", "model"])
def test_aot_inductor_runs_other_sizes(kind, lam, tmp_path):
    """The scan form runs without torchrum; a model's package calls its operator, where torchrum is imported."""
    if kind == "model":
        model = Tagger(**form_of(lam), **STACKED).eval()
        program = torch.export.export(model, inputs(5, 3, True), dynamic_shapes=dynamic(True))
    else:
        rum = RUM(3, 4, 2, **form_of(lam, layer_norm=True), bidirectional=True).eval()
        program = to_program(rum)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    for T, B in SIZES:
        x, lengths = inputs(T, B, True)
        with torch.no_grad():
            if kind == "model":
                got, expected = compiled(x, lengths), model(x, lengths)
            else:
                h0, R0 = torch.randn(4, B, 4), torch.linalg.qr(torch.randn(4, B, 4, 4)).Q.contiguous()
                hx = (h0, R0) if lam else h0
                given = {"h0": h0, "R0": R0, "lengths": lengths} if lam else {"h0": h0, "lengths": lengths}
                got, expected = compiled(input=x, **given)[0], rum(x, hx, lengths=lengths)[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


class Step(nn.Module):
    """A model of one step with the state as input and output, or of a few."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.rum = RUM(4, 6, **options)
        self.last = nn.Linear(6 * self.rum.num_directions, 2)

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        output, last = self.rum(x, state if len(state) > 1 else state[0])
        return self.last(output), *(last if isinstance(last, tuple) else (last,))


DECOMPOSED = {
    "one_step": ({}, 1),
    "stacked": (dict(num_layers=2, bidirectional=True, zoneout=0.2), 3),
    "lam1": (dict(lam=1), 3),
    "paper": (form_of(0, layer_norm=True, eta=1.5), 3),
    "no_gate": (form_of(0, update_gate=False, activation="tanh"), 3),
}


def decomposed(name: str, rows: Dim | None) -> tuple[nn.Module, tuple[Tensor, ...], torch.export.ExportedProgram]:
    """The model, an input of four rows with its state, and the model's program after ``decompositions``."""
    options, T = DECOMPOSED[name]
    model = Step(**options).eval()
    with torch.no_grad():
        last = model.rum(torch.randn(2, 4, 4))[1]
    given = torch.randn(T, 4, 4), *(last if isinstance(last, tuple) else (last,))
    dynamic = [{1: rows} for _ in given]
    program = torch.export.export(model, given, dynamic_shapes={"x": dynamic[0], "state": tuple(dynamic[1:])})
    return model, given, program.run_decompositions(decompositions())


def assert_as_model(model: nn.Module, run, given: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        for got, want in zip(run(*given), model(*given), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["one_step", *(pytest.param(name, marks=slow) for name in list(DECOMPOSED)[1:])])
def test_a_decomposed_program_has_only_torchs_operators(name):
    model, given, program = decomposed(name, Dim("B"))
    assert not any("torchrum" in str(node.target) for node in program.graph.nodes)
    run = program.module()
    assert_as_model(model, run, given)
    assert_as_model(model, run, tuple(part[:, :2] for part in given))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECOMPOSED)
def test_executorch_runs_a_decomposed_program(name):
    exir, runtime = pytest.importorskip("executorch.exir"), pytest.importorskip("executorch.runtime")
    model, given, program = decomposed(name, None)
    loaded = runtime.Runtime.get().load_program(exir.to_edge(program).to_executorch().buffer)
    method = loaded.load_method("forward")
    assert_as_model(model, lambda *given: method.execute(list(given)), given)
