"""A reader of stories: words or sentences, an embedding, a recurrent layer, one answer."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.lab.models.one_hot import init_readout, width
from torchrum.layers.recurrent import Recurrent, reverse
from torchrum.ops._checks import check_probability


def position_encoding(words: int, size: int, form: Literal["code", "paper"] = "code") -> Tensor:
    """Weights ``(J, E)`` that make a sum of embeddings depend on the word order (Sukhbaatar et al., 2015).

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


class BothWays(nn.Module):
    """Two directions for layers without ``lengths``: torch's own would read the padding first, or pack on the host.

    Args:
        layers: for each level the layer that reads forwards and the one that reads backwards, each of one level and one
            direction, with ``batch_first=False``.
        dropout: dropout between levels, from 0 to 1.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Module]], dropout: float = 0.0) -> None:
        super().__init__()
        check_probability("BothWays", dropout=dropout)
        self.forwards, self.backwards = (nn.ModuleList(column) for column in zip(*layers, strict=True))
        self.hidden_size, self.dropout = width(layers[0][0]), dropout

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Read ``x`` ``(T, B, I)`` both ways, each row within its length; returns ``(T, B, 2H)``."""
        for number, (forwards, backwards) in enumerate(zip(self.forwards, self.backwards, strict=True)):
            if number > 0:
                x = F.dropout(x, self.dropout, self.training)
            ahead, back = forwards(x)[0], backwards(reverse(x, lengths))[0]
            x = torch.cat((ahead, reverse(back, lengths)), -1)
        return x


class StoryReader(nn.Module):
    """An embedding, a recurrent layer in one or two directions, and a linear read-out of the last step.

    Two directions are read where each has read everything: the forward state at the last step, the backward one at the
    first. A step is a word, or a sentence: the sum of the embeddings of its words, each weighted by its place.

    Args:
        layer: reads ``(T, B, E)``; a layer with ``batch_first=False``, or ``BothWays``.
        num_inputs: symbols that may stand in the input; 0 is the blank.
        num_outputs: answers to choose from, V.
        embedding_size: width of the embedding, E.
        sentence_size: words of a sentence, J, where a step is a sentence.
        input_dropout, output_dropout: dropout of the embedded input and of what the read-out sees, from 0 to 1, in
            training.
        original_embedding: start the embedding with mean ``-s`` and deviation ``s = sqrt(6 / num_inputs)``, as the
            original implementation of RUM does, instead of 0 and 1.
        embedding_std: deviation with which the embedding starts around 0; None is 1.
    """

    def __init__(
        self,
        layer: nn.Module,
        num_inputs: int,
        num_outputs: int,
        embedding_size: int,
        sentence_size: int | None = None,
        input_dropout: float = 0.0,
        output_dropout: float = 0.0,
        original_embedding: bool = False,
        embedding_std: float | None = None,
    ) -> None:
        super().__init__()
        check_probability("StoryReader", input_dropout=input_dropout, output_dropout=output_dropout)
        self.layer, self.input_dropout, self.output_dropout = layer, input_dropout, output_dropout
        self.both_ways = isinstance(layer, BothWays) or bool(layer.bidirectional)
        self.embedding = nn.Embedding(num_inputs, embedding_size)
        self.place_weight: nn.Parameter | None = None
        if sentence_size is not None:
            self.place_weight = nn.Parameter(position_encoding(sentence_size, embedding_size))  # (J, E)
        self.readout = nn.Linear(width(layer) * (2 if self.both_ways else 1), num_outputs)
        init_readout(self.readout, width(layer) + embedding_size)
        if original_embedding:
            scale = math.sqrt(6 / num_inputs)
            nn.init.normal_(self.embedding.weight, -scale, scale)
        elif embedding_std is not None:
            nn.init.normal_(self.embedding.weight, 0, embedding_std)

    def embed(self, x: Tensor) -> Tensor:
        """Vectors ``(T, B, E)`` of words ``(B, T)`` or of sentences ``(B, T, J)``."""
        vectors = self.embedding(x)
        if self.place_weight is not None:
            real = (x != 0).unsqueeze(-1).to(vectors.dtype)
            vectors = (vectors * real * self.place_weight).sum(2)
        return F.dropout(vectors.transpose(0, 1), self.input_dropout, self.training)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score every answer.

        Args:
            x: words ``(B, T)``, or sentences ``(B, T, J)``, int64.
            lengths: steps of each row, ``(B,)`` int64 on x's device; None takes all T.

        Returns:
            Logits, ``(B, V)``.
        """
        state = self.state(self.embed(x), lengths)
        return self.readout(F.dropout(state, self.output_dropout, self.training))

    def state(self, vectors: Tensor, lengths: Tensor | None) -> Tensor:
        """What the layer knows of ``vectors`` ``(T, B, E)`` after reading them: ``(B, H)`` or ``(B, 2H)``."""
        if isinstance(self.layer, BothWays):
            output = self.layer(vectors, lengths)
        elif self.both_ways:
            assert isinstance(self.layer, Recurrent)
            output = self.layer(vectors, lengths=lengths)[0]
        else:  # a step never sees what follows it: the state at the last real step is right without lengths
            output = self.layer(vectors)[0]
        H = width(self.layer)
        if lengths is None:
            last = output[-1, :, :H]
        else:
            last = output[..., :H].gather(0, (lengths - 1).view(1, -1, 1).expand(1, -1, H)).squeeze(0)
        return torch.cat((last, output[0, :, H:]), -1) if self.both_ways else last
