"""Ray Tune around a torchrum Trainer: each trial is a run folder, on any machine of a Ray cluster.

pip install "torchrum[train]" "ray[tune]"
python examples/ray_search.py

Ray starts on this machine. After ``ray.init(address="auto")`` the trials run on all machines of a cluster.
``tune.with_resources`` says how many cores each gets, and how much of a GPU. Without Ray, ``torchrum sweep --storage``
lets workers on any machines share a search.
"""

from pathlib import Path
from typing import Any

from ray import tune

from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import Trainer, override

RECIPE = "recall-rum-lam1-t30"
SHORT = ["device=cpu", "batch_size=32", "task.length=6", "task.train_size=none", "task.validation_size=256"]


def train_once(chosen: dict[str, Any]) -> None:
    """Train the recipe with the fields that Ray has chosen."""
    fields = [f"{name}={value}" for name, value in chosen.items()]
    config = override(load_recipe(RECIPE), [*SHORT, *fields])
    folder = Path(tune.get_context().get_trial_dir()) / "run"
    result = Trainer(config, quiet=True).fit(folder, resume=folder.exists())  # a trial that is repeated goes on
    tune.report({config.task.metric: result.best, "run": str(folder)})


def main(steps: int = 300, trials: int = 4, folder: Path | None = None) -> tuple[float, dict[str, Any]]:
    """Return the best accuracy and its setting; the results go to ``folder``, or where Ray keeps them."""
    space = {"optimizer.lr": tune.loguniform(1e-4, 1e-1), "model.hidden_size": tune.choice([16, 32]), "steps": steps}
    tuner = tune.Tuner(
        tune.with_resources(train_once, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", num_samples=trials),
        run_config=tune.RunConfig(storage_path=None if folder is None else str(folder), verbose=1),
    )
    best = tuner.fit().get_best_result()
    assert best.metrics is not None and best.config is not None
    return best.metrics["accuracy"], best.config


if __name__ == "__main__":
    accuracy, setting = main()
    print(f"accuracy {accuracy:.3f} with {setting}")
