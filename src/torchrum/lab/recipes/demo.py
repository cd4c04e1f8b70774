"""The demonstration: associative recall at a size that a laptop learns in seconds."""

from torchrum.cells.rum import PAPER_OPTIONS
from torchrum.lab.tasks import Recall
from torchrum.lab.training.config import ModelConfig, OptimizerConfig, TrainConfig

MODELS = {
    "rum": ModelConfig(layer="rum", hidden_size=32, options={**PAPER_OPTIONS, "lam": 1}),
    "lstm": ModelConfig(layer="lstm", hidden_size=32),
}


def demo(model: str, seed: int = 1) -> TrainConfig:
    """The run of ``rum`` or ``lstm``: four pairs, fresh examples at every step, the same budget for both.

    RUM is at 100 % after 500 to 1,500 steps with seeds 1 to 7; seed 0 needs more than 2,500, which this budget does not
    give. The LSTM stays where a bag of values is from step 250 on. Far beyond this budget it learns four pairs too; at
    the lengths of the paper it did not.
    """
    return TrainConfig(
        name=f"demo-{model}",
        task=Recall(length=8, train_size=None, validation_size=1000, test_size=1000),
        model=MODELS[model],
        optimizer=OptimizerConfig(name="adam", lr=3e-3, clip=1.0, warmup=50, schedule="1500:0.3"),
        batch_size=64,
        steps=2000,
        seed=seed,
        device="cpu",
        log_every=10,
        eval_every=50,
        checkpoint_every=1000,
        stop_at=1.0,
        stop_after=1,
        about="recall among 4 pairs, side by side",
    )
