"""Trained models on the Hugging Face Hub, with a model card filled from the results ledger. Needs ``torchrum[hub]``.

model = TrainedModel.from_run("runs/char-ptb-fs-rum-2")
model.push_to_hub("me/fs-rum-2")

model = TrainedModel.from_pretrained("me/fs-rum-2")
print(model.task.draw(model.model, length=300, prompt="the company said "))
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from torchrum.lab.tasks.base import Task
from torchrum.lab.training.config import TrainConfig, from_json, to_json
from torchrum.paper.ledger.cells import table_lines
from torchrum.paper.ledger.record import changes, count_parameters
from torchrum.paper.ledger.schema import Entry, LedgerError, read_ledger
from torchrum.paper.ledger.texts import plain

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

RESULTS = Path("results")


def find_entry(config: TrainConfig, results: Path) -> Entry | None:
    """The entry of the ledger that describes the run of ``config``, if there is one."""
    if not results.is_dir():
        return None
    try:
        wanted = config.name, config.seed, changes(config)
    except LedgerError:  # a recipe of the user's own
        return None
    found = (entry for entry in read_ledger(results) if (entry.recipe, entry.seed, entry.overrides) == wanted)
    return next(found, None)


def card_text(config: TrainConfig, entry: Entry | None) -> str:
    """The model card: what it is, how it was trained, what it scored, how to use it."""
    lines = ["---", "library_name: torchrum", "tags:", "- rnn", "- rotational-unit-of-memory", "---"]
    lines += [
        "",
        f"# {config.name}",
        "",
        f"{config.about or type(config.task).__name__}; {count_parameters(config):,} parameters.",
    ]
    if entry is None:
        lines += ["", "This run is not in the results ledger of torchrum."]
    else:
        validation = ", ".join(f"{name} {value:.6g}" for name, value in entry.final.items())
        test = ", ".join(f"{name} {value:.6g}" for name, value in entry.test.items())
        rows = {
            "validation, last step": validation,
            "test, best checkpoint on validation": test,
            "published": config.paper.text + f" ({config.paper.where})" if config.paper else "",
            "steps": f"{entry.steps:,} in {entry.wall_seconds:,.0f} s on {entry.hardware}",
            "commit": entry.commit,
            "versions": ", ".join(f"{name} {version}" for name, version in entry.versions.items()),
            "note": entry.note,
        }
        lines += ["", *table_lines(("", ""), [(name, plain(text)) for name, text in rows.items() if text])]
        lines += ["", "Trained by:", "", f"    {entry.command}"]
    use = ["from torchrum.hub import TrainedModel", "", 'trained = TrainedModel.from_pretrained("THIS/REPOSITORY")']
    lines += ["", "```python", *use, "```", ""]
    return "\n".join(lines)


@functools.cache
def trained_model() -> type:
    """The class ``TrainedModel``; huggingface_hub is imported when it is first asked for."""
    try:
        from huggingface_hub import ModelCard, PyTorchModelHubMixin
    except ModuleNotFoundError as error:
        raise ImportError(f'torchrum.hub needs {error.name}; install it with: pip install "torchrum[hub]"') from error
    from torchrum.lab.training.resume import load_model
    from torchrum.lab.training.run_folder import read_config
    from torchrum.lab.training.step import build

    class TrainedModel(nn.Module, PyTorchModelHubMixin):
        """The model of a run, with what it was trained on.

        Args:
            description: the run's config as plain data.
        """

        def __init__(self, description: Mapping[str, Any]) -> None:
            super().__init__()
            self.run_config = from_json(description)
            self.model = build(self.run_config)
            self.eval()

        @classmethod
        def from_run(cls, run: Path | str, which: Literal["last", "best"] = "best") -> "TrainedModel":
            """The trained model of a run folder; what holds for one machine alone stays behind."""
            plain = to_json(read_config(run))
            task = {name: value for name, value in plain["task"].items() if name not in read_config(run).task.local}
            trained = cls({**plain, "task": task})
            trained.model.load_state_dict(load_model(run, which).state_dict())
            return trained

        @property
        def task(self) -> Task:
            """What it was trained on."""
            return self.run_config.task

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

        def generate_model_card(self, *args: Any, results: Path | str = RESULTS, **kwargs: Any) -> "ModelCard":
            """The card from the ledger in ``results``; pass it as ``model_card_kwargs={"results": ...}``."""
            return ModelCard(card_text(self.run_config, find_entry(self.run_config, Path(results))))

    return TrainedModel


def __getattr__(name: str) -> Any:
    if name == "TrainedModel":
        return trained_model()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
