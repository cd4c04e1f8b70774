"""The Rotational Unit of Memory, one step at a time."""

import torch
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.calling import call_as_nn
from torchrum.cells.rum_sequence import project_rum, run_rum, scan_rum
from torchrum.cells.rum_settings import PAPER_OPTIONS, USUAL, Eta, RumSettings
from torchrum.cells.rum_weights import (
    RUM_PARAMETERS,
    Weights,
    check_dtype,
    init_rum_weights,
    misfit,
    rum_initial_state,
    rum_shapes,
)
from torchrum.ops._checks import check_flags, check_positive_int
from torchrum.ops._dispatch import Backend
from torchrum.ops.rum_scan.options import Activation, LNOrder

__all__ = ["PAPER_OPTIONS", "RUMCell"]


class RUMCell(Cell):
    """One step of the Rotational Unit of Memory (Dangovski et al., TACL 2019; arXiv 1710.09537).

    ::

        eps = W_eps x + b_eps
        tau = W_tau x + U_tau h + b_tau;  u = sigmoid(W_u x + U_u h + b_u)
        R' = R^lam . Rotation(eps, tau);  h~ = f(eps + R' h);  h' = u * h + (1 - u) * h~
        and with eta:  h' = eta h' / |h'|

    It is called as :class:`torch.nn.GRUCell` is, ``h = cell(x, h)``, and with any ``lam`` but 0 as
    :class:`torch.nn.LSTMCell` is, ``h, R = cell(x, (h, R))``. x is ``(B, I)`` or ``(I,)``, h ``(B, H)`` or ``(H,)`` and
    R, which is orthogonal, ``(B, H, H)`` or ``(H, H)``.

    The defaults are chosen on everyday tasks; ``RUMCell(10, 20, **PAPER_OPTIONS)`` is the paper's cell.

    Args:
        input_size, hidden_size, bias, device, dtype: as in :class:`torch.nn.GRUCell`.
        lam: exponent of the accumulated rotation R. 0 keeps none; 1 accumulates the rotations; other integers and
            reals raise R to that power in every step, at a cost of H^3.
        learn_lam: make ``lam`` a parameter that starts at the value given.
        eta: norm given to every new state (time normalisation), "sqrt" for the root of ``hidden_size``, or None.
        activation: the function f, by name ("relu", "tanh", "sigmoid", "softsign") or any elementwise callable.
        target_activation: the same for the target tau; None, as in the paper, leaves it linear.
        update_gate: False takes the candidate h~ as the new state.
        layer_norm: normalise tau, u and the argument of f.
        ln_order: "before" normalises u before its sigmoid, "authors" after it, as the original implementation did.
        zoneout: chance that a unit keeps its old value, below 1; in evaluation the two values are mixed in that
            proportion.
        embed_bias: False leaves out b_eps.
        target_bias_init, update_bias_init: start values of b_tau and b_u.
        embed_bias_init: standard deviation of the normal numbers that b_eps starts from; 0 starts it at zero.
        embed_scale: standard deviation that eps starts with, without b_eps, for inputs of mean 0 and variance 1; None,
            as in the paper, starts W_eps semi-orthogonal.
        gate_scale: factor of the start of W_tau, U_tau, W_u and U_u, whose rows are orthonormal over both together.
        backend: "auto", or "fused", "native", "torch" or "reference" to insist on one; "persistent", "stepwise" and
            "lam1" insist on one design of "fused".

    Example:
        >>> cell, h = RUMCell(10, 20), torch.zeros(3, 20)
        >>> for x in torch.randn(6, 3, 10):
        ...     h = cell(x, h)
        >>> h.shape
        torch.Size([3, 20])
        >>> h, R = RUMCell(10, 20, lam=1)(torch.randn(3, 10))
        >>> R.shape
        torch.Size([3, 20, 20])
    """

    weight_ih: nn.Parameter

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        lam: float = USUAL.lam,
        learn_lam: bool = USUAL.learn_lam,
        eta: Eta = USUAL.eta,
        activation: Activation = USUAL.activation,
        target_activation: Activation | None = USUAL.target_activation,
        update_gate: bool = USUAL.update_gate,
        layer_norm: bool = USUAL.layer_norm,
        ln_order: LNOrder = USUAL.ln_order,
        zoneout: float = USUAL.zoneout,
        embed_bias: bool = USUAL.embed_bias,
        target_bias_init: float = USUAL.target_bias_init,
        update_bias_init: float = USUAL.update_bias_init,
        embed_bias_init: float = USUAL.embed_bias_init,
        embed_scale: float | None = USUAL.embed_scale,
        gate_scale: float = USUAL.gate_scale,
        backend: Backend = USUAL.backend,
    ) -> None:
        check_positive_int("RUMCell", input_size=input_size, hidden_size=hidden_size)
        check_flags("RUMCell", bias=bias)
        check_dtype("RUMCell", dtype)
        super().__init__(input_size, hidden_size)
        self.settings = RumSettings.given("RUMCell", locals())
        self.options = self.settings.options(hidden_size)
        self.backend: Backend = backend
        self._shapes = rum_shapes(input_size, hidden_size, self.options, bias, embed_bias)
        for name in RUM_PARAMETERS:
            shape = self._shapes.get(name)
            self.register_parameter(
                name, None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
        self.state_names = ("h", "R") if self.options.keeps_rotation else ("h",)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights and biases again, as the arguments of the constructor say."""
        init_rum_weights(self._weights(), self.settings)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return rum_initial_state(batch_size, self.hidden_size, self.options, device, dtype)

    def forward(  # type: ignore[override]  # the engine calls step and scan; a user calls the cell as torch.nn's
        self, input: Tensor, hx: Tensor | tuple[Tensor | None, ...] | None = None
    ) -> Tensor | State:
        """One step.

        Args:
            input: ``(B, I)``, or ``(I,)`` without a batch.
            hx: h, or ``(h, R)`` with lam other than 0; zeros (and the identity) if None, the identity for R = None.

        Returns:
            The new h, or ``(h, R)``, in the form of ``hx``.
        """
        H = self.hidden_size
        shapes = ((H,), (H, H))[: len(self.state_names)]
        return call_as_nn(self, input, hx, self.weight_ih, shapes, self._advance)

    def _advance(self, x: Tensor, state: State) -> State:
        """The state after the one step of ``x`` ``(1, B, I)``; where gradients are recorded, apart from the scan's."""
        returned, training = () if torch.is_grad_enabled() else None, self.training
        return run_rum(x, state, self._fitting(x), self.options, None, training, self.backend, returned)[1]

    def project(self, x: Tensor) -> Tensor:
        return project_rum(x, self._fitting(x), self.options)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        weights = self._fitting(x)
        output, state = scan_rum(x.unsqueeze(0), state, weights, self.options, None, self.training, self.backend)
        return output.squeeze(0), state

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        return run_rum(x, state, self._fitting(x), self.options, lengths, self.training, self.backend)

    def _weights(self) -> Weights:
        return {name: getattr(self, name) for name in RUM_PARAMETERS}

    def _fitting(self, x: Tensor) -> Weights:
        """The weights, if kernels can read them for an input on the device of ``x``."""
        weights, device = self._weights(), x.device
        for name, shape in self._shapes.items():
            part = weights[name]  # None for a bias that was taken away
            if part is not None and (part.device != device or part.shape != shape):
                raise misfit("RUMCell", name, part, shape, device)
        return weights

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + self.settings.describe(self._weights()["lam"])
