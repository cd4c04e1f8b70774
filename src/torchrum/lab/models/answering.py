"""Models that answer: at every step or at the end, from one-hot symbols or stories, and a memory network."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.layers.recurrent import Recurrent, reverse
from torchrum.layers.window import InputWindow
from torchrum.ops._checks import (
    ArgumentTypeError,
    check_flags,
    check_not_negative,
    check_positive_int,
    check_probability,
)


def init_readout(readout: nn.Linear, fans: int) -> None:
    """Initialise a read-out as the original implementation does: bias 0.01, and Glorot's bound with its ``fans``.

    There, fan-in plus fan-out is the sum of the sizes of input and output, or of state and embedding. The read-out's
    own fans would make the first logits smaller than those of the published curves.
    """
    bound = math.sqrt(6 / fans)
    nn.init.uniform_(readout.weight, -bound, bound)
    nn.init.constant_(readout.bias, 0.01)


def width(layer: nn.Module) -> int:
    """Return the number of output features of a recurrent layer, in one direction."""
    size = getattr(layer, "hidden_size", None)
    if not isinstance(layer, nn.Module) or not isinstance(size, int):
        raise ArgumentTypeError(
            f"layer is of type {type(layer).__name__}; it must be a recurrent layer with a hidden_size, such as RUM."
        )
    return size


class OneHotModel(nn.Module):
    """One-hot input, a recurrent layer, and a linear read-out at every step or at the last one.

    Args:
        layer: a recurrent layer of one direction with ``batch_first=True`` and ``input_size=window * num_inputs``.
        num_inputs: symbols that may occur in the input, I.
        num_outputs: classes to choose from, V.
        answers: ``"steps"`` reads out every step, ``"last"`` the last one.
        window: symbols that the layer reads per step: the current one and those before it.
    """

    def __init__(
        self,
        layer: nn.Module,
        num_inputs: int,
        num_outputs: int,
        answers: Literal["steps", "last"] = "last",
        window: int = 1,
    ) -> None:
        super().__init__()
        self.num_inputs, self.answers = num_inputs, answers
        self.window = InputWindow(num_inputs, window, batch_first=True) if window > 1 else None
        self.layer = layer
        self.readout = nn.Linear(width(layer), num_outputs)
        init_readout(self.readout, num_inputs + num_outputs)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score every class.

        Args:
            x: symbols, ``(B, T)`` int64.
            lengths: real steps of each sequence, ``(B,)`` int64 on x's device, where shorter ones are padded at
                the end; None takes all T steps. It must be None if every step is read out.

        Returns:
            Logits, ``(B, T, V)`` for every step or ``(B, V)`` for the last one.
        """
        symbols = F.one_hot(x, self.num_inputs).to(self.readout.weight.dtype)
        output, _ = self.layer(symbols if self.window is None else self.window(symbols)[0])  # (B, T, H)
        if self.answers == "steps" and lengths is not None:
            raise ValueError("OneHotModel: lengths is given, but every step is answered; mask the padding in the loss.")
        if lengths is not None:
            # a step never sees what follows it, so the state at the last real step is right without packing,
            # and packing would copy the lengths to the host
            output = output[torch.arange(len(x), device=x.device), lengths - 1]
        elif self.answers == "last":
            output = output[:, -1]
        return self.readout(output)


def position_encoding(words: int, size: int, form: Literal["code", "paper"] = "code") -> Tensor:
    """Return weights ``(J, E)`` that make a sum of embeddings depend on the word order (Sukhbaatar et al., 2015).

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

    Each direction is read out after its last step: the forward state at the end, the backward state at the start. A
    step is a word, or a sentence: the sum of the embeddings of its words, each weighted by its place.

    Args:
        layer: reads ``(T, B, E)``; a layer with ``batch_first=False``, or ``BothWays``.
        num_inputs: symbols that may occur in the input; 0 is the blank.
        num_outputs: answers to choose from, V.
        embedding_size: width of the embedding, E.
        sentence_size: words of a sentence, J, where a step is a sentence.
        input_dropout, output_dropout: dropout of the embedded input and of the input of the read-out, from 0 to 1, in
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
        """Embed words ``(B, T)`` or sentences ``(B, T, J)``; returns ``(T, B, E)``."""
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
        """Read ``vectors`` ``(T, B, E)`` and return the last state, ``(B, H)`` or ``(B, 2H)``."""
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


class MemN2N(nn.Module):
    """An end-to-end memory network (Sukhbaatar et al., 2015): attention over the sentences of a story, in hops.

    It reads the last M sentences, starting from the question:

    m_i = sum_j l_j A[x_ij] + T_A[age_i];  c_i likewise with C;  u = sum_j l_j B[q_j]
    p = softmax(u . m);  u <- u + sum_i p_i c_i, then relu if asked;  answer = W u

    The weights are adjacent: A of a hop is C of the hop before, B is the first A, and W the last C. Empty places of the
    memory stay in the softmax, with score 0. For the first ``linear_steps`` training steps the softmax of the hops is
    left out (linear start); in training, ages have random gaps of up to a tenth.

    Args:
        num_inputs: symbols, V; 0 is the blank, whose embedding is zero. Every symbol may be the answer.
        hidden_size: width of all embeddings, d.
        sentence_size: words of a sentence, J.
        memory_size: sentences that are kept, M.
        hops: number of times that the memory is read.
        position: form of the position encoding; None is a bag of words.
        linear_steps: training steps without the softmax of the hops.
        noise: random gaps between ages, as a share of the sentences.
        relu: apply ReLU after each hop.
    """

    updates: Tensor
    place_weight: Tensor

    def __init__(
        self,
        num_inputs: int,
        hidden_size: int,
        sentence_size: int,
        memory_size: int,
        hops: int = 3,
        position: Literal["code", "paper"] | None = "code",
        linear_steps: int = 0,
        noise: float = 0.1,
        relu: bool = False,
    ) -> None:
        super().__init__()
        check_positive_int("MemN2N", num_inputs=num_inputs, hidden_size=hidden_size, sentence_size=sentence_size)
        check_positive_int("MemN2N", memory_size=memory_size, hops=hops)
        check_not_negative("MemN2N", linear_steps=linear_steps)
        check_probability("MemN2N", noise=noise)
        check_flags("MemN2N", relu=relu)
        if position not in ("code", "paper", None):
            raise ValueError(f"MemN2N: position={position!r}; it must be 'code', 'paper' or None.")
        self.hidden_size, self.memory_size, self.hops = hidden_size, memory_size, hops
        self.linear_steps, self.noise, self.relu = linear_steps, noise, relu
        self.words, self.ages = (  # A, C1, C2, ...
            nn.ModuleList(nn.Embedding(count, hidden_size, padding_idx=0) for _ in range(hops + 1))
            for count in (num_inputs, memory_size + 1)
        )
        weights = torch.ones(sentence_size, hidden_size)
        if position is not None:
            weights = position_encoding(sentence_size, hidden_size, position)
        self.register_buffer("place_weight", weights, persistent=False)  # (J, d)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.1)
        with torch.no_grad():
            for table in (*self.words, *self.ages):
                table.weight[0] = 0

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score every answer.

        Args:
            x: the sentences of a story and, last, the question, ``(B, S, J)`` int64.
            lengths: sentences of each row, the question among them, ``(B,)``; None takes all S.

        Returns:
            Logits, ``(B, V)``.
        """
        B, S, _ = x.shape
        if lengths is None:
            lengths = torch.full((B,), S, device=x.device)
        count = (lengths - 1).unsqueeze(1)  # (B, 1) statements
        slot = torch.arange(self.memory_size, device=x.device)  # the newest statement is in slot 0
        source = (count - 1 - slot).clamp(min=0)  # (B, M)
        real = slot < count
        memory = x.gather(1, source.unsqueeze(-1).expand(-1, -1, x.shape[2])) * real.unsqueeze(-1)
        question = x.gather(1, count.unsqueeze(-1).expand(-1, 1, x.shape[2])).squeeze(1)
        ages = self._noisy_ages(count) if self.training and self.noise else slot + 1
        ages = torch.where(real, ages.clamp(max=self.memory_size), 0)  # (B, M)

        u = self._bag(0, question)
        for hop in range(self.hops):
            keys, values = (self._bag(table, memory) + self.ages[table](ages) for table in (hop, hop + 1))  # (B, M, d)
            scores = (keys * u.unsqueeze(1)).sum(-1)
            p = scores.softmax(1)
            if self.linear_steps:
                p = torch.where(self.updates < self.linear_steps, scores, p)
            u = u + (p.unsqueeze(-1) * values).sum(1)
            u = u.relu() if self.relu else u
        if self.training:
            self.updates += 1
        answers = self.words[self.hops]
        assert isinstance(answers, nn.Embedding)
        return F.linear(u, answers.weight)

    def _bag(self, table: int, sentences: Tensor) -> Tensor:
        """Sum the weighted embeddings of the words of ``(..., J)``; returns ``(..., d)``."""
        return (self.words[table](sentences) * self.place_weight).sum(-2)

    def _noisy_ages(self, count: Tensor) -> Tensor:
        """Draw ages ``(B, M)`` in order, with gaps: ``count`` of the numbers up to ``count`` and a random excess."""
        B, most = len(count), self.memory_size + math.ceil(self.memory_size * self.noise)
        count = count.clamp(max=self.memory_size)
        excess = torch.ceil(count * self.noise)
        total = count + (torch.rand(B, 1, device=count.device) * (excess + 1)).floor().long()  # (B, 1)
        number = torch.arange(1, most + 1, device=count.device)
        keys = torch.rand(B, most, device=count.device).masked_fill(number > total, 2.0)
        rank = keys.argsort(1).argsort(1)
        taken = torch.where(rank < count, number, most + 1)  # (B, most), with the others pushed to the end
        return taken.sort(1).values[:, : self.memory_size]
