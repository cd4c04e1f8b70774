import io
import re
import time
from dataclasses import dataclass

import pytest
from rich.console import Console

from torchrum.lab.tasks import Task
from torchrum.lab.training import TrainConfig
from torchrum.lab.training.progress import Display, is_early


@dataclass(frozen=True, kw_only=True)
class Bare(Task):
    """Nothing but what is shown of a task."""

    metric: str = "accuracy"
    loss_unit: str = "nats"
    baseline_name: str = "memoryless"
    loss: float = 0.5
    input_size = num_classes = batch = validation = None

    def baseline(self):
        return self.loss


def run(name="copying", steps=100, **task):
    return TrainConfig(name=name, steps=steps, task=Bare(**task))


def show(terminal, **options):
    """What a short run leaves on a terminal or in a file."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=160, soft_wrap=True)
    with Display(run(), console=console, **options) as display:
        display.say("resuming runs/[x] at step 0")
        display.tick(5)
        display.train(10, {"loss": 0.25})
        display.validation(10, {"loss": 0.2, "accuracy": 0.875}, best=True)
        display.train(20, {"loss": 0.125})
    return file.getvalue()


def test_a_terminal_shows_a_bar_with_loss_metric_baseline_speed_and_time_left():
    text = show(True)
    assert "\x1b[" in text
    for part in (
        "copying",
        "20/100",
        "loss 0.1250 nats (memoryless baseline 0.5000)",
        "accuracy 87.5%",
        "steps/s",
        "left",
    ):
        assert part in text
    assert "runs/[x]" in text


def test_the_bar_keeps_to_one_line_and_ends_with_the_last_score():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, soft_wrap=True)
    config = run("copying-rum-lam1-eta-t1000", 100_000, loss=0.0204, baseline_name="bag-of-values", metric="ratio")
    with Display(config, console=console) as display:
        display.train(100_000, {"loss": 1e-5})
        display.validation(100_000, {"loss": 1e-5, "ratio": 1.0012}, best=False)
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).rstrip())[-1]
    assert "loss 1.00e-05 nats (baseline 0.0204) ratio 1.0012" in last
    assert "100000/100000" in last
    assert "…" not in last
    assert len(last) <= 80


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_bar_uses_the_width(width):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, soft_wrap=True)
    config = run("copying-rum-t200", 10_000, loss=1.2, baseline_name="bigram", loss_unit="nats per character")
    with Display(config, console=console) as display:
        display.train(100, {"loss": 0.25})
        display.validation(100, {"loss": 0.2, "accuracy": 0.875}, best=True)
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).rstrip())[-1]
    assert len(last) == width
    assert last.count("━") >= 10
    full = width == 200
    told = "nats per character (bigram baseline 1.2000)" if full else "nats (baseline 1.2000)"
    assert f"loss 0.2500 {told} accuracy 87.5%" in last
    assert ("steps/s" in last) == full


def test_the_loss_is_shown_from_the_first_steps_on():
    assert [step for step in range(1, 200) if is_early(step, 50)] == [1, 2, 4, 8, 16, 32]
    assert not any(is_early(step, 1) for step in range(1, 5))  # each step is logged anyhow


def test_no_color_is_respected(monkeypatch):
    def colours(text):
        return [code for code in text.split("\x1b[")[1:] if code.startswith(("3", "4", "1;3", "1;4", "38", "9"))]

    assert colours(show(True))
    monkeypatch.setenv("NO_COLOR", "1")
    text = show(True)
    assert "20/100" in text
    assert not colours(text)


def test_a_file_gets_plain_lines():
    lines = show(False).splitlines()
    assert lines[0] == "resuming runs/[x] at step 0"
    assert lines[1].startswith("copying step 10/100  loss 0.2500 nats (memoryless baseline 0.5000)")
    assert "steps/s  left 0:00:0" in lines[1]
    assert lines[2] == (
        "copying step 10/100  validation loss 0.2000 nats (memoryless baseline 0.5000)  accuracy 87.5%  best so far"
    )
    assert "\x1b" not in "".join(lines)


def test_training_lines_are_rare_in_a_file(monkeypatch):
    monkeypatch.setattr("torchrum.lab.training.progress.PLAIN_SECONDS", 1000.0)
    file = io.StringIO()
    with Display(run(), console=Console(file=file, soft_wrap=True)) as display:
        display._line_time = time.monotonic()
        for step in range(1, 101):
            display.train(step, {"loss": 1e-5})
    assert len(file.getvalue().splitlines()) == 1
    assert "loss 1.00e-05" in file.getvalue()


def test_quiet_shows_nothing():
    assert show(True, quiet=True) == ""


def test_what_a_terminal_would_obey_is_written_out():
    """Text from a file, or drawn from a model that somebody else has trained."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    with Display(run("[red]run", 2), console=console) as display:
        display.say("one\n\ttwo \x1b]0;title\x07 \x9b31m é")
        display.tick(1)
    shown = console.file.getvalue()
    assert "\\x1b]0;title\\x07 \\x9b31m é" in shown
    assert "[red]run" in shown  # a name is no markup
