"""The torch and native backends against the reference: outputs and every gradient, for every option together."""

import itertools

import pytest
import torch
from torch import Tensor, library

from grids import thinned
from tolerances import DEEP, TOL
from torchrum.ops.kernels.masks import keep_mask
from torchrum.ops.rum_scan import RumOptions, ScanInputs, native, rum_scan, rum_scan_choice
from torchrum.ops.rum_scan.designs import clear_design_cache
from torchrum.ops.rum_scan.torch_rotation import WINDOW

NAMES = ("xp", "h0", "R0", "weight_hh", "ln_weight", "ln_bias")
CALM = 0.1
"""How strongly h turns R in long sequences with lam = 1.

At full strength they are chaotic where units are few: whatever differs by a rounding differs exponentially more with
every step (of 120 sequences of 3 units, tanh, the median grew 1e7-fold in 257 steps), and no tolerance tells a fault
from a rounding. At a tenth a difference stays what it is, and the roundings of T steps add up to about T * eps.
"""


@pytest.fixture(params=["torch", "native"])
def backend(request):
    """Each backend with a hand-written backward."""
    why = native.build_obstacle(double=True) if request.param == "native" else None
    if why is not None:
        pytest.skip(f"native cannot run: {why}")
    return request.param


def draw(options: RumOptions, T=5, B=4, H=6, dtype=torch.float64, feedback=1.0) -> dict[str, Tensor | None]:
    """Random inputs of a scan; ``feedback`` scales the weights through which h turns R, see ``CALM``."""
    inputs: dict[str, Tensor | None] = {
        "xp": torch.randn(T, B, options.num_inputs * H),
        "h0": torch.randn(B, H),
        "R0": torch.linalg.qr(torch.randn(B, H, H, dtype=torch.float64))[0] if options.keeps_rotation else None,
        "weight_hh": torch.randn(options.num_gates * H, H) / H**0.5,
        "ln_weight": torch.randn(options.num_inputs * H) if options.layer_norm else None,
        "ln_bias": torch.randn(options.num_inputs * H) if options.layer_norm else None,
    }
    inputs["weight_hh"][:H] *= feedback
    low = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        name: None if part is None else part.to(low if name == "R0" else dtype).requires_grad_()
        for name, part in inputs.items()
    }


def run(inputs, options, backend, weights=None, lam=None, **more):
    """Outputs and gradients of a random projection of them."""
    leaves = {name: part.detach().requires_grad_() for name, part in inputs.items() if part is not None}
    out, R = rum_scan(ScanInputs(*map(leaves.get, NAMES), **more), options, lam=lam, backend=backend)
    results = [out] if R is None else [out, R]
    weights = weights or [torch.randn_like(part) for part in results]
    grads = torch.autograd.grad(results, list(leaves.values()), weights)
    return dict(zip(["out", "R_n"], results, strict=False)), dict(zip(leaves, grads, strict=True)), weights


def assert_same(inputs, options, tol, backend, **more):
    values, grads, weights = run(inputs, options, "reference", **more)
    fast_values, fast_grads, _ = run(inputs, options, backend, weights, **more)
    for name, value in {**values, **grads}.items():
        fast = {**fast_values, **fast_grads}[name]
        assert fast.dtype == value.dtype, name
        scale = 1 + value.abs().max()
        torch.testing.assert_close(fast / scale, value / scale, **tol, msg=lambda m, n=name: f"{n}: {m}")


ACTIVATIONS = ("relu", "tanh", "sigmoid", "softsign")
LN = [(False, "before"), (True, "before"), (True, "authors")]
GRID = list(itertools.product([0.0, 1.0], [None, 0.7], [True, False], LN, [(0.0, False), (0.3, True), (0.3, False)]))


@pytest.mark.parametrize("first", thinned(range(4), 4))
def test_matches_reference_for_all_options(first, backend):
    for case, (lam, eta, update_gate, (layer_norm, ln_order), (zoneout, training)) in enumerate(GRID):
        if ln_order == "authors" and not update_gate:
            continue
        options = RumOptions(
            lam=lam,
            eta=eta,
            activation=ACTIVATIONS[(first + case + case // 4) % 4],
            update_gate=update_gate,
            layer_norm=layer_norm,
            ln_order=ln_order,
            zoneout=zoneout,
            training=training,
        )
        inputs = draw(options, T=4, B=3, H=5)
        lengths = torch.tensor([4, 3, 1]) if case % 2 else None
        assert_same(inputs, options, TOL[torch.float64], backend, lengths=lengths, seed=torch.tensor(7))


@pytest.mark.parametrize("lam", [0.0, 1.0])
@pytest.mark.parametrize(
    "T, B, H",
    [
        (1, 1, 1),
        (3, 2, 1),
        (2, 1, 2),
        (17, 3, 7),
        (33, 2, 5),
        (130, 1, 4),
        pytest.param(257, 2, 3, marks=pytest.mark.slow),
    ],
)
def test_odd_sizes(T, B, H, lam, backend):
    options = RumOptions(lam=lam, eta=1.0)
    long = T >= 100
    rounding = T * torch.finfo(torch.float64).eps
    tol = {"rtol": 100 * rounding, "atol": 100 * rounding} if long else TOL[torch.float64]
    assert_same(draw(options, T, B, H, feedback=CALM if long else 1.0), options, tol, backend)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_degenerate_planes(lam, backend):
    """Zero, parallel and opposite vectors in some rows do as the rotation's policy says, in value and gradient."""
    options = RumOptions(lam=lam)
    inputs = draw(options, T=3, B=5)
    H = 6
    with torch.no_grad():
        inputs["weight_hh"].zero_()  # so that tau is what is set here
        xp = inputs["xp"]
        xp[1, 0, -H:] = 0  # no eps
        xp[1, 1, :H] = 0  # no tau
        xp[1, 2, :H] = 3 * xp[1, 2, -H:]  # parallel
        xp[1, 3, :H] = -2 * xp[1, 3, -H:]  # opposite
        xp[2, 4, :H] = 0
        xp[2, 4, -H:] = 0  # neither
    assert_same(inputs, options, {"rtol": 1e-9, "atol": 1e-9}, backend)
    values, grads, _ = run(inputs, options, backend)
    assert all(part.isfinite().all() for part in {**values, **grads}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_precisions_match_float64(dtype, lam, backend):
    # with relu a rounding may turn a unit on or off, which no tolerance of the dtype covers
    options = RumOptions(lam=lam, eta=1.0, layer_norm=True, activation="tanh")
    inputs = draw(options, T=6, B=3, H=16, dtype=dtype)
    wide = {name: None if part is None else part.detach().double() for name, part in inputs.items()}
    values, grads, weights = run(wide, options, "reference")
    low_values, low_grads, _ = run(
        inputs, options, backend, [w.to(dtype if i == 0 else torch.float32) for i, w in enumerate(weights)]
    )
    for name, value in {**values, **grads}.items():
        low = {**low_values, **low_grads}[name].double()
        error = (low - value).norm() / value.norm()
        assert error < {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype], (name, error)


@pytest.mark.parametrize("T", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
@pytest.mark.parametrize("of_R", [True, False], ids=["gradient of R_n", "no gradient of R_n"])
@pytest.mark.parametrize("to_R", [True, False], ids=["R0 needs a gradient", "R0 needs none"])
def test_windows_of_the_memory(T, of_R, to_R, backend):
    """Gradients cross the windows in which R is formed, with and without those of R itself, some rows degenerate."""
    options = RumOptions(lam=1.0, eta=1.0, activation="tanh")
    inputs = draw(options, T=T, B=3, H=6, feedback=CALM)
    with torch.no_grad():
        inputs["xp"][T // 2, 0, -6:] = 0  # no eps
        inputs["xp"][T // 3, 1, :6] = -2 * inputs["xp"][T // 3, 1, -6:]
    weights = torch.randn(T, 3, 6, dtype=torch.float64), torch.randn(3, 6, 6, dtype=torch.float64) * of_R
    grads = {}
    for name in ("reference", backend):
        leaves = {key: part.detach().requires_grad_() for key, part in inputs.items() if part is not None}
        leaves["R0"].requires_grad_(to_R)
        out, R = rum_scan(ScanInputs(*map(leaves.get, NAMES)), options, backend=name)
        loss = (out * weights[0]).sum() + ((R * weights[1]).sum() if of_R else 0)
        loss.backward()
        grads[name] = {key: part.grad for key, part in leaves.items() if part.requires_grad}
    assert ("R0" in grads[backend]) == to_R
    for name, value in grads["reference"].items():
        torch.testing.assert_close(
            grads[backend][name], value, **DEEP[torch.float64], msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_short_tau_turns_nothing(backend):
    """|tau| of 1e-13 is below what has a direction, though its square is no zero."""
    options = RumOptions(lam=1.0)
    inputs = draw(options, T=1, B=2, dtype=torch.float32)
    with torch.no_grad():
        inputs["weight_hh"].zero_()
        inputs["xp"][0, 0, :6] *= 1e-13
    R = run(inputs, options, backend)[0]["R_n"]
    torch.testing.assert_close(R[0], inputs["R0"][0])
    assert not torch.allclose(R[1], inputs["R0"][1])


def test_autocast_leaves_the_memory_exact(backend):
    """The matmuls with R stay in float32, which bfloat16 ones would miss by a thousand times as much."""
    options = RumOptions(lam=1.0, eta=1.0)
    inputs = draw(options, T=20, B=2, H=24, dtype=torch.float32)
    values, grads, weights = run(inputs, options, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_values, cast_grads, _ = run(inputs, options, backend, weights)
    for name, value in {**values, **grads}.items():
        torch.testing.assert_close({**cast_values, **cast_grads}[name], value, rtol=0, atol=0)


def test_memory_of_a_long_sequence_stays_bounded(backend):
    """lam = 1 keeps no R per step: what the forward saves grows by a few vectors per step, whatever R's size."""
    H, B = 32, 2
    options = RumOptions(lam=1.0)

    def saved_bytes(T: int) -> int:
        inputs = draw(options, T=T, B=B, H=H, dtype=torch.float32)
        out = rum_scan(ScanInputs(*map(inputs.get, NAMES)), options, backend=backend)[0]
        return sum(part.untyped_storage().nbytes() for part in out.grad_fn.saved_tensors if part is not None)

    growth = (saved_bytes(512) - saved_bytes(256)) / 256
    assert growth < B * H * 4 * 10  # ten vectors, against the H vectors that R alone would take


def test_reversed_memory_keeps_gradients_exact(backend):
    """Over many windows, float32 outputs and gradients stay at rounding of float64."""
    T, options = 261, RumOptions(lam=1.0, eta=1.0, activation="tanh")
    inputs = draw(options, T=T, B=2, H=8, dtype=torch.float32, feedback=CALM)
    values, grads, weights = run(inputs, options, backend)
    wide = {name: None if part is None else part.detach().double() for name, part in inputs.items()}
    exact, exact_grads, _ = run(wide, options, "reference", [w.double() for w in weights])
    for name, value in {**exact, **exact_grads}.items():
        error = ({**values, **grads}[name] - value).norm() / value.norm()
        assert error < T * torch.finfo(torch.float32).eps, (name, error)


def test_orthogonality_after_ten_thousand_steps(backend):
    options = RumOptions(lam=1.0, eta=1.0)
    with torch.no_grad():
        inputs = draw(options, T=10_000, B=1, H=16, dtype=torch.float32)
        inputs["R0"] = None
        _, R = rum_scan(ScanInputs(*map(inputs.get, NAMES)), options, backend=backend)
    assert (R @ R.mT - torch.eye(16)).abs().max() < 1e-5


def test_zoneout_masks_have_their_rate_and_do_not_repeat():
    masks = torch.stack([keep_mask(torch.tensor(3), t, 50, 40, 0.3) for t in range(50)]).double()
    assert abs(masks.mean().item() - 0.7) < 0.01
    centred = masks - masks.mean()
    for shift in (1, 2, 7):  # over time, batch and units
        for dim in range(3):
            correlation = (centred * centred.roll(shift, dim)).mean() / centred.square().mean()
            assert abs(correlation) < 0.02
    other = keep_mask(torch.tensor(4), 0, 50, 40, 0.3).double()
    assert abs(((other - 0.7) * (masks[0] - 0.7)).mean()) < 0.02


def test_choice_says_why(monkeypatch):
    xp = torch.randn(2, 2, 9)
    monkeypatch.setattr(native, "build_obstacle", lambda double: None)
    assert rum_scan_choice(xp, RumOptions()) == ("native", "fused cannot run: the input is on cpu")
    assert rum_scan_choice(xp.half(), RumOptions(lam=1.0)).backend == "native"
    assert rum_scan_choice(xp.to("meta"), RumOptions()).backend == "torch"
    monkeypatch.setattr(native, "build_obstacle", lambda double: "no C compiler was found")
    clear_design_cache()
    why = "fused cannot run: the input is on cpu; native cannot run: no C compiler was found"
    assert rum_scan_choice(xp, RumOptions()) == ("torch", why)
    with pytest.raises(ValueError, match=r"backend='native' cannot run: no C compiler was found\. Pass backend='auto'"):
        rum_scan_choice(xp, RumOptions(), backend="native")
    assert rum_scan_choice(xp, RumOptions(lam=0.5)).backend == "reference"
    assert "lam is 0.5" in rum_scan_choice(xp, RumOptions(lam=0.5)).reason
    assert "callable" in rum_scan_choice(xp, RumOptions(activation=torch.sin)).reason
    assert "target_activation" in rum_scan_choice(xp, RumOptions(target_activation="tanh")).reason
    assert rum_scan_choice(xp, RumOptions(), backend="reference") == ("reference", "it was asked for")
    with pytest.raises(ValueError, match=r"backend='fused' cannot run: the input is on cpu\. Pass backend='auto'"):
        rum_scan_choice(xp, RumOptions(), backend="fused")
    with pytest.raises(ValueError, match="backend='torch' cannot run: lam is learnable"):
        rum_scan_choice(xp, RumOptions(), learnable_lam=True, backend="torch")
    with pytest.raises(ValueError, match="Did you mean 'torch'"):
        rum_scan_choice(xp, RumOptions(), backend="torhc")


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_operator_passes_opcheck(lam, backend):
    options = RumOptions(lam=lam, eta=1.0)
    inputs = draw(options, dtype=torch.float32)
    flags = (lam, 1.0, "relu", True, False, "before", 1e-3, 0.0, False, backend)
    args = [None if inputs[name] is None else inputs[name].detach() for name in NAMES]
    checks = ("test_schema", "test_faketensor")
    permuted = args[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)  # same values, other strides
    for xp, save in itertools.product((args[0], permuted), (True, False)):
        given = (xp, *args[1:], None, None, *flags, save)
        library.opcheck(torch.ops.torchrum.rum_scan.default, given, test_utils=checks)
    out, R_n, gates, ends = torch.ops.torchrum.rum_scan(*args, None, None, *flags, True)
    grads = (torch.randn_like(out), None if lam == 0 else torch.randn_like(R_n))
    saved = (out, gates, R_n, ends)
    library.opcheck(
        torch.ops.torchrum.rum_scan_backward.default,
        (*grads, *args, None, None, *saved, *flags, lam == 1),
        test_utils=checks,
    )


def test_options_that_hash_alike_are_told_apart():
    plain, normed = RumOptions(lam=1.0), RumOptions(lam=1.0, layer_norm=True)
    assert hash(plain) == hash(normed) and plain != normed
    assert {plain: 1, normed: 2}[RumOptions(lam=1.0, layer_norm=True)] == 2
    assert hash(RumOptions(eta=2)) == hash(RumOptions(eta=2.0))
