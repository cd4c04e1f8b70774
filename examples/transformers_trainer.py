"""A RUM language model under Hugging Face's Trainer, with accelerate beneath it.

pip install transformers accelerate
python examples/transformers_trainer.py
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from torchrum import RUM

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SYMBOLS = sorted(set(TEXT))


class Windows(Dataset):
    """Windows of characters; the labels are the inputs, and the model shifts them."""

    def __init__(self, length: int = 32) -> None:
        self.codes = torch.tensor([SYMBOLS.index(symbol) for symbol in TEXT]).unfold(0, length, 5)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.codes[place], "labels": self.codes[place]}


class LanguageModel(nn.Module):
    """``input_ids`` ``(B, T)`` -> logits ``(B, T, V)``, and the loss where labels are given."""

    def __init__(self, hidden_size: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(SYMBOLS), 16)
        self.rum = RUM(16, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, len(SYMBOLS))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.rum(self.embedding(input_ids))[0])
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def main(steps: int = 60) -> tuple[float, float]:
    """Return the evaluation loss, in nats per character, before and after training."""
    torch.manual_seed(0)
    data = Windows()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=1e-2,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(LanguageModel(), arguments, train_dataset=data, eval_dataset=data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        trainer.save_model(folder)  # safetensors
        return before, trainer.evaluate()["eval_loss"]


if __name__ == "__main__":
    print("loss {:.2f} before, {:.2f} after".format(*main()))
