"""Differentially private training with Opacus: per-sample gradients of the whole model by torch.func.

Opacus refuses nn.GRU and has hooks for its own copy of it. A RUM needs neither: ``vmap`` of ``grad`` is exact for it,
whichever of its outputs the model reads, and Opacus' optimizer clips and adds the noise.

    pip install opacus
    python examples/opacus_private.py
"""

import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from torchrum import RUM


class Classifier(nn.Module):
    """Whether the sum over a noisy sequence is above zero, from the last state; ``(B, T, I)`` -> ``(B, 2)``."""

    def __init__(self) -> None:
        super().__init__()
        self.rum, self.head = RUM(4, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rum(x)[1][-1])


def per_sample_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of each sample's loss, ``(B, ...)`` for each parameter."""

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, weights, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(logits, y.unsqueeze(0))

    weights = {name: part.detach() for name, part in model.named_parameters()}
    return vmap(grad(loss), (None, 0, 0), randomness="different")(weights, x, y)


def main(epochs: int = 3, samples: int = 512) -> tuple[float, float]:
    """Train; return the accuracy on the training data and the epsilon spent at delta = 1e-3."""
    torch.manual_seed(0)
    x = torch.randn(samples, 20, 4)
    y = (x.sum((1, 2)) > 0).long()
    model = Classifier()
    assert not ModuleValidator.validate(model)
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), 1e-2),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=64),
        noise_multiplier=0.8,
        max_grad_norm=1.0,
        grad_sample_mode="no_op",  # the gradients of single samples are made here
    )
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            for name, gradient in per_sample_gradients(model, inputs, labels).items():
                model.get_parameter(name).grad_sample = gradient
            optimizer.step()
    with torch.no_grad():
        accuracy = (private(x).argmax(-1) == y).float().mean().item()
    return accuracy, engine.get_epsilon(1e-3)


if __name__ == "__main__":
    print("accuracy {:.2f} at epsilon {:.1f}".format(*main()))
