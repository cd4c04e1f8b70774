"""Thirty small tasks, in pairs of one kind; a coin that was flipped before any RUM was run sends one of each pair to CHOOSE, the
other to JUDGE. Every score is an error: lower is better. Optimizer, rate and steps are those that people publish for a GRU."""

import functools
import math
import os
import random
import sys

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "swap"))
from digits import draw_digits  # noqa: E402


def gen(seed):
    return torch.Generator().manual_seed(seed)


def rand(g, *shape):
    return torch.rand(*shape, generator=g)


def randn(g, *shape):
    return torch.randn(*shape, generator=g)


# ---- numeric series: (x (T, B, I), y) --------------------------------------------------------------------------------
def trend(g, B):
    """A level, a slope, a season of 12 and noise; five steps ahead, values up to 20 (slopes extrapolate)."""
    T, ahead = 40, 5
    t = torch.arange(T + ahead).float()[:, None]
    s = randn(g, 1, B) * 2 + 0.15 * randn(g, 1, B) * t + rand(g, 1, B) * torch.sin(2 * math.pi * (t / 12 + rand(g, 1, B)))
    x = s[:T] + 0.2 * randn(g, T, B)
    return x[..., None], s[ahead:, :, None]


def drift(g, B):
    """Random walks with drift, not scaled (steps of 3, drift up to 2); the value one step ahead of a smoothed walk."""
    T = 50
    steps = 3 * randn(g, T + 1, B) + 2 * (2 * rand(g, 1, B) - 1)
    for t in range(1, T + 1):
        steps[t] = 0.7 * steps[t - 1] + 0.3 * steps[t]
    walk = steps.cumsum(0)
    return walk[:T, :, None], walk[1:, :, None] / 10


def season(g, B):
    """A season of 12 with its own shape per series, and noise; the value 12 steps later, asked at every step after 24."""
    T = 48
    shape = randn(g, 12, B)
    s = shape.repeat(6, 1)[: T + 12]
    x = s[:T] + 0.3 * randn(g, T, B)
    return x[24 - 24 :, :, None], s[12 : T + 12, :, None]


def twoseason(g, B):
    """Two periods whose heights change slowly; one step ahead at every step."""
    T = 60
    t = torch.arange(T + 1).float()[:, None]
    a = torch.sin(2 * math.pi * (t / 7 + rand(g, 1, B))) * (1 + 0.5 * torch.sin(2 * math.pi * (t / 80 + rand(g, 1, B))))
    b = torch.sin(2 * math.pi * (t / 24 + rand(g, 1, B))) * (0.5 + rand(g, 1, B))
    s = a + b
    return (s[:T] + 0.1 * randn(g, T, B))[..., None], s[1:, :, None]


def rawar(g, B):
    """AR(2) processes of their own coefficients times 50, plus 100: nobody scaled them. One step ahead, target scaled."""
    T = 60
    rho, th = 0.8 + 0.19 * rand(g, B), math.pi * rand(g, B)
    a1, a2 = 2 * rho * torch.cos(th), -rho * rho
    s, prev, prev2 = [], randn(g, B), randn(g, B)
    scale = (1 - rho).sqrt()
    for _ in range(T + 1):
        new = a1 * prev + a2 * prev2 + scale * randn(g, B)
        s.append(new)
        prev, prev2 = new, prev
    s = torch.stack(s)
    return (50 * s[:T] + 100)[..., None], s[1:, :, None]


def sensors(g, B):
    """Six channels of scales 0.01 to 30; a hidden smooth signal from all of them at every step."""
    T = 50
    w = gen(77)
    mixing = randn(w, 6, 2)
    scales = torch.tensor([0.01, 0.1, 1.0, 3.0, 10.0, 30.0])
    z = randn(g, T, B, 2)
    for t in range(1, T):
        z[t] = 0.9 * z[t - 1] + 0.44 * z[t]
    x = (z @ mixing.t() + 0.5 * randn(g, T, B, 6)) * scales
    y = (z[..., :1] * z[..., 1:]).clone()
    return x, y


def mackey(g, B):
    """Mackey-Glass, tau 17, six steps ahead at every step."""
    T, ahead, lag, skip = 60, 6, 17, 60
    x = torch.zeros(lag + skip + T + ahead, B)
    x[: lag + 1] = 0.5 + rand(g, 1, B) + 0.1 * randn(g, lag + 1, B)
    for t in range(lag, len(x) - 1):
        x[t + 1] = 0.9 * x[t] + 0.2 * x[t - lag] / (1 + x[t - lag].abs() ** 10)
    x = 4 * (x[-T - ahead :] - 0.9)
    return (x[:T] + 0.02 * randn(g, T, B))[..., None], x[ahead:, :, None]


def lorenz(g, B):
    """Lorenz's equations, raw coordinates over 8; four steps of 0.04 ahead."""
    T, ahead = 50, 4
    s = torch.stack((randn(g, B) * 8, randn(g, B) * 8, 25 + 8 * randn(g, B)))
    rows = []
    for k in range(4 * (T + ahead) + 200):
        x, y, z = s
        s = s + 0.01 * torch.stack((10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z))
        if k >= 200 and k % 4 == 0:
            rows.append(s)
    s = torch.stack(rows).transpose(1, 2) / 8
    return s[:T], s[ahead : T + ahead, :, :1]


def adding(g, B, T=50, product=False):
    v = rand(g, T, B)
    m = torch.zeros(T, B)
    for a in (0, T // 2):
        m.scatter_(0, a + torch.randint(T // 2, (1, B), generator=g), 1.0)
    x = torch.stack((v, m), -1)
    y = (v * m + (1 - m)).prod(0) if product else (v * m).sum(0)
    return x, y[:, None]


# ---- symbols ---------------------------------------------------------------------------------------------------------
def signed(g, B):
    """+1, -1 or 0 with drift; the running sum at every step, clipped to -6 .. 6."""
    T = 40
    p = rand(g, 1, B)
    s = torch.where(rand(g, T, B) < 0.3, 0, torch.where(rand(g, T, B) < 0.25 + 0.5 * p, 1, -1))
    return s + 1, s.cumsum(0).clamp(-6, 6) + 6


def parens(g, B):
    """Brackets of two kinds; depth at every step, 0 to 9, with letters between."""
    T, depth, xs, ys = 50, torch.zeros(B, dtype=torch.long), [], []
    for _ in range(T):
        r, kind = rand(g, B), torch.randint(2, (B,), generator=g)
        up, down = (r < 0.3) & (depth < 9), (r > 0.7) & (depth > 0)
        xs.append(torch.where(up, kind, torch.where(down, 2 + kind, 4 + torch.randint(6, (B,), generator=g))))
        depth = depth + up.long() - down.long()
        ys.append(depth)
    return torch.stack(xs), torch.stack(ys)


def lookup(g, B):
    keys = rand(g, 8, B).argsort(0)[:3]
    values = torch.randint(10, (3, B), generator=g)
    asked = torch.randint(3, (1, B), generator=g)
    told = torch.stack((keys + 10, values), 1).flatten(0, 1)
    return torch.cat((told, keys.gather(0, asked) + 10)), values.gather(0, asked)[0]


def copying(g, B):
    c = torch.randint(8, (5, B), generator=g)
    x = torch.full((40, B), 8)
    y = torch.full_like(x, -1)
    x[:5], x[-6], y[-5:] = c, 9, c
    return x, y


def automaton(g, B):
    """A fixed machine of 5 states and 4 symbols, one a reset; the state at every step."""
    table = torch.stack([gen_perm(i) for i in range(3)] + [torch.zeros(5, dtype=torch.long)])
    x = torch.where(rand(g, 40, B) < 0.1, 3, torch.randint(3, (40, B), generator=g))
    s, ys = torch.zeros(B, dtype=torch.long), []
    for row in x:
        s = table[row, s]
        ys.append(s)
    return x, torch.stack(ys)


def gen_perm(i):
    return torch.randperm(5, generator=gen(100 + i))


def waveclass(g, B):
    """Sine, square, saw, or triangle wave of random period on three noisy channels; told at the end."""
    T = 50
    t = torch.arange(T).float()[:, None]
    ph = (t / (6 + 10 * rand(g, 1, B)) + rand(g, 1, B)) % 1
    y = torch.randint(4, (B,), generator=g)
    kinds = torch.stack((torch.sin(2 * math.pi * ph), torch.sign(ph - 0.5), 2 * ph - 1, 4 * (ph - 0.5).abs() - 1))
    w = kinds.gather(0, y.view(1, 1, B).expand(1, T, B))[0]
    return w[..., None] * torch.tensor([1.0, -0.5, 0.3]) + 0.4 * randn(g, T, B, 3), y


def entities(g, B):
    """Tagging: a span opens after a trigger and its type is told by the word behind it; 5 tags."""
    T = 30
    x = torch.randint(10, 40, (T, B), generator=g)
    y = torch.zeros_like(x)
    for start in (2, 11, 20):
        a = start + torch.randint(3, (B,), generator=g)
        length = 1 + torch.randint(4, (B,), generator=g)
        trigger, kind = torch.randint(2, (B,), generator=g), torch.randint(2, (B,), generator=g)
        cols, here = torch.arange(B), rand(g, B) < 0.8
        x[a, cols] = torch.where(here, trigger, x[a, cols])
        x[a + length + 1, cols] = torch.where(here, 2 + kind, x[a + length + 1, cols])
        t = torch.arange(T)[:, None]
        inside = (t > a) & (t <= a + length) & here
        y = torch.where(inside, 1 + 2 * trigger + kind, y)
    return x, y


@functools.cache
def digits(n, seed):
    return draw_digits(n, gen(seed))


def digit_task(g, B, way, test):
    images, labels = digits(1000, 2) if test else digits(1500, 1)
    if not test:
        some = torch.randint(len(labels), (B,), generator=g)
        images, labels = images[some], labels[some]
    x = images.transpose(0, 1) if way == "row" else images.flatten(1).t().unsqueeze(-1)
    return (x[torch.randperm(64, generator=gen(3))] if way == "perm" else x), labels


@functools.cache
def chars():
    text = open(os.path.join(HERE, "..", "swap", "text.txt")).read()
    code = {c: i for i, c in enumerate(sorted(set(text)))}
    return torch.tensor([code[c] for c in text]), len(code), text


@functools.cache
def words():
    text = chars()[2].replace("\n", " <eos> ").split()
    freq = {}
    for w in text:
        freq[w] = freq.get(w, 0) + 1
    known = {w: i + 1 for i, (w, _) in enumerate(sorted(freq.items(), key=lambda kv: (-kv[1], kv[0]))[:999])}
    return torch.tensor([known.get(w, 0) for w in text]), 1000


@functools.cache
def synth():
    """A language of 200 words: 12 classes with a sparse bigram grammar, and a topic that lasts about 30 words."""
    g = gen(9)
    trans = (4 * randn(g, 12, 12)).softmax(1).cumsum(1)
    topics = (1.5 * randn(g, 4, 12, 16)).softmax(2).cumsum(2)
    u = rand(g, 40000, 3).tolist()
    trans, topics, out, c, k = trans.tolist(), topics.tolist(), [], 0, 0
    for a, b, d in u:
        if d < 1 / 30:
            k = int(d * 30 * 4) % 4
        c = next((i for i, v in enumerate(trans[c]) if a < v), 11)
        out.append(c * 16 + next((i for i, v in enumerate(topics[k][c]) if b < v), 15))
    return torch.tensor(out), 192


@functools.cache
def segmentation():
    text = chars()[2].replace("\n", " ")
    xs, ys = [], []
    for c in text:
        if c == " ":
            if ys:
                ys[-1] = 1
        elif c.isalpha():
            xs.append(ord(c) % 64)
            ys.append(0)
    return torch.tensor(xs), torch.tensor(ys)


def corpus(name):
    codes, size = {"chars": lambda: chars()[:2], "words": words, "synth": synth}[name]()
    cut = len(codes) - len(codes) // 10
    return codes[:cut], codes[cut:], size


def window_batch(codes, g, B, T):
    at = torch.randint(len(codes) - T - 1, (B,), generator=g) + torch.arange(T + 1)[:, None]
    return codes[at[:-1]], codes[at[1:]]


def seg_batch(g, B, test):
    x, y = segmentation()
    cut = len(x) * 9 // 10
    x, y = (x[cut:], y[cut:]) if test else (x[:cut], y[:cut])
    at = torch.randint(len(x) - 30, (B,), generator=g) + torch.arange(30)[:, None]
    return x[at], y[at]


class Task:
    """draw(g, B, test) -> x, y. measure: rmse over the target's std, error rate, or nats (nats: mean cross-entropy)."""

    def __init__(self, draw, measure, *, I=1, symbols=0, out=1, H=32, B=32, steps=400, every=True, layers=1, bi=False, drop=0.0,
                 opt="adam", lr=1e-3, wd=0.0, clip=1.0, momentum=0.9, embed=32, corpus=None, T=35, carried=False, bf16=False, cosine=False):
        self.__dict__.update(locals())


def plain(f, **kw):
    return lambda g, B, test: f(g, B, **kw)


def dig(way):
    return lambda g, B, test: digit_task(g, B, way, test)


PAIRS = {  # kind: two tasks; which of them chooses is decided below by a coin
    "trend": {"trend": Task(plain(trend), "rmse", H=48, steps=700, lr=1e-3),
              "drift": Task(plain(drift), "rmse", H=48, steps=600, lr=3e-3)},
    "season": {"season": Task(plain(season), "rmse", H=64, steps=600, lr=3e-3),
               "twoseason": Task(plain(twoseason), "rmse", H=32, steps=500, opt="sgd", lr=0.1)},
    "raw": {"rawar": Task(plain(rawar), "rmse", H=32, steps=500, lr=3e-3),
            "sensors": Task(plain(sensors), "rmse", I=6, H=48, steps=600, opt="adamw", wd=0.01, lr=1e-3)},
    "dynamics, stacked": {"mackey": Task(plain(mackey), "rmse", H=32, layers=3, steps=250, lr=1e-3),
                          "lorenz": Task(plain(lorenz), "rmse", I=3, H=32, layers=2, drop=0.1, steps=350, lr=3e-3)},
    "counting": {"signed": Task(plain(signed), "error", symbols=3, out=13, H=32, steps=700, embed=16),
                 "parens": Task(plain(parens), "error", symbols=10, out=10, H=32, steps=500, embed=16)},
    "words, SGD 20": {"words-sgd": Task(None, "nats", corpus="words", H=64, embed=64, layers=2, drop=0.2, B=20, T=35, steps=450,
                                        opt="sgd", momentum=0.0, lr=20.0, clip=0.25, carried=True),
                      "synth-sgd": Task(None, "nats", corpus="synth", H=64, embed=64, layers=1, B=20, T=35, steps=700,
                                        opt="sgd", momentum=0.0, lr=20.0, clip=0.25, carried=True)},
    "words, AdamW": {"words-adamw": Task(None, "nats", corpus="words", H=64, embed=64, B=20, T=35, steps=600, opt="adamw", wd=0.01,
                                         lr=2e-3, carried=True),
                     "synth-adamw": Task(None, "nats", corpus="synth", H=64, embed=32, layers=2, drop=0.2, B=20, T=35, steps=450,
                                         opt="adamw", wd=0.1, lr=3e-3)},
    "characters": {"chars": Task(None, "nats", corpus="chars", H=96, B=32, T=50, steps=400, lr=2e-3),
                   "chars-carried": Task(None, "nats", corpus="chars", H=64, layers=2, drop=0.2, B=16, T=50, steps=400, lr=2e-3,
                                         carried=True)},
    "digits, short": {"pixels": Task(dig("pixel"), "error", out=10, H=64, steps=500, every=False),
                      "permuted": Task(dig("perm"), "error", out=10, H=64, steps=500, every=False)},
    "digits, long": {"rows-long": Task(dig("row"), "error", I=8, out=10, H=64, steps=5000, every=False, lr=1e-3, cosine=True),
                     "pixels-long": Task(dig("pixel"), "error", out=10, H=48, steps=1500, every=False, lr=5e-3, cosine=True)},
    "adding": {"adding": Task(plain(adding), "rmse", I=2, H=64, steps=700, every=False),
               "product": Task(plain(adding, T=40, product=True), "rmse", I=2, H=48, steps=700, every=False, opt="rmsprop", lr=1e-3)},
    "recall": {"lookup": Task(plain(lookup), "error", symbols=18, out=10, H=64, steps=2500, every=False),
               "copying": Task(plain(copying), "error", symbols=10, out=8, H=64, steps=700, lr=2e-3)},
    "tagging, both ways": {"segment": Task(lambda g, B, test: seg_batch(g, B, test), "error", symbols=64, out=2, H=48, bi=True, steps=500,
                                           lr=2e-3),
                           "entities": Task(plain(entities), "error", symbols=40, out=5, H=32, bi=True, layers=2, drop=0.2, steps=350,
                                            lr=1e-3)},
    "momentum": {"automaton": Task(plain(automaton), "error", symbols=4, out=5, H=48, steps=800, opt="sgd", lr=0.1, embed=16),
                 "waves": Task(plain(waveclass), "error", I=3, out=4, H=48, steps=600, every=False, opt="sgd", lr=0.05)},
    "bf16": {"bf16-chars": Task(None, "nats", corpus="chars", H=64, B=32, T=40, steps=400, lr=2e-3, bf16=True),
             "bf16-season": Task(plain(season), "rmse", H=48, steps=500, lr=1e-3, bf16=True)},
}
TASKS = {name: task for pair in PAIRS.values() for name, task in pair.items()}

# The split: one coin per kind from Random(35), fixed before any RUM was trained on any of these. Written out below as a check.
_coin = random.Random(35)
CHOOSE, JUDGE = [], []
for _kind, _pair in PAIRS.items():
    _a, _b = _pair
    if _coin.random() < 0.5:
        _a, _b = _b, _a
    CHOOSE.append(_a)
    JUDGE.append(_b)
