"""Twelve more tasks, written before any variant was run on them: they judge what CHOOSE and JUDGE have chosen."""

import functools
import math
import os

import torch

import tasks
from tasks import Task, gen, plain, rand, randn


def grow(g, B, test=False):
    """A level, a slope and a season; three steps ahead. The test series go twice as far from zero as those of training."""
    T, ahead = 36, 3
    t = torch.arange(T + ahead).float()[:, None] / 12
    s = (2 if test else 1) * (randn(g, 1, B) + 0.7 * randn(g, 1, B) * t) + 0.5 * torch.sin(2 * math.pi * (t + rand(g, 1, B)))
    return (s[:T] + 0.1 * randn(g, T, B))[..., None], s[ahead:, :, None]


def traffic(g, B):
    """Counts with a day of 24 hours and a burst now and then, in the hundreds; the next hour over 100."""
    T = 72
    t = torch.arange(T + 1).float()[:, None]
    s = 200 + 150 * torch.sin(2 * math.pi * (t + 24 * rand(g, 1, B)) / 24) * (0.5 + rand(g, 1, B))
    burst = (rand(g, T + 1, B) < 0.04).float()
    for k in range(1, T + 1):
        burst[k] = torch.maximum(burst[k], 0.8 * burst[k - 1])
    s = s + 120 * burst + 10 * randn(g, T + 1, B)
    return s[:T, :, None], s[1:, :, None] / 100


def pendulum(g, B):
    """A driven, damped pendulum: the force and a noisy angle are seen; the speed is asked at every step."""
    T, q, v = 60, math.pi * (2 * rand(g, B) - 1), randn(g, B)
    force = (2 * rand(g, T, B) - 1) * (rand(g, T, B) < 0.3) * 4
    xs, ys = [], []
    for k in range(T):
        v = v + 0.1 * (-4 * torch.sin(q) - 0.3 * v + force[k])
        q = q + 0.1 * v
        xs.append(torch.stack((force[k], torch.sin(q) + 0.2 * randn(g, B)), -1))
        ys.append(v[:, None])
    return torch.stack(xs), torch.stack(ys)


def frequency(g, B):
    """The frequency of a noisy sine of unknown height, told at the end."""
    T = 64
    f = 0.02 + 0.2 * rand(g, B)
    t = torch.arange(T).float()[:, None]
    x = (0.3 + 2 * rand(g, 1, B)) * torch.sin(2 * math.pi * (f * t + rand(g, 1, B))) + 0.3 * randn(g, T, B)
    return x[..., None], 10 * f[:, None]


def parity(g, B):
    x = torch.randint(2, (24, B), generator=g)
    return x, x.cumsum(0) % 2


def majority(g, B):
    """Which of five letters is most frequent, told at the end; one letter is preferred."""
    best = torch.randint(5, (B,), generator=g)
    x = torch.where(rand(g, 40, B) < 0.15, best, torch.randint(5, (40, B), generator=g))
    counts = torch.nn.functional.one_hot(x, 5).sum(0).float()
    return x, (counts + 0.01 * rand(g, B, 5)).argmax(-1)


def opinion(g, B):
    """Good and bad words among others; "not" turns the next three words over. The sign of the sum, at the end."""
    T = 30
    x = torch.randint(12, 40, (T, B), generator=g)
    kind = rand(g, T, B)
    x = torch.where(kind < 0.2, torch.randint(0, 5, (T, B), generator=g), x)
    x = torch.where((kind >= 0.2) & (kind < 0.4), torch.randint(5, 10, (T, B), generator=g), x)
    x = torch.where((kind >= 0.4) & (kind < 0.48), 10, x)
    value = (x < 5).float() - ((x >= 5) & (x < 10)).float()
    turned = torch.zeros(T, B, dtype=torch.bool)
    for k in (1, 2, 3):
        turned[k:] ^= x[:-k] == 10
    total = torch.where(turned, -value, value).sum(0)
    return x, (total > 0).long() + (total >= 0).long()


def flipflop(g, B):
    """write, read or ignore, then a bit: a read must tell the bit of the last write."""
    n, held, xs, ys = 16, torch.zeros(B, dtype=torch.long), [], []
    for k in range(n):
        op = torch.where(rand(g, B) < 0.2, 0, torch.where(rand(g, B) < 0.2, 1, 2)) if k else torch.zeros(B, dtype=torch.long)
        bit = torch.randint(2, (B,), generator=g)
        held = torch.where(op == 0, bit, held)
        xs += [op, 3 + torch.where(op == 1, held, bit)]
        ys += [torch.where(op == 1, held, -1), torch.full((B,), -1)]
    return torch.stack(xs), torch.stack(ys)


def gestures(g, B):
    """Six kinds of paths in the plane, of unequal length and speed and turned at random a little; padded with zeros."""
    T, y = 48, torch.randint(6, (B,), generator=g)
    length = torch.randint(24, 49, (B,), generator=g)
    t = torch.arange(T).float()[:, None] / length
    a = 2 * math.pi * t
    paths = torch.stack((torch.stack((a.cos(), a.sin())), torch.stack((a.cos(), -a.sin())), torch.stack(((2 * a).sin(), a.sin())),
                         torch.stack((2 * t - 1, (2 * a).sin())), torch.stack((2 * t - 1, 1 - 2 * (2 * t - 1).abs())),
                         torch.stack((t * (3 * math.pi * t).cos(), t * (3 * math.pi * t).sin()))))
    p = paths[y, :, :, torch.arange(B)].permute(2, 0, 1)
    turn = 0.5 * randn(g, B)
    x, v = p.unbind(-1)
    p = torch.stack((x * turn.cos() - v * turn.sin(), x * turn.sin() + v * turn.cos()), -1) + 0.25 * randn(g, T, B, 2)
    return p * (t <= 1)[..., None], y


@functools.cache
def prose():
    return open(os.environ["PROSE"]).read()  # the path of Penn Treebank's valid.txt


def _prose_chars():
    text = prose()
    code = {c: i for i, c in enumerate(sorted(set(text)))}
    return torch.tensor([code[c] for c in text]), len(code)


def _prose_words():
    text, freq = prose().split(), {}
    for w in text:
        freq[w] = freq.get(w, 0) + 1
    known = {w: i + 1 for i, (w, _) in enumerate(sorted(freq.items(), key=lambda kv: (-kv[1], kv[0]))[:1999])}
    return torch.tensor([known.get(w, 0) for w in text]), 2000


FRESH_TASKS = {
    "grow": Task(lambda g, B, test: grow(g, B, test), "rmse", H=48, steps=800, lr=2e-3),
    "traffic": Task(plain(traffic), "rmse", H=32, steps=500, lr=1e-3),
    "pendulum": Task(plain(pendulum), "rmse", I=2, H=48, layers=2, steps=400, opt="adamw", wd=0.01, lr=2e-3),
    "frequency": Task(plain(frequency), "rmse", H=48, steps=600, every=False, opt="rmsprop", lr=1e-3),
    "parity": Task(plain(parity), "error", symbols=2, out=2, H=32, steps=800, embed=8, lr=3e-3),
    "majority": Task(plain(majority), "error", symbols=5, out=5, H=48, steps=500, every=False, embed=16, opt="sgd", lr=0.2),
    "opinion": Task(plain(opinion), "error", symbols=40, out=3, H=48, steps=800, every=False, bi=True, lr=2e-3),
    "flipflop": Task(plain(flipflop), "error", symbols=5, out=2, H=32, steps=500, embed=16, lr=2e-3),
    "gestures": Task(plain(gestures), "error", I=2, out=6, H=48, steps=600, every=False, lr=1e-3),
    "prose-chars": Task(None, "nats", corpus="prose-chars", H=128, B=32, T=60, steps=400, lr=2e-3, carried=True),
    "prose-words": Task(None, "nats", corpus="prose-words", H=96, embed=96, layers=2, drop=0.2, B=20, T=35, steps=500, opt="sgd",
                        momentum=0.0, lr=20.0, clip=0.25, carried=True),
    "prose-long": Task(None, "nats", corpus="prose-chars", H=64, B=32, T=50, steps=3000, lr=2e-3, cosine=True),
}
tasks.TASKS.update(FRESH_TASKS)
_corpus = tasks.corpus


@functools.cache
def corpus(name):
    if not name.startswith("prose"):
        return _corpus(name)
    codes, size = {"prose-chars": _prose_chars, "prose-words": _prose_words}[name]()
    cut = len(codes) - len(codes) // 10
    return codes[:cut], codes[cut:], size


tasks.corpus = corpus
