"""The progress of a run: a live bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from torchrum.lab.training.config import TrainConfig

PLAIN_SECONDS = 5.0  # plain lines of training loss come at most this often; those of validation always


def _number(value: float) -> str:
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"


BAR = 10
"""Columns that the bar itself has at least; where they are not there, the line leaves out what is known."""


def is_early(steps: int, log_every: int) -> bool:
    """Whether the loss is shown after so many steps, before the first log: after 1, 2, 4, ... of them."""
    return steps < log_every and steps & (steps - 1) == 0


def visible(text: str) -> str:
    """Write out what a terminal would obey, such as an escape sequence."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text)


class Lenient:
    """A text stream that falls silent when it cannot be written any more: a pipe that closed, a terminal that is gone.

    Args:
        stream: what to write to; standard error if None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._broken = stream or sys.stderr, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or do nothing."""
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[..., object], *arguments: str) -> None:
        try:
            if not self._broken:
                action(*arguments)
        except (OSError, ValueError):  # ValueError: it is closed
            self._broken = True
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # what is buffered would fail again at the exit


def say(text: str) -> None:
    """Print a line to standard error, as long as it can be written."""
    print(text, file=cast(TextIO, Lenient()))


class Display:
    """Shows step, speed, loss and metric against the memoryless baseline, and the time left.

    Args:
        config: the run.
        step: the step at which it starts.
        quiet: show nothing at all; for processes other than the first, and for tests.
        console: where to show it; standard error by default. rich leaves out colours if ``NO_COLOR`` is set.
    """

    def __init__(self, config: TrainConfig, step: int = 0, quiet: bool = False, console: Console | None = None) -> None:
        self._task, self._steps, self._quiet = config.task, config.steps, quiet
        self._name = name = config.label
        self._baseline, metric = _number(config.task.baseline()), config.task.metric
        self._console = console or Console(file=cast(TextIO, Lenient()), soft_wrap=True)
        self._step, self._time, self._speed = step, time.monotonic(), 0.0
        self._line_time = 0.0
        self._loss = self._score = ""
        count = f"{self._steps}/{self._steps}"
        whole = [name, " " * BAR, count, "1,000.0 steps/s", self._told(0.1, False), f"{metric} 0.1234", "left 0:00:00"]
        self._narrow = len(" ".join(whole)) > self._console.width
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            text = "{task.completed:.0f}/{task.total:.0f}", "{task.fields[text]}"
            columns: list[ProgressColumn] = [
                BarColumn(bar_width=None),
                *map(TextColumn, text),
                TimeRemainingColumn(compact=True),
            ]
            if not self._narrow:
                columns.insert(0, TextColumn("{task.description}", style="bold", markup=False))
                columns.insert(3, TextColumn("{task.fields[speed]}", style="progress.data.speed"))
                columns.insert(5, TextColumn("left"))
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4, expand=True)
            self._row = self._bar.add_task(name, total=self._steps, completed=step, speed="", text="")
            self._bar.start()

    def _told(self, loss: float, short: bool) -> str:
        """A loss beside the baseline, which has its name in full unless it must be short."""
        name, unit = self._task.baseline_name, self._task.loss_unit
        if short:
            return f"loss {_number(loss)} {unit.partition(' ')[0]} (baseline {self._baseline})"
        return f"loss {_number(loss)} {unit} ({name} baseline {self._baseline})"

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._quiet:
            self._console.print(visible(text), markup=False, highlight=False)

    def tick(self, step: int) -> None:
        """Move the bar; cheap enough for every step."""
        if self._bar is not None:
            self._bar.update(self._row, completed=step)

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Show the mean training loss of the last steps."""
        now = time.monotonic()
        self._speed = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        if self._bar is not None:
            self._loss = self._told(values["loss"], self._narrow)
            speed, text = f"{self._speed:,.1f} steps/s", f"{self._loss} {self._score}".strip()
            self._bar.update(self._row, completed=step, speed=speed, text=text)
        elif now - self._line_time >= PLAIN_SECONDS or step == self._steps:
            self._line_time = now
            left = timedelta(seconds=int((self._steps - step) / self._speed)) if self._speed else "?"
            text = self._told(values["loss"], False)
            self.say(f"{self._name} step {step}/{self._steps}  {text}  {self._speed:,.1f} steps/s  left {left}")

    def validation(self, step: int, values: Mapping[str, float], best: bool) -> None:
        """Show the scores on the validation set."""
        self._time, self._step = time.monotonic(), step  # scoring does not count as training time
        metric = self._task.metric
        score = f"{values[metric]:.1%}" if metric.endswith("accuracy") else _number(values[metric])
        self._score = f"{metric} {score}"
        if self._bar is not None:
            self._bar.update(self._row, completed=step, text=f"{self._loss} {self._score}".strip())
            return
        better = "  best so far" if best else ""
        loss = self._told(values["loss"], False)
        self.say(f"{self._name} step {step}/{self._steps}  validation {loss}  {self._score}{better}")

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()  # and leave it as it stands
