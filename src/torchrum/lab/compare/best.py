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
from torchrum.lab.compare.run import Settings, weights_file
from torchrum.lab.compare.verdict import Standing, champion
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.files import read_json, write_atomic, write_json

FAMILIES = tuple({model.family for model in MODELS.values()})


def save_best(folder: Path, found: Sequence[Standing], problem: Problem, settings: Settings) -> None:
    """Write ``best.safetensors`` and ``best.json``: the seed that is best on the validation part, of the best model."""
    best = champion([each for each in found if each.runs], FAMILIES)
    run = min(best.runs, key=lambda run: run.validation)
    write_atomic(folder / "best.safetensors", weights_file(folder, run).read_bytes())
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
        self.reading: dict[str, Any] = self.described["reading"]
        sizes = Sizes(**self.described["sizes"])
        self.network = Network(self.described["model"], sizes, self.described["hidden_size"]).eval()
        self.network.load_state_dict(load_file(folder / "best.safetensors"))

    def predict(self, sequences: Sequence[Any]) -> list[Any]:
        """Predict from sequences as they are in the data, before any scaling.

        Args:
            sequences: of numbers, arrays ``(T, F)`` with the columns ``reading["columns"]``, or ``(T,)`` for one
                column; of symbols, texts or lists.

        Returns:
            For each sequence the class, the class at every step, or the most probable next symbol after every step; or
            the target, ``(K,)``, and in forecasting the next value after every step, ``(T, K)``, in the units of the
            data.
        """
        kind, reading = self.described["kind"], self.reading
        found = self.answers([self.prepare(sequence) for sequence in sequences])
        if kind in ("regression", "forecasting"):
            return [self._in_units(answer, raw) for answer, raw in zip(found, sequences, strict=True)]
        names = [*reading["alphabet"], None] if kind == "symbols" else reading["classes"]  # None: a rare symbol
        places = [answer.argmax(-1).tolist() for answer in found]
        return [[names[place] for place in each] if isinstance(each, list) else names[each] for each in places]

    @torch.no_grad()
    def answers(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Answers of the network to prepared sequences, ``(outputs,)`` or ``(T, outputs)`` each."""
        lengths = torch.tensor([len(each) for each in inputs])
        found, _ = self.network(pad_sequence(list(inputs)), lengths)
        if not self.network.every_step:
            return list(found)
        return [found[:length, row] for row, length in enumerate(lengths.tolist())]

    def prepare(self, sequence: Any) -> Tensor:
        """Number the symbols, or scale the numbers, as for the training."""
        reading = self.reading
        if "alphabet" in reading:
            codes = {symbol: code for code, symbol in enumerate(reading["alphabet"])}
            return torch.tensor([codes.get(symbol, len(codes)) for symbol in sequence])
        x, changes = self._columns(sequence), torch.tensor(reading["changes"])
        x = torch.where(changes, x.diff(dim=0, prepend=x[:1]), x)
        means, scales = (torch.tensor(reading[name], dtype=x.dtype) for name in ("means", "scales"))
        x = ((x - means) / scales).float()
        return x.T if reading["turned"] else x

    def _columns(self, sequence: Any) -> Tensor:
        count, x = len(self.reading["means"]), torch.as_tensor(sequence, dtype=torch.float64)
        if x.dim() == 1:
            x = x.unsqueeze(0 if self.reading["turned"] else 1)
        if x.dim() != 2 or x.shape[1] != count:
            raise ConfigError(
                f"predict: a sequence has shape {tuple(x.shape)}; it must be (steps, {count}), with the columns "
                f"{', '.join(map(str, self.reading['columns']))}."
            )
        return x

    def _in_units(self, answer: Tensor, sequence: Any) -> Tensor:
        reading = self.reading
        means, scales = (torch.tensor(reading[f"target_{name}"]) for name in ("means", "scales"))
        answer = answer * scales + means
        if self.described["kind"] == "forecasting":
            last = self._columns(sequence)[:, [reading["columns"].index(name) for name in reading["targets"]]]
            answer = answer + torch.tensor(reading["target_changes"]) * last.float()
        return answer


def load(folder: Path | str) -> Best:
    """Load the best model of a comparison."""
    return Best(Path(folder))
