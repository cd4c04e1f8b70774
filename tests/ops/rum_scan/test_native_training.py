"""Training by the native scan from the input itself: one call of C each way, held to the reference."""

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ops.rum_scan.test_native import needs_compiler
from torchrum import RUM
from torchrum.ops.rum_scan import native
from torchrum.ops.rum_scan.types import NO_COPIES, Copies, LayerInputs

WORDS = [
    dict(),
    dict(update_gate=False, embed_bias=False, activation="relu", eta=None),
    dict(layer_norm=True, zoneout=0.3, ln_order="authors"),
    dict(layer_norm=True, num_layers=2),
    dict(num_layers=2, bidirectional=True, bias=False),
]


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """Two threads, however little there is to do."""
    before = torch.get_num_threads()
    monkeypatch.setattr(native, "SMALL", 0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch) -> list[Copies]:
    """Grows with each scan that is trained from its input, by the memory for the user's copies."""
    seen: list[Copies] = []
    run = native.forward

    def watched(inputs, options, save=True, copies=NO_COPIES):
        if save and isinstance(inputs, LayerInputs):
            seen.append(copies)
        return run(inputs, options, save, copies)

    monkeypatch.setattr(native, "forward", watched)
    return seen


def drawn_state(rum: RUM, B: int) -> tuple[Tensor, ...]:
    count, H = rum.num_layers * rum.num_directions, rum.hidden_size
    h = torch.randn(count, B, H, dtype=torch.float64)
    return (h, torch.linalg.qr(torch.randn(count, B, H, H, dtype=torch.float64)).Q)[: len(rum.state_names)]


def gradients(rum: RUM, x: Tensor, hx: tuple[Tensor, ...] | None, lengths: Tensor | None, backend: str) -> dict:
    """Results and gradients of a loss on all of them, by one backend; zoneout's masks come from one seed."""
    rum.backend = backend
    torch.manual_seed(5)
    leaves = {"x": x.clone().requires_grad_(), **dict(rum.named_parameters())}
    state = None
    if hx is not None:
        state = tuple(part.clone().requires_grad_() for part in hx)
        leaves.update(zip(("h0", "R0"), state, strict=False))
        state = state if len(state) > 1 else state[0]
    output, last = rum(leaves["x"], state, lengths=lengths)
    results = [output, *(last if isinstance(last, tuple) else (last,))]
    loss = sum((part * torch.arange(part.numel()).cos().view_as(part)).sum() for part in results)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {**dict(enumerate(results)), **dict(zip(leaves, grads, strict=True))}


@needs_compiler
@pytest.mark.parametrize("lam", [0, 1])
@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("T, B, I, H", [(1, 1, 1, 1), (1, 3, 5, 18), (3, 19, 17, 50)])
def test_gradients_match_the_reference(lam, words, T, B, I, H, calls):
    """Results and every gradient, with and without initial states and lengths."""
    rum, x = RUM(I, H, form="paper", lam=lam, dtype=torch.float64, **words), torch.randn(T, B, I, dtype=torch.float64)
    hx, lengths = drawn_state(rum, B), torch.randint(1, T + 1, (B,))
    for state, ends in ((None, None), (hx, lengths)):
        wanted = gradients(rum, x, state, ends, "reference")
        assert not calls
        found = gradients(rum, x, state, ends, "native")
        assert len(calls) == rum.num_layers * rum.num_directions
        calls.clear()
        for name, want in wanted.items():
            torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@needs_compiler
@pytest.mark.parametrize("T, B", [(1, 127), (1, 129), (26, 100)])  # around pieces of 128 rows, segments of 512 and more
@pytest.mark.parametrize("I, H", [(1, 1), (10, 100), (37, 5), (3, 340)])
def test_weight_gradients_of_many_rows(T, B, I, H):
    """To the last bit the same for any number of threads."""
    rum, x = RUM(I, H, form="paper", dtype=torch.float64), torch.randn(T, B, I, dtype=torch.float64)
    wanted, together = (gradients(rum, x, None, None, backend) for backend in ("torch", "native"))
    torch.set_num_threads(1)
    alone = gradients(rum, x, None, None, "native")
    for name, want in wanted.items():
        torch.testing.assert_close(alone[name], want, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(alone[name], together[name]), name


@needs_compiler
@pytest.mark.parametrize("lam", [0, 1])
def test_no_rows(lam, calls):
    rum, x = RUM(4, 5, form="paper", lam=lam, layer_norm=True), torch.randn(3, 0, 4, requires_grad=True)
    rum(x)[0].sum().backward()
    assert calls
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(part.grad is not None and part.grad.count_nonzero() == 0 for part in rum.parameters())


@needs_compiler
@pytest.mark.parametrize("lam", [0, 1])
def test_a_gradient_that_is_not_asked_for_is_left_out(lam, calls):
    rum, x = RUM(6, 20, form="paper", lam=lam), torch.randn(5, 4, 6)
    wanted = gradients(rum, x, None, None, "native")
    rum.bias_ih_l0.requires_grad_(False)
    rum.weight_hh_l0.requires_grad_(False)
    output, last = rum(x)
    results = [output, *(last if isinstance(last, tuple) else (last,))]
    sum((part * torch.arange(part.numel()).cos().view_as(part)).sum() for part in results).backward()
    assert torch.equal(rum.weight_ih_l0.grad, wanted["weight_ih_l0"])
    assert rum.bias_ih_l0.grad is None and rum.weight_hh_l0.grad is None
    assert len(calls) == 2
    rum.requires_grad_(False)
    assert not rum(x)[0].requires_grad
    assert len(calls) == 2  # nothing would be kept for


def assert_same_by_both(rum: RUM, compute: Callable[[], Sequence[Tensor]], **tolerances: float) -> None:
    """What ``compute`` finds by the reference and by C."""
    results = []
    for backend in ("reference", "native"):
        rum.backend = backend  # type: ignore[assignment]
        results.append(compute())
    for want, found in zip(*results, strict=True):
        torch.testing.assert_close(found, want, **tolerances)


@needs_compiler
@pytest.mark.parametrize("lam", [0, 1])
def test_second_derivatives(lam, calls):
    """Where a weight depends on the input, too: the way through it is the caller's graph, not the scan's."""
    rum, x = (
        RUM(3, 7, form="paper", lam=lam, dtype=torch.float64),
        torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True),
    )
    weight = rum.weight_ih_l0.detach().clone()
    del rum.weight_ih_l0

    def derivatives() -> list[Tensor]:
        rum.weight_ih_l0 = weight * (1 + x.mean())  # type: ignore[assignment]
        leaves = [x, rum.weight_hh_l0, rum.bias_ih_l0]
        firsts = torch.autograd.grad(rum(x)[0].pow(3).sum(), leaves, create_graph=True)
        return [*firsts, *torch.autograd.grad(sum(part.square().sum() for part in firsts), leaves)]

    assert_same_by_both(rum, derivatives, rtol=1e-8, atol=1e-9)
    assert calls


@needs_compiler
@pytest.mark.parametrize("lam", [0, 1])
def test_gradients_in_a_batch(lam, calls):
    """``is_grads_batched`` maps over the backward."""
    rum, x = (
        RUM(3, 6, form="paper", lam=lam, dtype=torch.float64),
        torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True),
    )
    leaves, grads = [x, *rum.parameters()], torch.randn(5, 4, 2, 6, dtype=torch.float64)
    batched = functools.partial(torch.autograd.grad, inputs=leaves, grad_outputs=grads, is_grads_batched=True)
    assert_same_by_both(rum, lambda: batched(rum(x)[0]), rtol=1e-9, atol=1e-10)
    assert calls


@needs_compiler
@pytest.mark.parametrize("layers", [1, 2])
def test_what_is_returned_may_be_written_to(layers, calls):
    rum, x = RUM(4, 9, layers, lam=1, backend="native"), torch.randn(5, 3, 4, requires_grad=True)
    wanted = torch.autograd.grad((3 * rum(x)[0]).sin().sum(), x)
    output, (h, R) = rum(x)
    h.zero_()
    R.zero_()
    found = torch.autograd.grad(output.mul_(3).sin_().sum(), x)
    torch.testing.assert_close(found, wanted)
    kept = [(copies.out is not None, copies.last.shape) for copies in calls]
    assert kept == ([(False, (3, 9)), (True, (3, 9))] if layers == 2 else [(True, (1, 3, 9))]) * 2


@needs_compiler
def test_checkpoints_and_second_backwards(calls):
    """Saved tensors may be thrown away and computed again, or read twice."""
    rum, x = RUM(4, 9, lam=1, zoneout=0.2, backend="native"), torch.randn(5, 3, 4, requires_grad=True)
    torch.manual_seed(1)
    output = rum(x)[0]
    wanted = torch.autograd.grad(output.sin().sum(), x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(output.sin().sum(), x)[0], wanted[0])
    torch.manual_seed(1)
    again = checkpoint(lambda x: rum(x)[0], x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sin().sum(), x)[0], wanted[0])
    assert len(calls) == 3


@needs_compiler
def test_it_stands_back_from_whoever_watches_torch(calls):
    rum, x = RUM(3, 4, form="paper"), torch.randn(5, 2, 3)
    with FlopCounterMode(display=False) as counter:
        rum(x)
    assert counter.get_total_flops() > 0
    torch.func.vmap(lambda x: rum(x)[0], in_dims=1)(x)
    with torch.autocast("cpu", torch.bfloat16):
        rum(x)
    RUM(3, 4, learn_lam=True)(x)
    RUM(3, 4, form="paper", backend="torch")(x)
    assert not calls
    output, _ = rum(x)
    assert len(calls) == 1
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() > 0
