"""The schedule of the trainings on a simulated machine that becomes slower."""

import heapq
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrum.lab.compare import run
from torchrum.lab.compare.data import read_problem
from torchrum.lab.compare.models import MODELS, Finished, check_steps
from torchrum.lab.compare.run import (
    LEAST_SHARE,
    RATES,
    SEEDS,
    Bar,
    Schedule,
    Settings,
    Training,
    cut_steps,
    in_parallel,
    is_scored,
    plan_steps,
    read_settings,
    read_trainings,
)
from torchrum.lab.compare.verdict import standings

SECONDS, JOBS = 300.0, 2
COSTS = {model: 0.002 * (1 + place % 4) for place, model in enumerate(MODELS)}
"""Seconds of a step."""
ALL = len(MODELS) * (len(RATES) + len(SEEDS))


class Machine:
    """Stands in for the processes that train: time passes without being spent."""

    def __init__(self, slowness: Callable[[float], float]) -> None:
        self.now, self.jobs, self.limit = 0.0, JOBS, SimpleNamespace(value=0)
        self.running: dict[Any, tuple[Any, float]] = {}
        self._slowness = slowness
        self.rows: list[tuple[Training, int]] = []

    def run(self, call: Any, waiting: list[Any], ended: Callable[[Any, Any, float], None]) -> bool:
        ends: list[tuple[float, int]] = []
        while waiting or self.running:
            while waiting and len(self.running) < self.jobs and self.now < SECONDS:
                task = waiting.pop(0)
                number = len(self.rows) + len(self.running)
                self.running[number] = task, self.now
                steps = self.limit.value
                seconds = 0 if task[2] else self._slowness(self.now) * COSTS[task[0].model] * steps
                heapq.heappush(ends, (self.now + seconds, number))
            if not self.running:
                return False
            self.now, number = heapq.heappop(ends)
            task, begin = self.running.pop(number)
            ended(task, self._train(*task, self.now - begin), self.now - begin)
        return True

    def _train(
        self, training: Training, planned: int, earlier: Finished | None, seconds: float
    ) -> tuple[Finished, dict[int, dict[str, Tensor]]]:
        if earlier is not None:
            return earlier._replace(test=1 / earlier.best_step), {}
        # one that began before a cut goes beyond it
        checks = [step for step in check_steps(planned) if step <= max(self.limit.value, 1)]
        curve = [(0, 0.0, 1.0), *((step, seconds * step / checks[-1], 1 / step) for step in checks)]
        self.rows.append((training, checks[-1]))
        test = 1 / checks[-1] if training.seed in SEEDS else None
        weights = {step: {"w": torch.tensor(step)} for step in checks} if test else {}
        return Finished(*training, 1 / checks[-1], test, seconds, False, curve), weights


def train_on(machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, fixed: bool = False) -> Settings:
    """Plan at full speed, then train at that of the machine."""
    monkeypatch.setattr(run.time, "monotonic", lambda: machine.now)
    steps = plan_steps({model: (cost, 0.0) for model, cost in COSTS.items()}, JOBS, SECONDS)
    settings = Settings(data="", options={}, digest="", hidden_sizes={}, parameters={}, steps=steps)
    run.write_json(folder / run.SETTINGS, vars(settings))
    (folder / run.WEIGHTS).mkdir()
    schedule = Schedule(folder, settings, SECONDS, machine, Bar(quiet=True), fixed)  # type: ignore[arg-type]
    schedule.run()
    return schedule.settings


@pytest.mark.parametrize("begin", [0.0, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0])
def test_all_trainings_end_in_time_with_the_same_steps(tmp_path, monkeypatch, begin, factor):
    machine = Machine(lambda now: factor if now >= begin * SECONDS else 1.0)
    settings = train_on(machine, tmp_path, monkeypatch)
    assert settings.steps is not None
    rows = [row for row in read_trainings(tmp_path, settings.steps) if is_scored(row)]
    assert len({Training(*row[:3]) for row in rows}) == ALL
    assert {row.curve[-1][0] for row in rows} == {settings.steps}
    assert {row.test for row in rows if row.seed} == {1 / settings.steps}  # of the weights at that step
    assert machine.now <= SECONDS + factor * max(COSTS.values()) * settings.steps  # the last one began in time
    assert read_settings(tmp_path) == settings
    if factor == 1.0:
        assert settings.planned is None
    elif begin <= 0.5:
        assert settings.planned is not None and LEAST_SHARE * settings.planned <= settings.steps < settings.planned
    assert len(list((tmp_path / run.WEIGHTS).iterdir())) == len(MODELS) * len(SEEDS)


def test_without_the_cut_time_would_be_up(tmp_path, monkeypatch):
    settings = train_on(Machine(lambda now: 2.0), tmp_path, monkeypatch, fixed=True)
    assert settings.planned is None
    assert len(read_trainings(tmp_path)) < ALL


def test_steps_are_cut_to_a_check_that_fits():
    assert cut_steps(300, 300, 100, lambda steps: steps / 3.1) == 300
    assert cut_steps(300, 300, 100, lambda steps: steps / 2) == 160  # of 20, 40, ..., the most below 80 seconds
    assert cut_steps(300, 160, 100, lambda steps: steps / 1.5) == 120
    assert cut_steps(300, 300, 100, lambda steps: steps * 2) == 300  # less than a fifth of the plan
    assert cut_steps(60, 60, 10, lambda steps: steps / 5) == 60  # fewer than LEAST_STEPS


def test_trainings_that_run_count_until_they_end():
    assert in_parallel([2, 2, 2], 2) == 4
    assert in_parallel([2, 2, 2], 2, busy=[1]) == 4
    assert in_parallel([2], 2, busy=[1, 5]) == 5


def test_a_cut_leaves_what_a_plan_of_fewer_steps_has(tmp_path, monkeypatch):
    """Real trainings that continued are scored again with the weights of the earlier step."""
    problem = read_problem((torch.randn(80, 4, 2).numpy(), torch.arange(80).numpy() % 2))
    settings, calls = run.settings_for(problem, "", {}), count()
    monkeypatch.setattr(run, "plan_steps", lambda *_: 15)
    # asked from the end of the eighth training; among the fresh seeds it cuts
    monkeypatch.setattr(run, "cut_steps", lambda planned, steps, *_: steps if next(calls) < 30 else 9)
    outcomes = []
    for name, given in {"cut": settings, "short": replace(settings, steps=9, planned=15)}.items():
        folder = tmp_path / name
        folder.mkdir()
        run.save_problem(folder, problem)
        ended, interrupted = run.train_all(folder, given, 5, run.time.monotonic(), True)
        assert not interrupted and (ended.steps, ended.planned) == (9, 15)
        found = standings([row for row in read_trainings(folder, 9) if is_scored(row)])
        runs = {(each.model, row.seed): row for each in found for row in each.runs}
        assert len(runs) == len(MODELS) * len(SEEDS)
        outcomes.append({key: (row[1:5], [point[::2] for point in row.curve]) for key, row in runs.items()})
    assert outcomes[0] == outcomes[1]
    assert sum(row.curve[-1][0] > 9 for row in read_trainings(tmp_path / "cut") if row.seed) > 5
