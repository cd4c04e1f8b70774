"""Symbols drawn from a language model, one at a time."""

import math
from collections.abc import Iterator, Sequence

import torch

from torchrum.lab.models.char_lm import CharModel


@torch.no_grad()
def sample(
    model: CharModel, prompt: Sequence[int], length: int, *, temperature: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Yield ``length`` symbols that follow ``prompt``; the state is carried, so each costs one step.

    Args:
        model: in eval mode, on any device.
        prompt: ids of at least one symbol.
        length: symbols to draw.
        temperature: divides the logits; 0 takes the likeliest symbol each time.
        seed: of the draws, which are made on the CPU: the same on every device, up to rounding.
    """
    if not prompt:
        raise ValueError("sample: the prompt is empty; give at least one symbol.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"sample: temperature={temperature}; it must be at least 0, and finite.")
    if length < 0:
        raise ValueError(f"sample: length={length}; it must be at least 0.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"sample: seed={seed}; it must be at least 0 and below 2**63.")
    device = model.readout.weight.device
    generator = torch.Generator().manual_seed(seed)
    logits, state = model(torch.tensor([prompt], device=device))
    for number in range(length):
        scores = logits[0, -1].double().cpu()
        if not scores.isfinite().all():
            raise ValueError("sample: the model's logits are not finite; its weights have diverged.")
        if temperature == 0:
            symbol = int(scores.argmax())
        else:
            scaled = (scores - scores.max()) / temperature  # at most 0: a tiny temperature must not overflow
            symbol = int(torch.multinomial(torch.softmax(scaled, -1), 1, generator=generator))
        yield symbol
        if number + 1 < length:
            logits, state = model(torch.tensor([[symbol]], device=device), None, state)
