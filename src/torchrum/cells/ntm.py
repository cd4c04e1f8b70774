"""The Neural Turing Machine: an LSTM controller that reads and writes a memory by content and by place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.init import glorot_
from torchrum.cells.lstm import LSTMCell
from torchrum.cells.unitary import widen
from torchrum.ops._checks import check_choice, check_finite, check_positive_int

STYLES = ("collier", "graves")
LIMIT = 20.0
"""Bound of the outputs and of the parameters of the heads in style "collier"."""


class NTMCell(Cell):
    """Neural Turing Machine (Graves et al., 2014) with an LSTM controller.

    controller:  h', c' = LSTM([x; r], h, c)
    each head:   key k, strength beta, gate g, shifts s, sharpness gamma = affine(h'), see :func:`address`
    read:        r' = w M
    write:       M' = M * prod(1 - w e^T) + sum(w a^T), erase e = sigmoid(.), add a = tanh(.)
    output:      y = affine([h'; r'])

    Style ``"collier"`` is the implementation of Collier & Beel (2018): keys pass through a tanh; the parameters of the
    heads and the output are clipped to +-20; the start of the memory, of the reads and of the weights of the heads is
    trained. Style ``"graves"`` has none of these, reads from M' instead of M, and starts every head on slot 0.

    Shapes: x ``(B, I)`` -> output ``(B, H)``; state ``h, c`` ``(B, H)``, ``read`` ``(B, heads, M)``, ``memory``
    ``(B, N, M)``, ``read_weights`` and ``write_weights`` ``(B, heads, N)``. For 16-bit dtypes the last three are
    float32.

    Args:
        input_size, hidden_size: I, H.
        num_slots, slot_size: N, M of the memory.
        num_read_heads, num_write_heads: heads.
        max_shift: a head moves by at most this many slots per step.
        memory_start: constant that the memory starts with.
        style: ``"collier"`` or ``"graves"``, see above.
        device, dtype: of the parameters.
    """

    state_names = ("h", "c", "read", "memory", "read_weights", "write_weights")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_slots: int = 128,
        slot_size: int = 20,
        num_read_heads: int = 1,
        num_write_heads: int = 1,
        max_shift: int = 1,
        memory_start: float = 1e-6,
        style: str = "collier",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("NTMCell", input_size=input_size, hidden_size=hidden_size)
        check_positive_int("NTMCell", num_slots=num_slots, slot_size=slot_size, max_shift=max_shift)
        check_positive_int("NTMCell", num_read_heads=num_read_heads, num_write_heads=num_write_heads)
        check_finite("NTMCell", memory_start=memory_start)
        check_choice("NTMCell", "style", style, STYLES)
        if 2 * max_shift + 1 > num_slots:
            raise ValueError(
                f"NTMCell: max_shift={max_shift} wraps around {num_slots} slots; it must be at most "
                f"{(num_slots - 1) // 2}."
            )
        self.num_slots = num_slots
        self.slot_size = slot_size
        self.num_read_heads = num_read_heads
        self.num_write_heads = num_write_heads
        self.max_shift = max_shift
        self.memory_start = memory_start
        self.style = style
        read_size = num_read_heads * slot_size
        self.address_sizes = (slot_size, 1, 1, 2 * max_shift + 1, 1)  # k, beta, g, s, gamma
        num_heads = num_read_heads + num_write_heads
        head_size = num_heads * sum(self.address_sizes) + num_write_heads * 2 * slot_size
        self.controller = LSTMCell(read_size, hidden_size, device=device, dtype=dtype)
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size, device=device, dtype=dtype))
        self.heads = nn.Linear(hidden_size, head_size, device=device, dtype=dtype)
        self.readout = nn.Linear(hidden_size + read_size, hidden_size, device=device, dtype=dtype)
        if style == "collier":

            def empty(*shape: int) -> nn.Parameter:
                return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

            self.start_read = empty(num_read_heads, slot_size)
            self.start_memory = empty(num_slots, slot_size)
            self.start_weights = empty(num_heads, num_slots)  # read heads first
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.controller.reset_parameters()
        glorot_(self.weight_ih)
        for linear in (self.heads, self.readout):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        if self.style == "collier":
            deviation = self.hidden_size**-0.5
            nn.init.trunc_normal_(self.heads.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            for start in (self.start_read, self.start_weights):
                glorot_(start)
            nn.init.constant_(self.start_memory, self.memory_start)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        h, c = self.controller.initial_state(batch_size, device=device, dtype=dtype)
        if self.style == "collier":
            wide = widen(h).dtype
            read = torch.tanh(self.start_read).to(device=device, dtype=dtype)
            memory = self.start_memory.to(device=device, dtype=wide)
            weights = torch.softmax(self.start_weights.to(device=device, dtype=wide), -1)
            parts = (read, memory, *weights.split((self.num_read_heads, self.num_write_heads)))
            return (h, c, *(part.expand(batch_size, *part.shape) for part in parts))
        read = h.new_zeros(batch_size, self.num_read_heads, self.slot_size)
        memory = widen(h).new_full((batch_size, self.num_slots, self.slot_size), self.memory_start)
        on_first = (torch.arange(self.num_slots, device=device) == 0).to(memory.dtype)
        on_slot_0 = (on_first.repeat(batch_size, heads, 1) for heads in (self.num_read_heads, self.num_write_heads))
        return (h, c, read, memory, *on_slot_0)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c, read, memory, read_weights, write_weights = state
        h, (h, c) = self.controller.step(x + self.controller.project(read.flatten(1)), (h, c))

        collier, R, W = self.style == "collier", self.num_read_heads, self.num_write_heads
        heads = self.heads(h).to(memory.dtype)
        if collier:
            heads = heads.clamp(-LIMIT, LIMIT)
        asked, erased, added = heads.split(
            ((R + W) * sum(self.address_sizes), W * self.slot_size, W * self.slot_size), -1
        )
        key, *others = asked.unflatten(-1, (R + W, -1)).split(self.address_sizes, -1)
        parts = [torch.tanh(key) if collier else key, *others]
        write_weights = address(memory, write_weights, *(part[:, R:] for part in parts))
        written = memory
        erase = torch.sigmoid(erased.unflatten(-1, (W, -1)))
        add = torch.tanh(added.unflatten(-1, (W, -1)))
        for w, e in zip(write_weights.unbind(1), erase.unbind(1), strict=True):  # prod's backward waits for the host
            written = written * (1 - w.unsqueeze(-1) * e.unsqueeze(-2))  # (B, N, M)
        written = written + torch.einsum("bwn,bwm->bnm", write_weights, add)
        source = memory if collier else written
        read_weights = address(source, read_weights, *(part[:, :R] for part in parts))
        read = torch.einsum("brn,bnm->brm", read_weights, source).to(h.dtype)

        output = self.readout(torch.cat((h, read.flatten(1)), -1))
        if collier:
            output = output.clamp(-LIMIT, LIMIT)
        return output, (h, c, read, written, read_weights, write_weights)

    def extra_repr(self) -> str:
        words = f"{self.input_size}, {self.hidden_size}, num_slots={self.num_slots}, slot_size={self.slot_size}"
        heads = f"num_read_heads={self.num_read_heads}, num_write_heads={self.num_write_heads}"
        return f"{words}, {heads}, max_shift={self.max_shift}, style={self.style!r}"


def address(
    memory: Tensor, before: Tensor, key: Tensor, beta: Tensor, gate: Tensor, shift: Tensor, gamma: Tensor
) -> Tensor:
    """Compute the weights of each head: by content, mixed with those ``before``, then shifted and sharpened.

    Args:
        memory: ``(B, N, M)``.
        before: ``(B, heads, N)``, the weights of the last step.
        key, beta, gate, shift, gamma: ``(B, heads, M or 1 or 2 max_shift + 1)``, before their nonlinearities.

    Returns:
        ``(B, heads, N)``, non-negative and of sum 1.
    """
    similar = torch.einsum("bhm,bnm->bhn", F.normalize(key, dim=-1), F.normalize(memory, dim=-1))
    content = torch.softmax(F.softplus(beta) * similar, -1)
    gate = torch.sigmoid(gate)
    weights = gate * content + (1 - gate) * before
    reach = shift.shape[-1] // 2
    moved = torch.stack([weights.roll(by, -1) for by in range(-reach, reach + 1)], -1)
    weights = (moved * torch.softmax(shift, -1).unsqueeze(-2)).sum(-1)
    # w^gamma / sum of w^gamma, by logarithms: a large gamma must not turn every weight into 0
    return torch.softmax((1 + F.softplus(gamma)) * weights.clamp_min(1e-12).log(), -1)
