"""Every path of the native scan once, for a run under sanitizers; values are compared elsewhere.

``python native_grid.py`` runs it; tests/ops/test_native.py does so with an object that was built with sanitizers.
"""

import itertools

import torch

from torchrum import RUM
from torchrum.ops.gated_scan import GatedOptions, gated_scan
from torchrum.ops.rum_scan import RumOptions, ScanInputs, native, rum_scan
from torchrum.ops.rum_scan.native import call

SIZES = [(1, 1, 1), (2, 1, 5), (3, 9, 16), (4, 17, 33), (2, 3, 100)]  # T, B, H
NORMS = ({}, {"layer_norm": True}, {"layer_norm": True, "ln_order": "authors"})
ZONEOUTS = ({}, {"zoneout": 0.3}, {"zoneout": 0.3, "training": True})
CHOICES = list(itertools.product((0.0, 1.0), (None, 0.7), (True, False), NORMS, ZONEOUTS))  # lam, eta, update gate


def scan_once(options: RumOptions, T: int, B: int, H: int, dtype: torch.dtype, case: int) -> None:
    """Forward and backward of one case, degenerate rows and lengths in some of them."""
    xp, h0 = torch.randn(T, B, options.num_inputs * H, dtype=dtype), torch.randn(B, H, dtype=dtype)
    if case % 2:
        xp[0, 0, -H:] = 0  # no eps
        xp[-1, -1, :H] = -2 * xp[-1, -1, -H:]  # opposite, with the weight below
    weight = torch.randn(options.num_gates * H, H, dtype=dtype) * (0 if case % 3 == 1 else H**-0.5)
    R0 = torch.linalg.qr(torch.randn(B, H, H)).Q.to(dtype) if options.lam == 1 and case % 2 else None
    norms = torch.randn(2, options.num_inputs * H, dtype=dtype) if options.layer_norm else (None, None)
    lengths = torch.randint(0, T + 1, (B,)) if case % 3 == 0 else None
    leaves = [None if part is None else part.requires_grad_() for part in (xp, h0, R0, weight)]
    inputs = ScanInputs(*leaves, *norms, lengths, torch.tensor(3))
    out, R = rum_scan(inputs, options, backend="native")
    (out.sum() + (0 if R is None else R.sin().sum())).backward()
    with torch.no_grad():
        rum_scan(inputs, options, backend="native")


def gated_scan_once(options: GatedOptions, T: int, B: int, H: int, dtype: torch.dtype, case: int) -> None:
    xp, h0 = torch.randn(T, B, 3 * H, dtype=dtype), torch.randn(B, H, dtype=dtype)
    weight, bias = torch.randn(3 * H, H, dtype=dtype), torch.randn(3 * H, dtype=dtype)
    if case % 2:
        xp[0, 0, -H:] = 0  # no eps
        weight[-H:] = 0
        xp[-1, -1, -H:] = -2 * bias[-H:]  # opposite
    leaves = [part.requires_grad_() for part in (xp, h0, weight, bias)]
    lengths = torch.randint(0, T + 1, (B,)) if case % 3 == 0 else None
    gated_scan(*leaves, lengths, options=options, backend="native").sum().backward()
    with torch.no_grad():
        gated_scan(*leaves, lengths, options=options, backend="native")


def main() -> None:
    torch.set_num_threads(3)
    call.SMALL = 0
    assert native.build_obstacle(False) is None, native.build_obstacle(False)
    for case, (lam, eta, gate, norm, zoneout) in enumerate(CHOICES):
        activation = call.ACTIVATIONS[case % 4]
        options = RumOptions(lam=lam, eta=eta, update_gate=gate, activation=activation, **norm, **zoneout)
        scan_once(options, *SIZES[case % len(SIZES)], (torch.float32, torch.float64)[case % 2], case)
    for case, (head, (T, B, H), zoneout) in enumerate(itertools.product((1, 3, 8, 16, 64), SIZES, ZONEOUTS)):
        rotated = (H, 0, H // 2 // head * head)[case % 3]
        gated = GatedOptions(head_size=head, rotated_units=rotated, **zoneout)
        gated_scan_once(gated, T, B, H, (torch.float32, torch.float64)[case % 2], case)
    for lam, T, B in itertools.product((0, 1), (1, 6), (1, 5)):
        words = dict(layer_norm=B > 1, update_gate=T > 1, zoneout=0.2)
        rum = RUM(7, 21, num_layers=2, bidirectional=B == 1, lam=lam, **words)
        x = torch.randn(T, B, 7, requires_grad=B > 1)
        rum(x)[0].sum().backward()
        rum.eval()
        with torch.no_grad():
            rum(x)
    print("done")


if __name__ == "__main__":
    main()
