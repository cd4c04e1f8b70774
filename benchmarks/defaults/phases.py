"""Which jobs to do next, from the results so far: choose among SECOND on CHOOSE, then judge the best on JUDGE and FRESH_TASKS."""
from fresh import FRESH_TASKS
from summary import rank
from tasks import CHOOSE, JUDGE
from variants import SECOND

KEEP, FINAL = 6, 2


def missing(jobs, rows):
    done = {(r["task"], r["variant"], r["seed"], r["factor"]) for r in rows}
    return [j for j in jobs if j not in done]


def PHASES(rows):
    first = [(t, v, s, 1.0) for s in (0, 1) for v in SECOND for t in CHOOSE]
    first += [(t, m, s, 1.0) for s in range(3) for m in ("gru", "lstm") for t in CHOOSE]
    if missing(first, rows):
        return "choose, seeds 0 and 1", missing(first, rows)
    seen = [r for r in rows if r["task"] in CHOOSE and r["factor"] == 1.0]
    best = [v for v, *_ in rank([r for r in seen if r["seed"] < 2 or r["variant"] in ("gru", "lstm")], list(SECOND))][:KEEP]
    more = [(t, v, s, 1.0) for s in (2, 3) for v in best for t in CHOOSE]
    if missing(more, rows):
        return "choose, seeds 2 and 3", missing(more, rows)
    final = [v for v, *_ in rank(seen, best)][:FINAL]
    judge = [(t, m, s, 1.0) for s in range(5) for m in ("gru", *final, "lstm") for t in (*FRESH_TASKS, *JUDGE)]
    if missing(judge, rows):
        return "judge " + ", ".join(final), missing(judge, rows)
    rates = [(t, m, s, f) for s in range(3) for f in (3.0, 0.3) for m in ("gru", final[0], "lstm") for t in (*FRESH_TASKS, *JUDGE)]
    return "rates", missing(rates, rows)
