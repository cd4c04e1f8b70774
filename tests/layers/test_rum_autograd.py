"""What users of autograd do with a layer: in-place operations, forward mode, counting, tracing, meta tensors."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from grids import form_of
from torchrum import RUM, RUMCell
from torchrum.layers.registry import build_layer

both = pytest.mark.parametrize("lam", [None, 0, 1])
SHAPES = [dict(), dict(num_layers=2), dict(num_layers=2, bidirectional=True), dict(batch_first=True)]


def make(lam: float, **options) -> RUM:
    torch.manual_seed(0)
    return RUM(3, 4, **form_of(lam, activation="tanh"), dtype=torch.float64, **options)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@both
@pytest.mark.parametrize("with_lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_output_may_be_changed_in_place(shape, with_lengths, lam):
    """As with nn.GRU on a CPU: gradients are those of the same operations on copies."""
    rum, x = make(lam, **shape), draw(5, 2, 3)
    lengths = torch.tensor([5, 3] if not rum.batch_first else [2, 1, 2, 2, 2]) if with_lengths else None

    def run(triple) -> list[Tensor]:
        output, hidden = rum(x, lengths=lengths)
        output, h_n, *memory = (triple(part) for part in (output, *(hidden if lam else (hidden,))))
        total = sum(part.sin().sum() for part in (output, h_n, *memory))  # R is orthogonal: its squares are constant
        return list(torch.autograd.grad(total, list(rum.parameters())))

    torch.testing.assert_close(run(lambda part: part.mul_(3.0)), run(lambda part: 3.0 * part))
    output, _ = rum(x, lengths=lengths)
    torch.relu_(output[-1])
    output.sum().backward()
    assert rum.weight_hh_l0.grad.isfinite().all()


@pytest.mark.parametrize("lam", [None, 0])
def test_the_output_may_be_changed_in_place_after_compile(lam):
    rum = make(lam)
    torch._dynamo.reset()
    compiled, x = torch.compile(rum, fullgraph=True, backend="aot_eager"), draw(5, 2, 3)
    grads = []
    for module in (rum, compiled):
        output, _ = module(x)
        output.mul_(3.0)
        grads.append(torch.autograd.grad(output.sin().sum(), list(rum.parameters())))
    torch.testing.assert_close(*grads)


def differences(function, x: Tensor, tangent: Tensor, step: float = 1e-6) -> Tensor:
    return (function(x + step * tangent) - function(x - step * tangent)) / (2 * step)


@pytest.mark.parametrize("lam", [None, 0, 1, 0.5])
@pytest.mark.parametrize("options", [dict(), dict(num_layers=2, bidirectional=True)], ids=str)
@pytest.mark.parametrize("norm", [dict(), dict(eta=1.0, layer_norm=True)], ids=str)
def test_forward_mode_is_the_directional_derivative(lam, norm, options):
    rum, x = make(lam, **options, **(norm if lam is not None else {})), draw(4, 2, 3)
    tangent = draw(4, 2, 3)
    value, derivative = jvp(lambda x: rum(x)[0], (x,), (tangent,))
    torch.testing.assert_close(value, rum(x)[0])
    with torch.no_grad():
        expected = differences(lambda x: rum(x)[0], x, tangent)
    torch.testing.assert_close(derivative, expected, rtol=1e-6, atol=1e-7)
    with torch.autograd.forward_ad.dual_level():
        output, _ = rum(torch.autograd.forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(output).tangent, derivative)


@both
def test_forward_mode_in_the_parameters(lam):
    rum, x = make(lam), draw(4, 2, 3)
    weights = {name: part.detach() for name, part in rum.named_parameters()}
    tangents = {name: torch.randn_like(part) for name, part in weights.items()}

    def run(weights):
        return functional_call(rum, weights, (x,))[0]

    _, derivative = jvp(run, (weights,), (tangents,))
    step = 1e-6
    ahead, behind = (run({n: w + s * step * tangents[n] for n, w in weights.items()}) for s in (1, -1))
    torch.testing.assert_close(derivative, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)


@both
def test_jacobians_and_hessians_agree_in_both_modes(lam):
    rum, x = make(lam), draw(3, 2, 3)
    torch.testing.assert_close(jacfwd(lambda x: rum(x)[0])(x), jacrev(lambda x: rum(x)[0])(x))

    def loss(x: Tensor) -> Tensor:
        return rum(x)[0].sin().sum()

    expected = torch.autograd.functional.hessian(loss, x)
    torch.testing.assert_close(hessian(loss)(x), expected)
    torch.testing.assert_close(vmap(hessian(loss))(torch.stack([x, x])), torch.stack([expected, expected]))


@pytest.mark.parametrize("lam", [None, 0])
def test_compiled_forward_mode_is_not_zero(lam):
    rum, x = make(lam), draw(1, 2, 3)  # a compiler unrolls the reference
    torch._dynamo.reset()

    def run(x):
        return jvp(lambda x: rum(x)[0], (x,), (torch.ones_like(x),))[1]

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


def test_forward_mode_is_refused_where_only_the_operator_is_left():
    rum, x = make(0), draw(3, 2, 3)
    module = torch.export.export(rum, (x,)).module()
    with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative\. Differentiate the RUM itself"):
        jvp(lambda x: module(x)[0], (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(ValueError, match="backend='torch' cannot run: forward-mode differentiation is on"):
            make(0, backend="torch")(dual)


def counted(run) -> tuple[int, int]:
    """Flops of the scan's two operators, and of everything."""
    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    scan = sum(count for operator, count in counts.items() if "_scan" in str(operator))
    return scan, counter.get_total_flops()


@pytest.mark.parametrize("lam, rows", [(None, 12), (0, 8)])
def test_flops_are_those_of_the_reference_loop(lam, rows):
    """Its matmuls with weight_hh, which the operator hides, and the same input projection."""
    x = draw(5, 2, 3)
    _, expected = counted(lambda: make(lam, backend="reference")(x))
    scan, total = counted(lambda: make(lam)(x))
    assert total == expected
    assert scan == 5 * 2 * 2 * rows * 4  # T B, two per multiplication, weight (3H, H) or (2H, H)


def test_flops_of_the_backward_and_of_the_memory():
    x = draw(5, 2, 3)
    forward, _ = counted(lambda: make(1)(x))
    assert forward == 5 * 2 * (2 * 8 * 4 + 10 * 4 * 4)
    both_ways, _ = counted(lambda: make(1)(x)[0].sum().backward())
    assert both_ways == 3 * forward
    assert counted(lambda: make(0, update_gate=False)(x))[0] == 5 * 2 * 2 * 4 * 4


class Model(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(3, 3), rnn, nn.Linear(4, 2)

    def forward(self, x: Tensor, hx: Tensor) -> tuple[Tensor, Tensor]:
        output, h_n = self.rnn(self.first(x).relu(), hx)
        return self.last(output), h_n


def test_symbolic_trace_leaves_the_layer_whole():
    for rnn in (RUM(3, 4), build_layer("goru", 3, 4)):
        model, x, hx = Model(rnn), torch.randn(5, 2, 3), torch.randn(1, 2, 4)
        traced = torch.fx.symbolic_trace(model)
        theirs = torch.fx.symbolic_trace(Model(nn.GRU(3, 4)))
        nodes, expected = ([(n.op, str(n.target)) for n in g.graph.nodes] for g in (traced, theirs))
        assert nodes == expected
        for same in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
            torch.testing.assert_close(same(x, hx), model(x, hx))


def test_symbolic_trace_with_lengths_and_as_root():
    rum = RUM(3, 4)

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = rum

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.rnn(x, lengths=lengths)[0]

    x, lengths = torch.randn(5, 2, 3), torch.tensor([5, 2])
    torch.testing.assert_close(torch.fx.symbolic_trace(Padded())(x, lengths), rum(x, lengths=lengths)[0])
    with pytest.raises(torch.fx.proxy.TraceError, match=r"cannot be the root\. Trace a model that contains it"):
        torch.fx.symbolic_trace(rum)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("lam", [None, 0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jit_trace_as_of_nn_gru(shape, lam):
    """With its own check, which compares the graph with gradients to the one without."""
    rum, x = make(lam, **shape), draw(5, 2, 3)
    traced = torch.jit.trace(rum, x)
    for other in (draw(5, 2, 3), draw(9, 4, 3)):
        torch.testing.assert_close(traced(other), rum(other))
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.jit.load(buffer)(x)[0], rum(x)[0])
    cell, row = RUMCell(3, 4, **form_of(lam), dtype=torch.float64), draw(2, 3)
    torch.testing.assert_close(torch.jit.trace(cell, row)(row + 1), cell(row + 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [RUM, RUMCell, lambda *sizes: Model(RUM(*sizes))], ids=["layer", "cell", "model"])
def test_jit_script_says_what_to_use(make):
    with pytest.raises(NotImplementedError, match=r"torch.jit.script cannot compile it; use torch.compile"):
        torch.jit.script(make(3, 4))


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_batched_output_is_no_view_as_with_nn_gru(with_gradients, shape, lam):
    """FSDP2 warns of views: an in-place operation on one would drop its hooks."""
    x = draw(5, 2, 3)
    with torch.set_grad_enabled(with_gradients):
        output, _ = make(lam, **shape)(x)
        theirs, _ = nn.GRU(3, 4, dtype=torch.float64, **shape)(x)
    assert not output._is_view() and not theirs._is_view()
    assert output.stride() == theirs.stride()


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("error:FSDP2")
@pytest.mark.parametrize("kind", [nn.GRU, RUM])
def test_fsdp2_shards_it_without_a_warning(kind, process_group):
    mesh, layer, x = torch.distributed.init_device_mesh("cpu", (1,)), kind(3, 4, batch_first=True), torch.randn(2, 5, 3)
    expected = torch.autograd.grad(layer(x)[0].sin().sum(), list(layer.parameters()))
    torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    layer(x)[0].sin().sum().backward()
    for part, grad in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), grad)


@pytest.mark.parametrize("lam", [None, 0, 1, 0.5])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_meta_tensors_run_forward_and_backward(lam, backend):
    rum = RUM(3, 4, 2, **form_of(lam), bidirectional=True, device="meta", backend=backend)
    x = torch.randn(5, 2, 3, device="meta", requires_grad=True)
    output, hidden = rum(x, lengths=torch.ones(2, dtype=torch.long, device="meta"))
    assert output.shape == (5, 2, 8)
    assert output.is_meta
    assert (hidden[0] if lam else hidden).shape == (4, 2, 4)
    output.sum().backward()
    assert x.grad.shape == x.shape
    assert rum.weight_hh_l1_reverse.grad.is_meta
    assert rum.explain_backend(x).backend == ("reference" if lam == 0.5 or backend == "reference" else "torch")
