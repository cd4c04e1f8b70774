"""Which design runs on a GPU, why no faster one does, and what its operator tells a compiler; without a device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchrum.ops.kernels import machine
from torchrum.ops.rum_scan import RumOptions, ScanInputs, lam1, persistent
from torchrum.ops.rum_scan.designs import DESIGNS, choose_design, operator_obstacle
from torchrum.ops.rum_scan.op import make_flags

FASTEST = "it is the fastest and no restriction applies"


@pytest.fixture
def hopper(monkeypatch):
    """Tensors without data pass for tensors of a Hopper device on which everything is installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(machine, "triton_obstacle", lambda: None)
    monkeypatch.setattr(machine, "interpreted", lambda: False)
    for design in (persistent, lam1):
        monkeypatch.setattr(design, "nvrtc_obstacle", lambda: None)
    monkeypatch.setattr(lam1, "shared_bytes", lambda device: 227 * 1024)
    monkeypatch.setattr(persistent, "machine", type("Machine", (), {"blocks": lambda self, device: 132})())
    with FakeTensorMode():
        yield


def draw(N: int, options: RumOptions, B: int = 40, dtype: torch.dtype = torch.float32) -> ScanInputs:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    norms = (empty(3 * N), empty(3 * N)) if options.layer_norm else ()
    return ScanInputs(empty(7, B, 3 * N), empty(B, N), None, empty(2 * N, N), *norms)


def explain(N: int, backend: str = "auto", B: int = 40, dtype: torch.dtype = torch.float32, **words) -> tuple[str, str]:
    options = RumOptions(**words)
    design, reason = choose_design(draw(N, options, B, dtype), options, backend)
    return design.name, reason


@pytest.mark.usefixtures("hopper")
def test_the_design_is_named_and_what_keeps_faster_ones_from_running():
    assert explain(64) == ("persistent", f"the persistent design: {FASTEST}")
    assert explain(50, lam=1.0) == ("lam1", f"the lam1 design: {FASTEST}")
    assert explain(64, layer_norm=True) == (
        "stepwise",
        "the stepwise design: persistent cannot run: the persistent kernels have no layer norm",
    )
    assert "a batch of 100000 rows does not fit" in explain(64, B=100_000)[1]
    assert explain(64, "stepwise") == ("stepwise", "the stepwise design: it was asked for")
    assert explain(64, "fused", layer_norm=True)[1].startswith(
        "the stepwise design: it was asked for; persistent cannot"
    )
    name, reason = explain(129, lam=1.0)
    assert (name, reason.partition(";")[0]) == (
        "torch",
        "fused cannot run: the lam=1 kernel holds hidden sizes up to 128 on chip, and this one is 129",
    )
    assert reason.endswith("native cannot run: the input is on cuda")
    assert explain(64, dtype=torch.float64)[1].startswith("fused cannot run: the dtype is torch.float64")
    with pytest.raises(
        ValueError, match=r"^backend='persistent' cannot run: the persistent kernels have no layer norm\."
    ):
        explain(64, "persistent", layer_norm=True)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name, N, words", [("persistent", 64, {}), ("stepwise", 2000, {}), ("lam1", 50, {"lam": 1.0})])
def test_the_operator_promises_what_the_design_returns(name, N, words):
    options = RumOptions(**words)
    inputs = draw(N, options)
    [design] = [design for design in DESIGNS if design.name == name]
    out, R, (gates, kept) = design.module.empty_results(inputs, options)
    told = torch.ops.torchrum.rum_scan(*inputs, *make_flags(options, "fused"), True)
    shapes = [(0,) if part is None else tuple(part.shape) for part in (out, R, gates, kept)]
    assert [tuple(part.shape) for part in told] == shapes
    out, R, gates, kept = told
    saved = (out, gates, R, kept)
    grads = torch.ops.torchrum.rum_scan_backward(
        torch.empty_like(out), None, *inputs, *saved, *make_flags(options, "fused"), False
    )
    wanted = [(0,) if part is None else tuple(part.shape) for part in inputs[:6]]
    assert [tuple(part.shape) for part in grads] == wanted


def test_an_option_that_the_operator_does_not_pass_on_is_refused():
    assert operator_obstacle(RumOptions(eta=2.0, zoneout=0.5, layer_norm=True), False) is None
    reason = "target_activation is given, and only target_activation=None is supported"
    assert operator_obstacle(RumOptions(target_activation="tanh"), False) == reason
    assert operator_obstacle(RumOptions(gate_scale=0.1, embed_bias=False), False) is None  # no step reads these
