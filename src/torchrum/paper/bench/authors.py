"""RUM written the way its authors wrote it: the yardstick of the benchmark, not a layer to use.

Each step orthonormalises the pair of vectors, takes sin = sqrt(1 - cos^2), and leaves the rest to autograd; with
lam = 1 it builds the N x N rotation of every row and multiplies matrices. Parallel eps and tau give NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.layers.rum import RUM


class AuthorsRUM(nn.Module):
    """One layer, ``forward(x (T, B, I)) -> (output (T, B, H), h_n)``; lam is 0 or 1.

    Args:
        input_size, hidden_size, device, dtype: as in :class:`torch.nn.GRU`.
        lam, eta: as in :class:`torchrum.RUM`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        lam: int = 0,
        eta: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.lam, self.eta = hidden_size, lam, eta
        start = RUM(input_size, hidden_size, lam=lam, **{**PAPER_OPTIONS, "eta": eta}, device=device, dtype=dtype)
        self.gates_x = nn.Linear(input_size, 2 * hidden_size, device=device, dtype=dtype)  # rows: tau, u
        self.gates_h = nn.Linear(hidden_size, 2 * hidden_size, bias=False, device=device, dtype=dtype)
        self.embed = nn.Linear(input_size, hidden_size, device=device, dtype=dtype)
        self.load(start)

    @torch.no_grad()
    def load(self, rum: RUM) -> None:
        """Take the weights of a one-layer RUM."""
        given, rows = dict(rum.named_parameters()), 2 * self.hidden_size
        self.gates_x.weight.copy_(given["weight_ih_l0"][:rows])
        self.gates_x.bias.copy_(given["bias_ih_l0"][:rows])
        self.embed.weight.copy_(given["weight_ih_l0"][rows:])
        self.embed.bias.copy_(given["bias_ih_l0"][rows:])
        self.gates_h.weight.copy_(given["weight_hh_l0"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, H = x.shape[1], self.hidden_size
        h = x.new_zeros(B, H)
        R = torch.eye(H, device=x.device, dtype=x.dtype).expand(B, H, H) if self.lam else None
        outputs = []
        for now in x:
            h, R = self.step(now, h, R)
            outputs.append(h)
        return torch.stack(outputs), h.unsqueeze(0)

    def step(self, x: Tensor, h: Tensor, R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One step, with its own matmuls of the input."""
        tau, u = (self.gates_x(x) + self.gates_h(h)).chunk(2, -1)
        u = torch.sigmoid(u)
        eps = self.embed(x)
        if R is None:
            turned = rotate_in_plane(eps, tau, h)
        else:
            R = torch.bmm(R, dense_rotation(eps, tau))
            turned = torch.bmm(R, h.unsqueeze(-1)).squeeze(-1)
        h = u * h + (1 - u) * F.relu(eps + turned)
        if self.eta is not None:
            h = F.normalize(h, dim=-1) * self.eta
        return h, R


def plane(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal u, v ``(B, H)`` of the plane of a and b, and the rotation inside it ``(B, 2, 2)``."""
    u = F.normalize(a, dim=-1)
    cos = (u * F.normalize(b, dim=-1)).sum(-1)
    sin = torch.sqrt(1 - cos**2)
    v = F.normalize(b - (u * b).sum(-1, keepdim=True) * u, dim=-1)
    turn = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return u, v, turn


def rotate_in_plane(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """h - u u^T h - v v^T h + [u v] turn [u v]^T h, each factor a batched matmul as theirs are."""
    u, v, turn = plane(a, b)
    basis = torch.stack([u, v], -1)  # (B, H, 2)
    u, v, column = u.unsqueeze(-1), v.unsqueeze(-1), h.unsqueeze(-1)  # (B, H, 1)
    outside = torch.bmm(u, torch.bmm(u.mT, column)) + torch.bmm(v, torch.bmm(v.mT, column))
    inside = torch.bmm(basis, torch.bmm(turn, torch.bmm(basis.mT, column)))
    return h + (inside - outside).squeeze(-1)


def dense_rotation(a: Tensor, b: Tensor) -> Tensor:
    """I - u u^T - v v^T + [u v] turn [u v]^T, ``(B, H, H)``."""
    u, v, turn = plane(a, b)
    basis = torch.stack([u, v], -1)  # (B, H, 2)
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    outside = eye - torch.bmm(u.unsqueeze(-1), u.unsqueeze(-2)) - torch.bmm(v.unsqueeze(-1), v.unsqueeze(-2))
    return outside + torch.bmm(torch.bmm(basis, turn), basis.mT)
