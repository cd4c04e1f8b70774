"""Every layer in the registry answers to torch.nn.GRU's call contract; a layer is tested here by being listed there."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from tolerances import DEEP, TOL
from torchrum import Stream
from torchrum.layers.registry import LAYERS, SHARED, build_layer

I, H, T, B = 3, 4, 5, 3
WIDE = 32  # where rounding is compared: layer norm over four units that happen to be alike magnifies it
SMALL = {
    "ntm": {"num_slots": 6, "slot_size": 3, "memory_start": 0.3},  # finite differences cannot follow a cosine near 0
    "hyper_lstm": {"hyper_size": 3, "embedding_size": 2},
}
VARIANTS = [
    ("rum", {"lam": 1}),
    ("rum-gated", {"rotated": 1.0, "head_size": 3}),
    ("rum", {"eta": 1.0, "layer_norm": True}),
    ("eunn", {"style": "fft", "complex_valued": True}),
    ("exprnn", {"orthogonal_map": "taylor", "init": "cayley"}),
    ("fast_weights", {"encoder": True, "start_norm": False, "bias": True}),
    ("ntm", {"num_slots": 6, "slot_size": 3, "style": "graves"}),
    ("fs", {"slow": "rum", "slow_size": 5, "num_fast": 3}),
    ("fs", {"slow": "rum-gated", "fast": "rotational_lstm", "head_size": 2, "slow_size": 5}),
    ("fs", {"slow": "rotational_lstm", "memory_size": 16}),  # layer norm over few units magnifies, as WIDE says
    ("fs", {"memory_size": 16, "memory": "input"}),
]
CASES = [(name, SMALL.get(name, {})) for name in LAYERS] + VARIANTS
TORCH = ("lstm", "gru")
RUMS = ("rum", "rum-gated")
STILL = ("hyper_lstm", "hm_lstm")
"""Parts that get no gradient at the start: an LSTM connected by zeros, levels below which no boundary is found yet."""

every = pytest.mark.parametrize("name, options", CASES, ids=lambda value: str(value).replace("'", ""))


def build(name, options, dtype=torch.float64, hidden_size=H, **shared):
    torch.manual_seed(0)
    return build_layer(name, I, hidden_size, **shared, **options).to(dtype)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def parts(hidden):
    return (hidden,) if isinstance(hidden, torch.Tensor) else tuple(hidden)


def change(hidden, function):
    return function(hidden) if isinstance(hidden, torch.Tensor) else tuple(function(part) for part in hidden)


def assert_same(given, expected):
    torch.testing.assert_close(parts(given), parts(expected), **TOL[torch.float64])


@pytest.mark.parametrize(
    "name, options", [*CASES, ("rum", {"lam": 0.5})], ids=lambda value: str(value).replace("'", "")
)
def test_runs_where_its_tensors_are_whatever_the_default_device(name, options):
    """torch.set_default_device("cuda") with a layer on the CPU; a tensor on the meta device fails here as one there."""
    layer, x = build(name, options).eval(), draw(T, B, I)
    words = {} if name in TORCH else {"reset": torch.tensor([[t == b for b in range(B)] for t in range(T)])}
    output, hidden = layer(x, **words)
    with torch.device("meta"):
        given, given_hidden = layer(x, **words)
    assert_same(given, output)
    assert_same(given_hidden, hidden)


@every
def test_shapes_of_two_layers_in_two_directions(name, options):
    layer = build(name, options, num_layers=2, bidirectional=True)
    output, hidden = layer(draw(T, B, I))
    assert output.shape == (T, B, 2 * H)
    assert all(part.shape[:2] == (4, B) for part in parts(hidden))
    one_way, hidden = build(name, options)(draw(T, B, I))
    assert one_way.shape == (T, B, H)
    assert all(part.shape[:2] == (1, B) for part in parts(hidden))


@every
def test_batch_first_only_swaps_axes(name, options):
    x = draw(T, B, I)
    output, hidden = build(name, options)(x)
    swapped, same = build(name, options, batch_first=True)(x.transpose(0, 1))
    assert_same(swapped.transpose(0, 1), output)
    assert_same(same, hidden)


@every
def test_a_stream_of_steps_is_the_whole(name, options):
    layer, x = build(name, options, num_layers=2).eval(), draw(T, B, I)
    stream = Stream(layer, batch_size=B)
    found = torch.stack([stream(step) for step in x])
    torch.testing.assert_close(found, layer(x)[0].detach(), **DEEP[torch.float64])


@every
def test_unbatched_is_a_batch_of_one(name, options):
    layer = build(name, options, num_layers=2)
    output, hidden = layer(draw(T, 1, I))
    again = layer(draw(T, 1, I), hidden)
    alone, state = layer(draw(T, 1, I).squeeze(1))
    assert_same(alone, output.squeeze(1))
    assert_same(state, change(hidden, lambda part: part.squeeze(1)))
    alone, state = layer(draw(T, 1, I).squeeze(1), state)
    assert_same(alone, again[0].squeeze(1))
    assert_same(state, change(again[1], lambda part: part.squeeze(1)))


@every
@pytest.mark.parametrize("lengths", [(5, 3, 2), (2, 5, 3)], ids=("sorted", "unsorted"))
def test_packed_sequences_are_their_members_one_by_one(name, options, lengths):
    layer = build(name, options, num_layers=2, bidirectional=True)
    sequences = [draw(T, B, I)[:length, row] for row, length in enumerate(lengths)]
    output, hidden = layer(pack_sequence(sequences, enforce_sorted=lengths == (5, 3, 2)))
    for row, (sequence, packed) in enumerate(zip(sequences, unpack_sequence(output), strict=True)):
        alone, state = layer(sequence)
        assert_same(packed, alone)
        assert_same(change(hidden, lambda part, row=row: part[:, row]), state)


@every
def test_lengths_are_packing_without_the_packing(name, options):
    if name in TORCH:
        pytest.skip("torch's own layers take lengths by packing only")
    layer = build(name, options, bidirectional=True)
    x, lengths = draw(T, B, I), (2, 5, 3)
    output, hidden = layer(x, lengths=torch.tensor(lengths))
    for row, length in enumerate(lengths):
        alone, state = layer(x[:length, row])
        assert_same(output[:length, row], alone)
        assert not output[length:, row].any()
        assert_same(change(hidden, lambda part, row=row: part[:, row]), state)


@every
def test_other_direction_is_the_reversed_sequence(name, options):
    both = build(name, options, bidirectional=True)
    x = draw(T, B, I)
    output, hidden = both(x)
    backward = build(name, options)
    source, target = dict(both.named_parameters()), dict(backward.named_parameters())
    if name in (*TORCH, *RUMS):
        target = {key: source[key + "_reverse"] for key in target}
    else:
        target = {key: source[key.replace("cells.0.", "cells.1.")] for key in target}
    state = {**backward.state_dict(), **{k: v.detach() for k, v in target.items()}}
    if name not in (*TORCH, *RUMS):  # what is not trained but drawn: a permutation, a starting matrix
        drawn = {key.replace("cells.1.", "cells.0."): v for key, v in both.state_dict().items() if "cells.1." in key}
        state.update(drawn)
    backward.load_state_dict(state)
    alone, last = backward(x.flip(0))
    assert_same(output[..., H:], alone.flip(0))
    assert_same(change(hidden, lambda part: part[1:]), last)


@every
def test_dropout_acts_between_layers_in_training_only(name, options):
    x = draw(T, B, I)
    layer = build(name, options, num_layers=2, dropout=0.5)
    plain = build(name, options, num_layers=2)(x)[0]
    assert_same(layer.eval()(x)[0], plain)
    layer.train()
    assert not torch.allclose(layer(x)[0], layer(x)[0])
    torch.manual_seed(3)
    first = layer(x)[0]
    torch.manual_seed(3)
    assert_same(layer(x)[0], first)


@every
def test_state_carries_over_a_split_sequence(name, options):
    layer = build(name, options, num_layers=2)
    x = draw(T, B, I)
    output, hidden = layer(x)
    first, state = layer(x[:2])
    second, state = layer(x[2:], state)
    assert_same(torch.cat((first, second)), output)
    assert_same(state, hidden)


@every
def test_initial_state_is_read_and_gets_gradients(name, options):
    layer = build(name, options)
    x = draw(T, B, I)
    _, hidden = layer(x)
    start = change(hidden, lambda part: (part + 0.1).detach().requires_grad_())
    output, _ = layer(x, start)
    assert not torch.allclose(output, layer(x)[0])
    output.sin().sum().backward()
    first = parts(start)[0].grad
    assert first is not None
    assert first.isfinite().all()
    assert first.any()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_follow_the_input_and_agree_with_float64(name, options, dtype):
    x = draw(T, B, I).to(dtype)
    layer = build(name, options, dtype, hidden_size=WIDE)
    output, hidden = layer(x)
    assert output.dtype == dtype
    assert parts(hidden)[0].dtype == dtype
    exact, _ = copy.deepcopy(layer).double()(x.double())
    tolerance = 3 * TOL[dtype]["atol"]  # five steps of rounding, one after the other
    torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance)
    output.float().sin().sum().backward()


@every
def test_layers_can_be_made_in_a_dtype(name, options):
    for dtype in (torch.float64, torch.bfloat16):
        layer = build_layer(name, I, H, **options, device="cpu", dtype=dtype)
        assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
        assert layer(draw(T, B, I, dtype=dtype))[0].dtype == dtype


@every
def test_layers_can_be_made_on_a_device(name, options):
    if name == "exprnn":
        pytest.skip("torch finds the start of its parametrization from values, which meta tensors lack")
    layer = build_layer(name, I, H, num_layers=2, **options, device="meta")
    assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))


@every
def test_autocast_runs(name, options):
    layer = build(name, options, torch.float32, hidden_size=WIDE)
    x = draw(T, B, I, dtype=torch.float32)
    exact = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output, hidden = layer(x)
        layer(x, hidden)
    torch.testing.assert_close(output.float(), exact, rtol=0.06, atol=0.06)
    output.float().sin().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@every
def test_every_parameter_and_the_input_get_gradients(name, options):
    layer = build(name, options, num_layers=2, bidirectional=True)
    if name in STILL:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += 0.1
    x = draw(T, B, I).requires_grad_()
    output, _ = layer(x)
    (output * draw(T, B, 2 * H)).sum().backward()
    for key, gradient in [("input", x.grad), *((k, p.grad) for k, p in layer.named_parameters())]:
        assert gradient is not None, key
        assert gradient.isfinite().all(), key
    without = [key for key, p in layer.named_parameters() if p.numel() and not p.grad.any()]
    assert not without


@every
def test_gradients_are_those_of_finite_differences(name, options):
    if (name, options) == ("hm_lstm", {}):
        pytest.skip("a straight-through gradient is not that of the step; boundary='soft' has a true one")
    layer = build(name, options)
    x = draw(3, 2, I).requires_grad_()
    leaves = [parameter for parameter in layer.parameters() if parameter.numel()]

    def run(x, *_):
        output, hidden = layer(x)
        return output, *(part for part in parts(hidden) if part.requires_grad)

    assert torch.autograd.gradcheck(run, (x, *leaves), fast_mode=True)


@every
def test_safetensors_bring_the_outputs_back(name, options, tmp_path):
    layer, x = build(name, options, num_layers=2), draw(T, B, I)
    save_file(layer.state_dict(), tmp_path / "weights.safetensors")
    torch.manual_seed(7)
    fresh = build_layer(name, I, H, num_layers=2, **options).double()
    assert not torch.allclose(fresh(x)[0], layer(x)[0])
    fresh.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert_same(fresh(x)[0], layer(x)[0])


@every
def test_copies_give_equal_outputs(name, options):
    layer, x = build(name, options), draw(T, B, I)
    output = layer(x)[0]
    copied = copy.deepcopy(layer)
    assert_same(copied(x)[0], output)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter += 0.5
    assert_same(layer(x)[0], output)
    assert not torch.allclose(copied(x)[0], output)
    if name == "exprnn":
        with pytest.raises(RuntimeError, match="state_dict"):  # so it is for every parametrised module of torch
            pickle.dumps(layer)
    else:
        assert_same(pickle.loads(pickle.dumps(layer))(x)[0], output)


@every
def test_empty_batch_gives_empty_output(name, options):
    output, hidden = build(name, options, num_layers=2)(draw(T, 0, I))
    assert output.shape == (T, 0, H)
    assert all(part.shape[:2] == (2, 0) for part in parts(hidden))


@every
def test_wrong_input_is_refused(name, options):
    layer = build(name, options)
    with pytest.raises((ValueError, RuntimeError), match=r"larger than 0|no time step"):
        layer(draw(0, B, I))
    with pytest.raises((ValueError, RuntimeError), match="must be equal to input_size"):
        layer(draw(T, B, I + 1))
    with pytest.raises((ValueError, RuntimeError), match=r"must be \(T, B, I\)|2D or 3D"):
        layer(draw(T, B, 1, I))
    _, hidden = layer(draw(T, B, I))
    with pytest.raises((ValueError, RuntimeError), match=r"hx|[Ee]xpected hidden"):
        layer(draw(T, B, I), change(hidden, lambda part: part[:, :1]))


@every
def test_options_are_listed_with_defaults_that_build_the_same(name, options):
    parameters = inspect.signature(LAYERS[name]).parameters
    assert tuple(parameters)[: len(SHARED)] == SHARED
    listed = {key: p.default for key, p in parameters.items() if key not in SHARED}
    assert {"device", "dtype"} <= listed.keys()
    torch.manual_seed(0)
    explicit = build_layer(name, I, H, **{**listed, **options}).double()
    assert_same(explicit(draw(T, B, I))[0], build(name, options)(draw(T, B, I))[0])


@every
def test_weights_are_drawn_from_torchs_generator(name, options):
    x = draw(T, B, I)
    first, second = build(name, options), build(name, options)
    assert_same(first(x)[0], second(x)[0])
    assert not torch.allclose(build_layer(name, I, H, **options).double()(x)[0], first(x)[0])


@every
def test_no_grad_keeps_no_graph(name, options):
    with torch.no_grad():
        output, hidden = build(name, options)(draw(T, B, I))
    assert not any(part.requires_grad for part in (output, *parts(hidden)))


@pytest.mark.parametrize("name", LAYERS)
def test_an_option_of_a_wrong_type_is_named(name):
    """Text for a number, or for a switch, which would pass for true."""
    plain = {
        key: p for key, p in inspect.signature(LAYERS[name]).parameters.items() if p.annotation in (bool, int, float)
    }
    assert {"input_size", "dropout", "bidirectional"} <= plain.keys()
    for key in plain:
        with pytest.raises((ValueError, TypeError), match=f"{key}='x'"):
            build_layer(**{"name": name, "input_size": I, "hidden_size": H, key: "x"})


@pytest.mark.parametrize("name", [name for name in LAYERS if "ln_eps" in inspect.signature(LAYERS[name]).parameters])
def test_what_is_added_to_a_variance_is_not_negative(name):
    """A layer norm took the square root of a negative number."""
    with pytest.raises(ValueError, match=r"Cell: ln_eps=-1e-05 is not allowed; it must be 0 or more\."):
        build_layer(name, I, H, ln_eps=-1e-5)
    build_layer(name, I, H, ln_eps=0)  # as torch.nn.LayerNorm takes it: rows of one value are then NaN


def test_unknown_names_are_errors_that_name_the_nearest():
    with pytest.raises(ValueError, match=r"build_layer: name='gorru' is not known; .* Did you mean 'goru'"):
        build_layer("gorru", I, H)
    with pytest.raises(ValueError, match="name='xyzzy' is not known; it must be one of 'rum', 'rum-gated'"):
        build_layer("xyzzy", I, H)
    with pytest.raises(ValueError, match=r"'goru'.: option='capasity' is not known; .* Did you mean 'capacity'"):
        build_layer("goru", I, H, capasity=2)
    with pytest.raises(ValueError, match=r"'urnn'.: option='qqq' is not known; .* one of .*'modrelu_bias'"):
        build_layer("urnn", I, H, qqq=2)


def test_torchs_layers_are_torchs_with_raised_gate_biases():
    for name, kind, word, rows in (
        ("lstm", nn.LSTM, "forget_bias", slice(H, 2 * H)),
        ("gru", nn.GRU, "gate_bias", slice(0, 2 * H)),
    ):
        torch.manual_seed(0)
        own = kind(I, H, 2)
        plain = build(name, {word: 0.0}, torch.float32, num_layers=2)
        raised = build(name, {}, torch.float32, num_layers=2)
        assert type(raised) is kind
        for key, expected in own.state_dict().items():
            torch.testing.assert_close(plain.state_dict()[key], expected)
            if key.startswith("bias_ih"):
                expected[rows] += 1
            torch.testing.assert_close(raised.state_dict()[key], expected)


def test_dropout_of_one_layer_warns():
    with pytest.warns(UserWarning, match="between layers"):
        build_layer("goru", I, H, dropout=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_layer("goru", I, H, num_layers=2, dropout=0.5)


@every
def test_no_step_waits_for_a_value(name, options):
    if name in RUMS:
        pytest.skip("its operator has tests of its own")
    layer = build(name, options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # asking a fake tensor for its value is an error
        output, _ = layer(mode.from_tensor(draw(T, B, I)))
    assert output.shape == (T, B, H)


def test_the_check_for_waiting_can_fail():
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        bool(mode.from_tensor(draw(1)) > 0)


@pytest.mark.gpu
@every
def test_gpu_gives_the_outputs_and_gradients_of_the_cpu(name, options):
    layer, x = build(name, options, num_layers=2, bidirectional=True), draw(T, B, I)
    other = copy.deepcopy(layer).cuda()
    output, there = layer(x)[0], other(x.cuda())[0]
    torch.testing.assert_close(there.cpu(), output, **DEEP[torch.float64])
    (output * draw(T, B, 2 * H)).sum().backward()
    (there * draw(T, B, 2 * H).cuda()).sum().backward()
    for (key, here), far in zip(layer.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(far.grad.cpu(), here.grad, rtol=1e-8, atol=1e-8, msg=key)


@pytest.mark.gpu
@every
def test_gpu_training_step_can_be_captured(name, options):
    if (name, options) == ("exprnn", {}):
        pytest.skip("torch's matrix_exp synchronises; orthogonal_map='taylor' is for graphs")
    layer = build(name, options, torch.float32).cuda()
    x = draw(T, B, I, dtype=torch.float32).cuda()

    def run():
        output = layer(x)[0]
        weights = [p for p in layer.parameters() if p.numel()]
        return output.detach(), torch.autograd.grad(output.sin().sum(), weights)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what the default stream has touched cannot be captured
        for _ in range(3):
            expected = run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-5)
