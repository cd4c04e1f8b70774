"""One training step, plain or as a CUDA graph: optimizer and learning rate, averaged weights, carried state, memory."""

import copy
import math
import random
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from torchrum.cells.base import Cell
from torchrum.lab.models import build_model
from torchrum.lab.training.config import DECAYS, OptimizerConfig, TrainConfig, milestones, plateau, rate_factors
from torchrum.lab.training.distributed import Engine
from torchrum.lab.training.errors import ConfigError, DivergedError, RunError
from torchrum.layers.registry import compile_steps
from torchrum.ops.kernels.cuda import recording


def schedule_factor(schedule: str, warmup: int, step: int, steps: int) -> float:
    """Compute the factor of lr in the step that follows ``step`` finished ones, of ``steps`` in all.

    A function of the step alone, so it needs no state: a resumed run finds its place. linear and cosine fall from the
    end of the warm-up to zero at the end of the run.
    """
    if step < warmup:
        return (step + 1) / warmup * _milestone_factor(schedule, step)
    if schedule not in DECAYS:
        return _milestone_factor(schedule, step)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def _milestone_factor(schedule: str, step: int) -> float:
    return next((factor for start, factor in reversed(milestones(schedule)) if step >= start), 1.0)


class RMSpropTF(Optimizer):
    """RMSProp with the arithmetic of TensorFlow 1.

    ``ms = decay * ms + (1 - decay) * g^2; p = p - lr * g / sqrt(ms + eps)``: ``ms`` starts at one, which warms up the
    first steps, and ``eps`` stands inside the root. torch's RMSprop starts at zero and adds ``eps`` outside.

    Args:
        params: what to train.
        lr: learning rate, a number or (to change it under a CUDA graph) a scalar tensor on the device.
        decay: how much of the average is kept at each step.
        eps: added to the average under the root.
        capturable: whether a step may be recorded in a CUDA graph; the arithmetic is the same.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        decay: float = 0.9,
        eps: float = 1e-10,
        capturable: bool = False,
    ) -> None:
        if not (lr >= 0 and 0 <= decay < 1 and eps >= 0):
            raise ValueError(
                f"RMSpropTF: lr={lr}, decay={decay}, eps={eps}; lr and eps must be >= 0 and decay in [0, 1)."
            )
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["mean_square"] = torch.ones_like(param)
            grads = [param.grad for param in params]
            squares = [self.state[param]["mean_square"] for param in params]
            # one kernel for all parameters: a small model has more parameters than work
            torch._foreach_mul_(squares, group["decay"])
            torch._foreach_addcmul_(squares, grads, grads, 1 - group["decay"])
            roots = torch._foreach_add(squares, group["eps"])
            torch._foreach_sqrt_(roots)
            changes = torch._foreach_div(grads, roots)
            torch._foreach_mul_(changes, group["lr"])
            torch._foreach_sub_(params, changes)
        return loss


def build_optimizer(config: OptimizerConfig, model: nn.Module, graph: bool, device: torch.device) -> Optimizer:
    """Make the optimizer; with ``graph`` its step can be recorded in a CUDA graph and its rate still be changed."""
    params = parameter_groups(model, rate_factors(config.groups), config.weight_decay)
    lr: float | Tensor = torch.tensor(config.lr, device=device) if graph else config.lr
    for group in params if graph else ():  # each fills its own rate
        group["lr"] = torch.tensor(config.lr, device=device)
    if config.name == "rmsprop_tf":
        eps = 1e-10 if config.eps is None else config.eps
        return RMSpropTF(params, lr=lr, decay=config.decay, eps=eps, capturable=graph)
    eps = 1e-8 if config.eps is None else config.eps
    if config.name == "rmsprop":
        return torch.optim.RMSprop(params, lr=lr, alpha=config.decay, eps=eps, capturable=graph)
    kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
    fused = graph or None  # one kernel instead of a dozen: of a small model's step they are a tenth
    return kind(params, lr=lr, betas=config.betas, eps=eps, capturable=graph, fused=fused)


def parameter_groups(model: nn.Module, factors: dict[str, float], weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """The parameters with the factor of their rate: that of the first name in ``factors`` that is a part of theirs.

    Weight decay pulls matrices alone: gains of layer norms and biases have no reason to be near zero.
    """
    groups: dict[tuple[float, float], list[Tensor]] = {}
    found = set()
    for name, param in model.named_parameters():
        part = next((part for part in factors if part in name), None)
        found.add(part)
        if param.requires_grad:
            decay = weight_decay if param.dim() > 1 and not name.rpartition(".")[2].startswith("ln_") else 0.0
            groups.setdefault((1.0 if part is None else factors[part], decay), []).append(param)
    if lost := [part for part in factors if part not in found]:
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name, _ in model.named_parameters()))
        raise ConfigError(
            f"optimizer: groups names {', '.join(lost)}, but no parameter has such a name; there are {names}."
        )
    return [
        {"params": params, "rate_factor": factor, "weight_decay": decay} for (factor, decay), params in groups.items()
    ]


def learning_rate(config: OptimizerConfig, step: int, steps: int, drops: int = 0) -> float:
    """The rate of the step that follows ``step`` finished ones, of ``steps`` in all, after ``drops`` plateaus."""
    factor, _ = plateau(config.schedule) or (1.0, 0)
    return config.lr * schedule_factor(config.schedule, config.warmup, step, steps) * factor**drops


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every group the rate times its factor; a tensor is filled in place: a CUDA graph reads that very memory."""
    for group in optimizer.param_groups:
        own = rate * group.get("rate_factor", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def detached_copy(state: Any) -> Any:
    """Copy the tensors of a nested tuple, cut from their history."""
    return tree_map_only(Tensor, lambda part: part.detach().clone(), state)


def copy_into(state: Any, new: Any) -> Any:
    """Copy the tensors of ``new`` into those of ``state``, a nested tuple of the same form, and return ``state``."""
    for part, fresh in zip(tree_leaves(state), tree_leaves(new), strict=True):
        if isinstance(part, Tensor):
            part.copy_(fresh)
    return state


def to_device(state: Any, device: torch.device) -> Any:
    """Move the tensors of a nested tuple to a device."""
    return tree_map_only(Tensor, lambda part: part.to(device), state)


class Average:
    """A copy of a model whose weights follow those of ``model``.

    ``average = d * average + (1 - d) * weight`` after each step t, with ``d = min(decay, (1 + t) / (10 + t))``: else
    the random start would weigh for ``1 / (1 - decay)`` steps. So it reaches back over a ninth of the steps at most.
    Buffers follow too, those of integers as they are.

    Args:
        model: the model that is trained.
        decay: share kept at each step, above 0 and below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._decay = decay
        source, target = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, self.model))
        self._pairs = [(target[name], weight) for name, weight in source.items()]

    @torch.no_grad()
    def update(self, step: Tensor) -> None:
        """Update the average after a step; ``step`` is the number of steps before it, a scalar on the device."""
        share = 1 - torch.clamp((1 + step) / (10 + step), max=self._decay)
        for average, weight in self._pairs:
            if average.is_floating_point():
                average.lerp_(weight, share.to(average.dtype))
            else:
                average.copy_(weight)


class TrainStep:
    """Run steps, and keep the sums and the carried state in place. Nothing in ``run`` waits for the device.

    Args:
        config: the run.
        engine: its processes.
        model, optimizer: as ``fabric.setup`` returned them.
        generator: makes the data, on the device.
        data: what the task's ``setup`` returned.
        average: of the weights, if there is one.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        model: nn.Module,
        optimizer: Optimizer,
        generator: torch.Generator,
        data: Any,
        average: Average | None = None,
    ) -> None:
        self.config, self.engine, self.model, self.optimizer = config, engine, model, optimizer
        self.generator, self.data, self.average = generator, data, average
        self.position = torch.zeros((), dtype=torch.int64, device=engine.device)
        self._annealed = [m for m in model.modules() if isinstance(m, Cell) and type(m).at_step is not Cell.at_step]
        self.sums: dict[str, Tensor] = {}
        self.carried: Any = None
        self.shape: Hashable = None
        """Key of the shapes of the next step."""

    def prepare(self, step: int) -> None:
        """Prepare the step that follows ``step`` finished ones, on the host."""
        task = self.config.task
        self.shape = task.plan(self.config.batch_size, step, self.data)
        if task.carries_state and task.starts_over(step):
            self._forget()
        for cell in self._annealed:
            cell.at_step(step)

    def run(self) -> None:
        """Do one step."""
        task, engine = self.config.task, self.engine
        batch = task.train_batch(self.config.batch_size, self.generator, self.position, self.data)
        if engine.world_size > 1:  # every process makes the whole batch: the data do not depend on their number
            batch = batch.rows(*engine.share(self.config.batch_size))
        if task.carries_state:
            logits, carried = self.model(batch.x, batch.lengths, self.carried)
        else:
            logits, carried = self.model(batch.x, batch.lengths), None
        loss = task.loss(logits, batch)
        self.optimizer.zero_grad()
        engine.fabric.backward(loss)
        if self.config.optimizer.clip is not None:
            engine.clip(self.model, self.optimizer, self.config.optimizer.clip)
        self.optimizer.step()
        with torch.no_grad():
            for name, value in {"loss": loss, **task.metrics(logits.detach(), batch)}.items():
                if name not in self.sums:
                    self.sums[name] = torch.zeros((), device=engine.device)
                self.sums[name].add_(value.detach())
            # after the backward, which reads the state that the step began with
            self.carried = detached_copy(carried) if self.carried is None else copy_into(self.carried, carried)
            if self.average is not None:
                self.average.update(self.position)
            self.position.add_(1)

    def _forget(self) -> None:
        """Replace the carried state by the initial one."""
        initial = initial_state(self.model)
        if self.carried is None or initial is None:
            self.carried = None
            return
        start, stop = self.engine.share(self.config.batch_size)
        dtype = next(self.model.parameters()).dtype
        with torch.no_grad():
            copy_into(self.carried, initial(stop - start, self.engine.device, dtype))


def initial_state(model: nn.Module) -> Any:
    """Find the method ``initial_state`` of a wrapped model; None if it has none."""
    while not hasattr(type(model), "initial_state") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return getattr(model, "initial_state", None) if hasattr(type(model), "initial_state") else None


WARM_UP = 3  # steps before recording; they are real ones, so that kernels are tuned and the optimizer has its state


def graph_obstacle(step: TrainStep) -> str | None:
    """Reason why a step cannot be recorded; None if no restriction is known."""
    config, engine = step.config, step.engine
    if engine.device.type != "cuda":
        return "the run is on " + engine.device.type
    if engine.world_size > 1:
        return "several processes train together"
    if config.precision == "16-mixed":
        return "precision 16-mixed reads the loss scale on the host; bf16-mixed does not"
    if not config.task.capturable:
        return f"the batches of {type(config.task).__name__} differ in shape or need the host"
    if config.task.carries_state and initial_state(step.model) is None:
        return f"{type(config.task).__name__} carries state, and the model has no initial_state to reset it to"
    return None


class GraphStep:
    """Runs ``step`` eagerly three times, captures it, and replays the graph from then on; one graph for each shape.

    All that a step reads or changes keeps its place in memory: parameters, optimizer state, the learning rate (a
    tensor), the position in the data, the sums, the carried state, and the state of the data's generator, registered
    with the graph. The graphs share one pool of memory: a step leaves nothing in it that the next one needs.

    Args:
        step: what to capture; its optimizer must be capturable.
        report: called with the reason if capturing fails; the steps then run eagerly.
    """

    def __init__(self, step: TrainStep, report: Callable[[str], None]) -> None:
        self._step, self._report = step, report
        self._stream = torch.cuda.Stream(step.engine.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._met: set[Hashable] = set()
        """Shapes that ran eagerly, so that their kernels are compiled: that may not happen while capturing."""
        self._done = 0
        self._failed = False

    def run(self) -> None:
        """Do one step."""
        shape = self._step.shape
        if shape not in self._graphs and not self._failed and self._done >= WARM_UP and shape in self._met:
            self._capture(shape)
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            self._eager()
            self._met.add(shape)
        self._done += 1

    def _eager(self) -> None:
        current = torch.cuda.current_stream(self._step.engine.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # the stream of the capture: autograd remembers where a weight was used
            self._step.run()
        current.wait_stream(self._stream)

    def _capture(self, shape: Hashable) -> None:
        step, device = self._step, self._step.engine.device
        generators = (step.generator, torch.cuda.default_generators[torch.cuda.current_device()])
        states = [generator.get_state() for generator in generators]
        current = torch.cuda.current_stream(device)
        step.optimizer.zero_grad(set_to_none=True)  # so that the gradients come to lie in the graph's own memory
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(step.generator)
        torch.cuda.synchronize(device)
        try:
            with recording(graph, self._pool, self._stream):
                step.run()
        except Exception as error:  # whatever a layer does that cannot be captured; nothing of the step was done
            self._failed = True
            torch.cuda.set_stream(current)  # a capture that breaks off does not leave its stream
            step.optimizer.zero_grad(set_to_none=True)
            for generator, state in zip(generators, states, strict=True):  # they are still in capture mode
                fresh = torch.Generator(device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh.graphsafe_get_state())
            self._report(f"no CUDA graph, steps run one kernel at a time: {str(error).splitlines()[0]}")
        else:
            self._graphs[shape] = graph


def build(config: TrainConfig) -> nn.Module:
    """Build the model of a config; settings that it refuses raise a ConfigError."""
    try:
        return build_model(config.model, config.task)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


TOO_LARGE = re.compile(
    r"can't allocate memory|out of memory|not enough memory|bad_alloc|[Oo]verflow|out of range of int64"
    r"|exceeds? the maximum|too many elements"
)
"""Messages of torch for sizes that it cannot allocate or count."""
NO_NUMBER = "without overflow"
"""Message of torch for a learning rate beyond the largest number of its type."""
ADVICE = "Choose smaller sizes: --batch_size, --model.hidden_size, or those of the task."


@contextmanager
def within_memory() -> Iterator[None]:
    """Report sizes that cannot be allocated, and rates beyond the largest number, as errors that a user can fix."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as error:
        if isinstance(error, RunError):
            raise
        if NO_NUMBER in str(error):
            raise DivergedError(
                "a rate of the optimizer is too large for a float; try a lower --optimizer.lr."
            ) from error
        if isinstance(error, RuntimeError) and not TOO_LARGE.search(str(error)):
            raise
        reason = (str(error).splitlines() or ["none is left"])[0]
        raise RunError(f"the run does not fit into memory: {reason:.200}. {ADVICE}") from error


def check_model(config: TrainConfig, model: nn.Module, engine: Engine) -> None:
    """Refuse a model that cannot read one example of its task."""
    row = next(iter(config.task.validation(config.seed))).rows(0, 1)
    inputs = (row.x, row.lengths, None) if config.task.carries_state else (row.x, row.lengths)
    training = model.training
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), engine.fabric.autocast():
            model.eval()(*inputs)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"the model does not fit its task: {error}") from error
    finally:
        model.train(training)


def seed_process(seed: int, rank: int) -> None:
    """Seed torch, Python and (where it is in use) numpy; processes differ, so that their dropout masks do."""
    mixed = (seed * 1_000_003 + rank * 7_919 + 1) % 2**31
    torch.manual_seed(mixed)
    random.seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed)


class Trained(NamedTuple):
    """The parts of a run that a checkpoint fills."""

    config: TrainConfig
    engine: Engine
    module: nn.Module
    """The model that is trained."""
    scored: nn.Module
    """The model that is validated and kept; the same, or its average."""
    optimizer: Optimizer
    step: TrainStep
    graph: bool
    """Whether a step is to be captured in a CUDA graph."""


def assemble(config: TrainConfig, engine: Engine, given: nn.Module | None = None) -> Trained:
    """Build model, optimizer and step of a config on the engine's device; nothing is written.

    Args:
        config: the run.
        engine: its processes.
        given: a model of the caller's own instead of the config's.
    """
    torch.manual_seed(config.seed)  # every process starts from the same weights
    module = engine.place(build(config) if given is None else given)
    graph = config.graph and engine.device.type == "cuda" and engine.world_size == 1
    if given is None and engine.device.type == "cpu":  # elsewhere kernels would be compiled for that one row
        check_model(config, module, engine)
    if config.compile and not compile_steps(module):
        raise ConfigError(
            f"compile=true, but the layer {config.model.layer!r} has no steps to compile; leave compile out."
        )
    model = engine.fabric.setup_module(module)
    optimizer = build_optimizer(config.optimizer, module, graph, engine.device)
    prepared: Any = engine.fabric.setup_optimizers(optimizer)
    generator = torch.Generator(engine.device).manual_seed(config.seed)
    seed_process(config.seed, engine.rank)
    data = config.task.setup(engine.device, config.seed)
    average = None if config.average is None else Average(module, config.average)
    step = TrainStep(config, engine, model, prepared, generator, data, average)
    return Trained(config, engine, module, module if average is None else average.model, optimizer, step, graph)
