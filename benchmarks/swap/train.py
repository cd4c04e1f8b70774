"""One job: a task, a layer, a seed; trained as users of ``nn.GRU`` do, scored on examples that were held out."""

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swap.models import Layer, SwapModel
from swap.tasks import Batch, SwapTask

RATE, CLIP = 1e-3, 1.0
CHECKS = 4
"""Scores on the held-out examples in the course of a run; the last is the result."""


def loss_of(task: SwapTask, answers: Tensor, y: Tensor) -> Tensor:
    if task.measure == "error":
        return F.mse_loss(answers, y)
    return F.cross_entropy(answers.flatten(0, -2), y.flatten(), ignore_index=-1)


@torch.no_grad()
def score(task: SwapTask, model: SwapModel, batch: Batch) -> tuple[float, float]:
    """The task's measure on these examples, and the mean norm of the last state."""
    answers, _, outputs = model(batch.x)
    norm = outputs[-1].norm(dim=-1).mean().item()
    if task.measure == "error":
        return (F.mse_loss(answers, batch.y) / batch.y.var()).item(), norm
    if task.measure == "bits":
        return loss_of(task, answers, batch.y).item() / math.log(2), norm
    asked = batch.y >= 0
    return (answers.argmax(-1) == batch.y)[asked].float().mean().item(), norm


def detached(state: Any) -> Any:
    return tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()


def run_job(task: SwapTask, layer: Layer, seed: int) -> dict[str, Any]:
    """Train and score; a loss or a gradient that is not finite ends the run as diverged."""
    torch.manual_seed(seed)
    model = SwapModel(task, layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(seed + 1000)
    held_out, state = task.held_out(), None
    scores, norms, gradients, losses = [], [], [], []
    start, diverged, h_train = time.process_time(), False, 0.0  # of this process: others may be at work beside it
    every = max(task.updates // CHECKS, 1)
    for step in range(task.updates):
        batch = task.train(step, generator)
        answers, state, outputs = model(batch.x, state if task.carries_state else None)
        state = detached(state)
        loss = loss_of(task, answers, batch.y)
        optimizer.zero_grad()
        loss.backward()
        gradient = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        losses.append(loss.item())
        gradients.append(gradient)
        if not (math.isfinite(losses[-1]) and math.isfinite(gradient)):
            diverged = True
            break
        optimizer.step()
        if (step + 1) % every == 0:
            value, norm = score(task, model, held_out)
            scores.append(value)
            norms.append(norm)
            h_train = outputs[-1].detach().norm(dim=-1).mean().item()
    tail = losses[-50:]
    return {
        "score": scores[-1] if scores and not diverged else None,
        "scores": scores,
        "diverged": diverged,
        "train_loss": sum(tail) / len(tail),
        "h_norms": norms,
        "h_norm_train": h_train,
        "grad_first": gradients[0],
        "grad_median": sorted(gradients)[len(gradients) // 2],
        "grad_max": max(gradients),
        "parameters": sum(part.numel() for part in model.layer.parameters()),
        "seconds": round(time.process_time() - start, 1),
    }
