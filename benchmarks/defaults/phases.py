"""Which jobs to do next, from the results so far: BETWEEN on the tasks known before, then the best on UNSEEN_TASKS."""
from fresh import FRESH_TASKS
from summary import rank
from tasks import CHOOSE, JUDGE
from unseen import UNSEEN_TASKS
from variants import BETWEEN

KNOWN = (*CHOOSE, *JUDGE, *FRESH_TASKS)
CANDIDATES = [v for v in BETWEEN if not v.startswith("gru")] + ["keras", "h-orth", "half-r.5"]


def missing(jobs, rows):
    done = {(r["task"], r["variant"], r["seed"], r["factor"]) for r in rows}
    return [j for j in jobs if j not in done]


def PHASES(rows):
    first = [(t, v, 0, 1.0) for t in KNOWN for v in [*BETWEEN, "keras", "h-orth"]]
    if missing(first, rows):
        return "choose, seed 0", missing(first, rows)
    seen = [r for r in rows if r["task"] in KNOWN and r["factor"] == 1.0]
    gru = [r for r in seen if r["variant"] == "gru"]
    best = [v for v, *_ in rank([r for r in seen if r["seed"] == 0] + gru, CANDIDATES)][:3]
    more = [(t, v, s, 1.0) for s in (1, 2) for v in best for t in KNOWN]
    if missing(more, rows):
        return "choose, seeds 1 and 2: " + ", ".join(best), missing(more, rows)
    final = [v for v, *_ in rank([r for r in seen if r["seed"] < 3] + gru, best)][:1]
    judged = dict.fromkeys(["gru", *final, "half-r.5", "lstm", "gru-orth-wide"])
    judge = [(t, m, s, 1.0) for s in range(5) for m in judged for t in UNSEEN_TASKS]
    if missing(judge, rows):
        return "judge " + ", ".join(final), missing(judge, rows)
    rest = [(t, v, s, 1.0) for s in (3, 4) for v in final for t in KNOWN]
    return "seeds 3 and 4", missing(rest, rows)
