from pathlib import Path

import pytest

from torchrum.cli import main
from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import Trainer, override

TINY = ["task.delay=3", "task.validation_size=16", "model.hidden_size=4", "batch_size=4", "steps=6", "eval_every=2"]


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """The folder of a short run of an overridden recipe, with its test scores."""
    folder = tmp_path_factory.mktemp("runs") / "copying-lstm"
    config = override(load_recipe("copying-lstm-t200"), [*TINY, "log_every=1", "seed=7", "device=cpu"])
    Trainer(config, quiet=True).fit(folder)
    assert main(["eval", str(folder), "--device", "cpu"]) == 0
    return folder
