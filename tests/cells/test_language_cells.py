"""The cells of the Penn Treebank table inside what PyTorch builds around modules."""

import copy

import pytest
import torch

from composing import assert_composes
from tolerances import TOL
from torchrum.layers.registry import LAYERS, build_layer

I, H, B, T = 3, 4, 2, 3
CASES = [
    ("hyper_lstm", {"hyper_size": 3, "embedding_size": 2, "recurrent_dropout": 0.2}),
    ("hm_lstm", {"level_size": 3, "boundary": "step"}),
    ("nas", {"state_dropout": 0.3}),
    ("rhn", {"depth": 3, "input_dropout": 0.2, "state_dropout": 0.3}),
]
each = pytest.mark.parametrize("name, options", CASES, ids=lambda value: str(value).replace("'", ""))


def build(name, options):
    return LAYERS[name].load()(I, H, **options).double()


@each
def test_cell_composes_with_compile_checkpoint_and_func(name, options):
    cell, x = build(name, options), torch.randn(T, B, I, dtype=torch.float64)
    assert_composes(cell, x, cell.initial_state(B, device="cpu", dtype=torch.float64))


@pytest.mark.parametrize(
    "name, option",
    [
        ("ln_lstm", "zoneout"),
        ("ln_lstm", "zoneout_cell"),
        ("fs", "cell_dropout"),
        ("fs", "slow_dropout"),
        ("fs", "zoneout"),
        ("fs", "slow_zoneout"),
        ("hyper_lstm", "recurrent_dropout"),
        ("nas", "state_dropout"),
        ("rhn", "input_dropout"),
        ("rhn", "state_dropout"),
    ],
)
def test_a_chance_is_from_0_to_1_both_included(name, option):
    for chance in (0, 1, 1.0):
        output, _ = build_layer(name, I, 6, **{option: chance}).train()(torch.randn(T, B, I))
        assert output.isfinite().all()
    for chance in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"=-?\d\.1 is not allowed; it must be a number from 0 to 1"):
            build_layer(name, I, 6, **{option: chance})


@each
def test_vmap_runs_an_ensemble(name, options):
    """Three cells of one shape in one call, as torch.func stacks them."""
    cells = [build(name, options).eval() for _ in range(3)]
    x = torch.randn(T, B, I, dtype=torch.float64)
    start = cells[0].initial_state(B, device="cpu", dtype=torch.float64)
    parameters, buffers = torch.func.stack_module_state(cells)
    shell = copy.deepcopy(cells[0]).to("meta")

    def run(parameters, buffers, x):
        state, outputs = start, []
        for x_t in x:
            output, state = torch.func.functional_call(shell, (parameters, buffers), (x_t, state))
            outputs.append(output)
        return torch.stack(outputs)

    together = torch.vmap(run, in_dims=(0, 0, None))(parameters, buffers, x)
    for cell, output in zip(cells, together, strict=True):
        torch.testing.assert_close(output, cell.scan(x, start)[0], **TOL[torch.float64])
