"""``Trainer``: from a config to a finished run folder. The one training loop is ``Run._loop``."""

import errno
import inspect
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrum.cells.rum import RELU_OPTIONS, TANH_OPTIONS
from torchrum.lab.models import count_parameters
from torchrum.lab.training.checkpoint import (
    Loaded,
    collect_random_state,
    has_checkpoint,
    load_run,
    restore,
    write_checkpoint,
)
from torchrum.lab.training.config import ModelConfig, TrainConfig, plateau, to_json
from torchrum.lab.training.distributed import LOST, Engine, Interrupts, on_host
from torchrum.lab.training.errors import ConfigError, DivergedError, RunError
from torchrum.lab.training.evaluation import calibrate, is_calibrated, score
from torchrum.lab.training.files import write_json
from torchrum.lab.training.progress import Display, is_early
from torchrum.lab.training.run_folder import (
    CONFIG,
    ENVIRONMENT,
    RESULT,
    MetricsFile,
    Progress,
    Result,
    claim_run,
    environment,
    last_validation,
    read_environment,
)
from torchrum.lab.training.step import (
    GraphStep,
    Trained,
    TrainStep,
    assemble,
    graph_obstacle,
    learning_rate,
    set_learning_rate,
    to_device,
    within_memory,
)
from torchrum.layers.introspection import diagonal_dominance, recurrent_blocks
from torchrum.layers.registry import LAYERS


def introduction(config: TrainConfig, model: nn.Module, engine: Engine, folder: Path, own: bool) -> list[str]:
    """Model and parameters, device and folder, the data and the loss to beat: three lines.

    Args:
        config: the run.
        model: the model.
        engine: its processes and device.
        folder: the run folder.
        own: whether the model is the caller's instead of the config's.
    """
    described = type(model).__name__ if own else describe_model(config.model)
    processes = f", {engine.world_size} processes" if engine.world_size > 1 else ""
    task = config.task
    reading = f"reading {task.source}; " if task.source else ""
    return [
        f"{config.label}: {described}, {count_parameters(model):,} parameters",
        f"on {describe_device(engine.device)}{processes}, {config.precision}; run folder {folder}",
        f"{reading}loss in {task.loss_unit}; the {task.baseline_name} baseline is {task.baseline():.4g}",
    ]


def describe_model(model: ModelConfig) -> str:
    """Describe the layer: its sizes, and the options that differ from its defaults or from the paper's."""
    layers = f"{model.num_layers} layers of " if model.num_layers > 1 else ""
    words = [f"{layers}{model.layer}, {model.hidden_size} units"]
    if model.window > 1:
        words.append(f"a window of {model.window} inputs")
    entry = LAYERS.get(model.layer)
    usual: dict[str, Any] = {}
    if entry is not None:
        usual = {name: parameter.default for name, parameter in inspect.signature(entry).parameters.items()}
    named = {"the paper's options": RELU_OPTIONS, "the tanh options": TANH_OPTIONS}
    if RELU_OPTIONS.keys() <= model.options.keys():  # name the set that the layer is closest to
        name = min(named, key=lambda name: sum(model.options.get(key) != value for key, value in named[name].items()))
        usual |= named[name]
        words.append(name)
    missing = object()
    changed = (f"{name} {value}" for name, value in model.options.items() if usual.get(name, missing) != value)
    return ", ".join([*words, *changed])


def describe_device(device: torch.device) -> str:
    """Name a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the {device.type.upper()} ({threads} thread{'s' * (threads > 1)})"


class Run:
    """Train in a locked folder; the constructor writes the first files there.

    Args:
        trained: model, optimizer and step.
        folder: the run folder.
        interrupts: signals that ask the run to stop.
        resume: whether the run began before.
        loaded: its checkpoint, if it has one.
        quiet: show no progress.
    """

    def __init__(
        self, trained: Trained, folder: Path, interrupts: Interrupts, resume: bool, loaded: Loaded | None, quiet: bool
    ) -> None:
        self.config, self.engine, self.folder = trained.config, trained.engine, folder
        self._trained, self._step, self._scored = trained, trained.step, trained.scored
        self._interrupts = interrupts
        self.progress, mark = (Progress(), None) if loaded is None else (loaded.progress, loaded.mark)
        self.engine.first(lambda: self._open_folder(resume))
        self._metrics = MetricsFile(folder, self.progress.step, mark) if self.engine.rank == 0 else None
        self.engine.start_tracker(self.config.logger, folder, self.config.name, to_json(self.config))
        self._display = Display(self.config, self.progress.step, quiet=quiet or self.engine.rank > 0)
        self._started = time.monotonic() - self.progress.seconds

    def train(self, lines: list[str], on_end: Callable[[Path], object] | None) -> Result:
        """Train to the end, to the goal, or to a signal.

        Args:
            lines: lines to print before the first step.
            on_end: called with the run folder once the run is complete, in one process.
        """
        with self._display as display:
            for line in lines:
                display.say(line)
            try:
                return self._end(*self._loop(), on_end)
            finally:
                with suppress(OSError, RunError):  # a full disk or a replaced folder was reported already
                    if self._metrics is not None:
                        self._metrics.sync()
                self.engine.close()
                if self._metrics is not None:
                    self._metrics.close()

    def _loop(self) -> tuple[str, dict[str, float]]:
        config, progress, runner = self.config, self.progress, self._runner()
        validation = [batch.to(self.engine.device) for batch in config.task.validation(config.seed)]
        validated, scores = self.engine.first(lambda: last_validation(self.folder))
        if self._goal():  # a crash came between the last checkpoint and the result
            return "goal", scores
        rate, first = math.nan, progress.step
        self._started = time.monotonic() - progress.seconds  # the time before the first step does not count
        self._trained.module.train()
        if progress.step >= config.steps and validated != progress.step:  # a resumed run that ends at its last step
            scores, improved = self._validate(validation)
            self._save(improved)
        while progress.step < config.steps:
            rate = self._advance(runner, rate)
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

    def _runner(self) -> TrainStep | GraphStep:
        """Return the step, captured as a CUDA graph where possible."""
        if not self._trained.graph:
            return self._step
        obstacle = graph_obstacle(self._step)
        if obstacle is None:
            return GraphStep(self._step, self._display.say)
        self._display.say(f"no CUDA graph: {obstacle}")
        return self._step

    def _advance(self, runner: TrainStep | GraphStep, rate: float) -> float:
        """Do one step and return its learning rate; ``rate`` is the previous one."""
        config, progress = self.config, self.progress
        planned = learning_rate(config.optimizer, progress.step, config.steps, progress.drops)
        if planned != rate:
            set_learning_rate(self._trained.optimizer, planned)
        self._step.prepare(progress.step)
        runner.run()
        progress.step += 1
        progress.since_log += 1
        self._display.tick(progress.step)
        return planned

    def _goal(self) -> bool:
        return self.config.stop_at is not None and self.progress.reached >= self.config.stop_after

    def _signal(self, log: bool) -> str:
        """Name of a signal that any process received; several processes compare at log steps only, since they wait."""
        numbers = [self._interrupts.received]
        if self.engine.world_size > 1:
            numbers = self.engine.gather(self._interrupts.received) if log else []
        return signal.Signals(max(numbers)).name if any(numbers) else ""

    def _record(self, kind: str, values: dict[str, float]) -> None:
        progress = self.progress
        progress.seconds = time.monotonic() - self._started
        if self._metrics is not None:
            self._metrics.append({"kind": kind, "step": progress.step, **values, "seconds": round(progress.seconds, 3)})
        self.engine.track(kind, values, progress.step)

    def _log(self, rate: float) -> None:
        sums = self._step.sums
        means = self.engine.mean(torch.stack(list(sums.values()))) / self.progress.since_log
        values = dict(zip(sums, means.tolist(), strict=True))
        for total in sums.values():
            total.zero_()
        self.progress.since_log = 0
        self._check_finite(values["loss"])
        self._record("train", {**values, "lr": rate})
        self._display.train(self.progress.step, values)

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            kept = f"; the checkpoints in {self.folder} are from earlier steps" if has_checkpoint(self.folder) else ""
            raise DivergedError(
                f"the loss is {loss} at step {self.progress.step}{kept}. "
                "Try a lower --optimizer.lr, or --optimizer.clip 1."
            )

    def _validate(self, batches: list[Any]) -> tuple[dict[str, float], bool]:
        task, progress = self.config.task, self.progress
        scores = self.engine.first_or_all(lambda: self._score(batches))
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
        if (self.engine.rank == 0 or self.engine.sharded) and math.isfinite(scores["loss"]):
            training = self._scored.training
            with self.engine.fabric.autocast():
                text = task.show(self._scored.eval())
            self._scored.train(training)
            if text:
                self._display.say(text)
        return scores, improved

    def _score(self, batches: list[Any]) -> dict[str, float]:
        task, scored, module = self.config.task, self._scored, self._trained.module
        if is_calibrated(scored) and is_calibrated(module):
            calibrate(task, scored, batches, self.engine)
            module.temperature.copy_(scored.temperature)  # the average follows the model
        return score(task, scored, batches, self.engine)

    def _record_weights(self) -> None:
        """Record the diagonal dominance of each recurrent block of a RUM, for figures."""
        with self.engine.unsharded(self._scored):
            blocks = {f"{name}/{block}_dominance": matrix for name, block, matrix in recurrent_blocks(self._scored)}
            values = [diagonal_dominance(matrix) for matrix in blocks.values()]
        if blocks:
            self._record("weights", dict(zip(blocks, torch.stack(values).tolist(), strict=True)))

    def _save(self, best: bool) -> None:
        """Write a checkpoint in the first process."""
        progress, module = self.progress, self._trained.module
        progress.seconds = time.monotonic() - self._started
        cpu = torch.device("cpu")
        own = {
            "random": collect_random_state(self._step.generator),
            "carried": to_device(self._step.carried, cpu),
            "sums": {name: total.to(cpu, copy=True) for name, total in self._step.sums.items()},
        }
        processes = self.engine.gather(own)
        for process in processes:
            self._check_finite(float(process["sums"]["loss"]))  # a run that has diverged must not replace a good one
        state = {
            "config": to_json(self.config),
            "progress": asdict(progress),
            "optimizer": self.engine.whole(self._trained.optimizer.state_dict()["state"]),
            "scaler": self.engine.fabric.strategy.precision.state_dict(),
            "processes": processes,
        }
        if self._scored is not module:  # the checkpoint's own weights are the average
            state["trained"] = {name: value.to(cpu, copy=True) for name, value in module.state_dict().items()}

        weights = self.engine.whole(self._scored.state_dict())

        def write() -> None:
            assert self._metrics is not None
            self._metrics.sync()
            whole = {**state, "metrics": asdict(self._metrics.mark())}
            write_checkpoint(self.folder, progress.step, weights, whole, best)

        self.engine.first(write)

    def _open_folder(self, resume: bool) -> None:
        now = environment(self.engine.device, self.engine.world_size, self.config.task.provenance())
        now = replace(now, parameters=count_parameters(self._trained.module))
        if resume:
            before, changed = read_environment(self.folder), asdict(now)
            del changed["resumed"]
            now = replace(before, resumed=[*before.resumed, {"step": self.progress.step, **changed}])
            (self.folder / RESULT).unlink(missing_ok=True)
        write_json(self.folder / ENVIRONMENT, asdict(now))
        write_json(self.folder / CONFIG, to_json(self.config))

    def _end(self, stopped: str, scores: dict[str, float], on_end: Callable[[Path], object] | None) -> Result:
        progress = self.progress
        result = Result(
            self.folder, stopped, progress.step, scores, progress.best, progress.best_step, progress.seconds
        )
        if stopped.startswith("SIG"):
            self._interrupts.heeded = True
            self._display.say(
                f"{stopped}: saved at step {progress.step}; resume with: torchrum train --resume {self.folder}"
            )
            return result
        summary = {name: value for name, value in asdict(result).items() if name != "folder"}
        self.engine.first(lambda: write_json(self.folder / RESULT, summary))
        if self.engine.rank == 0 and on_end is not None:
            on_end(self.folder)
        self._display.say(f"{stopped} at step {progress.step}: {self.folder}")
        return result


class Trainer:
    """Train a config: ``Trainer(load_recipe("copying-rum")).fit("runs/copying-rum")``.

    Args:
        config: the run.
        model: a model of your own instead of the config's; it is called as ``Task`` describes.
        quiet: show no progress.
        on_end: called with the run folder once a run is complete, in one process; for example
            ``torchrum.paper.plots.run.draw_curve``, which draws its curve.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module | None = None,
        quiet: bool = False,
        on_end: Callable[[Path], object] | None = None,
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"Trainer: config is {config!r:.60}, but it must be a TrainConfig; try load_recipe(...).")
        self.config = config
        self._given, self._quiet, self._on_end = model, quiet, on_end

    @on_host()
    def fit(self, folder: Path | str, resume: bool = False, rename: bool = False) -> Result:
        """Train to the end, to the goal, or to a signal.

        Args:
            folder: the run folder; a new one, or with ``resume`` that of an interrupted run.
            resume: start from the last checkpoint. The config must describe the same run; its length may change.
            rename: give a new run the next free name, as ``folder-2``, where ``folder`` is taken.

        Returns:
            How the run ended, its last step, and its scores on the validation set.
        """
        config, engine, place = self.config, Engine(self.config), Path(folder)
        with Interrupts() as interrupts, ExitStack() as held:
            with advice_on_failure(engine, place):
                claimed = partial(claim_run, place, config, resume, rename)
                place = engine.first(lambda: held.enter_context(claimed()).folder)
            with within_memory():
                loaded = load_run(place, config, engine) if resume else None
                trained = assemble(config, engine, self._given)
                lines = introduction(config, trained.module, engine, place, own=self._given is not None)
                if loaded is not None:
                    lines += restore(place, trained, loaded)
                elif resume:
                    lines.append(f"{place} has no checkpoint yet: starting from the first step")
                # nothing was written up to here: a checkpoint that does not fit leaves the folder as it was
                with advice_on_failure(engine, place):
                    return Run(trained, place, interrupts, resume, loaded, self._quiet).train(lines, self._on_end)


@contextmanager
def advice_on_failure(engine: Engine, folder: Path) -> Iterator[None]:
    """Report a full disk or a killed process as an error that says how to resume."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RunError) or engine.world_size == 1 or not LOST.search(str(error)):
            raise
        again = f"--resume {folder}" if has_checkpoint(folder) else "RECIPE"
        raise RunError(
            f"another process of the run has ended, and this one cannot continue alone; start it again with: "
            f"torchrum train {again}"
        ) from error
    except OSError as error:
        further = (
            f"Earlier checkpoints are intact; free disk space, then: torchrum train --resume {folder}"
            if has_checkpoint(folder)
            else "Free disk space or choose another --out."
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Choose another --out."
        )
        raise RunError(f"{error.filename or folder} cannot be written: {error.strerror or error}. {further}") from error
