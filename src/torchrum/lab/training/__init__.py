"""Train, stop, resume and score: ``Trainer(load_recipe("copying-rum")).fit("runs/copying-rum")``."""

from typing import Any

from torchrum.lab.training.config import ModelConfig, OptimizerConfig, Paper, TrainConfig
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.overrides import override

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

EXTRA = ("lightning_fabric", "lightning_utilities", "rich", "safetensors", "filelock", "matplotlib", "numpy", "jinja2")
"""Packages of the ``train`` extra, and those that come with them."""

_LATER = {
    "Trainer": "trainer",
    "Result": "run_folder",
    "evaluate": "evaluation",
    "load_model": "checkpoint",
    "read_config": "run_folder",
    "read_metrics": "run_folder",
    "run_sweep": "sweep",
}


def __getattr__(name: str) -> Any:
    # recipes and configs need no extra packages; the trainer does, so it is imported when it is asked for
    if name in _LATER:
        import importlib

        try:
            return getattr(importlib.import_module(f"torchrum.lab.training.{_LATER[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in EXTRA:
                raise
            install = 'pip install "torchrum[train]"'
            raise ModuleNotFoundError(
                f"torchrum.lab.training.{name} needs {error.name}; install it with: {install}", name=error.name
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
