"""RUM with candidate options, fast on one CPU core: the matmuls in torch, the row-wise step in C, backward by hand.

    [tau, u, r] = W x + U h + b;  eps = W_eps x + b_eps;  u, r through a sigmoid
    h~ = f(g * eps [+ gt * tau] + R (r * h)), or f(g * eps + r * (gt * tau + kap * R h)),  R = R_{t-1}^lam Rotation(eps, tau) in each head of n units
    h' = u * h + (1 - u) * h~  [; h' = eta h' / |h'|]

`RUMProto` has the contract of nn.GRU: (input_size, hidden_size, num_layers, dropout, bidirectional).
"""

import ctypes
import math
import os
import subprocess
import tempfile

import torch
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
ACTS = {"tanh": 0, "relu": 1, "softsign": 2}
RESET, MIX, AFTER, MIXIN = 1, 2, 4, 8


def _load(double=False):
    """Compile the step; this needs gcc."""
    out = os.path.join(tempfile.mkdtemp(), "rum_step.so")
    flags = ["-DREAL=double", "-DDOUBLE"] if double else ["-DREAL=float"]
    command = ["gcc", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", *flags, os.path.join(HERE, "rum_step.c")]
    subprocess.run([*command, "-o", out, "-lm"], check=True)
    return ctypes.CDLL(out)


_LIBS = {}


def lib(dtype):
    if dtype not in _LIBS:
        double = dtype == torch.float64
        real = ctypes.c_double if double else ctypes.c_float
        found, p, i = _load(double), ctypes.c_void_p, ctypes.c_int
        found.step_fwd.argtypes = [i, i, i, i, i, real, real, p] + [p] * 10
        found.step_bwd.argtypes = [i, i, i, i, i, real, real, p] + [p] * 13
        found.step_fwd.restype = found.step_bwd.restype = None
        _LIBS[dtype] = found
    return _LIBS[dtype]


class _Scan(torch.autograd.Function):
    """xp (T, B, (G+1)H), h0 (B, H), U (G H, H), gains g and gt (H) -> states (T, B, H), last R."""

    @staticmethod
    def forward(ctx, xp, h0, U, g, gt, R0, n, flags, f, eta, lam, res, kap):
        L, xp = lib(xp.dtype), xp.contiguous()
        T, B, width = xp.shape
        H, G = U.shape[1], U.shape[0] // U.shape[1]
        new = xp.new_empty
        out, save, pre = new(T + 1, B, H), new(T, B, 4 * H), new(B, G * H)
        out[0] = h0
        g, gt, UT = g.detach().contiguous(), gt.detach().contiguous(), U.detach().t()
        size, heads = xp.element_size(), -(-H // n)
        norm = new(T, B) if eta > 0 else None
        R = None
        if lam == 1:
            R = xp.new_zeros(T + 1, B, heads, n, n)
            R[0] = torch.eye(n, dtype=xp.dtype) if R0 is None else R0
        pk = kap.data_ptr()
        px, po, ps, pq, pg, pt = xp.data_ptr(), out.data_ptr(), save.data_ptr(), pre.data_ptr(), g.data_ptr(), gt.data_ptr()
        sx, so, ss = B * width * size, B * H * size, 4 * B * H * size
        pr, sr = (R.data_ptr(), B * heads * n * n * size) if R is not None else (None, 0)
        pn = norm.data_ptr() if norm is not None else None
        step, mm = L.step_fwd, torch.mm
        for t in range(T):
            mm(out[t], UT, out=pre)
            step(B, H, n, flags, f, eta, res, pk, px + t * sx, pq, po + t * so, pg, pt, po + (t + 1) * so, ps + t * ss,
                 None if pr is None else pr + t * sr, None if pr is None else pr + (t + 1) * sr,
                 None if pn is None else pn + t * B * size)
        ctx.kap = kap
        ctx.save_for_backward(xp, U, g, gt, out, save, R, norm)
        ctx.given = n, flags, f, eta, res
        last = R[-1].clone() if R is not None else xp.new_empty(0)
        ctx.mark_non_differentiable(last)
        return out[1:], last

    @staticmethod
    def backward(ctx, d_out, _):
        xp, U, g, gt, out, save, R, norm = ctx.saved_tensors
        n, flags, f, eta, res = ctx.given
        L, d_out, U = lib(xp.dtype), d_out.contiguous(), U.detach().contiguous()
        T, B, width = xp.shape
        H, G = U.shape[1], U.shape[0] // U.shape[1]
        dxp, d = torch.empty_like(xp), torch.zeros_like(out[0])
        dg, dgt = torch.zeros_like(g), torch.zeros_like(gt)
        size, heads = xp.element_size(), -(-H // n)
        A = xp.new_zeros(B, heads, n, n) if R is not None else None
        pk = ctx.kap.data_ptr()
        px, po, ps, pg, pt = xp.data_ptr(), out.data_ptr(), save.data_ptr(), g.data_ptr(), gt.data_ptr()
        sx, so, ss = B * width * size, B * H * size, 4 * B * H * size
        pd, pdx, pdg, pdt = d.data_ptr(), dxp.data_ptr(), dg.data_ptr(), dgt.data_ptr()
        pr, sr = (R.data_ptr(), B * heads * n * n * size) if R is not None else (None, 0)
        pa = A.data_ptr() if A is not None else None
        pn = norm.data_ptr() if norm is not None else None
        step = L.step_bwd
        gates = dxp[:, :, : G * H]
        for t in range(T - 1, -1, -1):
            d += d_out[t]
            step(B, H, n, flags, f, eta, res, pk, px + t * sx, po + t * so, po + (t + 1) * so, ps + t * ss, pg, pt, pd, pdx + t * sx,
                 pdg, pdt, None if pr is None else pr + (t + 1) * sr, pa, None if pn is None else pn + t * B * size)
            d.addmm_(gates[t], U)
        dU = gates.reshape(T * B, G * H).t() @ out[:-1].reshape(T * B, H)
        return dxp, d, dU, dg, dgt, None, None, None, None, None, None, None, None


class RUMProto(nn.Module):
    def __init__(self, input_size, hidden_size, num_layers=1, dropout=0.0, bidirectional=False, *, lam=0, eta=None,
                 activation="tanh", heads=0, reset=False, reset_after=False, gain=None, mix=None, mix_in=False, x_gates="tur",
                 init="orth", gate_scale=0.25, embed_scale=0.5, embed_bias=0.0, tau_bias=0.0, u_bias=1.0, r_bias=0.0,
                 tau_noise=0.0, gate_scale_h=None, tau_scale=1.0, gain_like_gru=False, learn_gain=True, res=0.0, learn_mix=True, eps_k=0.0, kap=1.0, share=1.0,
                 x_init=None, h_orth=None, u_spread=None, spread_where="all"):
        """kap, share: the first share of the units takes kap R h into the candidate, the others nothing (a GRU's units).
        res: the rotation ends at tau + res * eps. eps_k: the start of b_eps, uniform up to eps_k / sqrt(H).
        heads: units per head, 0 for one head. gain: start of g (learned, per unit); None fixes 1. mix: start of gt, or None. mix_in: r * (gt tau + R h).
        x_gates: which of tau, u, r see x. init: "orth" as the library, "gru" uniform +-1/sqrt(H).
        embed_scale: std of W_eps x for inputs of variance 1; "gru" for sqrt(I / 3H). embed_bias: std of b_eps.
        x_init: W starts uniform: "glorot", a tuple (c,) for a bound of c / sqrt(H), "wide" for glorot from 16 features on and (1.4,) below,
        or a number c for a std of c / sqrt(I). h_orth: {gate: gain}, gates whose U is orthogonal.
        u_spread: (lo, hi), added to b_u, evenly spread over the units of spread_where: "all", "plain" (those without a rotation) or "rotated".
        gain_like_gru: g starts so that g W_eps x has nn.GRU's std, sqrt(I / 3H)."""
        super().__init__()
        H = hidden_size
        self.hidden_size, self.num_layers, self.bidirectional = H, num_layers, bidirectional
        self.lam, self.f = lam, ACTS[activation]
        self.eta = math.sqrt(H) if eta == "sqrt" else float(eta or 0.0)
        self.n = min(heads, H) if heads else H
        self.reset, self.mixes = reset, mix is not None
        self.flags = RESET * reset + MIX * (mix is not None) + AFTER * reset_after
        assert not mix_in or (reset and reset_after and mix is not None)
        self.flags += MIXIN * mix_in
        self.order = [c for c in ("tur" if reset else "tu")]
        self.x_gates = [c in x_gates for c in self.order]
        self.drop = dropout
        self.res = float(res)
        self.learn_gain = gain is not None and learn_gain
        self.cells = nn.ModuleList()
        for layer in range(num_layers):
            I = input_size if layer == 0 else H * (1 + bidirectional)
            for _ in range(1 + bidirectional):
                G, cell = len(self.order), nn.Module()
                nx = sum(self.x_gates) + 1
                W, U, b = torch.empty(nx * H, I), torch.empty(G * H, H), torch.zeros((G + 1) * H)
                k = H**-0.5
                scale = math.sqrt(I / (3 * H)) if embed_scale == "gru" else embed_scale
                row = 0
                for i, (c, seen) in enumerate(zip(self.order, self.x_gates)):
                    if init == "orth":
                        block = gate_scale * nn.init.orthogonal_(torch.empty(H, I + H))
                        if c == "t":
                            block = block * tau_scale
                        if seen:
                            W[row : row + H] = block[:, :I]
                        U[i * H : (i + 1) * H] = block[:, I:]
                        if gate_scale_h is not None:
                            U[i * H : (i + 1) * H] *= gate_scale_h / gate_scale
                    else:
                        s = tau_scale if c == "t" else 1.0
                        if seen:
                            W[row : row + H].uniform_(-s * k, s * k)
                        U[i * H : (i + 1) * H].uniform_(-s * k, s * k)
                        b[i * H : (i + 1) * H].uniform_(-s * k, s * k)
                    row += H * seen
                    b[i * H : (i + 1) * H] += {"t": tau_bias, "u": u_bias, "r": r_bias}[c]
                    if c == "t" and tau_noise:
                        b[:H] += tau_noise * torch.randn(H)
                if scale is None:
                    nn.init.orthogonal_(W[-H:])
                elif init == "orth":
                    W[-H:] = scale * math.sqrt(max(H / I, 1)) * nn.init.orthogonal_(torch.empty(H, I))
                else:
                    W[-H:].uniform_(-1, 1).mul_(scale * math.sqrt(3 / I))
                if eps_k:
                    b[-H:].uniform_(-eps_k * k, eps_k * k)
                if embed_bias:
                    b[-H:] += embed_bias * torch.randn(H)
                if x_init is not None:
                    if x_init == "glorot" or (x_init == "wide" and I >= 16):
                        bound = math.sqrt(6 / (I + H))
                    elif isinstance(x_init, tuple) or x_init == "wide":
                        bound = (1.4 if x_init == "wide" else x_init[0]) / math.sqrt(H)
                    else:
                        bound = x_init * math.sqrt(3 / I)
                    W.uniform_(-bound, bound)
                for c, g in (h_orth or {}).items():
                    i = self.order.index(c)
                    U[i * H : (i + 1) * H] = g * nn.init.orthogonal_(torch.empty(H, H))
                if u_spread is not None:
                    i, cut = self.order.index("u"), round(share * H)
                    a, z = {"all": (0, H), "plain": (cut, H), "rotated": (0, cut)}[spread_where]
                    b[i * H + a : i * H + z] += torch.linspace(*u_spread, z - a)
                cell.W, cell.U, cell.b = nn.Parameter(W), nn.Parameter(U), nn.Parameter(b)
                start = 1.0 if gain is None else gain
                if gain_like_gru:
                    start = math.sqrt(I / (3 * H)) / scale
                if self.learn_gain:
                    cell.g = nn.Parameter(torch.full((H,), float(start)))
                else:
                    cell.register_buffer("g", torch.full((H,), float(start)))
                kv = torch.full((H,), float(kap))
                kv[round(share * H):] = 0.0
                cell.register_buffer("kap", kv)
                if self.mixes and not learn_mix:
                    cell.register_buffer("gt", torch.full((H,), float(mix)))
                elif self.mixes:
                    cell.gt = nn.Parameter(torch.full((H,), float(mix)))
                else:
                    cell.register_buffer("gt", torch.zeros(H))
                self.cells.append(cell)

    def _project(self, cell, x):
        if all(self.x_gates):
            return nn.functional.linear(x, cell.W, cell.b)
        H, parts, row = self.hidden_size, [], 0
        y = nn.functional.linear(x, cell.W)
        for i, seen in enumerate([*self.x_gates, True]):
            bias = cell.b[i * H : (i + 1) * H]
            parts.append(y[..., row : row + H] + bias if seen else bias.expand(*y.shape[:-1], H))
            row += H * seen
        return torch.cat(parts, -1)

    def forward(self, x, state=None):
        """x (T, B, I) -> outputs (T, B, H [* 2]) and the state: a list of (h, R) per recurrence."""
        last, d = [], 1 + self.bidirectional
        for layer in range(self.num_layers):
            outs = []
            for way in range(d):
                cell = self.cells[layer * d + way]
                xp = self._project(cell, x)
                if way:
                    xp = xp.flip(0)
                h0, R0 = state[layer * d + way] if state is not None else (xp.new_zeros(x.shape[1], self.hidden_size), None)
                out, R = _Scan.apply(xp, h0, cell.U, cell.g, cell.gt, R0, self.n, self.flags, self.f, self.eta, self.lam, self.res, cell.kap)
                last.append((out[-1], R if self.lam else None))
                outs.append(out.flip(0) if way else out)
            x = torch.cat(outs, -1) if d == 2 else outs[0]
            if self.drop and self.training and layer < self.num_layers - 1:
                x = nn.functional.dropout(x, self.drop)
        return x, last


def count(module):
    return sum(p.numel() for p in module.parameters())


def build(input_size, hidden_size, num_layers=1, dropout=0.0, bidirectional=False, **options):
    """RUMProto at the size of an nn.GRU with hidden_size units, or, where it would have more parameters, with fewer units.

    Draws from the random generator happen once, for the size that is taken."""
    limit = 0
    for layer in range(num_layers):
        I = input_size if layer == 0 else hidden_size * (1 + bidirectional)
        limit += (1 + bidirectional) * 3 * hidden_size * (I + hidden_size + 2)
    H = hidden_size
    while True:
        G = 3 if options.get("reset") else 2
        seen = sum(c in options.get("x_gates", "tur") for c in "tur"[:G]) + 1
        extra = (options.get("gain") is not None and options.get("learn_gain", True)) + (options.get("mix") is not None and options.get("learn_mix", True))
        total = 0
        for layer in range(num_layers):
            I = input_size if layer == 0 else H * (1 + bidirectional)
            total += (1 + bidirectional) * (seen * H * I + G * H * H + (G + 1 + extra) * H)
        if total <= limit:
            return RUMProto(input_size, H, num_layers, dropout, bidirectional, **options)
        H -= 1
