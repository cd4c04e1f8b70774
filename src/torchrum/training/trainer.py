"""The only training loop."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrum.layers.cells import compile_steps
from torchrum.layers.observing import diagonal_dominance, recurrent_blocks
from torchrum.training import random_state
from torchrum.training.average import Average
from torchrum.training.checkpoint import has_checkpoint, save_checkpoint
from torchrum.training.config import TrainConfig
from torchrum.training.config_file import to_json
from torchrum.training.environment import environment, read_environment
from torchrum.training.errors import ConfigError, DivergedError, RunError
from torchrum.training.fabric import LOST, Engine
from torchrum.training.files import write_json
from torchrum.training.graph_step import GraphStep, graph_obstacle
from torchrum.training.introduction import introduction
from torchrum.training.loading import build
from torchrum.training.memory import check_model, check_weights, within_memory
from torchrum.training.optim import build_optimizer, learning_rate, set_learning_rate
from torchrum.training.progress import Baseline, Display, is_early
from torchrum.training.records import (
    CONFIG,
    ENVIRONMENT,
    RESULT,
    MetricsFile,
    last_scores,
)
from torchrum.training.resume import Trained, load_run, restore
from torchrum.training.run_folder import claim_run
from torchrum.training.run_state import Progress, Result, to_device
from torchrum.training.schedule import plateau
from torchrum.training.scoring import score
from torchrum.training.signals import Interrupts
from torchrum.training.step import TrainStep


class Trainer:
    """Trains what a config says: ``Trainer(load_recipe("copying-rum")).fit("runs/copying-rum")``.

    Args:
        config: the run.
        model: a model of your own instead of the config's; it is called as ``Task`` describes.
        quiet: show no progress.
        on_end: called with the run folder once a run is complete, in one process; ``torchrum.plots.curve.draw_curve``
            draws its curve.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module | None = None,
        quiet: bool = False,
        on_end: Callable[[Path], object] | None = None,
    ) -> None:
        self.config = config
        self._given, self._quiet, self._on_end = model, quiet, on_end

    def fit(self, folder: Path | str, resume: bool = False, rename: bool = False) -> Result:
        """Train to the end, to the goal, or to a signal.

        Args:
            folder: the run folder; a new one, or with ``resume`` that of an interrupted run.
            resume: start from the last checkpoint. The config must describe the same run; its length may change.
            rename: give a new run the next free name, as ``folder-2``, where ``folder`` is taken.
        """
        self._engine, self._folder, self._interrupts = Engine(self.config), Path(folder), Interrupts()
        with self._interrupts, ExitStack() as held:

            def claim() -> Path:
                return held.enter_context(claim_run(self._folder, self.config, resume, rename)).folder

            with self._writing():
                self._folder = self._engine.first(claim)
            with within_memory():
                graph, notes = self._prepare(resume)
                # nothing was written up to here: a checkpoint that does not fit leaves the folder as it was
                with self._writing():
                    return self._run(resume, graph, notes)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What the disk refuses, or a process that was killed, becomes an error that says how to resume."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError) or self._engine.world_size == 1 or not LOST.search(str(error)):
                raise
            again = f"--resume {self._folder}" if has_checkpoint(self._folder) else "RECIPE"
            raise RunError(
                f"another process of the run has ended, and this one cannot continue alone; start it again with: "
                f"torchrum train {again}"
            ) from error
        except OSError as error:
            further = (
                f"Earlier checkpoints are intact; free disk space, then: torchrum train --resume {self._folder}"
                if has_checkpoint(self._folder)
                else "Free disk space or choose another --out."
            )
            raise RunError(
                f"{error.filename or self._folder} cannot be written: {error.strerror or error}. {further}"
            ) from error

    def _prepare(self, resume: bool) -> tuple[bool, list[str]]:
        config, engine = self.config, self._engine
        loaded = load_run(self._folder, config, engine) if resume else None
        if self._given is None:
            check_weights(config, engine.device)
        torch.manual_seed(config.seed)  # every process starts from the same weights
        self._module = self._given if self._given is not None else build(config)
        graph = config.graph and engine.device.type == "cuda" and engine.world_size == 1
        module = engine.place(self._module)
        if self._given is None:
            check_model(config, module, engine)
        if config.compile and not compile_steps(module):
            raise ConfigError(
                f"compile=true, but the layer {config.model.layer!r} takes no steps to compile; leave it out."
            )
        self._optimizer = build_optimizer(config.optimizer, module, graph, engine.device)
        model, optimizer = engine.setup(module, self._optimizer)
        generator = torch.Generator(engine.device).manual_seed(config.seed)
        random_state.seed_process(config.seed, engine.rank)
        data = config.task.setup(engine.device, config.seed)
        self._average = None if config.average is None else Average(module, config.average)
        self._step = TrainStep(config, engine, model, optimizer, generator, data, self._average)
        self._progress, self._mark = Progress(), None
        notes: list[str] = []
        if resume:
            trained = Trained(config, engine, self._module, self._scored, self._optimizer, self._step)
            self._progress, self._mark, notes = restore(self._folder, trained, loaded)
        return graph, notes

    def _run(self, resume: bool, graph: bool, notes: list[str]) -> Result:
        config, engine, folder = self.config, self._engine, self._folder
        engine.first(lambda: self._open_folder(resume))
        self._metrics = MetricsFile(folder, self._progress.step, self._mark) if engine.rank == 0 else None
        engine.start_tracker(config.logger, folder, config.name, to_json(config))
        task = config.task
        display = Display(
            config.label,
            config.steps,
            self._progress.step,
            Baseline(task.baseline(), task.baseline_name, task.loss_unit),
            task.metric,
            quiet=self._quiet or engine.rank > 0,
        )
        with display:
            self._display = display
            about = introduction(config, self._module, engine, folder, own=self._given is not None)
            for note in (*about, *notes):
                display.say(note)
            try:
                return self._end(self._loop(graph))
            finally:
                engine.close()
                if self._metrics is not None:
                    self._metrics.close()

    def _loop(self, graph: bool) -> tuple[str, dict[str, float]]:
        config, progress = self.config, self._progress
        runner: TrainStep | GraphStep = self._step
        if graph:
            obstacle = graph_obstacle(self._step)
            if obstacle is None:
                runner = GraphStep(self._step, self._display.say)
            else:
                self._display.say(f"no CUDA graph: {obstacle}")
        validation = [batch.to(self._engine.device) for batch in config.task.validation(config.seed)]
        scores = self._engine.first(lambda: last_scores(self._folder))
        if self._goal():  # a crash came between the last checkpoint and the result
            return "goal", scores
        rate, first = math.nan, progress.step
        self._started = time.monotonic() - progress.seconds
        self._module.train()
        while progress.step < config.steps:
            planned = learning_rate(config.optimizer, progress.step, config.steps, progress.drops)
            if planned != rate:
                rate = planned
                set_learning_rate(self._optimizer, rate)
            self._step.prepare(progress.step)
            runner.run()
            progress.step += 1
            progress.since_log += 1
            self._display.tick(progress.step)

            last = progress.step == config.steps
            improved = False
            log = last or progress.step % config.log_every == 0
            if log:
                self._log(rate)
            elif is_early(progress.step - first, config.log_every):
                self._display.train(progress.step, {"loss": self._step.sums["loss"].item() / progress.since_log})
            if last or progress.step % config.eval_every == 0:
                scores, improved = self._validate(validation)
            goal = self._goal()
            stopped = self._signal(log)
            if last or goal or stopped or improved or progress.step % config.checkpoint_every == 0:
                self._save(improved)
            if stopped:
                return stopped, scores
            if goal:
                return "goal", scores
        return "finished", scores

    @property
    def _scored(self) -> nn.Module:
        """The model that is validated and kept: the average of the weights, if there is one."""
        return self._module if self._average is None else self._average.model

    def _goal(self) -> bool:
        return self.config.stop_at is not None and self._progress.reached >= self.config.stop_after

    def _signal(self, log: bool) -> str:
        """Name of the signal that any process got. Several processes compare at log steps only: it makes them wait."""
        numbers = [self._interrupts.received]
        if self._engine.world_size > 1:
            numbers = self._engine.gather(self._interrupts.received) if log else []
        return signal.Signals(max(numbers)).name if any(numbers) else ""

    def _record(self, kind: str, values: dict[str, float]) -> None:
        progress = self._progress
        progress.seconds = time.monotonic() - self._started
        if self._metrics is not None:
            self._metrics.append({"kind": kind, "step": progress.step, **values, "seconds": round(progress.seconds, 3)})
        self._engine.track(kind, values, progress.step)

    def _log(self, rate: float) -> None:
        sums = self._step.sums
        means = self._engine.mean(torch.stack(list(sums.values()))) / self._progress.since_log
        values = dict(zip(sums, means.tolist(), strict=True))
        for total in sums.values():
            total.zero_()
        self._progress.since_log = 0
        self._check_finite(values["loss"])
        self._record("train", {**values, "lr": rate})
        self._display.train(self._progress.step, values)

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            kept = f"; the checkpoints in {self._folder} are from before" if has_checkpoint(self._folder) else ""
            raise DivergedError(
                f"the loss is {loss} at step {self._progress.step}{kept}. "
                "Try a lower --optimizer.lr, or --optimizer.clip 1."
            )

    def _validate(self, batches: list[Any]) -> tuple[dict[str, float], bool]:
        task, progress = self.config.task, self._progress
        scores = self._engine.first(lambda: score(task, self._scored, batches, self._engine))
        sign = 1 if task.goal == "max" else -1
        value = scores[task.metric]
        improved = math.isfinite(value) and (progress.best is None or sign * value > sign * progress.best)
        if improved:
            progress.best, progress.best_step = value, progress.step
        if (flat := plateau(self.config.optimizer.schedule)) is not None:
            progress.wait(improved, flat[1])
        goal = self.config.stop_at
        progress.reached = progress.reached + 1 if goal is not None and sign * value >= sign * goal else 0
        self._record("validation", scores)
        self._record_weights()
        self._display.validation(progress.step, scores, improved)
        if self._engine.rank == 0 and math.isfinite(scores["loss"]) and (text := self._shown()):
            self._display.say(text)
        return scores, improved

    def _record_weights(self) -> None:
        """How far the diagonal of each recurrent block of a RUM stands out: figures show it over training."""
        blocks = {f"{name}/{block}_dominance": matrix for name, block, matrix in recurrent_blocks(self._scored)}
        if blocks:
            values = torch.stack([diagonal_dominance(matrix) for matrix in blocks.values()]).tolist()
            self._record("weights", dict(zip(blocks, values, strict=True)))

    def _shown(self) -> str:
        training = self._scored.training
        with self._engine.autocast():
            text = self.config.task.show(self._scored.eval())
        self._scored.train(training)
        return text

    def _save(self, best: bool) -> None:
        engine, progress = self._engine, self._progress
        progress.seconds = time.monotonic() - self._started
        cpu = torch.device("cpu")
        own = {
            "random": random_state.collect(self._step.generator),
            "carried": to_device(self._step.carried, cpu),
            "sums": {name: total.to(cpu, copy=True) for name, total in self._step.sums.items()},
        }
        processes = engine.gather(own)
        for process in processes:
            self._check_finite(float(process["sums"]["loss"]))  # a run that has diverged must not replace a good one
        state = {
            "config": to_json(self.config),
            "progress": asdict(progress),
            "optimizer": self._optimizer.state_dict()["state"],
            "scaler": engine.scaler_state(),
            "processes": processes,
        }
        if self._average is not None:  # the checkpoint's own weights are the average
            state["trained"] = {name: value.to(cpu, copy=True) for name, value in self._module.state_dict().items()}

        def write() -> None:
            assert self._metrics is not None
            self._metrics.sync()
            whole = {**state, "metrics": asdict(self._metrics.mark())}
            save_checkpoint(self._folder, progress.step, self._scored.state_dict(), whole, best)

        engine.first(write)

    def _open_folder(self, resume: bool) -> None:
        now = environment(self._engine.device, self._engine.world_size, self.config.task.provenance())
        if resume:
            before, changed = read_environment(self._folder), asdict(now)
            del changed["resumed"]
            now = replace(before, resumed=[*before.resumed, {"step": self._progress.step, **changed}])
            (self._folder / RESULT).unlink(missing_ok=True)
        write_json(self._folder / ENVIRONMENT, asdict(now))
        write_json(self._folder / CONFIG, to_json(self.config))

    def _end(self, outcome: tuple[str, dict[str, float]]) -> Result:
        stopped, scores = outcome
        progress = self._progress
        result = Result(
            self._folder, stopped, progress.step, scores, progress.best, progress.best_step, progress.seconds
        )
        if stopped.startswith("SIG"):
            self._interrupts.heeded = True
            self._display.say(
                f"{stopped}: saved at step {progress.step}; resume with: torchrum train --resume {self._folder}"
            )
            return result
        summary = {name: value for name, value in asdict(result).items() if name != "folder"}
        self._engine.first(lambda: write_json(self._folder / RESULT, summary))
        if self._engine.rank == 0 and self._on_end is not None:
            self._on_end(self._folder)
        self._display.say(f"{stopped} at step {progress.step}: {self._folder}")
        return result
