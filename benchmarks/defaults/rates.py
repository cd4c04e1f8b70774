"""RUM, GRU and LSTM, each at its best of four rates, for a short and a long training: the protocol of docs/protocol.md on 24 small tasks.

The rates are the task's own times 0.3, 1, 3 and 10, compared on validation data with seed 0; the scores are those of seeds 1 to 5 on
test data, of the weights that were best on validation. Twelve tasks are of those that chose the default form of RUM, twelve of those
that no choice has used. RUM is the library's layer, with as many weights as the GRU has; the LSTM has a third more.

    python rates.py --procs 12 --seconds 580 --out rates.jsonl    # continues what is in the file
    python rates.py --table --out rates.jsonl
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

NEW = ("shifts", "demand", "chirp", "heading", "balance", "first", "echo", "modsum", "balanced", "accents", "pairs-sgd", "pairs-adamw")
OLD_COUNT = 12
MODELS, FACTORS, SHARES = ("gru", "rum", "lstm"), (0.3, 1.0, 3.0, 10.0), (1.0, 3.0)
SEEDS = (1, 2, 3, 4, 5)
CHECKS = 6  # validations per training


def old_tasks():
    from tasks import CHOOSE

    return tuple(CHOOSE[:OLD_COUNT])


def halves(task):
    """A function step, generator -> batch; validation data; test data."""
    import torch
    from train import data  # before tasks, which finds another train
    from tasks import gen

    draw, test = data(task)
    if task.corpus is None:
        validation = task.draw(gen(6), 500, True)
        if not torch.equal(validation[0], test[0]):
            return draw, validation, test
        # digits have one fixed test set; each half of it gets every other image
        x, y = test
        return draw, (x[:, ::2], y[::2]), (x[:, 1::2], y[1::2])
    x, y = test
    if task.carried:  # one long piece, in order
        half = len(x) // 2
        return draw, (x[:half], y[:half]), (x[half:], y[half:])
    half = x.shape[1] // 2
    return draw, (x[:, :half], y[:, :half]), (x[:, half:], y[:, half:])


def train(name, variant, seed, factor, share):
    import torch
    from torch import nn

    torch.set_num_threads(1)
    from train import Model, bf16, detached, loss_of, optimizer_of, score  # before tasks, which finds another train
    from tasks import TASKS, gen

    task = TASKS[name]
    torch.manual_seed(seed)
    model = Model(task, variant)
    params = list(model.parameters())
    opt = optimizer_of(task, model, task.lr * factor)
    draw, validation, test = halves(task)
    if task.bf16:
        validation, test = (bf16(validation[0]), validation[1]), (bf16(test[0]), test[1])
    g, state, steps = gen(1000 + seed), None, int(task.steps * share)
    checks = {round(steps * (k + 1) / CHECKS) for k in range(CHECKS)}
    best, start = {"validation": math.inf, "score": math.inf, "step": 0}, time.process_time()
    for step in range(steps):
        if task.cosine:
            opt.param_groups[0]["lr"] = task.lr * factor * 0.5 * (1 + math.cos(math.pi * step / steps))
        x, y = draw(step, g)
        masters = [p.data.clone() for p in params]
        if task.bf16:
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
        if not (math.isfinite(loss.item()) and math.isfinite(norm)):
            break
        opt.step()
        if step + 1 in checks:
            kept = [p.data.clone() for p in params]
            if task.bf16:
                for p in params:
                    p.data = bf16(p.data)
            got = score(task, model, validation)
            if got < best["validation"]:
                best = {"validation": got, "score": score(task, model, test), "step": step + 1}
            for p, m in zip(params, kept):
                p.data = m
    return {**best, "steps": steps, "seconds": round(time.process_time() - start, 2),
            "params": sum(p.numel() for p in model.layer.parameters())}


def work(job):
    task, variant, seed, factor, share = job
    return {"task": task, "variant": variant, "seed": seed, "factor": factor, "share": share, **train(*job)}


def read(path):
    return [json.loads(line) for line in open(path)] if os.path.exists(path) else []


def key(row):
    return row["task"], row["variant"], row["seed"], row["factor"], row["share"]


def best_factor(rows, task, variant, share):
    """The rate that is best on validation with seed 0; None while one of the four is missing."""
    tried = {r["factor"]: r["validation"] for r in rows if (r["task"], r["variant"], r["seed"], r["share"]) == (task, variant, 0, share)}
    return min(FACTORS, key=lambda f: (tried[f], f)) if len(tried) == len(FACTORS) else None


def jobs_of(rows):
    """What is left to do, most wanted first: short trainings before long ones, new tasks before old ones."""
    done, jobs = {key(r) for r in rows}, []
    for share in SHARES:
        for task in (*NEW, *old_tasks()):
            for variant in MODELS:
                jobs += [(task, variant, 0, f, share) for f in FACTORS]
                if (f := best_factor(rows, task, variant, share)) is not None:
                    jobs += [(task, variant, s, f, share) for s in SEEDS]
    return [j for j in jobs if j not in done]


def run(args):
    end, running, rows, lost = time.time() + args.seconds, {}, read(args.out), set()
    with mp.get_context("spawn").Pool(args.procs) as pool, open(args.out, "a") as out:
        while time.time() < end:
            for job in [j for j, r in running.items() if r.ready()]:
                try:
                    row = running.pop(job).get()
                except Exception as error:
                    print("lost", job, error, file=sys.stderr, flush=True)
                    lost.add(job)
                    continue
                rows.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
            left = [j for j in jobs_of(rows) if j not in running and j not in lost]
            if not left and not running:
                print("all done")
                return
            for job in left[: args.procs + 2 - len(running)]:
                running[job] = pool.apply_async(work, (job,))
            time.sleep(0.1)
        print(f"time is over: {len(rows)} trainings, {len(jobs_of(rows))} known to be left")
        pool.terminate()


def judged(ours, other):
    """The rule of docs/protocol.md for errors: ahead or behind only if the ranges over the seeds do not overlap."""
    return "ahead" if max(ours) < min(other) else "behind" if min(ours) > max(other) else "level"


def finished(rows, task, share):
    """The scores of seeds 1 to 5 and the factor of the rate, by model; None while a model lacks some."""
    found = {}
    for variant in MODELS:
        f = best_factor(rows, task, variant, share)
        scores = [r["score"] for r in rows if key(r)[:2] == (task, variant) and r["seed"] in SEEDS and (r["factor"], r["share"]) == (f, share)]
        if f is None or len(scores) < len(SEEDS):
            return None
        found[variant] = scores, f
    return found


def table(rows):
    """Print both tables of docs/everyday.md: counts by budget and group, and every task."""
    from summary import mean

    lines, counts, missing = [], [], []
    for share in SHARES:
        for group, names in (("new", NEW), ("old", old_tasks())):
            count = {v: dict.fromkeys(("ahead", "level", "behind"), 0) for v in ("rum", "lstm")}
            done = {task: found for task in names if (found := finished(rows, task, share))}
            missing += [f"x{share:g} {task}" for task in names if task not in done]
            for task, found in done.items():
                cells = [task, f"{share:g}"]
                for variant, (scores, factor) in found.items():
                    says = "" if variant == "gru" else judged(scores, found["gru"][0])
                    if says:
                        count[variant][says] += 1
                    marked = {"ahead": " +", "behind": " −"}.get(says, "")
                    cells.append(f"{mean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f}){marked}, x{factor:g}")
                lines.append("| " + " | ".join(cells) + " |")
            if done:
                each = [", ".join(f"{n} {says}" for says, n in count[v].items()) for v in ("rum", "lstm")]
                counts.append(f"| {group} | {share:g} | {len(done)} of {len(names)} | {each[0]} | {each[1]} |")
    print("| tasks | budget | finished | RUM | LSTM |\n| --- | ---: | ---: | --- | --- |", *counts, sep="\n", end="\n\n")
    print("| task | budget | GRU | RUM | LSTM |\n| --- | ---: | --- | --- | --- |", *lines, sep="\n", end="\n\n")
    print("not finished:", ", ".join(missing))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--procs", type=int, default=1)
    p.add_argument("--seconds", type=float, default=600)
    p.add_argument("--out", default="rates.jsonl")
    p.add_argument("--table", action="store_true")
    args = p.parse_args()
    table(read(args.out)) if args.table else run(args)


if __name__ == "__main__":
    main()
