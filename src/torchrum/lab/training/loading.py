"""A run folder read back: its config, and the model that it describes, with trained weights."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchrum.lab.training.config import TrainConfig, require_one_of
from torchrum.lab.training.config_file import from_json
from torchrum.lab.training.default_device import on_host
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.files import read_json
from torchrum.lab.training.records import CONFIG
from torchrum.lab.training.saved_state import check_config, load_state

WEIGHT_TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # other precisions keep float32 weights


def build(config: TrainConfig) -> nn.Module:
    """The model of a config; what it refuses is a ConfigError."""
    from torchrum.lab.models import build_model

    try:
        return build_model(config.model, config.task)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def fill(model: nn.Module, weights: dict[str, Any], run: Path) -> None:
    """Load weights into a model that must have exactly these, in these shapes."""
    own = model.state_dict()
    missing, extra = own.keys() - weights.keys(), weights.keys() - own.keys()
    shapes = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if missing or extra or shapes:
        first = sorted((*missing, *extra, *shapes))[0]
        given = {name: tuple(weights[name].shape) if name in weights else "absent" for name in (first,)}
        raise RunError(
            f"the checkpoint of {run} does not fit the model: {first} is {given[first]} there and "
            f"{tuple(own[first].shape) if first in own else 'absent'} in the model."
        )
    model.load_state_dict(weights)


def read_config(run: Path | str) -> TrainConfig:
    """The config of a run folder."""
    path = Path(run) / CONFIG
    return from_json(read_json(path), path, RunError)


@on_host()
def load_model(run: Path | str, which: Literal["last", "best"] = "best") -> nn.Module:
    """The trained model of a run folder, on the CPU, ready to use.

    Args:
        run: the run folder.
        which: the checkpoint to load: the best on validation, or the last.
    """
    require_one_of("load_model", "which", which, ("last", "best"))
    run = Path(run)
    config = read_config(run)
    weights, state = load_state(run, which)
    check_config(run, config, state)
    model = build(config).to(dtype=WEIGHT_TYPES.get(config.precision, torch.float32))
    fill(model, weights, run)
    return model.eval()
