"""Train, stop, resume and score: ``Trainer(load_recipe("copying-rum")).fit("runs/copying-rum")``."""

from typing import Any

from torchrum.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig
from torchrum.training.errors import ConfigError, RunError
from torchrum.training.overrides import override

__all__ = [
    "ConfigError",
    "ModelConfig",
    "OptimizerConfig",
    "Paper",
    "Result",
    "RunError",
    "TrainConfig",
    "Trainer",
    "evaluate",
    "load_model",
    "override",
    "read_config",
    "read_metrics",
    "run_sweep",
]

_LATER = {
    "Trainer": "trainer",
    "Result": "run_state",
    "evaluate": "scoring",
    "load_model": "scoring",
    "read_config": "scoring",
    "read_metrics": "records",
    "run_sweep": "sweep",
}


def __getattr__(name: str) -> Any:
    # recipes and configs need no extra packages; the trainer does, so it is imported when it is asked for
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(f"torchrum.training.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
