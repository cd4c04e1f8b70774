"""The gated form of RUM: its reference against nn.GRU and dense rotations, its fast backends against the reference."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tolerances import DEEP, TOL
from torchrum.ops.gated_scan import GatedOptions, gated_scan, gated_scan_reference
from torchrum.ops.rotation import rotation_matrix

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""xp, h0, weight_hh, bias_hh"""


def draw(T: int, B: int, H: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weight = (normal(3 * H, H) / H**0.5).to(dtype)
    return normal(T, B, 3 * H), normal(B, H), weight, 0.5 * normal(3 * H)


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs]


def test_reference_passes_gradcheck():
    options = GatedOptions(head_size=3, rotated_units=4)
    lengths = torch.tensor([3, 1])
    assert gradcheck(
        lambda *inputs: gated_scan(*inputs, lengths, options=options, backend="reference"), leaves(draw(3, 2, 5))
    )


def test_without_rotated_units_it_is_torch_gru():
    xp, h0, weight_hh, bias_hh = inputs = leaves(draw(7, 3, 5))
    gru = torch.nn.GRU(15, 5, dtype=torch.float64)
    with torch.no_grad():
        for name, value in {"weight_ih": torch.eye(15), "bias_ih": torch.zeros(15)}.items():
            getattr(gru, f"{name}_l0").copy_(value)
        gru.weight_hh_l0.copy_(weight_hh)
        gru.bias_hh_l0.copy_(bias_hh)
    want, _ = gru(xp, h0.unsqueeze(0))
    found = gated_scan(*inputs, options=GatedOptions(), backend="reference")
    torch.testing.assert_close(found, want, **TOL[torch.float64])
    probe = torch.randn_like(want)
    grads = torch.autograd.grad((found * probe).sum(), inputs)
    wanted = torch.autograd.grad((want * probe).sum(), [xp, h0, gru.weight_hh_l0, gru.bias_hh_l0])
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, **DEEP[torch.float64])


def test_rotated_units_turn_in_heads_by_dense_matrices():
    (x,), (h,), weight_hh, bias_hh = inputs = draw(1, 1, 7)
    (found,) = gated_scan(*inputs, options=GatedOptions(head_size=3, rotated_units=5), backend="reference")[0]
    gates = weight_hh @ h[:] + bias_hh
    r, u = torch.sigmoid(x[0, :7] + gates[:7]), torch.sigmoid(x[0, 7:14] + gates[7:14])
    eps, tau = x[0, 14:], gates[14:]
    rotation = torch.zeros(7, 7, dtype=torch.float64)
    for head in (slice(0, 3), slice(3, 5)):
        rotation[head, head] = rotation_matrix(eps[head], tau[head])
    candidate = torch.tanh(eps + r * (tau + rotation @ h))
    torch.testing.assert_close(found, u * h + (1 - u) * candidate, **TOL[torch.float64])


def test_rows_past_their_length_keep_their_state():
    inputs = draw(4, 3, 6)
    options = GatedOptions(head_size=2, rotated_units=4)
    found = gated_scan(*inputs, torch.tensor([4, 0, 2]), options=options)
    whole = gated_scan(*inputs, options=options)
    torch.testing.assert_close(found[:, 0], whole[:, 0])
    torch.testing.assert_close(found[:, 1], inputs[1][1].expand(4, 6))
    torch.testing.assert_close(found[:, 2], torch.cat((whole[:2, 2], whole[1:2, 2].expand(2, 6))))


def test_zoneout_draws_masks_in_training_and_mixes_otherwise():
    inputs, seed = draw(1, 40, 50), torch.tensor(3)
    _, h0, *_ = inputs
    new = gated_scan(*inputs, options=GatedOptions())[0]
    mixed = gated_scan(*inputs, options=GatedOptions(zoneout=0.3))[0]
    torch.testing.assert_close(mixed, 0.7 * new + 0.3 * h0)
    drawn = gated_scan_reference(*inputs, None, seed, GatedOptions(zoneout=0.3, training=True))[0]
    kept = drawn == h0
    torch.testing.assert_close(drawn[~kept], new[~kept])
    assert 0.25 < kept.double().mean() < 0.35


@pytest.mark.parametrize("wrong", [{"head_size": 0}, {"rotated_units": -1}, {"zoneout": 1.0}, {"training": 1}], ids=str)
def test_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GatedOptions(**wrong)
