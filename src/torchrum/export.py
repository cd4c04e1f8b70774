"""Export of a trained RUM: ``torch.export``, AOTInductor and ONNX, all with dynamic time and batch.

A model that contains a RUM can be exported without this module, by ``torch.onnx.export(model, ..., dynamo=True)`` and
``torch.export.export(model, ...)``. In ONNX the recurrence is one ``Scan`` per layer and direction. A program of
``torch.export`` calls torchrum's operator, so it needs torchrum, and it has gradients. :func:`to_program` uses torch's
own ``scan`` operator instead, so its programs run without torchrum; so do those of a whole model after
:func:`decompositions`.
"""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from torchrum.cells.base import state_parts
from torchrum.cells.rum import project_rum
from torchrum.layers.recurrent import Recurrent, State
from torchrum.layers.rum import RUM
from torchrum.ops.gated_scan import op as gated_scan_op
from torchrum.ops.gated_scan.scan_form import folded, gate_signs, gated_scan_form, onnx_form
from torchrum.ops.rum_scan import ScanInputs, rum_scan_form
from torchrum.ops.rum_scan import op as rum_scan_op

__all__ = ["decompositions", "exportable", "to_onnx", "to_onnx_step", "to_program"]

_ONNX_PACKAGES = ("onnx", "onnxscript")


class _ScanForm(Recurrent):
    """A RUM in evaluation with frozen weights, whose loop over time is an operator."""

    def __init__(self, rum: RUM) -> None:
        super().__init__(
            rum.input_size, rum.hidden_size, rum.num_layers, rum.bias, rum.batch_first, 0.0, rum.bidirectional
        )
        self.rum = copy.deepcopy(rum).eval().requires_grad_(False)
        self.state_names = rum.state_names
        self.eval()

    def _get_name(self) -> str:
        return "RUM"  # the name in error messages

    def initial_state(self, index: int, batch_size: int, like: Tensor) -> State:
        return self.rum.initial_state(index, batch_size, like)

    def forward(  # type: ignore[override]  # export formats have only tensors as inputs and outputs
        self, input: Tensor, h0: Tensor | None = None, R0: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the RUM's ``output, h_n`` and, if it has one, ``R_n``; ``input`` is batched."""
        given = (h0, R0)[: len(self.state_names)]
        hx = None if all(part is None for part in given) else given if len(given) > 1 else h0
        results: Any = super().forward(input, hx, lengths=lengths)
        output, hidden = results
        return output, *(hidden if isinstance(hidden, tuple) else (hidden,))

    def scan(self, index: int, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        states, *R = self.states(index, x, state, lengths)
        return states, (states[-1], *R)

    def states(self, index: int, x: Tensor, state: State, lengths: Tensor | None = None) -> State:
        """Return all states of a recurrence and, if it has one, the last R; for ``x`` ``(B, I)``, the new state."""
        weights, options = self.rum._weights(index), self.rum.options
        xp, weight_hh = project_rum(x, weights, options), weights["weight_hh"]
        assert weight_hh is not None
        if options.gated is not None:
            return (gated_scan_form(xp, state[0], weight_hh, weights["bias_hh"], lengths, options.gated[False]),)
        R0 = state[1] if len(state) == 2 else None
        inputs = ScanInputs(xp, state[0], R0, weight_hh, weights["ln_weight"], weights["ln_bias"], lengths)
        states, R_n = rum_scan_form(inputs, options)
        return (states,) if R_n is None else (states, R_n)

    def example(self, initial_state: bool, lengths: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return example inputs by name, and their dynamic dimensions."""
        T, B, count = 5, 3, self.num_layers * self.num_directions
        weight = next(self.parameters())
        shape = (B, T, self.input_size) if self.batch_first else (T, B, self.input_size)
        x = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        states = zip(*(self.initial_state(index, B, x) for index in range(count)), strict=True)
        time, batch = Dim("T"), Dim("B")
        values = {"input": x}
        dynamic: dict[str, Any] = {"input": {0: batch, 1: time} if self.batch_first else {0: time, 1: batch}}
        if initial_state:
            for name, parts in zip(self.state_names, states, strict=True):
                values[f"{name}0"], dynamic[f"{name}0"] = torch.stack(parts), {1: batch}
        if lengths:
            values["lengths"], dynamic["lengths"] = torch.full((B,), T, device=x.device), {0: batch}
        return values, dynamic


def exportable(rum: RUM) -> nn.Module:
    """Return a frozen copy of ``rum`` in evaluation mode that ``torch.export`` can trace with dynamic T and B.

    Args:
        rum: a RUM with lam 0 or 1, and any other options.

    Returns:
        A module ``forward(input, h0=None, R0=None, lengths=None) -> (output, h_n)``, or ``(output, h_n, R_n)`` with
        lam 1. The shapes are those of ``rum``; ``input`` is batched.

    Example:
        >>> from torchrum import RUM
        >>> output, h_n = exportable(RUM(4, 6))(torch.randn(5, 3, 4))
        >>> output.shape
        torch.Size([5, 3, 6])
    """
    if not isinstance(rum, RUM):
        raise ValueError(f"exportable: rum is a {type(rum).__name__}; only a torchrum.RUM can be exported this way.")
    if rum.options.lam not in (0, 1):
        given = "learnable" if "lam_l0" in rum._parameters else rum.options.lam
        raise ValueError(f"exportable: lam is {given}; allowed are 0 and 1, other powers of R have no ONNX operator.")
    return _ScanForm(rum)


def to_program(rum: RUM, *, initial_state: bool = True, lengths: bool = True) -> ExportedProgram:
    """Export ``rum`` with ``torch.export``; T and B are dynamic.

    Args:
        rum: as in :func:`exportable`.
        initial_state: add the input ``h0`` (and ``R0``); if False, every run starts from zeros (and the identity).
        lengths: add the input ``lengths`` ``(B,)`` int64; if False, every sequence has T steps.

    Returns:
        A program whose ``module()`` takes ``input`` and the inputs above by name, like the module of
        :func:`exportable`.
    """
    form = exportable(rum)
    assert isinstance(form, _ScanForm)
    values, dynamic = form.example(initial_state, lengths)
    return torch.export.export(form, (), values, dynamic_shapes=dynamic)


def decompositions() -> dict[Any, Callable[..., tuple[Tensor, ...]]]:
    """Return the decompositions of torchrum's operators into torch's own, for runtimes that have no torchrum.

    They are for exported models that contain RUMs with lam 0 or 1, in evaluation. The loop over time is unrolled, so
    the number of steps must be fixed: one step for a stream, with the state as an input and an output of the model.
    The batch size may be dynamic.

    Example:
        >>> import torch
        >>> from torchrum import RUM
        >>> program = torch.export.export(RUM(4, 6).eval(), (torch.randn(5, 3, 4),))
        >>> program = program.run_decompositions(decompositions())
        >>> "torchrum" in str(program.graph)
        False
    """
    return {
        torch.ops.torchrum.gated_scan.default: gated_scan_op.unrolled,
        torch.ops.torchrum.rum_scan.default: rum_scan_op.unrolled,
    }


def to_onnx(rum: RUM, path: str | Path, *, initial_state: bool = True, lengths: bool = True) -> Path:
    """Write ``rum`` as one ONNX file with dynamic T and B; needs ``pip install "torchrum[export]"``.

    The inputs are named ``input``, ``h0``, ``R0`` (lam 1) and ``lengths``, the outputs ``output``, ``h_n`` and ``R_n``
    (lam 1). Each layer and direction is one ``Scan`` node.

    Args:
        rum: as in :func:`exportable`, in float32 or float64.
        path: path of the file to write.
        initial_state, lengths: as in :func:`to_program`.

    Returns:
        ``path``.

    Example::

        to_onnx(rum, "rum.onnx", lengths=False)
        session = onnxruntime.InferenceSession("rum.onnx")
        output, h_n = session.run(None, {"input": x, "h0": h0})
    """
    form = _onnx_form("to_onnx", rum)
    values, dynamic = form.example(initial_state, lengths)
    return _write(form, form, values, dynamic, path)


def to_onnx_step(rum: RUM, path: str | Path) -> Path:
    """Write one step of ``rum`` as an ONNX file, for streams: without ``Scan``, and with the state as input and output.

    The inputs are ``input`` ``(B, I)``, ``h0`` ``(num_layers, B, H)`` and, with lam 1, ``R0``. The outputs are
    ``output`` ``(B, H)``, ``h_n`` and, with lam 1, ``R_n``; pass ``h_n`` and ``R_n`` as the next step's ``h0`` and
    ``R0``. B is dynamic. The first ``h0`` and ``R0`` may be zeros.

    Args:
        rum: as in :func:`to_onnx`, in one direction.
        path: path of the file to write.

    Returns:
        ``path``.

    Example::

        to_onnx_step(rum, "step.onnx")
        session, h = onnxruntime.InferenceSession("step.onnx"), numpy.zeros((rum.num_layers, 1, rum.hidden_size), "f")
        for x in stream:
            output, h = session.run(None, {"input": x, "h0": h})
    """
    form = _onnx_form("to_onnx_step", rum)
    if form.bidirectional:
        raise ValueError("to_onnx_step: rum is bidirectional, which needs whole sequences; take to_onnx.")
    values, dynamic = form.example(True, False)
    time = int(form.batch_first)
    values["input"], dynamic["input"] = values["input"].select(time, 0), {0: dynamic["input"][1 - time]}
    return _write(_Step(form), form, values, dynamic, path)


class _Step(nn.Module):
    """One step of all layers of a RUM in one direction."""

    def __init__(self, form: _ScanForm) -> None:
        super().__init__()
        self.form = form

    def forward(self, input: Tensor, h0: Tensor, R0: Tensor | None = None) -> tuple[Tensor, ...]:
        before = (h0,) if R0 is None else state_parts("RUM", (h0, R0), self.form.state_names)
        after, x = [], input
        for layer in range(self.form.num_layers):
            after.append(self._layer(layer, x, tuple(part[layer] for part in before if part is not None)))
            x = after[-1][0]
        return x, *(torch.stack(column) for column in zip(*after, strict=True))

    def _layer(self, layer: int, x: Tensor, state: State) -> State:
        weights, options = self.form.rum._weights(layer), self.form.rum.options
        weight_hh = weights["weight_hh"]
        if options.gated is None:
            return self.form.states(layer, x, state)
        zeros = weight_hh.new_zeros(len(weight_hh))
        bias_ih, bias_hh = (zeros if weights[name] is None else weights[name] for name in ("bias_ih", "bias_hh"))
        bias, weight_hh = folded(bias_ih, weight_hh, bias_hh)
        parts = F.linear(x, weights["weight_ih"] * gate_signs(zeros), torch.cat(bias)).chunk(3, -1)
        return (onnx_form(list(parts), state[0], weight_hh, bias_hh, None, options.gated[False]),)


def _onnx_form(where: str, rum: RUM) -> _ScanForm:
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f'{where}: {" and ".join(missing)} not installed. Run: pip install "torchrum[export]"')
    form = exportable(rum)
    assert isinstance(form, _ScanForm)
    dtype = next(rum.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{where}: the weights are {dtype}; allowed are float32 and float64. Pass rum.float().")
    return form.cpu()


def _write(
    module: nn.Module, form: _ScanForm, values: dict[str, Tensor], dynamic: dict[str, Any], path: str | Path
) -> Path:
    program = torch.onnx.export(
        module,
        (),
        kwargs=values,
        dynamic_shapes=dynamic,
        input_names=list(values),
        output_names=["output", *(f"{name}_n" for name in form.state_names)],
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    path = Path(path)
    program.save(path, external_data=False)
    return path
