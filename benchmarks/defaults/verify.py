"""Compare the prototype with the library's reference (pass the path of its src), and check the gradients of all options."""
import itertools
import sys
import torch
from rum_proto import RUMProto

torch.manual_seed(0)
T, B, I, H = 7, 3, 4, 10


def plain(m, x):
    """The equations with autograd, one layer, one way."""
    cell, H, n = m.cells[0], m.hidden_size, m.n
    xp = m._project(cell, x)
    h, outs = x.new_zeros(x.shape[1], H), []
    G = len(m.order)
    heads = -(-H // n)
    sizes = [min(n, H - k * n) for k in range(heads)]
    Rs = [torch.eye(s, dtype=x.dtype).expand(x.shape[1], s, s) for s in sizes]
    for p in xp:
        q = p[:, : G * H] + h @ cell.U.t()
        tau, u, eps = q[:, :H], q[:, H : 2 * H].sigmoid(), p[:, G * H :]
        r = q[:, 2 * H : 3 * H].sigmoid() if m.reset else 1.0
        hr = h if m.flags & 4 else r * h
        z = []
        for k, (e, t, v) in enumerate(zip(eps.split(n, -1), tau.split(n, -1), hr.split(n, -1))):
            t = t + m.res * e
            e, w = e / e.norm(dim=-1, keepdim=True), t / t.norm(dim=-1, keepdim=True)
            b = (e + w) / (e + w).norm(dim=-1, keepdim=True)
            eye = torch.eye(e.shape[-1], dtype=x.dtype)
            Q = (eye - 2 * b[:, :, None] * b[:, None]) @ (eye - 2 * e[:, :, None] * e[:, None])
            Rs[k] = Rs[k] @ Q if m.lam else Q
            z.append((Rs[k] @ v[:, :, None])[:, :, 0])
        z = cell.kap * torch.cat(z, -1)
        if m.flags & 8:
            z = z + cell.gt * tau
        if m.flags & 4:
            z = r * z
        a = cell.g * eps + z + (0 if m.flags & 8 else cell.gt * tau)
        c = (torch.tanh, torch.relu, torch.nn.functional.softsign)[m.f](a)
        h = u * h + (1 - u) * c
        if m.eta:
            h = m.eta * h / h.norm(dim=-1, keepdim=True)
        outs.append(h)
    return torch.stack(outs)


worst = 0
for dtype, limit in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
    for mix_in, lam, heads, reset, after, mix, eta, act, xg in itertools.product(
            (False, True), (0, 1), (0, 4), (False, True), (False, True), (None, 0.3), (None, "sqrt"), ("tanh", "relu", "softsign"), ("tur", "ur")):
        if (after and not reset) or (mix_in and not (after and mix)):
            continue
        m = RUMProto(I, H, lam=lam, heads=heads, reset=reset, reset_after=after, mix=mix, mix_in=mix_in, eta=eta, activation=act, gain=0.5,
                     gate_scale=1.0, embed_bias=0.5, tau_bias=0.3, x_gates=xg, res=0.7, kap=0.6, share=0.5).to(dtype)
        x = torch.randn(T, B, I, dtype=dtype, requires_grad=True)
        v = torch.randn(T, B, H, dtype=dtype)
        wanted = plain(m, x)
        params = [x, *m.parameters()]
        a = torch.autograd.grad((wanted * v).sum(), params)
        got = m(x)[0]
        b = torch.autograd.grad((got * v).sum(), params)
        err = max([(got - wanted).abs().max().item()] + [((p - q).norm() / (p.norm() + 1e-6)).item() for p, q in zip(a, b)])
        worst = max(worst, err)
        if err > limit:
            print("WRONG", dtype, lam, heads, reset, after, mix, eta, act, xg, err)
    print(dtype, "worst", worst)
    worst = 0
if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
    from torchrum import RUM
    from torchrum.cells.rum import RELU_OPTIONS, TANH_OPTIONS
    for lam, options, mine in itertools.product((0, 1), (TANH_OPTIONS, RELU_OPTIONS), (None,)):
        ref = RUM(I, H, form="paper", lam=lam, backend="reference", **options).double()
        eta, act = options["eta"], options["activation"]
        m = RUMProto(I, H, lam=lam, eta=eta, activation=act).double()
        cell, names = m.cells[0], dict(ref.named_parameters())
        get = lambda s: next(p for k, p in names.items() if s in k)
        cell.W.data, cell.U.data, cell.b.data = get("weight_ih").data, get("weight_hh").data, get("bias_ih").data
        x = torch.randn(T, B, I).double()
        print("library", lam, act, (ref(x)[0] - m(x)[0]).abs().max().item())
    from variants import VARIANTS
    for I_, H_ in ((10, 48), (3, 64)):  # the default form of the library is the variant that was judged
        m, rum = RUMProto(I_, H_, **VARIANTS["half-r.5"]).double(), RUM(I_, H_).double()
        cell = m.cells[0]
        (u, r, eps), (tau_h, u_h, r_h), (tau_b, u_b, r_b, eps_b) = cell.W.data.split(H_), cell.U.data.split(H_), cell.b.data.split(H_)
        zero = torch.zeros(2 * H_).double()
        rum.weight_ih_l0.data, rum.weight_hh_l0.data = torch.cat((r, u, eps)), torch.cat((r_h, u_h, tau_h))
        rum.bias_ih_l0.data, rum.bias_hh_l0.data = torch.cat((r_b, u_b, eps_b)), torch.cat((zero, tau_b))
        x = torch.randn(T, B, I_).double()
        print("library, default", (rum(x)[0] - m(x)[0]).abs().max().item())
