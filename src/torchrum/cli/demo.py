"""``torchrum demo``: RUM and an LSTM side by side on associative recall."""

import os
import shutil
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from torchrum.cli.parsing import Parser
from torchrum.lab.recipes.recall import DEMO_MODELS, demo
from torchrum.lab.tasks import Recall
from torchrum.lab.training.distributed import threads, train_side_by_side
from torchrum.lab.training.run_folder import lock_free_folder, read_config, read_environment, read_metrics
from torchrum.lab.training.trainer import Trainer
from torchrum.paper.ledger.runs import model_label

LEAD = "RUM and an LSTM on associative recall: four keys, each with a value; then a key, and the answer is its value."
NEXT = {
    "{torchrum} compare mydata.csv": "GRU, LSTM and RUM on your own data, and a verdict",
    "{torchrum} sample": "text from a small model that comes with the package",
    "{torchrum} list": "what else to train, how long it takes, on what",
    "torchrum.RUM(10, 20)": "in Python: the layer, in place of nn.GRU(10, 20)",
}
"""What to type next."""


def main(arguments: list[str]) -> int:
    """Train both, then compare them."""
    parser = Parser("demo", "Train RUM and an LSTM side by side on associative recall, and compare them.")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="parent folder of the runs (default: runs)")
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of the initial weights and the data (default: 1)"
    )
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    options = parser.parse_args(arguments)

    built = [demo(name, options.seed) for name in DEMO_MODELS]
    if options.steps is not None:
        built = [replace(config, steps=options.steps) for config in built]
    console = Console(soft_wrap=True, markup=False, highlight=False)
    introduce(console, built[0].task)
    with lock_free_folder(options.out / "demo") as lock:
        configs = {model_label(config.model): config for config in built}
        runs = {label: lock.folder / config.name for label, config in configs.items()}
        over = threading.Event()
        watcher = threading.Thread(target=watch, args=(console, runs, built[0].steps, over))
        watcher.start()
        calls = {label: partial(Trainer(configs[label], quiet=True).fit, run) for label, run in runs.items()}
        try:
            with threads(len(runs)):  # each process takes its share, one thread: the fastest for tiny models
                signalled = train_side_by_side(calls, len(calls), lambda label, outcome: None)
        finally:
            over.set()
            watcher.join()
        if signalled:
            raise KeyboardInterrupt
        compare(console, runs, lock.folder)
    return 0


def introduce(console: Console, task: Any) -> None:
    """Say what is learnt, with an example."""
    x, y, *_ = task.batch(1, torch.Generator().manual_seed(11))
    letters = "?" + "abcdefghijklmnopqrstuvwxyz"[: task.pairs] + "0123456789"
    text = "".join(letters[symbol] for symbol in x[0].tolist())
    console.print(
        f"Associative recall: {text} -> {y.item()}\n"
        f"{task.pairs} keys, each with a value; after ?? comes a key, and the answer is its value.\n"
        f"Counting the values without pairing them is right {task.baseline_accuracy():.1%} of the time.\n"
    )


def watch(console: Console, runs: dict[str, Path], steps: int, over: threading.Event) -> None:
    """Show both runs from the files that they write; without a terminal, print a line every ten seconds."""
    columns = (
        TextColumn("[bold]{task.description:<8}"),
        BarColumn(bar_width=32),
        TextColumn("step {task.completed:>5,.0f}  {task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as bars:
        rows = {label: bars.add_task(label, total=steps, text="starting") for label in runs}
        printed = time.monotonic()
        while True:
            ended = over.wait(0.25)  # read the files once more afterwards
            states = {label: state(run) for label, run in runs.items()}
            for label, (step, text) in states.items():
                bars.update(rows[label], completed=step, text=text)
            if not console.is_terminal and (time.monotonic() - printed > 10 or ended):
                printed = time.monotonic()
                console.print("   ".join(f"{label} step {step:,}  {text}" for label, (step, text) in states.items()))
            if ended:
                return


def state(run: Path) -> tuple[int, str]:
    """Steps done and the last scores of a run, from its folder."""
    training, validation = read_metrics(run, "train"), read_metrics(run, "validation")
    if not training:
        return 0, "starting"
    accuracy = f"accuracy {validation[-1]['accuracy']:6.1%}" if validation else ""
    return training[-1]["step"], f"loss {training[-1]['loss']:.4f}  {accuracy}".strip()


def compare(console: Console, runs: dict[str, Path], folder: Path) -> None:
    """Write the page and the picture, print the table, and say where to go next."""
    from torchrum.lab.page import write_page
    from torchrum.lab.plot_style import drawing, save
    from torchrum.paper.plots.run import comparison_figure
    from torchrum.paper.report import runs_page

    task = read_config(next(iter(runs.values()))).task
    assert isinstance(task, Recall)
    table = Table("model", "parameters", "steps", "accuracy", "loss", "seconds", box=None, header_style="bold")
    for label, run in runs.items():
        last = read_metrics(run, "validation")[-1]
        scores = f"{last['accuracy']:.1%}", f"{last['loss']:.4f}", f"{last['seconds']:.0f}"
        table.add_row(label, f"{read_environment(run).parameters:,}", f"{last['step']:,}", *scores)
    table.add_row("bag of values", "", "", f"{task.baseline_accuracy():.1%}", f"{task.baseline():.4f}", "")
    with drawing():
        picture = save(comparison_figure(runs, task), folder / "demo.png")
    page = write_page(runs_page(list(runs.values()), "torchrum demo", LEAD), folder / "report.html")
    console.print()
    console.print(table)
    console.print(f"\nThe picture: {picture}\nThe page, with what RUM learnt: {page}\n")
    console.print("Where to go next")
    commands = {line.format(torchrum=command_name()): meaning for line, meaning in NEXT.items()}
    for line, meaning in commands.items():
        console.print(f"  {line:<{max(map(len, commands))}}  {meaning}")


def command_name() -> str:
    """Return ``torchrum`` as the reader can type it: with its folder where that is not on the path."""
    here = Path(sys.executable).parent
    if shutil.which("torchrum") or not (here / "torchrum").exists():
        return "torchrum"
    return os.path.relpath(here / "torchrum")
