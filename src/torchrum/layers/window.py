"""A causal window over the inputs, for use before any recurrent layer."""

import torch
from torch import Tensor

from torchrum.layers.recurrent import Recurrent, State
from torchrum.ops._checks import check_positive_int


class InputWindow(Recurrent):
    """A window that joins each input with the previous ones: ``y[t] = [x[t], x[t-1], ..., x[t-width+1]]``.

    The input matrix of the next recurrent layer then acts as a short causal convolution. That layer and its ``hx`` do
    not change, except that its ``input_size`` is ``width * input_size``. A network that must bind an input to the
    previous one, such as a value to its key, does not have to learn to remember one step.

    It is called like a recurrent layer, ``output, x_n = window(input, hx=None)``, with ``lengths`` and ``reset`` as in
    :class:`torchrum.RUM`. Its state holds the last inputs, so that a sequence can be read in segments.

    Args:
        input_size: number of input features I.
        width: inputs per window, at least 1; with 1 the output is the input.
        batch_first: if True, the input is ``(B, T, I)`` instead of ``(T, B, I)``.

    Inputs: input, hx
        - **input**: ``(T, B, I)``, ``(B, T, I)`` with ``batch_first``, ``(T, I)`` unbatched, or a ``PackedSequence``.
        - **hx**: the ``width - 1`` inputs before the first one, oldest first, ``(1, B, width - 1, I)``, or
          ``(1, width - 1, I)`` unbatched; zeros if None.

    Outputs: output, x_n
        - **output**: in the form of ``input``, with ``width * I`` features, the newest input first.
        - **x_n**: the last ``width - 1`` inputs of each row, in the form of ``hx``.

    It has no parameters.

    Example:
        >>> import torch
        >>> from torchrum import RUM, InputWindow
        >>> window, rum = InputWindow(10), RUM(2 * 10, 50, lam=1)
        >>> x = torch.randn(5, 3, 10)
        >>> output, (h_n, R_n) = rum(window(x)[0])
        >>> first, x_n = window(x[:2])  # the same in segments
        >>> rest, x_n = window(x[2:], x_n)
        >>> torch.equal(torch.cat([first, rest]), window(x)[0])
        True
    """

    state_names = ("x",)

    def __init__(self, input_size: int, width: int = 2, batch_first: bool = False) -> None:
        check_positive_int("InputWindow", input_size=input_size, width=width)
        super().__init__(input_size, width * input_size, batch_first=batch_first)
        self.width = width

    def initial_state(self, index: int, batch_size: int, like: Tensor) -> State:
        return (like.new_zeros(batch_size, self.width - 1, self.input_size),)

    def scan(self, index: int, x: Tensor, state: State, lengths: Tensor | None) -> tuple[Tensor, State]:
        T, before = x.shape[0], self.width - 1
        padded = torch.cat([state[0].to(x.dtype).transpose(0, 1), x])  # (before + T, B, I)
        output = torch.cat([padded[before - back : before - back + T] for back in range(self.width)], -1)
        if lengths is None:
            last = padded[T:]
        else:
            steps = lengths + torch.arange(before, device=x.device).unsqueeze(1)  # (before, B)
            last = padded.gather(0, steps.unsqueeze(-1).expand(*steps.shape, self.input_size))
        return output, (last.transpose(0, 1),)

    def _any_weight(self, input: Tensor) -> Tensor:
        return input  # there are no weights, so every device and dtype is allowed

    def extra_repr(self) -> str:
        return f"{self.input_size}, width={self.width}" + (", batch_first=True" if self.batch_first else "")
