"""What a Fast-Slow step can vary."""

from dataclasses import dataclass

from torchrum.ops.lstm_scan import LstmOptions
from torchrum.ops.rum_scan import RumOptions

STREAMS_PER_CELL = 3  # of masks: h, c, dropout behind it; cells count F1, S, F2, F3, ...


@dataclass(frozen=True, kw_only=True)
class FastSlowOptions:
    """Hyper-parameters of one Fast-Slow scan."""

    fast: tuple[LstmOptions, ...]
    """Two or more."""
    slow: LstmOptions | RumOptions
    """A RUM with lam 0, or an LSTM."""
    dropout: float = 0.0
    """Chance that a number is zeroed: behind F1 on the way to S, behind S, and behind the last fast cell."""
    slow_dropout: float | None = None
    """The first of these apart; None is as the others."""
    training: bool = False
    """Whether dropout acts."""

    @property
    def cells(self) -> tuple[LstmOptions | RumOptions, ...]:
        """In the order of a step: F1, S, F2, F3, ..."""
        return self.fast[0], self.slow, *self.fast[1:]

    @property
    def drops(self) -> tuple[float, ...]:
        """Dropout behind each of them, now."""
        if not self.training:
            return (0.0,) * (len(self.fast) + 1)
        first = self.dropout if self.slow_dropout is None else self.slow_dropout
        return first, self.dropout, *[0.0] * (len(self.fast) - 2), self.dropout

    @property
    def draws(self) -> bool:
        """Whether a scan needs a seed."""
        return self.slow.draws or any(fast.draws for fast in self.fast) or any(self.drops)
