"""A language model over symbols that carries its state between calls, and sampling from it."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchrum.lab.models.answering import width
from torchrum.layers.recurrent import Recurrent
from torchrum.ops._checks import check_flags, check_positive_int, check_probability

State = tuple[Tensor, ...]
RECURRENT = re.compile(r"(^|\.)weight_hh\w*(\.\d+)?$")  # some cells have several, in a list


class CharModel(nn.Module):
    """Embedding, a recurrent layer, and a softmax at every step (Mujika et al., 2017).

    The embedding and the read-out start orthogonal, the read-out's bias uniform within 0.01.

    Args:
        layer: a one-directional recurrent layer with ``batch_first=False``, reading ``embedding_size`` numbers (or
            ``num_symbols``, where the input is one-hot).
        num_symbols: symbols of the text, V.
        embedding_size: width of the embedding, E; None feeds one-hot vectors.
        input_dropout, output_dropout: chance, from 0 to 1, that a number is zeroed before and after the layer.
        locked_dropout: draw these two masks once per call instead of in each step.
        weight_drop: chance that a recurrent weight is zeroed for a whole call (DropConnect; Merity et al., 2018).
        tied: the read-out's matrix is the embedding's; the layer must be as wide as the embedding.
        calibrated: add a buffer ``temperature``, 1 at first, that divides the logits in evaluation mode: a model that
            has seen its text many times is overconfident (Guo et al., 2017).
    """

    temperature: Tensor

    def __init__(
        self,
        layer: nn.Module,
        num_symbols: int,
        embedding_size: int | None = None,
        input_dropout: float = 0.0,
        output_dropout: float = 0.0,
        locked_dropout: bool = False,
        weight_drop: float = 0.0,
        tied: bool = False,
        calibrated: bool = False,
    ) -> None:
        super().__init__()
        chances = {"input_dropout": input_dropout, "output_dropout": output_dropout, "weight_drop": weight_drop}
        check_probability("CharModel", **chances)
        check_positive_int("CharModel", num_symbols=num_symbols)
        check_flags("CharModel", locked_dropout=locked_dropout, tied=tied, calibrated=calibrated)
        size = width(layer)
        self.num_symbols = num_symbols
        self.layer = layer
        self.input_dropout, self.output_dropout, self.locked_dropout = input_dropout, output_dropout, locked_dropout
        self.weight_drop, self.calibrated = weight_drop, calibrated
        self.dropped = [name for name, _ in layer.named_parameters() if RECURRENT.search(name)]
        if weight_drop and not self.dropped:
            raise ValueError(
                f"CharModel: weight_drop={weight_drop}, but {type(layer).__name__} has no weight_hh to drop."
            )
        self.embedding = None if embedding_size is None else nn.Embedding(num_symbols, embedding_size)
        self.readout = nn.Linear(size, num_symbols)
        if self.embedding is not None:
            nn.init.orthogonal_(self.embedding.weight)
        nn.init.orthogonal_(self.readout.weight)
        nn.init.uniform_(self.readout.bias, -0.01, 0.01)
        if calibrated:
            self.register_buffer("temperature", torch.ones(()))
        if tied:
            if embedding_size != size:
                raise ValueError(
                    f"CharModel: tied=True needs an embedding as wide as the layer, but embedding_size is "
                    f"{embedding_size} and the layer has {size} units; make them equal."
                )
            assert self.embedding is not None
            self.readout.weight = self.embedding.weight

    def initial_state(self, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> State:
        """Return the state before the first symbol, in the form and dtype in which ``forward`` returns it."""
        if isinstance(self.layer, Recurrent):
            like = torch.empty(0, device=device, dtype=dtype)
            count = self.layer.num_layers * self.layer.num_directions
            states = [self.layer.initial_state(index, batch_size, like) for index in range(count)]
            return tuple(torch.stack(column).to(dtype) for column in zip(*states, strict=True))
        assert isinstance(self.layer, nn.RNNBase)
        parts = 2 if isinstance(self.layer, nn.LSTM) else 1
        shape = (self.layer.num_layers, batch_size, self.layer.hidden_size)
        return tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(parts))

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: State | None = None) -> tuple[Tensor, State]:
        """Score every symbol as the next one, at every step.

        Args:
            x: symbols, ``(B, T)`` int64.
            lengths: must be None; every model is called with the same arguments.
            state: the state that the previous call returned; None is ``initial_state``.

        Returns:
            Logits ``(B, T, V)``, in float32 at least, and the state after the last step, in the dtype of ``state``.
        """
        if lengths is not None:
            raise ValueError("CharModel: lengths is given, but every step is scored; mask the padding in the loss.")
        weight = self.readout.weight
        if state is None:
            state = self.initial_state(x.shape[0], x.device, weight.dtype)
        symbols = x.t()  # (T, B)
        if self.embedding is None:
            inputs = F.one_hot(symbols, self.num_symbols).to(weight.dtype)
        else:
            inputs = self.embedding(symbols)
        hx: Any = state if len(state) > 1 else state[0]
        output, hx = self._scan(self._drop(inputs, self.input_dropout), hx)
        last = (hx,) if isinstance(hx, Tensor) else hx
        output = self._drop(output, self.output_dropout)  # (T, B, H)
        with torch.autocast(x.device.type, enabled=False):  # 16-bit logits would blur the loss
            logits = F.linear(output.to(weight.dtype), weight, self.readout.bias)
            if self.calibrated and not self.training:
                logits = logits / self.temperature
        return logits.transpose(0, 1), tuple(part.to(given.dtype) for part, given in zip(last, state, strict=True))

    def _scan(self, inputs: Tensor, hx: Any) -> tuple[Tensor, Any]:
        if not (self.training and self.weight_drop):
            return self.layer(inputs, hx)
        # outside the kernels, once per segment: they see ordinary weights
        weights = {name: F.dropout(self.layer.get_parameter(name), self.weight_drop) for name in self.dropped}
        return functional_call(self.layer, weights, (inputs, hx))

    def _drop(self, x: Tensor, chance: float) -> Tensor:
        if not (self.training and chance):
            return x
        if not self.locked_dropout:
            return F.dropout(x, chance)
        return x * F.dropout(x.new_ones(x.shape[1:]), chance)


@torch.no_grad()
def sample(
    model: CharModel, prompt: Sequence[int], length: int, *, temperature: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Yield ``length`` symbols that follow ``prompt``; the state is carried, so each costs one step.

    Args:
        model: in eval mode, on any device.
        prompt: ids of at least one symbol.
        length: number of symbols to draw.
        temperature: divides the logits; 0 takes the likeliest symbol each time.
        seed: random seed; symbols are drawn on the CPU, the same for every device up to rounding.
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
