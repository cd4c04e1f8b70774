"""Processes, devices, precision and trackers (Lightning Fabric), signals, and runs side by side."""

import importlib
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError, DivergedError, RunError
from torchrum.lab.training.run_folder import Result


@contextmanager
def on_host() -> Iterator[None]:
    """Make tensors without a device on the CPU, where data and weights are drawn, whatever the default device is."""
    if torch.get_default_device().type == "cpu":  # the usual case; entering a device costs every call of torch time
        yield
    else:
        with torch.device("cpu"):
            yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch this number of threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


AT_ONCE = 1.0
"""Seconds in which more signals are the same request: ``timeout``, for one, tells the process and then its group."""


class Interrupts:
    """While active, the first signal is noted; one that comes after ``AT_ONCE`` acts as it always does."""

    WATCHED = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

    def __init__(self) -> None:
        self.received: int = 0
        """Number of the signal; 0 while there was none."""
        self.heeded = False
        """Whether the work was ended because of the signal; otherwise the signal acts at the end."""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > AT_ONCE:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            for number in self.WATCHED:
                if number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: the run is to outlive its terminal
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received and not self.heeded and failure is None:
            signal.raise_signal(self.received)


INTERACTIVE = ("bash", "interactive")
"""Names of SLURM jobs in which a person types the commands: there the variables say nothing about processes."""


def check_launch(config: TrainConfig) -> int:
    """Refuse counts of processes that contradict the config, as a shell keeps them from another program.

    Returns:
        The processes that a launcher has started; 1 without one.
    """
    by_slurm = os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
    asked, started = config.devices * config.nodes, 1
    for name in ("WORLD_SIZE", *(("SLURM_NTASKS",) if by_slurm else ())):
        text = os.environ.get(name, "1")
        if not text.isdecimal() or int(text) not in (1, asked):
            raise ConfigError(
                f"{name} is {text!r}, but devices * nodes is {asked}; pass --devices and --nodes to match, or unset it."
            )
        started = max(started, int(text))
        if name == "SLURM_NTASKS" and int(text) > 1 and "SLURM_PROCID" not in os.environ:
            raise ConfigError(f"{name} is {text}, but SLURM_PROCID is not set; start the processes with srun.")
    # MASTER_ADDR: each machine's process was started by hand. Without any of them it would wait for the others for ever
    if config.nodes > 1 and started == 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"nodes is {config.nodes}, but nothing has started processes on other machines; start them with srun or "
            "torchrun, or pass --nodes 1."
        )
    return started


T = TypeVar("T")


class Engine:
    """The processes of one run, started and connected; with one process every exchange is a plain call.

    Under torchrun or SLURM the processes are there already. Otherwise, with ``devices`` above one, the same command is
    started once more for each further process. ``fabric`` wraps models and does the steps of their training.
    """

    def __init__(self, config: TrainConfig) -> None:
        with Interrupts():  # an import might swallow the exception that Ctrl-C raises
            from lightning_fabric import Fabric

        if config.device == "cuda" and not torch.cuda.is_available():
            raise RunError("device='cuda', but torch sees no CUDA device; pass --device cpu, or auto.")
        cuda = config.device != "cpu" and torch.cuda.is_available()
        many = max(check_launch(config), config.devices * config.nodes) > 1
        try:
            importlib.import_module("torch" if config.logger == "none" else config.logger)  # named like their packages
        except ModuleNotFoundError as error:
            advice = f'pip install "torchrum[{config.logger}]"'
            raise RunError(f"logger={config.logger!r} needs a package: {advice} ({error}).") from error
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its banner would break the progress bar
        self.sharded = config.strategy == "fsdp"
        """Whether each process has a share of the weights only; then every process must make each call of the model."""
        strategy: Any = "ddp" if many else "auto"
        if self.sharded:
            from lightning_fabric.strategies import ModelParallelStrategy

            strategy = ModelParallelStrategy(_shard, config.devices * config.nodes, tensor_parallel_size=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about other accelerators; precision is checked in the config
            self.fabric = Fabric(
                accelerator="cuda" if cuda else "cpu",
                strategy=strategy,
                devices=config.devices,
                num_nodes=config.nodes,
                precision=config.precision,
            )
            self.fabric.launch()
        self.rank: int = self.fabric.global_rank
        self.world_size: int = self.fabric.world_size
        self.device: torch.device = self.fabric.device
        self._track: Callable[[dict[str, float], int], object] | None = None
        self._finish: Callable[[], object] | None = None
        if config.batch_size % self.world_size:
            raise ConfigError(
                f"batch_size {config.batch_size} cannot be divided among {self.world_size} processes; choose "
                "a multiple of that number."
            )

    def share(self, size: int) -> tuple[int, int]:
        """First and last-but-one row of this process in a batch of ``size`` rows."""
        rows = size // self.world_size
        return self.rank * rows, (self.rank + 1) * rows

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in the precision of the run."""
        return self.fabric.strategy.precision.convert_module(model).to(self.device)

    def clip(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
        """Limit the norm of the whole gradient; one without a finite norm becomes zero. Nothing is read on the host."""
        norm = self.fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        assert norm is not None
        lost = ~self.whole(norm).isfinite()  # over a thousand steps a gradient can outgrow float32
        for weight in model.parameters():
            if weight.grad is not None:
                grad: Any = weight.grad
                (grad.to_local() if self.sharded else grad).masked_fill_(lost, 0.0)

    def whole(self, state: T) -> T:
        """Gather the sharded tensors of a nested state, in every process."""
        if not self.sharded:
            return state
        from torch.distributed.tensor import DTensor

        return tree_map_only(DTensor, DTensor.full_tensor, state)

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Keep the weights of ``model`` whole, so that they can be read outside of its calls."""
        if not self.sharded:
            yield
            return
        sharded: Any = model
        sharded.unshard()
        yield
        sharded.reshard()

    def share_like(self, value: Any, like: Any) -> Any:
        """Keep this process's share of ``value`` if ``like``, a tensor of the same shape, is sharded."""
        if not (self.sharded and isinstance(value, Tensor) and value.shape == getattr(like, "shape", None)):
            return value
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return value
        # no source rank: every process has read the whole value
        return distribute_tensor(value.to(self.device), like.device_mesh, like.placements, src_data_rank=None)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of ``value`` over the processes."""
        return value if self.world_size == 1 else self.fabric.all_reduce(value, reduce_op="mean")  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def first(self, work: Callable[[], T]) -> T:
        """Do ``work`` in the first process only; its result, or its failure, is that of all processes."""
        outcome: Any = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                outcome = work()
            except Exception as error:
                failure = error
        if self.world_size > 1:
            reported = None if failure is None else (type(failure).__name__, str(failure))
            outcome, reported = self.fabric.broadcast((outcome, reported))
            if failure is None and reported is not None:
                failure = ConfigError(reported[1]) if reported[0] == "ConfigError" else RunError(reported[1])
        if failure is not None:
            raise failure
        return outcome

    def first_or_all(self, work: Callable[[], T]) -> T:
        """Do ``work`` that calls the model: in the first process or, if the weights are sharded, in all processes."""
        return self.fabric.broadcast(work()) if self.sharded else self.first(work)

    def start_tracker(self, kind: str, folder: Path, name: str, config: dict[str, Any]) -> None:
        """Open TensorBoard or Weights & Biases in the first process."""
        if kind == "none" or self.rank > 0:
            return
        if kind == "tensorboard":
            from lightning_fabric.loggers import TensorBoardLogger

            board = TensorBoardLogger(root_dir=folder, name="tensorboard", version="")
            self._track, self._finish = board.log_metrics, lambda: board.finalize("success")
        else:
            import wandb

            run = wandb.init(project="torchrum", name=name, dir=str(folder), config=config)
            self._track, self._finish = lambda values, step: run.log(values, step=step), run.finish

    def track(self, kind: str, values: dict[str, float], step: int) -> None:
        """Send numbers to the tracker, if there is one."""
        if self._track is not None:
            self._track({f"{kind}/{name}": value for name, value in values.items()}, step)

    def close(self) -> None:
        """Close the tracker."""
        if self._finish is not None:
            self._finish()


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard a model as one group: its weights are whole while it runs, as kernels need them, and shares otherwise."""
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # no loss changes logits in place
    try:
        fully_shard(model, mesh=mesh["data_parallel"])
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"strategy fsdp cannot shard this model: {error}") from error
    return model


LOST = re.compile(r"gloo|NCCL|Connection (?:reset|closed|refused)|Broken pipe|Dist(?:Network|Backend|Store)Error")
"""Messages of torch when another process of an exchange has ended."""
LET_GO = 0.1  # seconds


def leave_together() -> None:
    """End the processes of a run at once: one that ends while another is still connected can bring that one down."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        # gloo's thread needs the interpreter to let go of the barrier; the group's destructor waits for that thread
        # without giving the interpreter up
        time.sleep(LET_GO)
        torch.distributed.destroy_process_group()


Call = Callable[[], Result]
Outcome = Result | DivergedError
WATCH = 0.2
"""Seconds between two looks for a signal."""


Worker = tuple[BaseProcess, Connection]  # a training under way, and where its result arrives


def train_side_by_side(calls: Mapping[str, Call], jobs: int, ended: Callable[[str, Outcome], None]) -> str | None:
    """Make the calls, at most ``jobs`` at a time, and say how each one ended as soon as it has.

    A signal is passed on to the trainings, which save and leave, and no other one starts. If one fails, the others are
    ended in the same way and the failure is raised. Calls and results must be picklable.

    Returns:
        The name of the signal, or None.
    """
    waiting, running = list(calls.items()), dict[str, Worker]()
    num_threads = max(1, torch.get_num_threads() // jobs)
    stopping = False
    with Interrupts() as interrupts:
        try:
            while running or (waiting and not interrupts.received):
                while waiting and len(running) < jobs and not interrupts.received:
                    label, call = waiting.pop(0)
                    running[label] = _start(call, num_threads)
                wait([process.sentinel for process, _ in running.values()], WATCH)
                if interrupts.received and not stopping:
                    stopping = True
                    _end(running)
                for label in [label for label, (process, _) in running.items() if not process.is_alive()]:
                    outcome = _outcome(label, running.pop(label), interrupts.received)
                    if outcome is not None:
                        ended(label, outcome)
        finally:
            _end(running)
            for process, _ in running.values():
                process.join()
        interrupts.heeded = True
    return signal.Signals(interrupts.received).name if interrupts.received else None


def _start(call: Call, num_threads: int) -> Worker:
    context = start_context("torch", "lightning_fabric", "safetensors.torch")
    answer, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(call, sender, num_threads))
    with hold_back_interrupts():
        process.start()
    sender.close()
    return process, answer


@contextmanager
def hold_back_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back while a process starts, which would die of it: a terminal sends it to all, and we pass it on.

    The fork server and what it starts inherit this: a process ignores Ctrl-C until it trains. What came meanwhile
    reaches us afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started here, because it lets SIGINT through again when it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_context(*preload: str) -> Any:
    """Choose how processes start: never as forks of this one, which would share its CUDA and miss its threads.

    Where the system can, they are forks of a fresh one that has done nothing but import ``preload``.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _work(call: Call, sender: Connection, num_threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(num_threads)
    try:
        sender.send(call())
    except Exception as error:
        if not hasattr(error, "exit_code"):  # only errors that are meant for the user have one
            raise
        sender.send(error)


def _end(running: Mapping[str, Worker]) -> None:
    for process, _ in running.values():
        process.terminate()


def _outcome(label: str, worker: Worker, received: int) -> Outcome | None:
    """The result of a training that has ended; None for one that a signal ended before it began."""
    process, answer = worker
    process.join()
    try:
        found = answer.recv()
    except EOFError:  # it left nothing
        if received:
            return None
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else "failed; see the message above"
        raise RunError(
            f"{label} {how}. To resume it, run the same command with --resume and the folder of the runs."
        ) from None
    if isinstance(found, Result) and received and found.stopped.startswith("SIG"):
        return replace(found, stopped=signal.Signals(received).name)
    if isinstance(found, Result | DivergedError):
        return found
    raise found
