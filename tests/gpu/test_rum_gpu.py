"""torchrum.RUM with the fused kernels, used as users use layers; the float64 reference on the CPU is the oracle."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from oracle import loss_of, tensors
from tolerances import DEEP, TOL
from torchrum import RUM
from torchrum.cells import rum as rum_cell
from torchrum.ops.kernels import machine
from torchrum.ops.rum_scan.designs import clear_design_cache

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
T, B, I, H = 12, 5, 7, 40  # lam0 runs the persistent kernels, lam0-all the stepwise ones
KINDS = {
    "lam0": {},
    "lam1": {"lam": 1},
    "lam0-all": {"eta": 1.0, "layer_norm": True},
    "lam1-all": {"lam": 1, "eta": 1.0, "layer_norm": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("kind", ["lam0", "lam1"])


def build(kind, **more):
    """The fused layer in float32 on the device, and the reference with the same weights in float64 on the CPU."""
    torch.manual_seed(0)
    input_size = more.pop("input_size", I)
    reference = RUM(input_size, H, form="paper", **KINDS[kind], **more, backend="reference", dtype=torch.float64)
    fused = RUM(input_size, H, form="paper", **KINDS[kind], **more, backend="fused", device=CUDA)
    fused.load_state_dict(reference.state_dict())
    with torch.no_grad():  # the reference starts from the rounded weights
        for mine, theirs in zip(reference.parameters(), fused.parameters(), strict=True):
            mine.copy_(theirs)
    return fused, reference


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def like(layer, x):
    """``x`` as the layer takes it, a leaf that wants its gradient."""
    weight = next(layer.parameters())
    return x.detach().to(weight.device, weight.dtype).requires_grad_()


def run(layer, call, inputs):
    """Outputs of ``call(layer, *inputs)`` and the gradients of the inputs and of every weight."""
    layer.zero_grad()
    leaves = [like(layer, x) for x in inputs]
    results = call(layer, *leaves)
    loss_of(results).backward()
    named = {f"output {i}": part.detach() for i, part in enumerate(tensors(results))}
    named |= {f"gradient of input {i}": leaf.grad for i, leaf in enumerate(leaves)}
    return named | {f"gradient of {name}": p.grad for name, p in layer.named_parameters()}


def assert_near(given, expected, tolerance=TOL[torch.float32]["rtol"]):
    """The error of each tensor against the norm of that tensor."""
    assert given.keys() == expected.keys()
    for name, right in expected.items():
        assert given[name].shape == right.shape, name
        size = right.double().norm().cpu()
        error = (given[name].double().cpu() - right.double().cpu()).norm() / (size if size > 0 else 1)
        assert error <= tolerance, f"{name}: relative error {error:.2e} above {tolerance}"


def start(kind, layers=1, batch=B):
    """Initial states for ``layers`` recurrences: h, and R with lam 1."""
    h = 0.3 * draw(layers, batch, H, seed=2)
    if "lam1" not in kind:
        return [h]
    return [h, torch.linalg.qr(draw(layers, batch, H, H, seed=3))[0]]


def with_state(layer, x, *state):
    return layer(x, state[0] if len(state) == 1 else tuple(state))


@kinds
@pytest.mark.parametrize("hidden", [H, 1, 20, 33])
def test_one_layer(kind, hidden, monkeypatch):
    monkeypatch.setitem(globals(), "H", hidden)
    fused, reference = build(kind)
    inputs = [draw(T, B, I), *start(kind)]
    assert_near(run(fused, with_state, inputs), run(reference, with_state, inputs))


@kinds
def test_a_plain_call_gives_what_the_operator_gives(kind, monkeypatch):
    fused, _ = build(kind)
    inputs = [draw(T, B, I)]
    plain = run(fused, lambda layer, x: layer(x), inputs)
    monkeypatch.setattr(rum_cell, "plain_scan", lambda *args: None)
    assert_near(run(fused, lambda layer, x: layer(x), inputs), plain, 1e-5)  # sums in another order


@both
def test_two_layers_in_two_directions(kind):
    fused, reference = build(kind, num_layers=2, bidirectional=True, eta=1.0)
    inputs = [draw(T, B, I), *start(kind, 4)]
    assert_near(run(fused, with_state, inputs), run(reference, with_state, inputs))


@both
@pytest.mark.parametrize("lengths", [(12, 5, 1), (5, 1, 12)], ids=("sorted", "unsorted"))
def test_packed_and_padded(kind, lengths):
    fused, reference = build(kind, bidirectional=True)

    def packed(layer, *sequences):
        return layer(pack_sequence(sequences, enforce_sorted=lengths[0] == 12))

    inputs = [draw(length, I, seed=length) for length in lengths]
    assert_near(run(fused, packed, inputs), run(reference, packed, inputs))

    def padded(layer, x):
        return layer(x, lengths=torch.tensor(lengths))

    assert_near(run(fused, padded, [draw(T, 3, I)]), run(reference, padded, [draw(T, 3, I)]))


@both
def test_other_forms_of_input(kind):
    fused, reference = build(kind, batch_first=True)
    swapped = [draw(B, T, I)]
    assert_near(run(fused, lambda layer, x: layer(x), swapped), run(reference, lambda layer, x: layer(x), swapped))
    alone = [draw(T, I)]
    assert_near(run(fused, lambda layer, x: layer(x), alone), run(reference, lambda layer, x: layer(x), alone))
    fused.zero_grad()
    x = torch.zeros(0, T, I, device=CUDA, requires_grad=True)
    output, _ = fused(x)
    assert output.shape == (0, T, H)
    output.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is None or not p.grad.any() for p in fused.parameters())  # NaN, too, counts as any


@both
def test_dropout_and_zoneout_draw_the_masks_of_the_torch_backend(kind):
    fused, _ = build(kind, num_layers=2, dropout=0.4, zoneout=0.3, activation="tanh")
    plain = copy.deepcopy(fused)
    plain.backend = "torch"
    found = []
    for layer in (fused, plain, fused):
        torch.manual_seed(5)
        found.append(run(layer, lambda layer, x: layer(x), [draw(T, B, I)]))
    assert_near(found[0], found[1], 1e-4)  # two float32 computations, each with its own rounding
    assert_near(found[2], found[1], 1e-4)
    again = run(fused, lambda layer, x: layer(x), [draw(T, B, I)])
    assert not torch.equal(again["output 0"], found[0]["output 0"])
    fused.eval()
    plain.eval()
    x = like(fused, draw(T, B, I))
    torch.testing.assert_close(fused(x)[0], plain(x)[0], **DEEP[torch.float32])


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(kind, dtype):
    fused, reference = build(kind, eta=1.0, activation="tanh")

    def cast(layer, x):
        with torch.autocast("cuda", dtype, enabled=layer is fused):
            return layer(x)

    mine, theirs = run(fused, cast, [draw(T, B, I)]), run(reference, cast, [draw(T, B, I)])
    assert mine["output 0"].dtype == dtype
    assert mine["gradient of weight_hh_l0"].dtype == torch.float32
    assert_near(mine, theirs, 2e-2)  # both: fp16's gradients pass through the same few roundings as bf16's


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_layer(kind, dtype):
    fused, reference = build(kind, eta=1.0, activation="tanh")
    fused.to(dtype)
    mine = run(fused, lambda layer, x: layer(x), [draw(T, B, I)])
    assert all(part.dtype == dtype for name, part in mine.items() if "gradient" in name)
    assert_near(mine, run(reference, lambda layer, x: layer(x), [draw(T, B, I)]), 2e-2)


@both
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_whole(kind, compiler):
    if kind == "lam1" and compiler == "inductor":
        pytest.skip("the op is opaque to the compiler: one kind shows it, and inductor takes long")
    torch._dynamo.reset()
    fused, reference = build(kind)
    compiled = torch.compile(fused, fullgraph=True, backend=compiler)
    x = [draw(T, B, I)]
    assert_near(
        run(fused, lambda layer, x: compiled(x), x),
        run(reference, lambda layer, x: layer(x), x),
    )


@both
def test_func_grad_and_vmap(kind):
    fused, reference = build(kind, activation="tanh")

    def per_sample(layer):
        weights = {name: p.detach() for name, p in layer.named_parameters()}
        device, dtype = next(iter(weights.values())).device, next(iter(weights.values())).dtype

        def loss(weights, x):
            return functional_call(layer, weights, (x,))[0].sin().sum()

        return vmap(grad(loss), (None, 1))(weights, draw(T, B, I).to(device, dtype))

    assert_near(per_sample(fused), per_sample(reference))


@both
def test_double_backward(kind):
    fused, reference = build(kind, activation="tanh")

    def penalty(layer):
        layer.zero_grad()
        x = like(layer, draw(4, 3, I))
        (first,) = torch.autograd.grad(layer(x)[0].sin().sum(), x, create_graph=True)
        first.square().sum().backward()
        return {"first": first.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}

    assert_near(penalty(fused), penalty(reference), 1e-4)  # second derivatives, float32 throughout


@both
def test_the_same_layer_twice_and_shared_weights(kind):
    fused, reference = build(kind, input_size=H)

    def twice(layer, x):
        twin = RUM(H, H, form="paper", **KINDS[kind], backend=layer.backend)
        for name, p in layer.named_parameters():
            setattr(twin, name, p)
        return twin(layer(layer(x)[0])[0])

    assert_near(run(fused, twice, [draw(T, B, H)]), run(reference, twice, [draw(T, B, H)]), 1e-4)  # three layers deep


@both
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(kind, reentrant):
    fused, reference = build(kind)

    def kept_little(layer, x):
        # the re-entrant form sees tensors only at the top level of the results
        output, *state = checkpoint(lambda x: tuple(tensors(layer(x))), x, use_reentrant=reentrant)
        return output, state

    assert_near(run(fused, kept_little, [draw(T, B, I)]), run(reference, lambda layer, x: layer(x), [draw(T, B, I)]))
    fused, _ = build(kind, zoneout=0.5)  # recomputation must draw the same mask
    torch.manual_seed(3)
    expected = run(fused, lambda layer, x: layer(x), [draw(T, B, I)])
    torch.manual_seed(3)
    assert_near(run(fused, kept_little, [draw(T, B, I)]), expected, 1e-6)


@both
def test_inference(kind):
    fused, reference = build(kind, num_layers=2)
    x = draw(T, B, I)
    expected = {str(i): part.detach() for i, part in enumerate(tensors(reference(x)))}
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            results = tensors(fused(x.float().to(CUDA)))
        assert all(part.requires_grad == (mode is torch.enable_grad) for part in results)
        assert_near({str(i): part.detach() for i, part in enumerate(results)}, expected)


@both
def test_results_of_a_plain_call_are_the_users_own(kind):
    """They may be written to before the backward, share no memory, and are the same without gradients."""
    fused, _ = build(kind)
    x = draw(T, B, I).float().to(CUDA)

    def gradients(write):
        results = fused(x)
        loss, kept = loss_of(results), [part.detach().clone() for part in tensors(results)]
        for i, part in enumerate(tensors(results) if write else ()):
            part.detach().fill_(7.0)  # behind autograd's back
            assert all(map(torch.equal, tensors(results)[i + 1 :], kept[i + 1 :]))
        grads = dict(zip(dict(fused.named_parameters()), torch.autograd.grad(loss, fused.parameters()), strict=True))
        return grads | {str(i): part for i, part in enumerate(kept)}

    assert_near(gradients(True), gradients(False), 1e-5)
    trained = [part.detach() for part in tensors(fused(x))]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inferred = tensors(fused(x))
        assert_near(*({str(i): part for i, part in enumerate(parts)} for parts in (inferred, trained)), 1e-6)


@pytest.mark.parametrize("kind, most", [("lam0", 14.5), ("lam1", 11)])
def test_a_training_call_takes_little_memory(kind, most):
    """In units of the input, beside it and the incoming gradient; ops/rum_scan/test_plain.py says what takes them."""
    layer = RUM(100, 100, form="paper", **KINDS[kind], backend="fused", device=CUDA)
    x, incoming = torch.randn(300, 64, 100, device=CUDA, requires_grad=True), torch.randn(300, 64, 100, device=CUDA)

    def train():
        x.grad = None
        layer.zero_grad()
        layer(x)[0].backward(incoming)

    train()  # libraries take memory of their own at first
    x.grad = None
    layer.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train()
    assert (torch.cuda.max_memory_allocated() - before) / x.nbytes < most


@both
def test_two_streams(kind):
    fused, reference = build(kind)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [draw(T, B, I, seed=seed) for seed in range(6)]

    def in_streams(layer, *inputs):
        results = []
        for index, x in enumerate(inputs):
            stream = streams[index % 2] if layer is fused else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(layer(x)[0])
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return torch.stack(results), results[0][-1]

    assert_near(run(fused, in_streams, inputs), run(reference, in_streams, inputs))


@both
def test_one_process_of_ddp(kind, process_group):
    fused, reference = build(kind)
    parallel = nn.parallel.DistributedDataParallel(fused)
    x = [draw(T, B, I)]
    for _ in range(2):
        mine = run(fused, lambda layer, x: parallel(x), x)
        assert_near(mine, run(reference, lambda layer, x: layer(x), x))


@both
def test_inside_another_recording(kind):
    fused, reference = build(kind)
    x = like(fused, draw(T, B, I))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            results = fused(x)
            grads = torch.autograd.grad(loss_of(results), [x, *fused.parameters()])
    torch.cuda.current_stream().wait_stream(side)
    del results, grads  # autograd remembers the stream that the leaves were used on
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = fused(x)
        grads = torch.autograd.grad(loss_of(results), [x, *fused.parameters()])
    names = [f"gradient of {name}" for name in ("input 0", *(name for name, _ in fused.named_parameters()))]
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(draw(T, B, I, seed=seed))
            for weight, other in zip(fused.parameters(), reference.parameters(), strict=True):
                weight.mul_(0.9)
                other.copy_(weight)
        graph.replay()
        mine = {f"output {i}": part.detach() for i, part in enumerate(tensors(results))}
        mine |= dict(zip(names, grads, strict=True))
        assert_near(mine, run(reference, lambda layer, x: layer(x), [draw(T, B, I, seed=seed)]))


def test_backends_say_why(monkeypatch):
    x = torch.zeros(T, B, I, device=CUDA)

    def choice(dtype=torch.float32, hidden=H, **options):
        return RUM(I, hidden, form="paper", device=CUDA, dtype=dtype, **options).explain_backend(x.to(dtype))

    for lam in (0, 1):
        assert choice(lam=lam).backend == "fused"
        assert choice(lam=lam).reason.endswith("design: it is the fastest and no restriction applies")
        assert choice(lam=lam, backend="torch") == ("torch", "it was asked for")
        assert choice(lam=lam, dtype=torch.float64).backend == "torch"
        assert "float64" in choice(lam=lam, dtype=torch.float64).reason
    assert choice(activation=F.silu).backend == "reference"
    assert "activation is a callable" in choice(activation=F.silu).reason
    assert choice(lam=0.5).backend == "reference"
    assert "lam is 0.5" in choice(lam=0.5).reason
    assert choice(lam=1, hidden=512).backend == "torch"
    assert "512" in choice(lam=1, hidden=512).reason
    with pytest.raises(ValueError, match=r"backend='fused' cannot run: .*float64"):
        RUM(I, H, form="paper", backend="fused", device=CUDA, dtype=torch.float64)(x.double())

    monkeypatch.setattr(machine, "triton_obstacle", lambda: "Triton is not installed")
    clear_design_cache()
    words = {"layer_norm": True}  # the persistent kernels need no Triton, and have no layer norm
    assert choice(**words).backend == "torch"
    assert "stepwise cannot run: Triton is not installed" in choice(**words).reason
    layer = RUM(I, H, form="paper", device=CUDA, **words)
    expected = RUM(I, H, form="paper", device=CUDA, backend="torch", **words)
    expected.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x + 1)[0], expected(x + 1)[0])
    with pytest.raises(ValueError, match=r"cannot run: Triton is not installed\. Pass backend='auto'"):
        RUM(I, H, form="paper", device=CUDA, backend="stepwise")(x)
    clear_design_cache()


def test_hidden_sizes_beyond_the_kernels_still_run():
    layer = RUM(I, 160, lam=1, device=CUDA)
    assert layer(torch.ones(3, 2, I, device=CUDA))[0].shape == (3, 2, 160)


@pytest.fixture
def compiled(monkeypatch):
    """Counts what Triton and NVRTC compile."""
    import triton

    from torchrum.ops.kernels import cuda

    count = {"triton": 0, "nvrtc": 0}

    def after_triton(*args, **kwargs):
        count["triton"] += 1

    class Counting:
        def __init__(self, library):
            self.real = library

        def __getattr__(self, name):
            count["nvrtc"] += name == "nvrtcCompileProgram"
            return getattr(self.real, name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", after_triton)
    library = Counting(cuda._nvrtc())
    monkeypatch.setattr(cuda, "_nvrtc", lambda: library)
    return count


def every_form(layer, time, batch):
    lengths = torch.tensor([3, 1, 2, 2, 3]).clamp(max=time).repeat(batch)[:batch]
    run(layer, lambda layer, x: layer(x), [draw(time, batch, I)])
    run(layer, lambda layer, x: layer(x, lengths=lengths), [draw(time, batch, I)])


@kinds
def test_new_lengths_and_batches_compile_nothing(kind, monkeypatch, compiled):
    monkeypatch.setitem(globals(), "H", 27)  # no other test has compiled for this size
    fused, _ = build(kind, zoneout=0.1)
    for time, batch in ((16, 16), (7, 5), (2, 3)):  # the last is too short for graphs, the other form of each kernel
        every_form(fused, time, batch)
    first = sum(compiled.values())
    assert first > 0, "nothing was counted"
    for time, batch in ((3, 1), (1, 16), (16, 5), (33, 17), (130, 3), (64, 48), (5, 130)):
        every_form(fused, time, batch)
    assert sum(compiled.values()) == first, compiled


def test_a_persistent_kernel_is_compiled_once_for_all_batches_of_its_height(monkeypatch, compiled):
    """Forward and backward, with lengths and without; a batch too large for tiles of eight rows compiles them again."""
    monkeypatch.setitem(globals(), "H", 45)
    fused, _ = build("lam0", zoneout=0.1)
    for time, batch in ((16, 16), (3, 1), (1, 16), (33, 200), (2, 5), (5, 130)):
        every_form(fused, time, batch)
    assert compiled["nvrtc"] == 4
    every_form(fused, 3, 600)
    every_form(fused, 2, 700)
    assert compiled["nvrtc"] == 8


def test_repr():
    layer = RUM(I, H, lam=1, eta=1.0, backend="fused", device=CUDA)
    assert repr(layer) == f"RUM({I}, {H}, lam=1, eta=1.0, backend=fused)"


@pytest.mark.parametrize("lam", [0, 1])
def test_parts_of_a_long_sequence_are_the_whole(lam, monkeypatch):
    """Rows that have ended before a part begins have a length of 0 in it."""
    monkeypatch.setattr(rum_cell, "PART_STEPS", 64)
    monkeypatch.setattr(rum_cell, "PART_NUMBERS", 1)
    rum, x = RUM(5, 32, form="paper", lam=lam, activation="tanh").to(CUDA), torch.randn(200, 3, 5, device=CUDA)
    for lengths in (None, torch.tensor([200, 1, 100])):
        whole, _ = rum(x, lengths=lengths)
        with torch.no_grad():
            in_parts, _ = rum(x, lengths=lengths)
        torch.testing.assert_close(in_parts, whole, rtol=1e-3, atol=1e-3)


@kinds
def test_resets_match_the_reference(kind):
    fused, reference = build(kind, num_layers=2, bidirectional=True)
    x, reset = draw(T, B, I), torch.rand(T, B, generator=torch.Generator().manual_seed(4)) < 0.3
    expected = reference(x, reset=reset)
    loss_of(expected).backward()
    got = fused(x.float().to(CUDA), reset=reset.to(CUDA))
    loss_of(got).backward()
    for mine, theirs in zip(tensors(got), tensors(expected), strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=1e-3, atol=1e-4)
    for mine, theirs in zip(fused.parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max()
        torch.testing.assert_close(mine.grad.cpu().double() / scale, theirs.grad / scale, rtol=0, atol=2e-3)
