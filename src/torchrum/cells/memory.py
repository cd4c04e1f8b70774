"""Cells with a memory matrix: fast weights, DeltaNet, and the Neural Turing Machine."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.base import Cell, State
from torchrum.cells.init import glorot_, new_parameter, widen
from torchrum.cells.lstm import LSTMCell
from torchrum.ops._checks import check_choice, check_finite, check_flags, check_not_negative, check_positive_int

ENCODER_SIZES = (50, 100)
"""Widths of the two layers between a symbol and the recurrent layer (Ba et al., 2016)."""


class FastWeightsCell(Cell):
    """RNN with fast weights and layer norm (Ba et al., 2016), FW-LN in the recall table.

    A' = decay A + rate h h^T;   z = W h + C x
    h_0 = relu(LN(z));   h_{s+1} = relu(LN(z + A' h_s)), S inner steps;   h' = h_S

    Shapes: x ``(B, I)``, state ``(h, A)`` of ``(B, H)``, ``(B, H, H)`` -> output h' ``(B, H)``, state ``(h', A')``.
    A is float32 for 16-bit dtypes: its decay is below their rounding.

    The parameters are a linear map of [x; h] with H(I + H) numbers, and 2H numbers of layer norm; A is not trained. The
    recall table of the RUM paper counts an affine map twice, 2H(I + H + 1): 8,700 for I=36, H=50, while this cell has
    4,400.

    Args:
        input_size, hidden_size: I, H.
        inner_steps: S, at least 1.
        decay, rate: decay and learning rate of A, lambda and eta in the paper.
        layer_norm: normalise in the inner steps; the recall task needs it.
        start_norm: with ``layer_norm``, normalise h_0 too.
        encoder: pass x through two ReLU layers of 50 and 100 units before C, as the paper does for symbols. (The
            paper's hidden layer of 100 units before the softmax is part of the read-out, not of the cell.)
        bias: add a trained bias to z, which the paper does not have in addition to layer norm's.
        ln_eps: added to the variance in layer norm.
        recurrent_scale: W is initialised to this multiple of the identity.
        device, dtype: device and dtype of the parameters.
    """

    state_names = ("h", "A")
    shown = ("inner_steps", "decay", "rate", "layer_norm", "start_norm", "recurrent_scale")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        inner_steps: int = 1,
        decay: float = 0.9,
        rate: float = 0.5,
        layer_norm: bool = True,
        start_norm: bool = True,
        encoder: bool = False,
        bias: bool = False,
        ln_eps: float = 1e-5,
        recurrent_scale: float = 0.05,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_positive_int("FastWeightsCell", inner_steps=inner_steps)
        check_flags("FastWeightsCell", layer_norm=layer_norm, start_norm=start_norm, encoder=encoder, bias=bias)
        check_finite("FastWeightsCell", decay=decay, rate=rate, recurrent_scale=recurrent_scale)
        check_not_negative("FastWeightsCell", ln_eps=ln_eps)
        self.inner_steps = inner_steps
        self.decay = decay
        self.rate = rate
        self.layer_norm = layer_norm
        self.start_norm = start_norm
        self.ln_eps = ln_eps
        self.recurrent_scale = recurrent_scale
        empty = new_parameter(device, dtype)
        sizes = (input_size, *(ENCODER_SIZES if encoder else ()))
        self.encoder = nn.ModuleList(nn.Linear(*pair, device=device, dtype=dtype) for pair in pairwise(sizes))
        self.weight_ih = empty(hidden_size, sizes[-1])
        self.weight_hh = empty(hidden_size, hidden_size)
        self.bias = empty(hidden_size) if bias else None
        if layer_norm:
            self.ln_weight = empty(hidden_size)
            self.ln_bias = empty(hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for dense in self.encoder:
            dense.reset_parameters()  # type: ignore[operator]
        bound = self.weight_ih.shape[1] ** -0.5
        nn.init.uniform_(self.weight_ih, -bound, bound)
        nn.init.eye_(self.weight_hh).mul_(self.recurrent_scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.layer_norm:
            nn.init.ones_(self.ln_weight)
            nn.init.zeros_(self.ln_bias)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        h = torch.zeros(batch_size, self.hidden_size, device=device, dtype=dtype)
        return h, widen(h).unsqueeze(-1).repeat(1, 1, self.hidden_size)

    def project(self, x: Tensor) -> Tensor:
        for dense in self.encoder:
            x = F.relu(dense(x))
        return F.linear(x, self.weight_ih, self.bias)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, A = state
        wide = h.to(A.dtype)
        A = self.decay * A + self.rate * wide.unsqueeze(-1) * wide.unsqueeze(-2)
        slow = x + F.linear(h, self.weight_hh)
        h = F.relu(self._normalize(slow) if self.start_norm else slow)
        for _ in range(self.inner_steps):
            h = slow + torch.bmm(A, h.to(A.dtype).unsqueeze(-1)).squeeze(-1).to(slow.dtype)
            h = F.relu(self._normalize(h))
        return h, (h, A)

    def _normalize(self, z: Tensor) -> Tensor:
        if not self.layer_norm:
            return z
        return F.layer_norm(z, (self.hidden_size,), self.ln_weight, self.ln_bias, self.ln_eps)


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

    Style ``"collier"`` is the implementation of Collier & Beel (2018): keys pass through a tanh, the parameters of the
    heads and the output are clipped to +-20, and the initial memory, reads and weights of the heads are trained. Style
    ``"graves"`` has none of these, reads from M' instead of M, and starts every head at slot 0.

    Shapes: x ``(B, I)`` -> output ``(B, H)``; state ``h, c`` ``(B, H)``, ``read`` ``(B, heads, M)``, ``memory``
    ``(B, N, M)``, ``read_weights`` and ``write_weights`` ``(B, heads, N)``. For 16-bit dtypes the last three are
    float32.

    Args:
        input_size, hidden_size: I, H.
        num_slots, slot_size: N, M of the memory.
        num_read_heads, num_write_heads: numbers of heads.
        max_shift: largest number of slots that a head moves per step.
        memory_start: initial value of the memory.
        style: ``"collier"`` or ``"graves"``, see above.
        device, dtype: device and dtype of the parameters.
    """

    state_names = ("h", "c", "read", "memory", "read_weights", "write_weights")
    shown = ("num_slots", "slot_size", "num_read_heads", "num_write_heads", "max_shift", "style")

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
            empty = new_parameter(device, dtype)
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
        for w, e in zip(write_weights.unbind(1), erase.unbind(1), strict=True):  # prod's backward would synchronise
            written = written * (1 - w.unsqueeze(-1) * e.unsqueeze(-2))  # (B, N, M)
        written = written + torch.einsum("bwn,bwm->bnm", write_weights, add)
        source = memory if collier else written
        read_weights = address(source, read_weights, *(part[:, :R] for part in parts))
        read = torch.einsum("brn,bnm->brm", read_weights, source).to(h.dtype)

        output = self.readout(torch.cat((h, read.flatten(1)), -1))
        if collier:
            output = output.clamp(-LIMIT, LIMIT)
        return output, (h, c, read, written, read_weights, write_weights)


def address(
    memory: Tensor, before: Tensor, key: Tensor, beta: Tensor, gate: Tensor, shift: Tensor, gamma: Tensor
) -> Tensor:
    """Compute the weights of each head: by content, mixed with the previous weights, then shifted and sharpened.

    Args:
        memory: ``(B, N, M)``.
        before: ``(B, heads, N)``, the weights of the previous step.
        key, beta, gate, shift, gamma: ``(B, heads, M or 1 or 2 max_shift + 1)``, before their nonlinearities.

    Returns:
        ``(B, heads, N)``, non-negative with sum 1.
    """
    similar = torch.einsum("bhm,bnm->bhn", F.normalize(key, dim=-1), F.normalize(memory, dim=-1))
    content = torch.softmax(F.softplus(beta) * similar, -1)
    gate = torch.sigmoid(gate)
    weights = gate * content + (1 - gate) * before
    reach = shift.shape[-1] // 2
    moved = torch.stack([weights.roll(by, -1) for by in range(-reach, reach + 1)], -1)
    weights = (moved * torch.softmax(shift, -1).unsqueeze(-2)).sum(-1)
    # w^gamma / sum of w^gamma, by logarithms, since all w^gamma may underflow for a large gamma
    return torch.softmax((1 + F.softplus(gamma)) * weights.clamp_min(1e-12).log(), -1)


CHUNK = 64
"""Number of steps that a triangular system solves at once."""


class DeltaNetCell(Cell):
    """Linear transformer with the delta rule (Schlag et al., 2021), scanned as in Yang et al. (2024), with one head.

    q = unit(silu(W_q x));  k = unit(silu(W_k x));  v = silu(W_v x);  beta = sigmoid(w_beta x)
    S' = S + beta (v - S k) k^T;   output S' q

    Only S depends on the past, so a chunk of steps needs only a few matmuls and one triangular system.

    Shapes: x ``(B, I)``, state ``(S,)`` of ``(B, H, H)`` -> output ``(B, H)``, state ``(S',)``. Between calls S
    has the dtype of x; within a scan it is at least float32.

    Args:
        input_size, hidden_size: I, H.
        bias: add a trained bias to the projections, which the published model does not have.
        device, dtype: device and dtype of the parameters.
    """

    state_names = ("S",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size)
        check_flags("DeltaNetCell", bias=bias)
        rows = 3 * hidden_size + 1  # q, k, v, beta
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight_ih, -(self.input_size**-0.5), self.input_size**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def initial_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> State:
        return (torch.zeros(batch_size, self.hidden_size, self.hidden_size, device=device, dtype=dtype),)

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_ih, self.bias)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        q, k, v, beta = self._parts(x)
        S, dtype = widen(state[0]), state[0].dtype
        written = beta * (v - torch.einsum("bij,bj->bi", S, k))
        S = S + written.unsqueeze(-1) * k.unsqueeze(-2)
        return torch.einsum("bij,bj->bi", S, q).to(dtype), (S.to(dtype),)

    def scan(self, x: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        xp = self.project(x)
        q, k, v, beta = (part.transpose(0, 1) for part in self._parts(xp))  # (B, T, H), beta (B, T, 1)
        if lengths is not None:  # steps past the length write nothing
            beta = beta * (torch.arange(x.shape[0], device=x.device) < lengths.unsqueeze(1)).unsqueeze(-1)
        S = widen(state[0])
        outputs = []
        for Q, K, V, b in zip(*(part.split(CHUNK, 1) for part in (q, k, v, beta)), strict=True):
            # a step writes w = b (v - S k), where S includes the writes of earlier steps: (I + A) W = b (V - K S^T)
            A = (b * (K @ K.mT)).tril(-1)
            W = torch.linalg.solve_triangular(widen(A), widen(b * (V - K @ S.mT)), upper=False, unitriangular=True)
            outputs.append(Q @ S.mT + (Q @ K.mT).tril() @ W)
            S = S + W.mT @ K
        return torch.cat(outputs, 1).transpose(0, 1).to(xp.dtype), (S.to(state[0].dtype),)

    def _parts(self, xp: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, beta = widen(xp).split([self.hidden_size] * 3 + [1], -1)
        q, k = F.normalize(F.silu(q), dim=-1), F.normalize(F.silu(k), dim=-1)
        return q, k, F.silu(v), torch.sigmoid(beta)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias is not None}"
