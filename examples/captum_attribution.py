"""Which step decided: integrated gradients through a RUM by captum, and a table of its layers by torchinfo.

pip install captum torchinfo
python examples/captum_attribution.py
"""

import torch
import torchinfo
from captum.attr import IntegratedGradients
from torch import Tensor, nn

from torchrum import RUM


class First(nn.Module):
    """The sign of the first step's number, after a sequence of others; ``(B, T, 1)`` -> ``(B, 1)``."""

    def __init__(self) -> None:
        super().__init__()
        self.rum, self.head = RUM(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rum(x)[0][:, -1])


def main(steps: int = 150) -> tuple[int, float, int]:
    """Return the step with the largest attribution, the error of completeness, and torchinfo's count of parameters.

    Completeness: attributions add up to the difference between the output and that of the baseline.
    """
    torch.manual_seed(0)
    model = First()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        x = torch.randn(64, 10, 1)
        loss = nn.functional.mse_loss(model(x), x[:, 0].sign())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.randn(32, 10, 1)
    attributions, delta = IntegratedGradients(model).attribute(x, n_steps=64, return_convergence_delta=True)
    decisive = attributions.abs().mean((0, 2)).argmax().item()
    counted = torchinfo.summary(model, input_data=x, verbose=0).total_params
    return int(decisive), delta.abs().max().item(), counted


if __name__ == "__main__":
    print("step {} decided; completeness to {:.1e}; {} parameters".format(*main()))
