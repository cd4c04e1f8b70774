"""Mailboxes that launches share."""

import pytest
import torch

from torchrum.ops.kernels import mail
from torchrum.ops.kernels.mail import FEWEST, MOST, kept_mail


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current stream, and no mail yet."""
    current = [0]
    monkeypatch.setattr(mail, "_kept", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: current[0], raising=False)
    return current


def test_mail_is_empty_kept_and_grows() -> None:
    x = torch.zeros(2)
    first = kept_mail(x, 3)
    assert first.shape == (FEWEST,) and first.dtype is torch.int32 and (first == -1).all()
    assert kept_mail(x.double(), FEWEST) is first
    larger = kept_mail(x, MOST)
    assert larger.shape == (MOST,)
    assert kept_mail(x, 3) is larger
    assert kept_mail(x, MOST + 1) is None


def test_only_the_default_stream_has_mail(stream: list[int]) -> None:
    """Two streams may run at once, and a CUDA graph is recorded on one that is not the default."""
    x = torch.zeros(2)
    before = kept_mail(x, 3)
    stream[0] = 7
    assert kept_mail(x, 3) is None
    stream[0] = 0
    assert kept_mail(x, 3) is before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mail_stays_empty_under_training(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, of rows that fill no tile and of several; a second stream gives the same, without it."""
    monkeypatch.undo()
    from torchrum import RUM

    mail._kept.clear()
    layer = RUM(8, 100, device="cuda", dtype=dtype)
    for B in (4, 21, 4):
        x = torch.randn(5, B, 8, device="cuda", dtype=dtype)

        def found() -> list[torch.Tensor]:
            output = layer(x)[0]  # noqa: B023
            return [output.detach(), *torch.autograd.grad(output.square().sum(), list(layer.parameters()))]

        first, again = found(), found()
        (kept,) = mail._kept.values()
        torch.cuda.synchronize()
        assert (kept == -1).all()
        with torch.cuda.stream(torch.cuda.Stream()):
            filled = found()
        torch.cuda.synchronize()
        assert all(map(torch.equal, first, again))
        assert all(map(torch.equal, first, filled))
