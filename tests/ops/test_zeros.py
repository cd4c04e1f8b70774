"""Zeros that launches share."""

import pytest
import torch

from torchrum.ops.kernels import zeros
from torchrum.ops.kernels.zeros import FEWEST, MOST, kept_zeros


@pytest.fixture(autouse=True)
def none_kept(monkeypatch):
    monkeypatch.setattr(zeros, "_kept", {})


def test_zeros_are_kept_and_grow():
    cpu = torch.device("cpu")
    first = kept_zeros(cpu, 3)
    assert first.shape == (FEWEST,) and not first.any()
    assert kept_zeros(cpu, FEWEST) is first
    larger = kept_zeros(cpu, FEWEST + 1)
    assert larger.shape == (FEWEST + 1,)
    assert kept_zeros(cpu, 3) is larger
    assert zeros._kept[cpu] == [first, larger]  # a launch that has not run yet may read the first
    assert kept_zeros(cpu, MOST + 1) is None


def test_a_graph_records_only_zeros_that_outlive_it(monkeypatch):
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert kept_zeros(torch.device("cuda", 0), 3) is None
    before = torch.zeros(FEWEST)
    zeros._kept[torch.device("cuda", 0)] = [before]
    assert kept_zeros(torch.device("cuda", 0), 3) is before
    assert kept_zeros(torch.device("cuda", 0), FEWEST + 1) is None


@pytest.mark.gpu
def test_zeros_stay_zeros_under_training():
    from torchrum import RUM

    layer = RUM(8, 64, device="cuda")
    for _ in range(3):
        layer(torch.randn(5, 4, 8, device="cuda"))[0].square().sum().backward()
    (kept,) = zeros._kept.values()
    torch.cuda.synchronize()
    assert not kept[-1].any()
