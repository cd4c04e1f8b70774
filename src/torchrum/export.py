"""A trained RUM outside Python: ``torch.export``, AOTInductor and ONNX, all with dynamic time and batch.

A model that holds a RUM needs nothing from here: ``torch.onnx.export(model, ..., dynamo=True)`` and
``torch.export.export(model, ...)`` take it as it is. In ONNX the recurrence is one ``Scan`` per layer and direction; a
program of ``torch.export`` names torchrum's operator, which loads where torchrum is installed and has gradients. What
:func:`to_program` returns is the form with torch's own ``scan`` operator instead, which runs without torchrum.
"""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from torchrum.cells.rum import project_rum
from torchrum.layers.recurrent import Recurrent, State
from torchrum.layers.rum import RUM
from torchrum.ops.gated_scan.scan_form import gated_scan_form
from torchrum.ops.rum_scan import ScanInputs, rum_scan_form

__all__ = ["exportable", "to_onnx", "to_program"]

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
        return "RUM"  # what errors speak of

    def initial_state(self, index: int, batch_size: int, like: Tensor) -> State:
        return self.rum.initial_state(index, batch_size, like)

    def forward(  # type: ignore[override]  # tensors in, tensors out: what export formats speak
        self, input: Tensor, h0: Tensor | None = None, R0: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """``output, h_n`` of the RUM, and ``R_n`` where it has one; ``input`` is batched."""
        given = (h0, R0)[: len(self.state_names)]
        hx = None if all(part is None for part in given) else given if len(given) > 1 else h0
        results: Any = super().forward(input, hx, lengths=lengths)
        output, hidden = results
        return output, *(hidden if isinstance(hidden, tuple) else (hidden,))

    def scan(self, index: int, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        weights = self.rum._weights(index)
        options = self.rum.options
        xp, weight_hh = project_rum(x, weights, options), weights["weight_hh"]
        assert weight_hh is not None
        if options.gated is not None:
            states = gated_scan_form(xp, state[0], weight_hh, weights["bias_hh"], lengths, options.gated[False])
            return states, (states[-1],)
        R0 = state[1] if len(state) == 2 else None
        inputs = ScanInputs(xp, state[0], R0, weight_hh, weights["ln_weight"], weights["ln_bias"], lengths)
        states, R_n = rum_scan_form(inputs, options)
        return states, (states[-1],) if R_n is None else (states[-1], R_n)

    def example(self, initial_state: bool, lengths: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Inputs to trace with, by name, and which of their dimensions are dynamic."""
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
    """A frozen copy of ``rum`` in evaluation mode that ``torch.export`` can trace with dynamic T and B.

    Args:
        rum: with lam 0 or 1; every other option is free.

    Returns:
        A module ``forward(input, h0=None, R0=None, lengths=None) -> (output, h_n)``, or ``(output, h_n, R_n)`` with
        lam 1. Shapes are those of ``rum``; ``input`` is batched.

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
        initial_state: take ``h0`` (and ``R0``); without it every run starts from zeros (and the identity).
        lengths: take ``lengths`` ``(B,)`` int64; without it every sequence has T steps.

    Returns:
        A program whose ``module()`` is called with ``input`` and the parts above by name, as :func:`exportable`'s.
    """
    form = exportable(rum)
    assert isinstance(form, _ScanForm)
    values, dynamic = form.example(initial_state, lengths)
    return torch.export.export(form, (), values, dynamic_shapes=dynamic)


def to_onnx(rum: RUM, path: str | Path, *, initial_state: bool = True, lengths: bool = True) -> Path:
    """Write ``rum`` as one ONNX file with dynamic T and B; needs ``pip install "torchrum[export]"``.

    Inputs are named ``input``, ``h0``, ``R0`` (lam 1) and ``lengths``, outputs ``output``, ``h_n`` and ``R_n`` (lam 1);
    each layer and direction is one ``Scan`` node.

    Args:
        rum: as in :func:`exportable`, in float32 or float64.
        path: of the file to write.
        initial_state, lengths: as in :func:`to_program`.

    Returns:
        ``path``.

    Example::

        to_onnx(rum, "rum.onnx", lengths=False)
        session = onnxruntime.InferenceSession("rum.onnx")
        output, h_n = session.run(None, {"input": x, "h0": h0})
    """
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f'to_onnx: {" and ".join(missing)} not installed. Run: pip install "torchrum[export]"')
    form = exportable(rum)
    assert isinstance(form, _ScanForm)
    dtype = next(rum.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"to_onnx: the weights are {dtype}; allowed are float32 and float64. Pass rum.float().")
    values, dynamic = form.cpu().example(initial_state, lengths)
    program = torch.onnx.export(
        form,
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
