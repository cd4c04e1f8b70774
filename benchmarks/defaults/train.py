"""One job: a task, a model variant, a seed and a factor on the task's rate."""

import math
import time

import torch
import torch.nn.functional as F
from torch import nn

from rum_proto import build
import unseen  # noqa: F401
from tasks import TASKS, corpus, gen, window_batch
from variants import VARIANTS


class Model(nn.Module):
    def __init__(self, task, variant):
        super().__init__()
        symbols = corpus(task.corpus)[2] if task.corpus else task.symbols
        out = symbols if task.corpus else task.out
        I = task.embed if symbols else task.I
        self.embed = nn.Embedding(symbols, I) if symbols else nn.Identity()
        shape = dict(num_layers=task.layers, dropout=task.drop if task.layers > 1 else 0.0, bidirectional=task.bi)
        if variant in ("gru", "lstm"):
            self.layer = {"gru": nn.GRU, "lstm": nn.LSTM}[variant](I, task.H, **shape)
        elif variant == "rum":  # the library's default
            from torchrum import RUM

            self.layer = RUM(I, task.H, **shape)
        else:
            self.layer = build(I, task.H, **shape, **VARIANTS[variant])
        self.readout = nn.Linear(self.layer.hidden_size * (1 + task.bi), out)
        self.task = task
        if task.corpus in ("words", "prose-words"):
            nn.init.uniform_(self.embed.weight, -0.1, 0.1)  # as the well-known example does

    def forward(self, x, state=None):
        task = self.task
        x = self.embed(x)
        if task.drop:
            x = F.dropout(x, task.drop, self.training) if self.embed.__class__ is nn.Embedding else x
        out, state = self.layer(x, state)
        if not task.every:
            out = out[-1]
        elif task.drop and self.training:
            out = F.dropout(out, task.drop)
        return self.readout(out), state


def detached(state):
    if state is None or torch.is_tensor(state):
        return state if state is None else state.detach()
    return type(state)(detached(s) for s in state)


def loss_of(task, answer, y):
    if task.measure == "rmse":
        return F.mse_loss(answer, y)
    return F.cross_entropy(answer.flatten(0, -2), y.flatten(), ignore_index=-1)


@torch.no_grad()
def score(task, model, test):
    model.eval()
    x, y = test
    answer, _ = model(x)
    model.train()
    if task.measure == "rmse":
        return (F.mse_loss(answer, y) / y.var()).sqrt().item()
    if task.measure == "nats":
        return loss_of(task, answer, y).item()
    asked = y >= 0
    return (answer.argmax(-1) != y)[asked].float().mean().item()


def data(task):
    """A function step, generator -> batch; and the test batch."""
    if task.corpus:
        train, test, _ = corpus(task.corpus)
        T, B = task.T, task.B
        lane = test[: len(test) // 8 * 8].view(8, -1).t()
        held = lane[:-1], lane[1:]
        if task.carried:
            lanes = train[: len(train) // B * B].view(B, -1).t()
            per = (len(lanes) - 1) // T

            def draw(step, g):
                a = step % per * T
                return lanes[a : a + T], lanes[a + 1 : a + T + 1]
        else:
            def draw(step, g):
                return window_batch(train, g, B, T)
            n = len(test) // (T + 1)
            piece = test[: n * (T + 1)].view(n, T + 1).t()
            held = piece[:-1], piece[1:]
        return draw, held
    return (lambda step, g: task.draw(g, task.B, False)), task.draw(gen(5), 500, True)


def optimizer_of(task, model, lr):
    p = model.parameters()
    if task.opt == "sgd":
        return torch.optim.SGD(p, lr=lr, momentum=task.momentum)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}[task.opt](p, lr=lr, weight_decay=task.wd)


def bf16(t):
    return t.bfloat16().float() if t.is_floating_point() else t


def run_job(name, variant, seed, factor=1.0, share=1.0):
    task = TASKS[name]
    torch.manual_seed(seed)
    model = Model(task, variant)
    params = list(model.parameters())
    opt = optimizer_of(task, model, task.lr * factor)
    draw, test = data(task)
    g, state, steps = gen(1000 + seed), None, max(1, int(task.steps * share))
    start, failed, wall = time.process_time(), False, time.time()
    total, recent = 0.0, []
    for step in range(steps):
        if task.cosine:
            opt.param_groups[0]["lr"] = task.lr * factor * 0.5 * (1 + math.cos(math.pi * step / steps))
        x, y = draw(step, g)
        if task.bf16:  # float32 master weights, every product with weights and inputs rounded to bfloat16
            masters = [p.data.clone() for p in params]
            for p in params:
                p.data = bf16(p.data)
            x = bf16(x)
        answer, state = model(x, state if task.carried else None)
        state = detached(state) if task.carried else None
        loss = loss_of(task, answer, y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, task.clip).item()
        if task.bf16:
            for p, m in zip(params, masters):
                p.data = m
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            failed = True
            break
        recent.append(value)
        opt.step()
    if task.bf16:
        for p in params:
            p.data = bf16(p.data)
        test = bf16(test[0]), test[1]
    result = float("inf") if failed else score(task, model, test)
    if not math.isfinite(result):
        result = float("inf")
    tail = recent[-20:]
    return {"score": result, "train": sum(tail) / max(len(tail), 1), "seconds": round(time.process_time() - start, 2),
            "wall": round(time.time() - wall, 2), "params": sum(p.numel() for p in model.layer.parameters()),
            "hidden": model.layer.hidden_size}
