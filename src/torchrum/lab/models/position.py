"""Weights of the words of a sentence by their place (Sukhbaatar et al., 2015)."""

from typing import Literal

import torch
from torch import Tensor


def position_encoding(words: int, size: int, form: Literal["code", "paper"] = "code") -> Tensor:
    """Weights ``(J, E)`` that make a sum of embeddings depend on the order of the words.

    Args:
        words: words of a sentence, J, padding included.
        size: width of the embedding, E.
        form: ``"paper"`` is the printed formula; ``"code"`` that of the original implementation, about twice as large,
            with mean 1.
    """
    j = torch.arange(1, words + 1).unsqueeze(1)
    k = torch.arange(1, size + 1)
    if form == "paper":
        return (1 - j / words) - (k / size) * (1 - 2 * j / words)
    return 1 + 4 * (k - (size + 1) / 2) * (j - (words + 1) / 2) / (size * words)
