"""A plain training loop with accelerate: padded sequences, gradient accumulation, clipping, a saved state.

pip install accelerate
python examples/accelerate_loop.py
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchrum import RUM


class Counter(nn.Module):
    """How many ones a padded sequence holds, as a class; ``(B, T, 1)`` and lengths -> ``(B, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.rum, self.head = RUM(1, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, h_n = self.rum(x, lengths=lengths)
        return self.head(h_n[-1])


def draw(sequences: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad sequences of bits; the label is their sum."""
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=float("nan"))  # never looked at
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    labels = torch.stack([sequence.sum() for sequence in sequences]).long()
    return padded.unsqueeze(-1), lengths, labels


def main(epochs: int = 6) -> tuple[float, float]:
    """Return the mean loss of the first and of the last epoch."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    sequences = [torch.randint(2, (int(length),)).float() for length in torch.randint(1, 8, (512,))]
    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(sequences, 32, shuffle=True, collate_fn=draw)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for _ in range(epochs):
        seen = []
        for x, lengths, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x, lengths), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(sum(seen) / len(seen))
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss {:.2f} in the first epoch, {:.2f} in the last".format(*main()))
