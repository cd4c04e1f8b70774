"""Which jobs to do next, from the results so far.

P0  gru and lstm with seeds 0, 1, 2 and every variant with seed 0 on CHOOSE
P1  the 10 best variants on CHOOSE with seeds 1, 2
P2  the 3 best of those on JUDGE with seeds 0-4, with gru and lstm          <- the first look at JUDGE
P3  the 3 best on CHOOSE with seeds 3, 4, with gru; then rates x 0.3 and x 3 of gru, lstm and the best on all tasks, seeds 0-2
"""
from summary import rank
from tasks import CHOOSE, JUDGE
from variants import VARIANTS

KEEP, FINAL = 10, 3


def missing(jobs, rows):
    done = {(r["task"], r["variant"], r["seed"], r["factor"]) for r in rows}
    return [j for j in jobs if j not in done]


def PHASES(rows):
    p0 = [(t, m, 0, 1.0) for m in ("gru", "lstm") for t in CHOOSE]
    p0 += [(t, v, 0, 1.0) for v in VARIANTS for t in CHOOSE]
    p0 += [(t, m, s, 1.0) for s in (1, 2) for m in ("gru", "lstm") for t in CHOOSE]
    if missing(p0, rows):
        return "P0", missing(p0, rows)
    seen = [r for r in rows if r["task"] in CHOOSE and r["factor"] == 1.0]
    best = [v for v, *_ in rank([r for r in seen if r["seed"] == 0 or r["variant"] in ("gru", "lstm")], list(VARIANTS))][:KEEP]
    p1 = [(t, v, s, 1.0) for s in (1, 2) for v in best for t in CHOOSE]
    if missing(p1, rows):
        return "P1", missing(p1, rows)
    final = [v for v, *_ in rank([r for r in seen if r["seed"] < 3], best)][:FINAL]
    p2 = [(t, m, s, 1.0) for s in range(5) for m in ("gru", *final, "lstm") for t in JUDGE]
    if missing(p2, rows):
        return "P2 " + ", ".join(final), missing(p2, rows)
    p3 = [(t, m, s, 1.0) for s in (3, 4) for m in ("gru", *final, "lstm") for t in CHOOSE]
    p3 += [(t, m, s, f) for s in range(3) for f in (3.0, 0.3) for m in ("gru", final[0], "lstm") for t in (*CHOOSE, *JUDGE)]
    return "P3", missing(p3, rows)
