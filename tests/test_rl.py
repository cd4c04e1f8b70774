"""RUMModule against the layer and TorchRL's own GRUModule."""

import pytest
import torch
from torch import nn

from grids import form_of
from torchrum import RUM

pytest.importorskip("torchrl", reason="TorchRL is an optional extra")

from tensordict import TensorDict
from torchrl.modules import GRUModule, set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module

from torchrum.rl import RUMModule

B, T, I, H = 3, 7, 4, 5


def trajectories(lam: float, layers: int = 2) -> tuple[RUMModule, TensorDict]:
    torch.manual_seed(0)
    module = RUMModule(RUM(I, H, layers, batch_first=True, **form_of(lam)))
    is_init = torch.rand(B, T, 1) < 0.3
    is_init[:, 0] = True
    return module, TensorDict({"observation": torch.randn(B, T, I), "is_init": is_init}, batch_size=[B, T])


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_trajectories_give_what_single_steps_give(lam):
    """A state of zeros, as a primer leaves it, is never read: a trajectory's first step is its reset."""
    module, data = trajectories(lam)
    with set_recurrent_mode(True):
        whole = module(data.clone())
    zeros = [torch.zeros(B, 2, H), torch.zeros(B, 2, H, H)]
    states = dict(zip(module.state_keys, zeros, strict=False))
    for t in range(T):
        step = module(TensorDict({**data[:, t], **states}, batch_size=[B]))
        torch.testing.assert_close(step["features"], whole["features"][:, t])
        states = {key: step["next", key] for key in module.state_keys}
    for key in module.state_keys:
        torch.testing.assert_close(whole["next", key][:, -1], states[key])


def test_entries_are_shaped_as_those_of_a_gru_module():
    module, data = trajectories(0)
    theirs = GRUModule(I, H, 2, in_key="observation", out_key="features")
    for mode, given in ((True, data), (False, data[:, 0]), (True, data[0]), (False, data[0, 0])):
        with set_recurrent_mode(mode):
            mine, expected = module(given.clone()), theirs(given.clone())
        for key in ("features", ("next", "recurrent_state")):
            assert mine[key].shape == expected[key].shape, (mode, key)
    assert module.in_keys == theirs.in_keys
    assert module.out_keys == theirs.out_keys
    primers = [get_primers_from_module(nn.ModuleList([kind])) for kind in (module, theirs)]
    assert list(primers[0].primers) == list(primers[1].primers)
    assert primers[0].primers["recurrent_state"].shape == primers[1].primers["recurrent_state"].shape


@pytest.mark.parametrize("lam", [None, 0, 1])
def test_gradients_stop_at_resets(lam):
    module, data = trajectories(lam)
    data["is_init"][:, 3] = True
    x = data["observation"].requires_grad_()
    with set_recurrent_mode(True):
        features = module(data)["features"]
    features[:, 4].sum().backward()
    assert not x.grad[:, :3].any()
    assert x.grad[:, 3].any() or data["is_init"][:, 4].all()


def test_wrong_use_is_refused_in_words():
    with pytest.raises(TypeError, match=r"rum is a GRU; it must be a torchrum\.RUM"):
        RUMModule(nn.GRU(I, H))
    with pytest.raises(ValueError, match="batch_first=False and bidirectional=False; a policy needs batch_first=True"):
        RUMModule(RUM(I, H))
    module, data = trajectories(0)
    with pytest.raises(KeyError, match="no entry 'is_init'; InitTracker adds"):
        module(data.exclude("is_init"))
    with set_recurrent_mode(True), pytest.raises(ValueError, match="the last batch dimension is time"):
        module(data[0, 0])
