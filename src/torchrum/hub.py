"""Trained models on the Hugging Face Hub, with a model card from the results ledger. Needs ``torchrum[hub]``.

model = TrainedModel.from_run("runs/char-ptb-fs-rum-2")
model.push_to_hub("me/fs-rum-2")

model = TrainedModel.from_pretrained("me/fs-rum-2")
print(model.task.draw(model.model, length=300, prompt="the company said "))
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from torchrum.lab.models import build_model, count_parameters
from torchrum.lab.recipes import registered_recipe
from torchrum.lab.tasks.base import Task
from torchrum.lab.training.config import TrainConfig, from_json, to_json
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.overrides import assignments

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

RESULTS = Path("results")
MARKS = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": r"\|", "[": r"\[", "]": r"\]"})


def find_entry(config: TrainConfig, results: Path) -> dict[str, Any] | None:
    """Return the entry of the ledger for the run of ``config``, or None."""
    try:
        wanted = config.name, config.seed, assignments(registered_recipe(config.name), config)
    except ConfigError:  # a user's own recipe
        return None
    for path in sorted(results.glob("*.jsonl")):
        for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if (entry["recipe"], entry["seed"], entry["overrides"]) == wanted:
                return entry
    return None


def card_text(config: TrainConfig, entry: Mapping[str, Any] | None) -> str:
    """Return the text of the model card: the model, its training, its scores and its use."""
    lines = ["---", "library_name: torchrum", "tags:", "- rnn", "- rotational-unit-of-memory", "---"]
    parameters = count_parameters(build_model(config.model, config.task))
    about = config.about or type(config.task).__name__
    lines += ["", f"# {config.name}", "", f"{about}; {parameters:,} parameters."]
    if entry is None:
        lines += ["", "This run is not in the results ledger of torchrum."]
    else:
        rows = {
            "validation, last step": ", ".join(f"{name} {value:.6g}" for name, value in entry["final"].items()),
            "test, best checkpoint on validation": ", ".join(
                f"{name} {value:.6g}" for name, value in entry.get("test", {}).items()
            ),
            "published": config.paper.text + f" ({config.paper.where})" if config.paper else "",
            "steps": f"{entry['steps']:,} in {entry['wall_seconds']:,.0f} s on {entry['hardware']}",
            "commit": entry["commit"],
            "versions": ", ".join(f"{name} {version}" for name, version in entry["versions"].items()),
            "note": entry["note"],
        }
        cells = [f"| {name} | {text.translate(MARKS)} |" for name, text in rows.items() if text]
        lines += ["", "|  |  |", "| --- | --- |", *cells]
        lines += ["", "Trained by:", "", f"    {entry['command']}"]
    use = ["from torchrum.hub import TrainedModel", "", 'trained = TrainedModel.from_pretrained("THIS/REPOSITORY")']
    lines += ["", "```python", *use, "```", ""]
    return "\n".join(lines)


@functools.cache
def trained_model() -> type:
    """Return the class ``TrainedModel``; the first call imports huggingface_hub."""
    try:
        from huggingface_hub import ModelCard, PyTorchModelHubMixin
    except ModuleNotFoundError as error:
        raise ImportError(f'torchrum.hub needs {error.name}; install it with: pip install "torchrum[hub]"') from error
    from torchrum.lab.training.checkpoint import load_model
    from torchrum.lab.training.run_folder import read_config
    from torchrum.lab.training.step import build, within_memory

    class TrainedModel(nn.Module, PyTorchModelHubMixin):
        """The model of a run, with its task.

        Args:
            description: the config of the run as plain data.
        """

        def __init__(self, description: Mapping[str, Any]) -> None:
            super().__init__()
            self.run_config = from_json(description)
            with torch.device("cpu"), within_memory():
                self.model = build(self.run_config)
            self.eval()

        @classmethod
        def _from_pretrained(cls, *, strict: bool = True, **words: Any) -> "TrainedModel":
            """Load the weights; by default all must be present, while huggingface_hub would leave random ones."""
            return super()._from_pretrained(strict=strict, **words)

        @classmethod
        def from_run(cls, run: Path | str, which: Literal["last", "best"] = "best") -> "TrainedModel":
            """Load the trained model of a run folder, without fields that are specific to one machine."""
            plain = to_json(read_config(run))
            task = {name: value for name, value in plain["task"].items() if name not in read_config(run).task.local}
            trained = cls({**plain, "task": task})
            trained.model.load_state_dict(load_model(run, which).state_dict())
            return trained

        @property
        def task(self) -> Task:
            """The task of the run."""
            return self.run_config.task

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

        def generate_model_card(self, *args: Any, results: Path | str = RESULTS, **kwargs: Any) -> "ModelCard":
            """Build the card from the ledger in ``results``; pass it as ``model_card_kwargs={"results": ...}``."""
            return ModelCard(card_text(self.run_config, find_entry(self.run_config, Path(results))))

    return TrainedModel


def __getattr__(name: str) -> Any:
    if name == "TrainedModel":
        return trained_model()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
