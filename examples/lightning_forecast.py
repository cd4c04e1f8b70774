"""A LightningModule with a RUM inside: training, a checkpoint, and ONNX by Lightning's own call.

pip install pytorch-lightning "torchrum[export]"
python examples/lightning_forecast.py
"""

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchrum import RUM


class Forecaster(lightning.LightningModule):
    """The next value of a noisy sine at every step; ``(B, T, 1)`` -> ``(B, T, 1)``."""

    def __init__(self, hidden_size: int = 24) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.rum, self.head = RUM(1, hidden_size, batch_first=True), nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rum(x)[0])

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        (series,) = batch
        loss = nn.functional.mse_loss(self(series[:, :-1]), series[:, 1:])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def main(epochs: int = 4) -> tuple[float, float]:
    """Return the last training loss and the largest difference between ONNX Runtime and the model at another length."""
    lightning.seed_everything(0, verbose=False)
    phase, step = 6.28 * torch.rand(256, 1), torch.arange(33)
    series = (torch.sin(0.4 * step + phase) + 0.05 * torch.randn(256, 33)).unsqueeze(-1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            gradient_clip_val=1.0,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Forecaster()
        trainer.fit(model, DataLoader(TensorDataset(series), 32, shuffle=True))
        loaded = Forecaster.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, map_location="cpu").eval()
        path = Path(folder) / "model.onnx"
        shapes = ({0: torch.export.Dim("B"), 1: torch.export.Dim("T")},)
        loaded.to_onnx(path, (series[:3, :5],), dynamo=True, dynamic_shapes=shapes, verbose=False, external_data=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        given = series[:2, :21]
        (got,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        with torch.no_grad():
            difference = np.abs(got - loaded(given).numpy()).max()
    return trainer.callback_metrics["loss"].item(), float(difference)


if __name__ == "__main__":
    print("loss {:.4f}; ONNX Runtime differs by {:.1e}".format(*main()))
