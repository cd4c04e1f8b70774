"""scikit-learn around a RUM: cross-validation and a grid search by skorch.

pip install skorch
python examples/skorch_search.py
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score
from skorch import NeuralNetClassifier
from torch import Tensor, nn

from torchrum import RUM


class RowReader(nn.Module):
    """A digit read row by row; ``(B, 8, 8)`` -> ``(B, 10)``."""

    def __init__(self, hidden_size: int = 32, lam: float = 0.0) -> None:
        super().__init__()
        self.rum = RUM(8, hidden_size, batch_first=True, lam=lam)
        self.head = nn.Linear(hidden_size, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rum(x)[0][:, -1])


def main(samples: int = 600, epochs: int = 15) -> tuple[float, dict[str, object]]:
    """Return the mean accuracy of three folds and the best setting of a small search."""
    torch.manual_seed(0)
    digits, labels = load_digits(return_X_y=True)
    x, y = digits[:samples].reshape(-1, 8, 8).astype(np.float32) / 16, labels[:samples].astype(np.int64)
    net = NeuralNetClassifier(
        RowReader,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=1e-2,
        max_epochs=epochs,
        batch_size=64,
        train_split=None,
        verbose=0,
    )
    accuracy = cross_val_score(net, x, y, cv=3).mean()
    search = GridSearchCV(net, {"module__lam": [0.0, 1.0], "max_epochs": [2]}, cv=2).fit(x[:200], y[:200])
    return float(accuracy), search.best_params_


if __name__ == "__main__":
    accuracy, best = main()
    print(f"accuracy {accuracy:.2f}; of the search {best}")
