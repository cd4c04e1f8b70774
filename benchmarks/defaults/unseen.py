"""Twelve more tasks, written after the third round had been planned and before any of its results were looked at: its judges."""

import functools
import math

import torch

import fresh
import tasks
from tasks import Task, plain, rand, randn


def shifts(g, B):
    """A level that jumps now and then, in noise as large as the jumps; the level without the noise, at every step."""
    T = 60
    level = torch.where(rand(g, T, B) < 0.06, 1.0, 0.0).cumsum(0).long()
    s = (3 * randn(g, 40, B)).gather(0, level.clamp(max=39))
    return (s + 1.5 * randn(g, T, B))[..., None], s[..., None]


def demand(g, B):
    """Growth times a season of 7, positive and not scaled (5 to 400); four steps ahead, over 100."""
    T, ahead = 49, 4
    t = torch.arange(T + ahead).float()[:, None]
    s = (40 + 60 * rand(g, 1, B)) * (1 + (0.03 * rand(g, 1, B)) * t) * (1 + 0.5 * torch.sin(2 * math.pi * (t / 7 + rand(g, 1, B))))
    return (s[:T] * (1 + 0.05 * randn(g, T, B)))[..., None], s[ahead:, :, None] / 100


def chirp(g, B):
    """A sine whose frequency drifts; three steps ahead."""
    T, ahead = 56, 3
    t = torch.arange(T + ahead).float()[:, None]
    s = torch.sin(2 * math.pi * (rand(g, 1, B) + t * (0.04 + 0.06 * rand(g, 1, B)) + t * t * 0.001 * rand(g, 1, B)))
    return (s[:T] + 0.1 * randn(g, T, B))[..., None], s[ahead:, :, None]


def heading(g, B):
    """Dead reckoning: from speed and turning rate, the position at every step."""
    T = 40
    speed, turn = 0.5 + 0.5 * rand(g, T, B), 0.4 * randn(g, T, B)
    angle = turn.cumsum(0)
    position = torch.stack((speed * angle.cos(), speed * angle.sin()), -1).cumsum(0)
    return torch.stack((speed, turn), -1), position[..., :1] / 5


def balance(g, B):
    """Deposits and withdrawals of two accounts in one stream of (account 1, account 2, ignored) amounts; their difference."""
    T = 45
    which = torch.nn.functional.one_hot(torch.randint(3, (T, B), generator=g), 3).float()
    amount = randn(g, T, B)
    total = (amount[..., None] * which).cumsum(0)
    return torch.cat((amount[..., None], which), -1), (total[..., :1] - total[..., 1:2]) / 3


def first(g, B):
    """Name the first symbol after 60 others."""
    x = torch.randint(6, (61, B), generator=g)
    return x, x[0]


def echo(g, B):
    """Every symbol again, six steps later."""
    x = torch.randint(5, (40, B), generator=g)
    y = torch.full_like(x, -1)
    y[6:] = x[:-6]
    return x, y


def modsum(g, B):
    """The sum of the digits so far, modulo 4, where a reset symbol starts again from zero."""
    x = torch.where(rand(g, 30, B) < 0.15, 4, torch.randint(4, (30, B), generator=g))
    s, ys = torch.zeros(B, dtype=torch.long), []
    for row in x:
        s = torch.where(row == 4, 0, (s + row) % 4)
        ys.append(s)
    return x, torch.stack(ys)


def balanced(g, B):
    """Whether a string of brackets ever closes more than was open, and ends at depth zero: three classes."""
    T = 30
    step = torch.where(rand(g, T, B) < 0.52, 1, -1)
    depth = step.cumsum(0)
    return (step > 0).long(), torch.where(depth.min(0).values < 0, 0, torch.where(depth[-1] == 0, 1, 2))


def accents(g, B):
    """Tag each of 25 words by the words on both sides: a name if the word before is a title or the one behind a verb of saying."""
    T = 25
    x = torch.randint(8, 48, (T, B), generator=g)
    x = torch.where(rand(g, T, B) < 0.25, torch.randint(0, 8, (T, B), generator=g), x)
    title, says = x < 4, (x >= 4) & (x < 8)
    y = torch.zeros_like(x)
    y[1:] = torch.where(title[:-1] & (x[1:] >= 8), 1, y[1:])
    y[:-1] = torch.where(says[1:] & (x[:-1] >= 8), y[:-1] + 2, y[:-1])
    return x, y


@functools.cache
def bigrams():
    """The prose as pairs of letters, a vocabulary of 300."""
    text, freq = fresh.prose()[:300_000], {}
    pairs = [text[i : i + 2] for i in range(0, len(text) - 1, 2)]
    for p in pairs:
        freq[p] = freq.get(p, 0) + 1
    known = {p: i + 1 for i, (p, _) in enumerate(sorted(freq.items(), key=lambda kv: (-kv[1], kv[0]))[:299])}
    return torch.tensor([known.get(p, 0) for p in pairs]), 300


UNSEEN_TASKS = {
    "shifts": Task(plain(shifts), "rmse", H=32, steps=500, lr=2e-3),
    "demand": Task(plain(demand), "rmse", H=48, steps=700, lr=1e-3),
    "chirp": Task(plain(chirp), "rmse", H=48, layers=2, steps=400, opt="adamw", wd=0.01, lr=2e-3),
    "heading": Task(plain(heading), "rmse", I=2, H=64, steps=700, lr=1e-3),
    "balance": Task(plain(balance), "rmse", I=4, H=32, steps=600, opt="sgd", lr=0.05),
    "first": Task(plain(first), "error", symbols=6, out=6, H=48, steps=600, every=False, embed=16, lr=2e-3),
    "echo": Task(plain(echo), "error", symbols=5, out=5, H=48, steps=500, embed=16, lr=1e-3),
    "modsum": Task(plain(modsum), "error", symbols=5, out=4, H=48, steps=700, embed=16, lr=2e-3),
    "balanced": Task(plain(balanced), "error", symbols=2, out=3, H=32, steps=600, every=False, embed=8, opt="rmsprop", lr=1e-3),
    "accents": Task(plain(accents), "error", symbols=48, out=4, H=32, bi=True, layers=2, drop=0.1, steps=300, lr=2e-3),
    "pairs-sgd": Task(None, "nats", corpus="prose-pairs", H=96, embed=64, B=20, T=35, steps=500, opt="sgd", momentum=0.0, lr=20.0,
                      clip=0.25, carried=True),
    "pairs-adamw": Task(None, "nats", corpus="prose-pairs", H=96, embed=64, layers=2, drop=0.2, B=32, T=40, steps=500, opt="adamw",
                        wd=0.01, lr=2e-3),
}
tasks.TASKS.update(UNSEEN_TASKS)
_corpus = tasks.corpus


@functools.cache
def corpus(name):
    if name != "prose-pairs":
        return _corpus(name)
    codes, size = bigrams()
    cut = len(codes) - len(codes) // 10
    return codes[:cut], codes[cut:], size


tasks.corpus = corpus
