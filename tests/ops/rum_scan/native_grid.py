"""Random configurations of the native scan, compared with the reference in float64, for a run under sanitizers.

``python native_grid.py 0 2000`` runs 2,000 of them; test_native.py does so with an object that was built with
sanitizers. A configuration depends on its number only, so ``python native_grid.py 1234 1235`` runs number 1234 again.
"""

import copy
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrum import RUM
from torchrum.ops.gated_scan import GatedOptions, gated_scan
from torchrum.ops.rum_scan import RumOptions, ScanInputs, native, rum_scan
from torchrum.ops.rum_scan.native import build

NORMS = ({}, {"layer_norm": True}, {"layer_norm": True, "ln_order": "authors"})
ZONEOUTS = ({}, {"zoneout": 0.3}, {"zoneout": 0.3, "training": True})
CHOICES = list(itertools.product((0.0, 1.0), (None, 0.7), (True, False), NORMS, ZONEOUTS))  # lam, eta, update gate
DTYPES = (torch.float32, torch.float64, torch.float32, torch.float64, torch.bfloat16, torch.float16)
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest |found - exact| / |exact| of a result or gradient, unless another backend has a tenth of it in that dtype: a
rotation by nearly half a turn, likely with two units, magnifies roundings."""
Run = Callable[[torch.dtype, str], dict[str, Tensor]]
"""Results and gradients by name, in a dtype and by a backend."""


def draw(*shape: int) -> Tensor:
    """Random numbers, at times a part of a larger tensor, an expanded or a transposed one."""
    kind = random.choice(("own", "own", "part", "expanded", "transposed"))
    if kind == "part":
        return torch.randn(*shape[:-1], shape[-1] + 3, dtype=torch.float64)[..., 2:-1]
    if kind == "expanded" and len(shape) > 1:
        return torch.randn(1, *shape[1:], dtype=torch.float64).expand(*shape)
    if kind == "transposed" and len(shape) > 1:
        return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=torch.float64).mT
    return torch.randn(*shape, dtype=torch.float64)


def cast(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor by way of ``dtype`` and keep its strides."""
    return part.to(dtype) if part.numel() == 0 or 0 not in part.stride() else part[:1].to(dtype).expand(part.shape)


def pulled(results: Sequence[Tensor], inputs: dict[str, Tensor], chosen: Sequence[bool]) -> dict[str, Tensor]:
    """The results, and the gradients of a projection of the chosen ones."""
    names = [f"result {i}" for i in range(len(results))]
    asked = [part for part, which in zip(results, chosen, strict=False) if which] or [results[0]]
    loss = sum((part.double() * torch.arange(part.numel()).cos().view_as(part)).sum() for part in asked)
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    found = {
        name: torch.zeros_like(part) if grad is None else grad
        for (name, part), grad in zip(inputs.items(), grads, strict=True)
    }
    return {**dict(zip(names, (part.detach() for part in results), strict=True)), **found}


def scan_case(options: RumOptions, T: int, B: int, H: int) -> Run:
    """The scan from projected inputs, with degenerate rows and rows that end early in some cases."""
    xp, weight = draw(T, B, options.num_inputs * H), draw(options.num_gates * H, H) * H**-0.5
    if T * B > 0 and random.random() < 0.3:
        xp, weight = xp.clone(), torch.zeros_like(weight)
        xp[0, 0, -H:] = 0  # no eps
        xp[-1, -1, :H] = -2 * xp[-1, -1, -H:]  # opposite
    drawn = {"xp": xp, "h0": draw(B, H), "weight_hh": weight}
    if options.lam == 1 and random.random() < 0.5:
        Q = torch.linalg.qr(torch.randn(random.choice((1, B)), H, H, dtype=torch.float64)).Q
        drawn["R0"] = Q.expand(B, H, H)
    if options.layer_norm:
        drawn["ln_weight"], drawn["ln_bias"] = draw(options.num_inputs * H), draw(options.num_inputs * H)
    lengths = torch.randint(0, T + 1, (B,)) if random.random() < 0.5 else None
    seed, chosen = torch.tensor(random.randrange(2**31)), [random.random() < 0.7 for _ in range(2)]

    def run(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        leaves = {name: cast(part, dtype).requires_grad_() for name, part in drawn.items()}
        leaves = {"R0": None, "ln_weight": None, "ln_bias": None, **leaves}
        inputs = ScanInputs(**leaves, lengths=lengths, seed=seed)
        out, R = rum_scan(inputs, options, backend=backend)
        with torch.no_grad():
            bare, _ = rum_scan(inputs, options, backend=backend)
        torch.testing.assert_close(bare, out, equal_nan=True)
        given = {name: part for name, part in leaves.items() if part is not None}
        return pulled([part for part in (out, R) if part is not None], given, chosen)

    return run


def layer_case(options: RumOptions, T: int, B: int, H: int) -> Run:
    """A layer, which passes its input to C unprojected."""
    words: dict[str, Any]
    if options.lam == 0 and random.random() < 0.4:
        words = dict(form="gated", head_size=random.choice((1, 3, 8, 16, 64)), rotated=random.choice((0, 0.5, 1)))
    else:
        words = {name: getattr(options, name) for name in ("lam", "eta", "update_gate", "layer_norm")}
        words |= {name: getattr(options, name) for name in ("ln_order", "activation")}
        words |= dict(form="paper", embed_bias=random.random() < 0.5)
    words |= dict(num_layers=random.choice((1, 1, 2)), bidirectional=random.random() < 0.3)
    words |= dict(bias=random.random() < 0.8, zoneout=options.zoneout)
    I, seed = random.choice((1, 3, 16, 40)), random.randrange(2**31)
    layer, x = RUM(I, H, dtype=torch.float64, **words).train(options.training), draw(T, B, I)
    states, needs_x = layer.num_layers * layer.num_directions, random.random() < 0.7
    kind = random.choice(("none", "states", "no memory", "zero memory") if options.lam else ("none", "states"))
    h, R = draw(states, B, H), torch.linalg.qr(torch.randn(states, B, H, H, dtype=torch.float64)).Q
    if kind == "zero memory":
        R = R * (torch.rand(states, B, 1, 1) < 0.5)
    lengths = torch.randint(1, T + 1, (B,)) if random.random() < 0.4 else None
    chosen = [random.random() < 0.6 for _ in range(3)]

    def run(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        rum = copy.deepcopy(layer).to(dtype)
        rum.backend = backend
        leaves = dict(rum.named_parameters())
        leaves["x"] = cast(x, dtype)
        if needs_x:
            leaves["x"].requires_grad_()
        hx: Any = None
        if kind != "none":
            leaves["h"], hx = h.to(dtype).requires_grad_(), h
            hx = leaves["h"] if not options.lam else (leaves["h"], None)
        if options.lam and kind in ("states", "zero memory"):
            leaves["R"] = R.to(dtype).requires_grad_()
            hx = (leaves["h"], leaves["R"])
        torch.manual_seed(seed)
        out, last = rum(leaves["x"], hx, lengths=lengths)
        torch.manual_seed(seed)
        with torch.no_grad():
            bare, _ = rum(leaves["x"], hx, lengths=lengths)
        torch.testing.assert_close(bare, out, **({} if dtype.itemsize > 2 else dict(rtol=0.05, atol=0.05)))
        given = {name: part for name, part in leaves.items() if part.requires_grad}
        return pulled([out, *(last if options.lam else [last])], given, chosen)

    return run


def gated_case(options: GatedOptions, T: int, B: int, H: int) -> Run:
    """The gated scan, with degenerate rows and rows that end early in some cases."""
    drawn = {"xp": draw(T, B, 3 * H), "h0": draw(B, H), "weight": draw(3 * H, H) * H**-0.5, "bias": draw(3 * H)}
    if random.random() < 0.3:
        drawn["xp"], drawn["weight"] = drawn["xp"].clone(), torch.zeros_like(drawn["weight"])
        drawn["xp"][0, 0, -H:] = 0  # no eps
        drawn["xp"][-1, -1, -H:] = -2 * drawn["bias"][-H:]  # opposite
    lengths = torch.randint(0, T + 1, (B,)) if random.random() < 0.5 else None
    seed = random.randrange(2**31)

    def run(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        leaves = {name: cast(part, dtype).requires_grad_() for name, part in drawn.items()}
        torch.manual_seed(seed)
        out = gated_scan(*leaves.values(), lengths, options=options, backend=backend)
        torch.manual_seed(seed)
        with torch.no_grad():
            bare = gated_scan(*leaves.values(), lengths, options=options, backend=backend)
        torch.testing.assert_close(bare, out, equal_nan=True)
        return pulled([out], leaves, [True])

    return run


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """|found - exact| / |exact| of each tensor; one that is all but zero beside the others counts as a small one."""
    least = 0.03 * max(float(part.norm()) for part in exact.values()) + 1e-30
    return {name: float((found[name].double() - part).norm() / (part.norm() + least)) for name, part in exact.items()}


def run_case(case: int) -> None:
    """Raise unless the native scan agrees with the reference in one random configuration."""
    torch.manual_seed(case)
    random.seed(case)
    lam, eta, gate, norm, zoneout = CHOICES[case % len(CHOICES)]
    if not gate:
        norm = {name: value for name, value in norm.items() if name == "layer_norm"}
    T, B = random.choice((1, 1, 2, 3, 5)), random.choice((1, 1, 2, 5, 9, 17, 20))
    H = random.choice((1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 50, 64, 100))
    dtype = torch.float64 if H == 1 else random.choice(DTYPES)  # many exact gradients of one unit are 0, not roundings
    activation = random.choice(native.ACTIVATIONS if dtype is torch.float64 else native.ACTIVATIONS[1:])  # relu jumps
    options = RumOptions(lam=lam, eta=eta, update_gate=gate, activation=activation, **norm, **zoneout)
    torch.set_num_threads(random.choice((1, 1, 2, 4)))
    native.SMALL = random.choice((0, 1_000_000))
    if random.random() < 0.3:
        head = random.choice((1, 3, 8, 16, 64))
        run = gated_case(GatedOptions(head_size=head, rotated_units=random.choice((0, H // 2, H)), **zoneout), T, B, H)
    else:
        run = random.choice((scan_case, layer_case))(options, T, B, H)
    exact, found = run(torch.float64, "reference"), run(dtype, "native")
    if all(error <= LIMITS[dtype] for error in errors(found, exact).values()):
        return
    others = [] if dtype is torch.float64 else [errors(run(dtype, other), exact) for other in ("torch", "reference")]
    for name, error in errors(found, exact).items():
        where = f"case {case}: {name} of {dtype}, T={T}, B={B}, H={H}, {run.__qualname__}, {options}"
        usual = max((other[name] for other in others), default=0.0)
        assert error <= max(LIMITS[dtype], 10 * usual), f"{where} is wrong by {error:.1e}, others by {usual:.1e}"


def main(start: int, stop: int) -> None:
    build.SECONDS = 900.0  # a compiler with sanitizers takes a minute
    assert native.build_obstacle(False) is None, native.build_obstacle(False)
    for case in range(start, stop):
        run_case(case)
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
