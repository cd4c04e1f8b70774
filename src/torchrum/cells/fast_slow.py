"""The Fast-Slow RNN: several fast cells that share one state, and a slow cell between the first two."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State, with_mask
from torchrum.cells.composite import CompositeCell, PrecededCell, SideBySideCell
from torchrum.cells.lstm import LSTMCell, projected_like
from torchrum.cells.rum import RELU_OPTIONS, TANH_OPTIONS, Eta, RUMCell
from torchrum.ops._checks import check_choice, check_positive_int, check_probability
from torchrum.ops._dispatch import Backend, Choice, choose_fused
from torchrum.ops.fast_slow_scan import (
    CellWeights,
    FastSlowInputs,
    FastSlowOptions,
    fast_slow_scan,
    fast_slow_scan_choice,
)
from torchrum.ops.rum_scan.options import DEFAULTS, LNOrder

LSTMS = ("lstm", "rotational_lstm")
SLOW = (*LSTMS, "rum", "rum-tanh", "rum-gated")


class FastSlowCell(CompositeCell):
    """FS-RNN-k (Mujika et al., 2017) of any cells, with k = ``len(fast)``.

    f = F1(f, drop(x));   s = S(s, drop(out F1));   f = F2(f, drop(out S));   f = Fi(f), i >= 3;   y = drop(out Fk)

    Shapes: x ``(B, I)`` -> output ``(B, H)`` with the fast cells' H. The state is the shared state of the fast cells,
    followed by the state of the slow cell.

    Args:
        fast: at least two cells with the same hidden size and form of state. The first reads x, the second the slow
            cell's output; the others have no input: ``input_size=0``.
        slow: the slow cell, which reads the output of the first fast cell.
        dropout: probability that a number is zeroed, drawn in each step, at the four places above.
        slow_dropout: the same for the input of the slow cell; None means ``dropout``.
        backend: backend of ``scan``: "auto", "fused" to insist on the kernels for fast LSTMs with a slow LSTM or a slow
            RUM of lam 0, or "torch" or "reference" for the plain loop.
    """

    may_read_nothing = True
    shown = ("dropout",)

    def __init__(
        self,
        fast: Sequence[Cell],
        slow: Cell,
        *,
        dropout: float = 0.0,
        slow_dropout: float | None = None,
        backend: Backend = "auto",
    ) -> None:
        if len(fast) < 2:
            raise ValueError(f"FastSlowCell: fast has {len(fast)} cells; it needs two or more.")
        super().__init__(fast[0].input_size, fast[0].hidden_size)
        slow_dropout = dropout if slow_dropout is None else slow_dropout
        check_probability("FastSlowCell", dropout=dropout, slow_dropout=slow_dropout)
        check_choice("FastSlowCell", "backend", backend, ("auto", "fused", "torch", "reference"))
        reads = [fast[0].input_size, slow.hidden_size, *[0] * (len(fast) - 2)]
        for number, (cell, size) in enumerate(zip(fast, reads, strict=True), start=1):
            if cell.input_size != size:
                raise ValueError(
                    f"FastSlowCell: fast cell {number} has input_size={cell.input_size}; it must be {size}."
                )
            if (cell.hidden_size, cell.state_names) != (self.hidden_size, fast[0].state_names):
                raise ValueError(
                    f"FastSlowCell: fast cell {number} has the state {cell.state_names} of size {cell.hidden_size}, "
                    f"but all share the state of the first one, {fast[0].state_names} of size {self.hidden_size}."
                )
        if slow.input_size != self.hidden_size:
            raise ValueError(
                f"FastSlowCell: the slow cell has input_size={slow.input_size}; it must be {self.hidden_size}."
            )
        self.fast = cast(Sequence[Cell], nn.ModuleList(fast))
        self.slow = slow
        self.dropout, self.slow_dropout = dropout, slow_dropout
        self.backend: Backend = backend
        self.state_names = tuple(
            f"{part}_{name}" for part, cell in (("fast", fast[0]), ("slow", slow)) for name in cell.state_names
        )

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells in the order of a step: F1, S, F2, F3, ..."""
        first, *others = self.fast
        return first, self.slow, *others

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        fast = self.fast[0].initial_state(batch_size, device=device, dtype=dtype)
        return fast + self.slow.initial_state(batch_size, device=device, dtype=dtype)

    def project(self, x: Tensor) -> Tensor:
        return self.fast[0].project(self._drop(x, self.dropout))

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        x, masks = self.split_masks(x)
        first, second, *others = self.fast
        parts = len(first.state_names)
        fast, slow = state[:parts], state[parts:]
        output, fast = first.step(with_mask(x, masks[0]), fast)
        slow_output = self.slow.project(self._drop(output, self.slow_dropout))
        slow_output, slow = self.slow.step(with_mask(slow_output, masks[1]), slow)
        output, fast = second.step(with_mask(second.project(self._drop(slow_output, self.dropout)), masks[2]), fast)
        for cell, mask in zip(others, masks[3:], strict=True):
            output, fast = cell.step(with_mask(cell.project(output[:, :0]), mask), fast)  # nothing to read
        return self._drop(output, self.dropout), (*fast, *slow)

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        if self.explain_backend(x, lengths).backend == "fused":
            output, fast, slow = fast_slow_scan(self.scan_inputs(x, state), self.scan_options(), backend="fused")
            return output, (*fast, *slow)
        return super().scan(x, state, lengths)

    def explain_backend(self, x: Tensor, lengths: Tensor | None = None) -> Choice:
        """Return the backend that ``scan`` takes for ``x`` ``(T, B, I)``, and the reason."""
        obstacle = self._obstacle(lengths)
        if obstacle is not None:
            return choose_fused(self.backend, lambda: obstacle)
        xp = projected_like(x, self.scan_options().fast[0].blocks * self.hidden_size)
        return fast_slow_scan_choice(xp, self.slow.hidden_size, self.scan_options(), backend=self.backend)

    def _obstacle(self, lengths: Tensor | None) -> str | None:
        """Return the reason why the kernels cannot run these cells, or None."""
        if not all(isinstance(cell, LSTMCell) for cell in self.fast):
            return "the fast cells are not all LSTMs, and the kernels know only them"
        if not isinstance(self.slow, LSTMCell | RUMCell):
            return f"the slow cell is a {type(self.slow).__name__}, and the kernels know LSTM and RUM"
        if isinstance(self.slow, RUMCell) and self.slow.lam is not None:
            return "the slow cell's lam is learnable, and the kernels are written for lam 0"
        if lengths is not None:
            return "the rows have lengths of their own, and the kernels take whole sequences"
        return None

    def scan_options(self) -> FastSlowOptions:
        """Return the hyper-parameters for the kernels; only for cells that they support."""
        fast = tuple(cell.scan_options() for cell in self.fast if isinstance(cell, LSTMCell))
        slow: Any = self.slow
        if isinstance(slow, LSTMCell):
            slow = slow.scan_options()
        elif slow.options.gated is not None:
            slow = slow.options.gated[slow.training]
        else:
            slow = slow.options.with_training(slow.training)
        return FastSlowOptions(
            fast=fast, slow=slow, dropout=self.dropout, slow_dropout=self.slow_dropout, training=self.training
        )

    def scan_inputs(self, x: Tensor, state: State) -> FastSlowInputs:
        """Return the inputs of ``fast_slow_scan``; only for cells that the kernels support."""
        first, second, *others = (cell.scan_weights() for cell in self.fast if isinstance(cell, LSTMCell))
        slow = self.slow.scan_weights() if isinstance(self.slow, LSTMCell) else rum_weights(self.slow)
        weights = [first._replace(weight_ih=None, bias=None), slow, second]
        # an empty weight_ih adds nothing, but the caller's parameter must have a gradient
        weights += [
            cell._replace(weight_ih=None, bias=cell.bias + cell.weight_ih.sum(1))
            for cell in others
            if cell.bias is not None and cell.weight_ih is not None
        ]
        xp = self.project(x)
        return FastSlowInputs(xp, state[:2], state[2:], weights, masks=self.draw_masks(xp))

    def _drop(self, x: Tensor, chance: float) -> Tensor:
        return F.dropout(x, chance, self.training) if chance > 0 else x

    def extra_repr(self) -> str:
        slow = "" if self.slow_dropout == self.dropout else f", slow_dropout={self.slow_dropout}"
        return f"{super().extra_repr()}{slow}"


def rum_weights(cell: Cell) -> CellWeights:
    """Return a RUM's parameters for the kernels: one matmul over its input and its state, and one bias."""
    if isinstance(cell, RUMCell) and cell.options.gated is not None:
        return gated_weights(cell)
    names = ("weight_ih", "weight_hh", "bias_ih", "ln_weight", "ln_bias")
    weights = CellWeights(*(getattr(cell, name) for name in names))
    rows = weights.weight_ih.shape[0] if weights.weight_ih is not None else 0
    if weights.bias is not None and weights.bias.shape[0] < rows:
        return weights._replace(bias=F.pad(weights.bias, (0, rows - weights.bias.shape[0])))  # no bias for eps
    return weights


def gated_weights(cell: RUMCell) -> CellWeights:
    """Return a gated RUM's parameters in blocks r, u, tau, eps: tau reads only the state, eps only the input."""
    S, bias = cell.hidden_size, None
    ih, hh, first, second = (getattr(cell, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    if first is not None and second is not None:
        bias = torch.cat((first[: 2 * S] + second[: 2 * S], second[2 * S :], first[2 * S :]))
    weight_ih = torch.cat((ih[: 2 * S], ih.new_zeros(S, ih.shape[1]), ih[2 * S :]))
    return CellWeights(weight_ih, hh, bias, None, None)


def fast_slow(
    input_size: int,
    hidden_size: int,
    *,
    slow_size: int | None = None,
    num_fast: int = 2,
    slow: str = "lstm",
    fast: str = "lstm",
    cell_dropout: float = 0.0,
    slow_dropout: float | None = None,
    layer_norm: bool = True,
    zoneout: float = 0.0,
    slow_zoneout: float | None = None,
    zoneout_cell: float = 0.0,
    state_dropout: float = 0.0,
    slow_state_dropout: float | None = None,
    eta: Eta = None,
    ln_order: LNOrder = "before",
    head_size: int = DEFAULTS.head_size,
    rotated: float = DEFAULTS.rotated,
    memory_size: int = 0,
    memory: str = "slow",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> FastSlowCell | PrecededCell:
    """Build an FS-LSTM-k or FS-RUM-k as in the Penn Treebank experiments: fast LSTMs and one slow LSTM or RUM.

    Args:
        input_size, hidden_size: I, and H of the fast cells.
        slow_size: hidden size of the slow cell; None means H.
        num_fast: k, the number of fast cells.
        slow: ``"lstm"``; ``"rotational_lstm"``, an LSTM with a rotated candidate; ``"rum"``, a RUM with the paper's
            options; ``"rum-tanh"``, a RUM of the paper's form with tanh and bounded states; or ``"rum-gated"``, which
            has no layer norm.
        fast: ``"lstm"`` or ``"rotational_lstm"``.
        cell_dropout: dropout between the cells, see :class:`FastSlowCell`.
        slow_dropout: dropout of the slow cell's input; None means ``cell_dropout``. In trials a slow RUM did better
            with 0: the noise that dropout adds to the two vectors of a rotation changes its plane and does not average
            out.
        layer_norm, zoneout: layer norm and zoneout of h in every cell.
        slow_zoneout: zoneout of the slow cell's h; None means ``zoneout``. In trials a slow RUM did better with 0.
        zoneout_cell: zoneout of c in the LSTMs.
        state_dropout: probability that a unit of h is hidden from a cell's recurrent matmul, with one mask per call.
        slow_state_dropout: the same for the slow cell; None means ``state_dropout``.
        eta: norm of the slow RUM's state. None means no normalisation with the paper's options, and ``"sqrt"``, the
            root of the cell's size, with ``"rum-tanh"``.
        ln_order: order of layer norm in the slow RUM.
        head_size, rotated: options of the slow gated RUM.
        memory_size: units of an associative memory, a RUM of lam 1 with states of norm 1; 0 for none.
        memory: place of this memory. ``"slow"`` is beside the slow cell: the second fast cell reads both, and there is
            no fused scan. ``"input"`` is before the first fast cell, which reads the input and the memory; the memory
            and the other cells then scan one after the other, each by its kernels.
        device, dtype: device and dtype of the parameters.
        backend: see :class:`FastSlowCell`.
    """
    check_choice("fast_slow", "slow", slow, SLOW)
    check_choice("fast_slow", "fast", fast, LSTMS)
    check_choice("fast_slow", "memory", memory, ("slow", "input"))
    if memory_size != 0:
        check_positive_int("fast_slow", memory_size=memory_size)
    size = hidden_size if slow_size is None else slow_size
    check_positive_int("fast_slow", num_fast=num_fast, slow_size=size)
    slow_zoneout = zoneout if slow_zoneout is None else slow_zoneout
    slow_state_dropout = state_dropout if slow_state_dropout is None else slow_state_dropout
    check_probability("fast_slow", cell_dropout=cell_dropout, zoneout=zoneout, slow_zoneout=slow_zoneout)
    check_probability("fast_slow", state_dropout=state_dropout, slow_state_dropout=slow_state_dropout)
    if slow not in ("rum", "rum-tanh") and (eta is not None or ln_order != "before"):
        raise ValueError(
            f"fast_slow: eta={eta!r} and ln_order={ln_order!r} need a slow RUM of the paper's form; slow={slow!r} has "
            "neither."
        )
    if slow != "rum-gated" and (head_size, rotated) != (DEFAULTS.head_size, DEFAULTS.rotated):
        raise ValueError(
            f"fast_slow: head_size={head_size!r} and rotated={rotated!r} need slow='rum-gated'; slow={slow!r} has "
            "neither."
        )

    def lstm(
        kind: str, inputs: int, hidden: int, zoneout: float = zoneout, state_dropout: float = state_dropout
    ) -> LSTMCell:
        return LSTMCell(
            inputs,
            hidden,
            rotational=kind == "rotational_lstm",
            layer_norm=layer_norm,
            zoneout=zoneout,
            zoneout_cell=zoneout_cell,
            state_dropout=state_dropout,
            init="orthogonal",
            device=device,
            dtype=dtype,
        )

    beside, before = (memory_size if memory == place else 0 for place in ("slow", "input"))
    reads = (input_size + before, size + beside, *[0] * (num_fast - 2))[:num_fast]
    cells = [lstm(fast, inputs, hidden_size) for inputs in reads]
    own: Cell
    if slow in LSTMS:
        own = lstm(slow, hidden_size, size, slow_zoneout, slow_state_dropout)
    elif slow == "rum-gated":
        own = RUMCell(
            hidden_size,
            size,
            head_size=head_size,
            rotated=rotated,
            zoneout=slow_zoneout,
            state_dropout=slow_state_dropout,
            device=device,
            dtype=dtype,
        )
    else:
        options = TANH_OPTIONS if slow == "rum-tanh" else RELU_OPTIONS
        own = RUMCell(
            hidden_size,
            size,
            layer_norm=layer_norm,
            ln_order=ln_order,
            zoneout=slow_zoneout,
            state_dropout=slow_state_dropout,
            device=device,
            dtype=dtype,
            form="paper",
            **{**options, **({} if eta is None else {"eta": eta})},
        )

    def associative(inputs: int) -> RUMCell:
        options = {**RELU_OPTIONS, "eta": 1.0, "lam": 1.0, "layer_norm": layer_norm}
        return RUMCell(inputs, memory_size, device=device, dtype=dtype, form="paper", **options)

    if beside:
        own = SideBySideCell(own, associative(hidden_size))
    cell = FastSlowCell(cells, own, dropout=cell_dropout, slow_dropout=slow_dropout, backend=backend)
    return PrecededCell(associative(input_size), cell) if before else cell
