"""A RUM in darts' RNNModel in place of its GRU: fit a series and forecast it.

pip install darts
python examples/darts_forecast.py
"""

from typing import Any

import numpy as np
from darts import TimeSeries
from darts.metrics import mae
from darts.models import RNNModel
from darts.models.forecasting.rnn_model import _RNNModule

from torchrum import RUM


class RUMModule(_RNNModule):
    """darts' own module with its GRU swapped for a RUM; states are carried as a GRU's are."""

    def __init__(self, **words: Any) -> None:
        super().__init__(name="GRU", **words)
        self.rnn = RUM(
            self.input_size,
            self.hidden_dim,
            self.num_layers,
            batch_first=True,
            dropout=self.dropout,
        )


def main(epochs: int = 40) -> float:
    """Return the mean absolute error of the last 24 steps of a seasonal series."""
    values = np.sin(2 * np.pi * np.arange(264) / 12).astype(np.float32)
    series = TimeSeries.from_values(values)
    model = RNNModel(
        input_chunk_length=24,
        training_length=36,
        model=RUMModule,
        hidden_dim=24,
        n_epochs=epochs,
        batch_size=16,
        optimizer_kwargs={"lr": 3e-2},
        random_state=0,
        pl_trainer_kwargs={
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
        },
    )
    model.fit(series[:-24], verbose=False)
    return float(mae(series[-24:], model.predict(24, verbose=False)))


if __name__ == "__main__":
    print(f"mean absolute error {main():.3f}")
