"""The Fast-Slow RNN: several fast cells that share one state, and a slow cell between the first two."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._checks import check_choice, check_positive_int, check_probability
from ..ops.rum_scan.options import LNOrder
from .base import Cell, State
from .lstm import LSTMCell
from .unitary import matrices_fixed

SLOW = ("lstm", "rum")


class FastSlowCell(Cell):
    """FS-RNN-k (Mujika et al., 2017), k = ``len(fast)``, of any cells.

    f = F1(f, drop(x));   s = S(s, drop(out F1));   f = F2(f, drop(out S));   f = Fi(f), i >= 3;   y = drop(out Fk)

    Shapes: x ``(B, I)`` -> output ``(B, H)`` with H of the fast cells; the state is that of the fast cells, which they
    hand on to each other, followed by that of the slow one.

    Args:
        fast: at least two cells of one hidden size and one form of state. The first reads I numbers, the second the
            slow cell's output; from the third on they read nothing: ``input_size=0``.
        slow: reads the output of the first fast cell.
        dropout: chance that a number is zeroed, drawn afresh in each step, at the four places above.
    """

    def __init__(self, fast: Sequence[Cell], slow: Cell, *, dropout: float = 0.0) -> None:
        if len(fast) < 2:
            raise ValueError(f"FastSlowCell: fast has {len(fast)} cells; it needs two or more.")
        super().__init__(fast[0].input_size, fast[0].hidden_size)
        check_probability("FastSlowCell", dropout=dropout)
        reads = [fast[0].input_size, slow.hidden_size, *[0] * (len(fast) - 2)]
        for number, (cell, size) in enumerate(zip(fast, reads, strict=True), start=1):
            if cell.input_size != size:
                raise ValueError(
                    f"FastSlowCell: fast cell {number} reads {cell.input_size} numbers; it must read {size}."
                )
            if (cell.hidden_size, cell.state_names) != (self.hidden_size, fast[0].state_names):
                raise ValueError(
                    f"FastSlowCell: fast cell {number} has the state {cell.state_names} of size {cell.hidden_size}, "
                    f"the first {fast[0].state_names} of {self.hidden_size}; they share one state, so make them alike."
                )
        if slow.input_size != self.hidden_size:
            raise ValueError(
                f"FastSlowCell: the slow cell reads {slow.input_size} numbers; it must read {self.hidden_size}."
            )
        self.fast = cast(Sequence[Cell], nn.ModuleList(fast))
        self.slow = slow
        self.dropout = dropout
        self.state_names = tuple(
            f"{part}_{name}" for part, cell in (("fast", fast[0]), ("slow", slow)) for name in cell.state_names
        )

    def reset_parameters(self) -> None:
        for cell in (*self.fast, self.slow):
            cell.reset_parameters()  # type: ignore[operator]

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        fast = self.fast[0].initial_state(batch_size, device=device, dtype=dtype)
        return fast + self.slow.initial_state(batch_size, device=device, dtype=dtype)

    def project(self, x: Tensor) -> Tensor:
        return self.fast[0].project(self._drop(x))

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        first, second, *others = self.fast
        parts = len(first.state_names)
        fast, slow = state[:parts], state[parts:]
        output, fast = first.step(x, fast)
        told, slow = self.slow.step(self.slow.project(self._drop(output)), slow)
        output, fast = second.step(second.project(self._drop(told)), fast)
        for cell in others:
            output, fast = cell.step(cell.project(output[:, :0]), fast)  # nothing to read
        return self._drop(output), (*fast, *slow)

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        with matrices_fixed(self, state[0].dtype):
            return super().scan(x, state, lengths)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout > 0 else x

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, dropout={self.dropout}"


def fast_slow(
    input_size: int,
    hidden_size: int,
    *,
    slow_size: int | None = None,
    num_fast: int = 2,
    slow: str = "lstm",
    cell_dropout: float = 0.0,
    layer_norm: bool = True,
    zoneout: float = 0.0,
    zoneout_cell: float = 0.0,
    eta: float | None = None,
    ln_order: LNOrder = "before",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> FastSlowCell:
    """FS-LSTM-k or FS-RUM-k as in the Penn Treebank experiments: fast LSTMs and one slow LSTM or RUM.

    Args:
        input_size, hidden_size: I, and H of the fast cells.
        slow_size: hidden size of the slow cell; None means H.
        num_fast: k.
        slow: ``"lstm"`` or ``"rum"``.
        cell_dropout: between the cells, see :class:`FastSlowCell`.
        layer_norm, zoneout: in every cell.
        zoneout_cell: of the LSTMs' c.
        eta, ln_order: of the slow RUM.
        device, dtype: of the parameters.
    """
    check_choice("fast_slow", "slow", slow, SLOW)
    check_positive_int("fast_slow", num_fast=num_fast)
    if slow != "rum" and (eta is not None or ln_order != "before"):
        raise ValueError(
            f"fast_slow: eta={eta!r} and ln_order={ln_order!r} need slow='rum'; slow={slow!r} has neither."
        )
    size = hidden_size if slow_size is None else slow_size

    def lstm(inputs: int, hidden: int) -> LSTMCell:
        return LSTMCell(
            inputs,
            hidden,
            layer_norm=layer_norm,
            zoneout=zoneout,
            zoneout_cell=zoneout_cell,
            init="orthogonal",
            device=device,
            dtype=dtype,
        )

    fast = [lstm(inputs, hidden_size) for inputs in (input_size, size, *[0] * (num_fast - 2))[:num_fast]]
    if slow == "lstm":
        return FastSlowCell(fast, lstm(hidden_size, size), dropout=cell_dropout)
    from .rum import RUMCell

    rum = RUMCell(
        hidden_size,
        size,
        eta=eta,
        layer_norm=layer_norm,
        ln_order=ln_order,
        zoneout=zoneout,
        device=device,
        dtype=dtype,
    )
    return FastSlowCell(fast, rum, dropout=cell_dropout)
