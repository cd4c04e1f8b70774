import pytest


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """A curve takes longer to draw than these runs to train; the module-wide run of test_trainer.py has one."""
    monkeypatch.setattr("torchrum.training.trainer.Trainer._draw", lambda self: None)
