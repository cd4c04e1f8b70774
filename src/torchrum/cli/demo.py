"""``torchrum demo``: RUM and an LSTM side by side on associative recall."""

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrum.cli.parsing import Parser

if TYPE_CHECKING:
    from rich.console import Console

    from torchrum.lab.training import TrainConfig
    from torchrum.paper.report.page import Block

NEXT = """Where to go next
  torchrum list                      every recipe, with the paper's number beside ours
  torchrum train recall-rum-lam1     the paper's own size, 15 pairs (a GPU helps)
  torchrum train copying-rum-lam1    remember ten symbols for 200 steps
  torchrum.RUM(10, 20, lam=1)        the layer itself, called as nn.LSTM is"""


def train_one(config: "TrainConfig", folder: Path) -> None:
    """Train one of the two; each has a process and a core of its own."""
    import torch

    from torchrum.lab.training import Trainer

    torch.set_num_threads(1)
    raise SystemExit(Trainer(config, quiet=True).fit(folder).exit_code)  # the demo's own picture has both curves


def main(arguments: list[str]) -> int:
    """Train both, then compare them."""
    parser = Parser("demo", "Train RUM and an LSTM side by side on associative recall, and compare them.")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="parent folder of the runs (default: runs)")
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of the initial weights and the data (default: 1)"
    )
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts a thread when imported, and start_method looks

    from dataclasses import replace

    from torchrum.lab.recipes.recall import DEMO_MODELS, demo
    from torchrum.lab.training.run_folder import lock_free_folder
    from torchrum.paper.ledger.runs import model_label

    built = [demo(name, options.seed) for name in DEMO_MODELS]
    configs = {model_label(config.model): config for config in built}
    if options.steps is not None:
        configs = {label: replace(config, steps=options.steps) for label, config in configs.items()}
    with lock_free_folder(options.out / "demo") as lock:
        return train_both(configs, lock.folder)


def train_both(configs: "dict[str, TrainConfig]", folder: Path) -> int:
    """Train both at the same time, and compare them."""
    from rich.console import Console

    from torchrum.lab.training import RunError
    from torchrum.lab.training.distributed import preload

    runs = {label: folder / config.name for label, config in configs.items()}
    console = Console(soft_wrap=True)
    introduce(console, next(iter(configs.values())).task)

    preload()
    context: Any = multiprocessing.get_context(start_method())
    processes: dict[str, BaseProcess] = {
        label: context.Process(target=train_one, args=(config, runs[label])) for label, config in configs.items()
    }
    for process in processes.values():
        process.start()
    painter = ThreadPoolExecutor(1)
    try:
        drawn = watch(console, configs, runs, processes, painter)
    finally:
        for process in processes.values():
            process.terminate()  # after Ctrl-C; at the end there is nothing left to stop
            process.join()
        painter.shutdown(wait=False)
    failed = [label for label, process in processes.items() if process.exitcode]
    if failed:
        raise RunError(f"{' and '.join(failed)} did not finish; see the message above.")
    compare(console, configs, runs, drawn, folder)
    return 0


def start_method() -> str:
    """How to start the two processes: forked, where that is safe, they need not import torch again.

    It is where this process has no other thread, which could hold a lock that nobody in the child would ever release.
    """
    if sys.platform != "linux":
        return "spawn"
    try:
        return "fork" if len(os.listdir("/proc/self/task")) == 1 else "spawn"
    except OSError:
        return "spawn"


def introduce(console: "Console", task: Any) -> None:
    """Say what is learnt, with an example."""
    import torch

    x, y, *_ = task.batch(1, torch.Generator().manual_seed(11))
    letters = "?" + "abcdefghijklmnopqrstuvwxyz"[: task.pairs] + "0123456789"
    text = "".join(letters[symbol] for symbol in x[0].tolist())
    console.print(f"Associative recall: {text} -> {y.item()}", markup=False, highlight=False)
    console.print(
        f"{task.pairs} keys, each with a value; after ?? comes a key, and the answer is its value.\n"
        f"Counting the values without pairing them is right {task.baseline_accuracy():.1%} of the time.\n",
        markup=False,
        highlight=False,
    )


def watch(
    console: "Console",
    configs: "dict[str, TrainConfig]",
    runs: dict[str, Path],
    processes: Mapping[str, BaseProcess],
    painter: ThreadPoolExecutor,
) -> "dict[Path, Future[list[Block]]]":
    """Show both runs as they go, from the files that they write; lines every ten seconds where there is no terminal.

    Returns:
        The part of the page of a run that has ended first; ``painter`` draws it while the other one trains.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("[bold]{task.description:<8}"),
        BarColumn(bar_width=32),
        TextColumn("step {task.completed:>5,.0f}  {task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as bars:
        rows = {label: bars.add_task(label, total=config.steps, text="starting") for label, config in configs.items()}
        said, drawn = time.monotonic(), {}
        while True:
            running = any(process.is_alive() for process in processes.values())
            for label, process in processes.items():
                if running and process.exitcode == 0 and runs[label] not in drawn:
                    drawn[runs[label]] = painter.submit(draw_run, runs[label])
            states = {label: state(run) for label, run in runs.items()}
            for label, (step, text) in states.items():
                bars.update(rows[label], completed=step, text=text)
                if not processes[label].is_alive():
                    bars.stop_task(rows[label])
            if not console.is_terminal and (time.monotonic() - said > 10 or not running):
                said = time.monotonic()
                line = "   ".join(f"{label} step {step:,}  {text}" for label, (step, text) in states.items())
                console.print(line, markup=False, highlight=False)
            if not running:
                return drawn
            wait([process.sentinel for process in processes.values() if process.is_alive()], timeout=0.25)


def state(run: Path) -> tuple[int, str]:
    """Steps done and the last scores of a run, from its folder."""
    from torchrum.lab.training.run_folder import read_metrics

    training, validation = read_metrics(run, "train"), read_metrics(run, "validation")
    if not training:
        return 0, "starting"
    accuracy = f"accuracy {validation[-1]['accuracy']:6.1%}" if validation else ""
    return training[-1]["step"], f"loss {training[-1]['loss']:.4f}  {accuracy}".strip()


def draw_run(run: Path) -> "list[Block]":
    """The part of the page that is about one run."""
    from torchrum.paper.report.pages import run_blocks

    return run_blocks(run)


def compare(
    console: "Console",
    configs: "dict[str, TrainConfig]",
    runs: dict[str, Path],
    drawn: "dict[Path, Future[list[Block]]]",
    folder: Path,
) -> None:
    """Print the table, draw the picture, and say where to go next."""
    from rich.table import Table

    from torchrum.lab.tasks import Recall
    from torchrum.lab.training.run_folder import read_metrics
    from torchrum.paper.ledger.record import count_parameters
    from torchrum.paper.plots.curves import draw_comparison

    task = next(iter(configs.values())).task
    assert isinstance(task, Recall)
    table = Table("model", "parameters", "steps", "accuracy", "loss", "seconds", box=None, header_style="bold")
    for label, run in runs.items():
        last = read_metrics(run, "validation")[-1]
        table.add_row(
            label,
            f"{count_parameters(configs[label]):,}",
            f"{last['step']:,}",
            f"{last['accuracy']:.1%}",
            f"{last['loss']:.4f}",
            f"{last['seconds']:.0f}",
        )
    table.add_row("bag of values", "", "", f"{task.baseline_accuracy():.1%}", f"{task.baseline():.4f}", "")
    parts = {run: part.result() for run, part in drawn.items()}  # matplotlib draws one figure at a time
    picture = draw_comparison(runs, task, folder / "demo.png")
    console.print()
    console.print(table)
    page = write_report(list(runs.values()), parts, folder / "report.html")
    console.print(f"\nThe picture: {picture}\nThe page, with what RUM learnt: {page}\n", markup=False, highlight=False)
    console.print(NEXT, markup=False, highlight=False)


def write_report(runs: list[Path], drawn: "dict[Path, list[Block]]", out: Path) -> Path:
    """Write the page of both runs."""
    from torchrum.paper.report.page import write_page
    from torchrum.paper.report.pages import runs_page

    lead = (
        "RUM and an LSTM on associative recall: four keys, each with a value; then a key, and the answer is its value."
    )
    return write_page(runs_page(runs, "torchrum demo", lead, drawn), out)
