"""The best model of a comparison: saved with what prepares new data, and loaded for predictions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrum.lab.compare.models import MODELS, Network, Sizes
from torchrum.lab.compare.problem import Problem
from torchrum.lab.compare.run import WEIGHTS, Settings, Training
from torchrum.lab.compare.verdict import Standing, champion
from torchrum.lab.training.files import read_json, write_atomic, write_json

FAMILIES = tuple({model.family for model in MODELS.values()})


def save_best(folder: Path, found: Sequence[Standing], problem: Problem, settings: Settings) -> None:
    """Write ``best.safetensors`` and ``best.json``: the seed that is best on the validation part, of the best model."""
    best = champion([each for each in found if each.runs], FAMILIES)
    run = min(best.runs, key=lambda run: run.validation)
    weights = folder / WEIGHTS / Training(*run[:3]).weights
    write_atomic(folder / "best.safetensors", weights.read_bytes())
    scale = problem.target_scale
    described = {
        "model": run.model,
        "hidden_size": settings.hidden_sizes[run.model],
        "sizes": Sizes.of(problem)._asdict(),
        "kind": problem.kind,
        "metric": problem.metric,
        "test": run.test,
        "rate": run.rate,
        "seed": run.seed,
        "target_scale": None if scale is None else scale.tolist(),
        "reading": problem.reading,
    }
    write_json(folder / "best.json", described)


class Best:
    """A trained model that reads new data as the comparison read its own.

    Args:
        folder: of the comparison.
    """

    def __init__(self, folder: Path) -> None:
        self.described: dict[str, Any] = read_json(folder / "best.json")
        """Which model it is, its score on the test part, and how data are read."""
        sizes = Sizes(**self.described["sizes"])
        self.network = Network(self.described["model"], sizes, self.described["hidden_size"]).eval()
        self.network.load_state_dict(load_file(folder / "best.safetensors"))

    @torch.no_grad()
    def answers(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Answers of the network to prepared sequences, ``(outputs,)`` or ``(T, outputs)`` each."""
        lengths = torch.tensor([len(each) for each in inputs])
        found, _ = self.network(pad_sequence(list(inputs)), lengths)
        if not self.network.every_step:
            return list(found)
        return [found[:length, row] for row, length in enumerate(lengths.tolist())]


def load(folder: Path | str) -> Best:
    """Load the best model of a comparison."""
    return Best(Path(folder))
