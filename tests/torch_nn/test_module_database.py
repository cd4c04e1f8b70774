"""PyTorch's own samples for nn.GRU and nn.GRUCell, from the module database inside torch, given to RUM and RUMCell.

The database tells constructor arguments, inputs, a reference and wrong inputs; what is checked of them is what torch's
``test_modules.py`` checks. ``DIFFERENCES`` lists every wrong input that RUM treats in another way, with the reason.
"""

import copy
import functools
import importlib
import pickle
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from torchrum import RUM, RUMCell

pytest.importorskip("expecttest", reason="torch's module database needs the package expecttest")

SUBSTITUTES = {nn.GRU: RUM, nn.GRUCell: RUMCell}
DIFFERENCES = {
    (nn.GRUCell, "(10, 20, 'relu')"): "nn.GRUCell takes any bias for a flag; RUMCell refuses what is not a bool",
    (nn.GRUCell, "(10, 20, 'tanh')"): "nn.GRUCell takes any bias for a flag; RUMCell refuses what is not a bool",
}

modules = pytest.mark.parametrize("theirs", SUBSTITUTES, ids=lambda kind: kind.__name__)
forms = pytest.mark.parametrize(
    "options",
    [{}, {"form": "paper", "activation": "tanh"}],  # relu bends at zero
    ids=["gated", "paper"],
)
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@functools.cache
def database() -> ModuleType:
    """Torch's module; its import takes seconds, so that only who runs these tests waits for it."""
    common = importlib.import_module("torch.testing._internal.common_modules")
    # the import forbids every test after it to set flags of torch.backends
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return common


def info_of(theirs: type) -> Any:
    return next(info for info in database().module_db if info.module_cls is theirs)


def samples(theirs: type, training: bool = True, dtype=torch.float64, **more) -> Iterator[tuple]:
    """Modules with the arguments of each sample, and its arguments of the call, requiring gradients."""
    info = info_of(theirs)
    packed = {"with_packed_sequence": True} if theirs is nn.GRU else {}
    make = functools.partial(info.module_inputs_func, info, device=more.get("device", "cpu"), dtype=dtype)
    for sample in make(requires_grad=True, training=training, **packed):
        made = sample.constructor_input
        torch.manual_seed(0)
        module = SUBSTITUTES[theirs](*made.args, **made.kwargs, dtype=dtype, **more)
        yield module.train(training), sample.forward_input.args, sample


def floats(results) -> list[Tensor]:
    """The tensors of nested results that can have gradients."""
    return [part for part in tree_leaves(results) if isinstance(part, Tensor) and part.is_floating_point()]


def loss(results) -> Tensor:
    return sum(part.sin().sum() for part in floats(results))


@modules
@modes
@forms
def test_forward_is_the_reference(theirs, training, options):
    count = 0
    for module, args, sample in samples(theirs, training, **options):
        outputs = module(*args)
        if any(isinstance(arg, nn.utils.rnn.PackedSequence) for arg in args):
            assert type(outputs[0]) is nn.utils.rnn.PackedSequence  # their reference takes padded input only
        else:
            torch.testing.assert_close(outputs, sample.reference_fn(module, *args))
        count += 1
    assert count == {nn.GRU: 32, nn.GRUCell: 2}[theirs]


@modules
def test_outputs_have_the_shapes_of_theirs(theirs):
    for module, args, sample in samples(theirs, False):
        made = sample.constructor_input
        expected = theirs(*made.args, **made.kwargs, dtype=torch.float64)(*args)
        shapes = [[part.shape for part in floats(results)] for results in (module(*args), expected)]
        assert shapes[0] == shapes[1]


@modules
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_factory_arguments(theirs, dtype):
    for module, _, sample in samples(theirs, dtype=dtype):
        made = sample.constructor_input
        assert {part.dtype for part in module.parameters()} == {dtype}
        meta = type(module)(*made.args, **made.kwargs, dtype=dtype, device="meta")
        assert all(part.is_meta and part.dtype == dtype for part in meta.parameters())
        with torch.device("meta"):
            assert all(part.is_meta for part in type(module)(*made.args, **made.kwargs).parameters())
        filled = meta.to_empty(device="cpu")
        filled.load_state_dict(module.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(filled.parameters(), module.parameters(), strict=True))


@modules
@modes
def test_copies_pickles_and_state_dicts(theirs, training):
    for module, args, sample in samples(theirs, training):
        made = sample.constructor_input
        other = type(module)(*made.args, **made.kwargs, dtype=torch.float64).train(training)
        other.load_state_dict(module.state_dict())
        expected = floats(module(*args))
        for same in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert same.training == training
            torch.testing.assert_close(floats(same(*args)), expected, rtol=0, atol=0)
        assert str(module).startswith(type(module).__name__)


def assert_gradients(theirs: type, training: bool, places, **options) -> None:
    for place, (module, args, _) in enumerate(samples(theirs, training, **options)):
        if place in places:
            leaves = [
                *module.parameters(),
                *(x for x in tree_leaves(args) if isinstance(x, Tensor) and x.requires_grad),
            ]
            run = as_function(module, args)
            assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
            assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def as_function(module: nn.Module, args):
    """The call as a function of the module's parameters and the differentiable inputs."""
    names = [name for name, _ in module.named_parameters()]

    def run(*leaves):
        weights, given = leaves[: len(names)], iter(leaves[len(names) :])
        call = tree_map_only(Tensor, lambda x: next(given) if x.requires_grad else x, args)
        return floats(torch.func.functional_call(module, dict(zip(names, weights, strict=True)), call))

    return run


@modules
@forms
def test_gradients_and_second_gradients(theirs, options):
    assert_gradients(theirs, True, (1, 18), **options)  # of nn.GRU one with an initial state, one packed


@pytest.mark.slow
@modules
@modes
@forms
def test_gradients_and_second_gradients_of_all(theirs, training, options):
    assert_gradients(theirs, training, range(32), **options)


def scattered(part: Tensor) -> Tensor:
    """The same values with gaps between them."""
    wide = part.detach().repeat_interleave(2, -1)[..., ::2]
    return wide.requires_grad_(part.requires_grad)


@modules
@modes
def test_inputs_and_gradients_need_not_be_contiguous(theirs, training):
    for module, args, _ in samples(theirs, training):
        if any(isinstance(arg, nn.utils.rnn.PackedSequence) for arg in args):
            continue
        loss(module(*args)).backward()
        expected = [part.grad.clone() for part in (*module.parameters(), *args)]
        module.zero_grad()
        strange = [scattered(arg) for arg in args]
        outputs = floats(module(*strange))
        torch.autograd.backward(outputs, [scattered(part.detach().cos()) for part in outputs])
        torch.testing.assert_close([part.grad for part in (*module.parameters(), *strange)], expected)


@modules
@forms
def test_training_is_looked_at_where_theirs_looks(theirs, options):
    """nn.GRU passes its mode on to dropout, nn.GRUCell has none: so with dropout the two modes differ, else not."""
    for module, args, _ in samples(theirs, True, **options):
        first = floats(module(*args))
        torch.testing.assert_close(floats(module.eval()(*args)), first, rtol=0, atol=0)
        if theirs is nn.GRU:
            module.dropout = 0.5
            assert not torch.equal(floats(module.train()(*args))[0], first[0])


@modules
def test_moves_change_every_parameter_and_nothing_else(theirs):
    for module, _, _ in samples(theirs):
        before = dict(module.named_parameters())
        module.float()
        assert all(module.get_parameter(name) is part for name, part in before.items())
        assert {part.dtype for part in module.parameters()} == {torch.float32}
        assert {part.device.type for part in module.to("meta").parameters()} == {"meta"}


@modules
def test_wrong_inputs_raise_the_same_classes(theirs):
    info, met = info_of(theirs), []
    errors = info.module_error_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    for case in errors:
        sample = case.module_error_input
        made, call = sample.constructor_input, sample.forward_input
        described = str(made.args)
        if (theirs, described) in DIFFERENCES:
            met.append((theirs, described))
            with pytest.raises(TypeError, match="it must be True or False"):
                SUBSTITUTES[theirs](*made.args, **made.kwargs)
            continue
        if case.error_on == database().ModuleErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(case.error_type):
                SUBSTITUTES[theirs](*made.args, **made.kwargs)
        else:
            module = SUBSTITUTES[theirs](*made.args, **made.kwargs)
            with pytest.raises(case.error_type):
                module(*call.args, **call.kwargs)
    assert set(met) == {key for key in DIFFERENCES if key[0] is theirs}
    assert len(errors) >= {nn.GRU: 12, nn.GRUCell: 6}[theirs]


@pytest.mark.gpu
@modules
@modes
def test_gpu_gives_the_outputs_and_gradients_of_the_cpu(theirs, training):
    for module, args, _ in samples(theirs, training):
        other = copy.deepcopy(module).cuda()
        there = tree_map_only(Tensor, lambda part: part.detach().cuda().requires_grad_(part.requires_grad), args)
        if any(isinstance(arg, nn.utils.rnn.PackedSequence) for arg in args):
            there = tuple(arg.to("cuda") for arg in args)
        outputs, results = floats(module(*args)), floats(other(*there))
        torch.testing.assert_close([part.cpu() for part in results], outputs)
        grads = (
            torch.autograd.grad(loss(out), list(m.parameters())) for m, out in ((module, outputs), (other, results))
        )
        for mine, theirs_grad in zip(*grads, strict=True):
            torch.testing.assert_close(theirs_grad.cpu(), mine)
