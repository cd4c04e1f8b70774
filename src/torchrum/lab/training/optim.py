"""Optimizers and the learning rate over the steps."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrum.lab.training.config import DECAYS, OptimizerConfig, milestones, plateau, rate_factors
from torchrum.lab.training.errors import ConfigError


def schedule_factor(schedule: str, warmup: int, step: int, steps: int) -> float:
    """What lr is multiplied by in the step that follows ``step`` finished ones, of ``steps`` in all.

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
