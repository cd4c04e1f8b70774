"""Calls that nobody looks at: they pass the registered operator by, and give what it gives."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchrum import RUM, RUMCell
from torchrum.cells import rum as rum_cell
from torchrum.ops.kernels import cuda
from torchrum.ops.kernels.cuda import Fill
from torchrum.ops.rum_scan import designs, lam1, native, persistent, plain

NODE = "_PlainScanBackward"
both = pytest.mark.parametrize("lam", [0, 1])
backends = pytest.mark.parametrize("backend", ["torch", "native"])

CASES: dict[str, dict] = {
    "usual": {},
    "layer norm": {"layer_norm": True},
    "zoneout": {"zoneout": 0.3},
    "no update gate": {"update_gate": False},
    "no bias of eps": {"embed_bias": False},
    "no bias": {"bias": False},
    "eta": {"eta": 1.5, "activation": "tanh"},
    "stacked": {"num_layers": 2, "bidirectional": True},
    "two layers": {"num_layers": 2},
}


@pytest.fixture(autouse=True)
def _needs_a_compiler(request: pytest.FixtureRequest) -> None:
    if "native" in request.node.name and (why := native.build_obstacle(False)):
        pytest.skip(f"the native scan cannot be compiled: {why}")


@pytest.fixture
def by_operator(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], list[Tensor]]], list[Tensor]]:
    """Runs a function with calls that are not plain."""

    def run(function: Callable[[], list[Tensor]]) -> list[Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(rum_cell, "plain_scan", lambda *args: None)
            return function()

    return run


def parts_of(h_n: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return h_n if isinstance(h_n, tuple) else (h_n,)


def results(rum: RUM, x: Tensor, hx: tuple[Tensor, ...], lengths: Tensor | None, of: str = "all") -> list[Tensor]:
    """Outputs, last state and the gradients of everything, of a loss that depends on some of the results."""
    torch.manual_seed(1)  # of zoneout's masks
    x, hx = x.detach().requires_grad_(), tuple(part.detach().requires_grad_() for part in hx)
    output, h_n = rum(x, hx if len(hx) > 1 else hx[0], lengths=lengths)
    given = {"all": (output, *parts_of(h_n)), "output": (output,), "state": parts_of(h_n)}[of]
    loss = sum((part * torch.linspace(-1, 1, part.numel(), dtype=part.dtype).view(part.shape)).sum() for part in given)
    grads = torch.autograd.grad(loss, [x, *hx, *rum.parameters()], allow_unused=True)
    return [output, *parts_of(h_n), *(grad for grad in grads if grad is not None)]


def draw(rum: RUM, dtype: torch.dtype = torch.float32, T: int = 5, B: int = 3) -> tuple[Tensor, tuple[Tensor, ...]]:
    count, H = rum.num_layers * rum.num_directions, rum.hidden_size
    h = torch.randn(count, B, H, dtype=dtype)
    rotation = torch.linalg.qr(torch.randn(count, B, H, H, dtype=dtype)).Q
    return torch.randn(T, B, rum.input_size, dtype=dtype), (h, rotation)[: len(rum.state_names)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def agree(backend: str, a: list[Tensor], b: list[Tensor]) -> bool:
    """To the bit, but for the native scan, which projects the input by its own matmul, in float64."""
    if backend == "torch":
        return same(a, b)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    return True


@both
@backends
@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_results_and_gradients_are_the_operators(lam, backend, words, by_operator):
    dtype = torch.float32 if backend == "torch" else torch.float64
    rum = RUM(4, 6, form="paper", lam=lam, backend=backend, dtype=dtype, **words)
    x, hx = draw(rum, dtype)
    for lengths in (None, torch.tensor([5, 1, 3])):
        for of in ("all", "output", "state"):
            wanted = by_operator(lambda: results(rum, x, hx, lengths, of))  # noqa: B023
            assert agree(backend, results(rum, x, hx, lengths, of), wanted)


@pytest.mark.parametrize("T, B", [(1, 1), (1, 3), (2, 2), (1, 8), (5, 3), (12, 3), (2, 35), (40, 1)])
@pytest.mark.parametrize("words", [{}, {"zoneout": 0.3}, {"bias": False}, CASES["stacked"], {"rotated": 0.3}], ids=str)
def test_native_gated_calls_match_the_reference(words, T, B):
    """The scan projects few rows and steps all at once, and more in windows."""
    rum = RUM(5, 20, backend="native", dtype=torch.float64, **words)
    reference = RUM(5, 20, backend="reference", dtype=torch.float64, **words)
    reference.load_state_dict(rum.state_dict())
    x, hx = draw(rum, torch.float64, T=T, B=B)
    for lengths in (None, torch.arange(B) % T + 1):
        for of in ("all", "output", "state"):
            found, wanted = (results(each, x, hx, lengths, of) for each in (rum, reference))
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    for training in (False, True):
        found, wanted = [], []
        for each, values in ((rum, found), (reference, wanted)):
            each.train(training)
            torch.manual_seed(1)
            output, h_n = each(x)  # from zeros
            assert NODE in str(output.grad_fn) or each is reference or rum.bidirectional
            values += [output, h_n, *torch.autograd.grad(output.square().sum() + h_n.sum(), list(each.parameters()))]
            with torch.no_grad():
                torch.manual_seed(1)
                values += [*each(x, *hx), *each(x)]
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("T, B", [(2, 1), (3, 2)])
def test_native_gated_calls_have_second_and_batched_derivatives(T, B):
    rum = RUM(2, 3, head_size=2, backend="native", dtype=torch.float64)
    x, (h,) = draw(rum, torch.float64, T=T, B=B)
    x, h, weights = x.requires_grad_(), h.requires_grad_(), list(rum.parameters())

    def run(x: Tensor, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return rum(x, h)

    assert torch.autograd.gradcheck(run, (x, h, *weights), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (x, h, *weights), check_batched_grad=True, fast_mode=True)


@pytest.mark.parametrize("T, B", [(1, 2), (5, 3)])
def test_native_gated_calls_meet_hooks_and_changed_weights(T, B):
    rum = RUM(5, 12, backend="native")
    x, hx = draw(rum, T=T, B=B)
    wanted = results(rum, x, hx, None)
    with save_on_cpu():
        assert same(results(rum, x, hx, None), wanted)
    output, _ = rum(x, *hx)
    kept = output.detach().clone()
    output.detach().zero_()  # the user's copy
    grads = torch.autograd.grad(output.sum(), list(rum.parameters()))
    again, _ = rum(x, *hx)
    assert torch.equal(again, kept)
    assert same(list(grads), list(torch.autograd.grad(again.sum(), list(rum.parameters()))))
    output, _ = rum(x, *hx)
    with torch.no_grad():
        rum.weight_hh_l0.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@both
@backends
def test_wide_inputs_too(lam, backend, by_operator):
    """Sizes at which the native projection runs, float64, and an input that is not contiguous."""
    rum = RUM(70, 64, form="paper", lam=lam, backend=backend, dtype=torch.float64, batch_first=True)
    x, hx = draw(rum, torch.float64, T=8, B=12)
    x = x.transpose(0, 1)
    assert agree(backend, results(rum, x, hx, None), by_operator(lambda: results(rum, x, hx, None)))


@both
@backends
@pytest.mark.parametrize("T", [1, 5])
def test_no_state_is_as_good_as_zeros(lam, backend, T):
    rum = RUM(4, 6, form="paper", lam=lam, backend=backend)
    x, (h, *_) = draw(rum, T=T)
    given = (torch.zeros_like(h), None) if lam else torch.zeros_like(h)

    def found(hx: Tensor | tuple[Tensor | None, ...] | None) -> list[Tensor]:
        output, h_n = rum(x, hx)
        return [output, *parts_of(h_n), *torch.autograd.grad(output.sum(), list(rum.parameters()))]

    assert same(found(None), found(given))


@both
@backends
def test_a_sign_that_is_not_in_memory_is_read(lam, backend):
    """torch negates lazily where it takes the imaginary part of a conjugate; one number of it is contiguous."""
    rum = RUM(1, 1, form="paper", lam=lam, backend=backend, dtype=torch.float64)
    x, h, grad = (torch.randn(1, 1, 1, dtype=torch.complex128).conj().imag for _ in range(3))
    assert x.is_neg() and x.is_contiguous()

    def found(x: Tensor, h: Tensor, grad: Tensor) -> list[Tensor]:
        hx = (h, None) if lam else h
        output, _ = rum(x, hx)
        with torch.no_grad():
            alone, _ = rum(x, hx)
        return [output, alone, *torch.autograd.grad(output, list(rum.parameters()), grad)]

    wanted = found(*(part.resolve_neg() for part in (x, h, grad)))
    torch.testing.assert_close(found(x, h, grad), wanted, rtol=1e-10, atol=1e-12)  # of another projection, see agree


def node_of(output: Tensor) -> str:
    assert output.grad_fn is not None
    return output.grad_fn.name()


def test_who_looks_gets_the_operator():
    rum, x = RUM(3, 5, form="paper", backend="torch"), torch.randn(4, 2, 3)
    assert node_of(rum(x)[0]) == NODE
    with FlopCounterMode(display=False) as counter:
        assert node_of(rum(x)[0]) != NODE
    assert any("rum_scan" in str(name) for name in counter.get_flop_counts()["Global"])
    seen = []
    torch.func.grad(lambda x: [seen.append(NODE in str(rum(x)[0])), rum(x)[0].sum()][1])(x)
    assert seen == [False]
    with torch.autocast("cpu", torch.bfloat16):
        assert node_of(rum(x)[0]) != NODE
    assert node_of(RUM(3, 5, form="paper", backend="reference")(x)[0]) != NODE
    assert node_of(RUM(3, 5, learn_lam=True)(x)[0]) != NODE


@both
def test_who_counts_operators_sees_the_scan(lam):
    layer, x = RUM(3, 5, form="paper", lam=lam, backend="torch"), torch.randn(2, 1, 3)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    assert any("rum_scan" in str(name) for name in counter.get_flop_counts()["Global"])


@both
def test_nothing_is_recorded_where_nothing_asks_for_gradients(lam):
    rum, x = RUM(3, 5, form="paper", lam=lam, backend="torch"), torch.randn(4, 2, 3)
    wanted = rum(x)[0].detach()
    for parameter in rum.parameters():
        parameter.requires_grad_(False)
    assert not rum(x)[0].requires_grad
    assert torch.equal(rum(x)[0], wanted)
    rum.bias_ih_l0.requires_grad_()
    rum(x)[0].sum().backward()
    assert rum.bias_ih_l0.grad is not None
    assert rum.weight_hh_l0.grad is None


@both
@backends
@pytest.mark.parametrize("of", ["output", "state"])
def test_second_derivatives_are_the_references(lam, backend, of):
    def second(backend: str) -> list[Tensor]:
        torch.manual_seed(0)
        rum = RUM(2, 3, form="paper", lam=lam, activation="tanh", backend=backend, dtype=torch.float64)
        x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
        output, h_n = rum(x)
        assert (node_of(output) == NODE) == (backend != "reference")
        loss = sum(part.sin().sum() for part in ((output,) if of == "output" else parts_of(h_n)))
        weights = [x, *rum.parameters()]
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return list(torch.autograd.grad(sum(part.sin().sum() for part in first), weights))

    torch.testing.assert_close(second(backend), second("reference"))


@both
def test_a_weight_that_is_written_to_before_the_backward_is_an_error(lam):
    for name in ("weight_ih_l0", "weight_hh_l0"):
        rum = RUM(3, 5, form="paper", lam=lam, backend="torch")
        output = rum(torch.randn(4, 2, 3))[0]
        with torch.no_grad():
            getattr(rum, name).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@both
@backends
@pytest.mark.parametrize("num_layers", [1, 2])
def test_results_may_be_written_to(lam, backend, num_layers):
    rum, x = RUM(3, 5, num_layers, form="paper", lam=lam, backend=backend), torch.randn(4, 2, 3)

    def gradients(write: bool) -> list[Tensor]:
        output, h_n = rum(x)
        if write:
            kept = output.detach().clone()
            for part in parts_of(h_n):
                part.mul_(2)
            assert torch.equal(output.detach(), kept)
            output.mul_(3)
            return list(torch.autograd.grad(output.sum(), list(rum.parameters())))
        return list(torch.autograd.grad((3 * output).sum(), list(rum.parameters())))

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)
    with torch.no_grad():
        output, h_n = rum(x)
        kept = output.clone()
        for part in parts_of(h_n):
            part.zero_()
        assert torch.equal(output, kept)


@both
def test_backward_twice_hooks_and_checkpoints(lam):
    rum, x = RUM(3, 5, 2, form="paper", lam=lam, backend="torch"), torch.randn(4, 2, 3, requires_grad=True)
    weights = list(rum.parameters())
    output = rum(x)[0]
    wanted = torch.autograd.grad(output.sum(), weights, retain_graph=True)
    assert same(list(torch.autograd.grad(output.sum(), weights)), list(wanted))
    with save_on_cpu():
        output = rum(x)[0]
    assert same(list(torch.autograd.grad(output.sum(), weights)), list(wanted))
    output = checkpoint(lambda x: rum(x)[0], x, use_reentrant=False)
    assert same(list(torch.autograd.grad(output.sum(), weights)), list(wanted))
    output = rum(x)[0]
    output.register_hook(lambda grad: 2 * grad)
    assert same(list(torch.autograd.grad(output.sum(), weights)), [2 * grad for grad in wanted])


def test_a_backward_that_a_compiler_traces():
    rum, x = RUM(3, 5, form="paper", backend="torch"), torch.randn(4, 2, 3)
    wanted = torch.autograd.grad(rum(x)[0].sin().sum(), list(rum.parameters()))
    loss = rum(x)[0].sin().sum()
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in rum.parameters()], list(wanted))


@both
@backends
def test_a_cell_is_a_plain_call_too(lam, backend, by_operator):
    dtype = torch.float64
    cell, x = RUMCell(3, 5, form="paper", lam=lam, backend=backend, dtype=dtype), torch.randn(2, 3, dtype=dtype)
    rotation = torch.linalg.qr(torch.randn(2, 5, 5, dtype=dtype)).Q
    hx = (torch.randn(2, 5, dtype=dtype), rotation)[: 1 + lam]

    def found(write: bool = False) -> list[Tensor]:
        state = parts_of(cell(x, hx if lam else hx[0]))
        kept = [part.detach().clone() for part in state]
        if write:
            for part in state:
                part.mul_(1)
        return [*kept, *torch.autograd.grad(sum(part.sin().sum() for part in state), list(cell.parameters()))]

    assert node_of(parts_of(cell(x))[0]) == NODE
    assert agree(backend, found(), by_operator(found))
    assert same(found(), found(write=True))


def test_the_backward_rounds_nothing_under_autocast():
    rum, x = RUM(3, 5, form="paper", backend="torch"), torch.randn(4, 2, 3)
    wanted = torch.autograd.grad(rum(x)[0].sum(), list(rum.parameters()))
    output = rum(x)[0].sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(output, list(rum.parameters()))
    assert same(list(found), list(wanted))


class Counter:
    """Stands in for a loaded kernel, and does nothing."""

    launches = 0
    fills = 0

    def launch(self, *args: object, fills: Sequence[Fill] = (), **words: object) -> None:
        Counter.launches += 1
        Counter.fills += len(fills)


@pytest.fixture
def gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Counter]]:
    """Tensors on the CPU take the way of tensors on a GPU up to the launches, which do nothing."""
    monkeypatch.setattr(Counter, "launches", 0)
    monkeypatch.setattr(Counter, "fills", 0)
    for design, lam in ((persistent, 0), (lam1, 1)):
        monkeypatch.setattr(design, "obstacle", lambda _, options, lam=lam: None if options.lam == lam else "other lam")
        monkeypatch.setattr(design, "load_kernel", lambda *_: Counter())
    monkeypatch.setattr(native, "projects", lambda *_: False)
    monkeypatch.setattr(plain, "adds_bias_separately", lambda *_: True)
    monkeypatch.setattr(plain, "kernel_projects", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(cuda, "_mailboxes", {})
    monkeypatch.setattr(persistent, "resident_blocks", lambda _: 132)
    monkeypatch.setattr(persistent, "_kernel", lambda *_: Counter())
    designs.clear_design_cache()
    yield Counter
    designs.clear_design_cache()


NO_LAUNCH = {f"aten::{name}" for name in ("new_empty", "empty_like", "as_strided", "reshape", "view", "t", "detach")}


@pytest.mark.parametrize(
    "lam, training, launches, by_torch, most",
    [(0, True, 2, 3, 20), (1, True, 3, 5, 20), (0, False, 1, 0, 3), (1, False, 1, 1, 5)],
)
def test_a_call_on_a_gpu_makes_few_calls_of_torch(gpu_without_kernels, lam, training, launches, by_torch, most):
    """At small sizes each costs more than its share of a kernel: the counts may fall, and must not rise unnoticed.

    torch launches the matmuls of W_hh, W_ih and x, and with lam 1 that of the projection and the sum for the bias.
    """
    rum, x = RUM(64, 64, form="paper", lam=lam).train(training), torch.randn(3, 2, 64, requires_grad=True)
    grad = torch.randn(3, 2, 64)

    def call() -> None:
        rum.zero_grad()
        x.grad = None
        if training:
            rum(x)[0].backward(grad)
        else:
            with torch.no_grad():
                rum(x)

    call()
    gpu_without_kernels.launches = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    assert gpu_without_kernels.launches == launches
    assert gpu_without_kernels.fills == 0
    names = [e.name for e in profiler.events() if e.name.startswith("aten::") and _is_outermost(e)]
    assert 0 < len(names) <= most, (len(names), names)
    assert len([name for name in names if name not in NO_LAUNCH]) == by_torch, names


@pytest.mark.parametrize("lam, most", [(0, 12.5), (1, 9.5)])
def test_a_training_call_takes_little_memory(gpu_without_kernels, lam, most):
    """In units of the input: the projected input and its gradient, 3 each, the states, the user's copy of them and the
    input's gradient; with lam 0 the gates, 2, and mailboxes, 2, until the backward kernel is queued. Mailboxes of up to
    1 MB are kept for good."""
    T, B, H = 600, 8, 64
    rum, x, grad = RUM(H, H, form="paper", lam=lam), torch.randn(T, B, H, requires_grad=True), torch.randn(T, B, H)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        rum(x)[0].backward(grad)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    taken = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    assert 8 < max(taken) / x.nbytes < most


def _is_outermost(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    parent = event.cpu_parent
    return parent is None or not parent.name.startswith("aten::")
