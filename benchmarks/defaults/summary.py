"""Print, for each task, mean and range over seeds per variant, and who is ahead of or behind nn.GRU.

Behind: the mean is worse than nn.GRU's mean by more than the larger of the two spreads (max - min over seeds), and worse than
nn.GRU's worst seed. Ahead: the same the other way round. With one seed of a variant, its spread counts as nn.GRU's.
"""
import json
import math
import sys


def table(rows, factor=1.0):
    got = {}
    for r in rows:
        if r["factor"] == factor:
            got.setdefault(r["variant"], {}).setdefault(r["task"], []).append(min(r["score"], 1e3))
    return got


def mean(v):
    return sum(v) / len(v)


def verdict(mine, gru):
    spread = max(max(gru) - min(gru), max(mine) - min(mine))
    gap = mean(mine) - mean(gru)
    if gap > spread and mean(mine) > max(gru):
        return "behind"
    if -gap > spread and mean(mine) < min(gru):
        return "ahead"
    return "level"


def score(mine, gru):
    """The log of the ratio to nn.GRU's mean, bounded, so that no single task decides; errors near zero count as half a percent."""
    return max(-1.0, min(1.0, math.log((mean(mine) + 5e-3) / (mean(gru) + 5e-3))))


def rank(rows, variants):
    """(variant, behind, ahead, mean log ratio), the best first: fewest behind (half weight), then the ratio."""
    got, out = table(rows), []
    gru = got.get("gru", {})
    for v in variants:
        tasks = [t for t in got.get(v, {}) if t in gru]
        if not tasks:
            continue
        says = [verdict(got[v][t], gru[t]) for t in tasks]
        ratio = mean([score(got[v][t], gru[t]) for t in tasks])
        out.append((v, says.count("behind"), says.count("ahead"), ratio))
    return sorted(out, key=lambda r: r[3] + 0.05 * r[1])


def main():
    rows = []
    for path in sys.argv[1:]:
        for line in open(path):
            try:
                rows.append(json.loads(line))
            except ValueError:
                pass
    from tasks import CHOOSE, JUDGE
    variants = list(dict.fromkeys(r["variant"] for r in rows))
    from fresh import FRESH_TASKS
    from unseen import UNSEEN_TASKS
    known = (*CHOOSE, *JUDGE, *FRESH_TASKS)
    for half, names in (("CHOOSE", CHOOSE), ("JUDGE", JUDGE), ("FRESH", tuple(FRESH_TASKS)), ("ALL BEFORE", known), ("UNSEEN", tuple(UNSEEN_TASKS))):
        part = [r for r in rows if r["task"] in names and r["factor"] == 1.0]
        if not part:
            continue
        got, order = table(part), rank(part, variants)
        print(f"\n== {half}: variant, tasks, seeds, behind, ahead, mean log ratio to gru")
        for v, behind, ahead, ratio in order:
            n = [len(x) for x in got[v].values()]
            print(f"{v:22} {len(n):3} tasks {min(n)}-{max(n)} seeds  behind {behind:2}  ahead {ahead:2}  {ratio:+.3f}")
        shown = ["gru", "lstm"] + [v for v, *_ in order if v not in ("gru", "lstm")]
        for t in names:
            gru = got.get("gru", {}).get(t)
            if not gru:
                continue
            print(f"\n{t}")
            for v in shown:
                x = got.get(v, {}).get(t)
                if x:
                    mark = verdict(x, gru) if v != "gru" else ""
                    print(f"   {v:22} {mean(x):9.4f}  [{min(x):.4f}, {max(x):.4f}] n={len(x)} {mark}")
    crashed = [r for r in rows if "crash" in r]
    if crashed:
        print("\ncrashes:", len(crashed), crashed[0]["task"], crashed[0]["variant"], crashed[0]["crash"])
    other = [r for r in rows if r["factor"] != 1.0]
    if other:
        print("\n== best of the rates (mean over seeds)")
        for t in (*CHOOSE, *JUDGE):
            line = []
            for v in variants:
                by = {f: [min(r["score"], 1e3) for r in rows if (r["task"], r["variant"], r["factor"]) == (t, v, f)] for f in (0.3, 1.0, 3.0)}
                by = {f: mean(x) for f, x in by.items() if x}
                if len(by) > 1:
                    f = min(by, key=by.get)
                    line.append(f"{v} {by[f]:.4f} (x{f})")
            if line:
                print(f"{t:14}", "  ".join(line))


if __name__ == "__main__":
    main()
