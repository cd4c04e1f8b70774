"""Everyday tasks with ``nn.GRU``, ``nn.LSTM`` and RUM, under the same code, budget and seeds.

Run after tests/paper/bench/test_swap_suite.py:

    PYTHONPATH=src python benchmarks/swap_suite.py --jobs 8 --json results/swap/suite.jsonl

Each job (a task, a model, a seed) has one process and one thread. Its result is added to the JSON lines as soon as it
is there, so a run can be cut off; a second run with the same file does what is missing.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from swap.models import MODELS
from swap.table import REFERENCE, add_result, fill, read_results, summary
from swap.tasks import TASKS
from swap.train import run_job
from torchrum.paper.bench.measure import conditions

Job = tuple[str, str, int, float]
"""Task, model, seed, and the share of the task's updates that are made."""


def run(job: Job) -> dict[str, Any]:
    """One job, in a process of its own."""
    torch.set_num_threads(1)
    task, model, seed, share = job
    budget = max(int(share * TASKS[task].updates), 1)
    done = run_job(replace(TASKS[task], updates=budget), MODELS[model].layer, seed)
    return {"task": task, "model": model, "seed": seed, "updates": budget, **done}


def planned(seeds: int, tasks: str, models: str, share: float) -> list[Job]:
    """The jobs in order of what they tell: all of the reference, every model on every task once, then further seeds."""
    wanted = [name for name in MODELS if any(fnmatch(name, pattern) for pattern in models.split(","))]
    chosen = [name for name in TASKS if any(fnmatch(name, pattern) for pattern in tasks.split(","))]
    if not wanted or not chosen:
        raise SystemExit(f"swap_suite: nothing matches --models {models} --tasks {tasks}; see --list.")
    jobs = [(task, model, seed, share) for seed in range(seeds) for model in wanted for task in chosen]
    return sorted(jobs, key=lambda job: job[1] != REFERENCE)  # stable: its spread decides who is level with it


def results(jobs: list[Job], processes: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Results as they come; after ``seconds`` what is unfinished is given up."""
    end = time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # leaving it ends the processes
        coming = pool.imap_unordered(run, jobs)
        for _ in jobs:
            try:
                yield coming.next(timeout=max(end - time.monotonic(), 0.1))
            except multiprocessing.TimeoutError:
                print("swap_suite: the time is over; what is unfinished is left out.", file=sys.stderr)
                return
            except Exception as error:  # one broken job is no reason to lose the others
                print(f"swap_suite: a job failed: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results here, one line per job")
    parser.add_argument("--minutes", type=float, default=1440, help="stop after so many (default: a day)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each task and model (default: 3)")
    parser.add_argument("--tasks", default="*", metavar="PATTERNS", help="only these, as rows,char* (default: all)")
    parser.add_argument("--models", default="*", metavar="PATTERNS", help="only these, as gru,rum-* (default: all)")
    parser.add_argument("--share", type=float, default=1.0, help="of the updates, for a quick look (default: 1)")
    parser.add_argument("--list", action="store_true", help="print the tasks and models, and do nothing")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="run nothing: put the tables of --json here")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:12} {task.about}" for name, task in TASKS.items()) + "\n")
        print("\n".join(f"{name:22} {model.about}" for name, model in MODELS.items()))
        return
    if options.write:
        if not options.json:
            parser.error("--write needs --json FILE, whose results the tables show")
        for name, path in (("json", options.json), ("write", options.write)):
            if not path.is_file():
                parser.error(f"--{name} {path} is not a file")
        options.write.write_text(fill(options.write.read_text(), read_results(options.json)))
        return
    known = read_results(options.json) if options.json and options.json.exists() else []
    done = {(row["task"], row["model"], row["seed"]) for row in known}
    jobs = [job for job in planned(options.seeds, options.tasks, options.models, options.share) if job[:3] not in done]
    where = {name: conditions()[name] for name in ("date", "commit", "torch", "python", "cpu")}
    for number, row in enumerate(results(jobs, options.jobs, 60 * options.minutes), start=1):
        known.append(row)
        if options.json:
            add_result(options.json, {**row, "environment": where})
        shown = "diverged" if row["score"] is None else f"{row['score']:.4f}"
        print(f"{number}/{len(jobs)} {row['task']} {row['model']} seed {row['seed']}: {shown} ({row['seconds']} s)",
              file=sys.stderr, flush=True)  # fmt: skip
    print(summary(known))


if __name__ == "__main__":
    main()
