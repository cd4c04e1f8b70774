"""Run jobs (task, variant, seed, rate factor) in processes of one thread; one JSON line per job as soon as it ends.

    python search.py --procs 12 --seconds 580 --out results.jsonl           # all phases, each from the results of those before
    python search.py --procs 1 --seconds 60 --out o.jsonl --jobs jobs.json  # or a list of [task, variant, seed, factor]
"""

import argparse
import json
import multiprocessing as mp
import os
import sys
import time
import traceback

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def work(job):
    import torch

    torch.set_num_threads(1)
    from train import run_job

    task, variant, seed, factor = job
    try:
        got = run_job(task, variant, seed, factor)
    except Exception:
        got = {"score": float("inf"), "crash": traceback.format_exc()[-800:]}
    return {"task": task, "variant": variant, "seed": seed, "factor": factor, **got}


def read(path):
    rows = []
    if os.path.exists(path):
        for line in open(path):
            try:
                rows.append(json.loads(line))
            except ValueError:
                pass
    return rows


def phases(rows):
    """The next jobs to do, phase after phase; a phase is planned when the one before it is complete."""
    import phases as plan

    return plan.PHASES(rows)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--procs", type=int, default=1)
    p.add_argument("--seconds", type=float, default=600)
    p.add_argument("--out", default="results.jsonl")
    p.add_argument("--jobs")
    a = p.parse_args()
    end = time.time() + a.seconds
    with mp.get_context("spawn").Pool(a.procs) as pool:
        tried = set()
        while True:
            rows = read(a.out)
            done = {(r["task"], r["variant"], r["seed"], r["factor"]) for r in rows}
            name, jobs = ("list", json.load(open(a.jobs))) if a.jobs else phases(rows)
            jobs = [tuple(j) for j in jobs if tuple(j) not in done and tuple(j) not in tried]
            tried.update(jobs)
            if not jobs:
                print("nothing left to do", flush=True)
                return
            print(f"phase {name}: {len(jobs)} jobs", flush=True)
            begun = time.time()
            coming = pool.imap_unordered(work, jobs)
            for k in range(len(jobs)):
                try:
                    row = coming.next(timeout=max(end - time.time(), 0.1))
                except mp.TimeoutError:
                    print(f"time is over in phase {name}: {k} of {len(jobs)}", flush=True)
                    os._exit(0) if False else pool.terminate()
                    return
                except Exception as error:
                    print("lost a job:", error, file=sys.stderr)
                    continue
                with open(a.out, "a") as f:
                    f.write(json.dumps(row) + "\n")
                if (k + 1) % 50 == 0 or k < 3:
                    print(f"{k + 1}/{len(jobs)} {time.time() - begun:.0f}s {row['task']} {row['variant']} {row['score']:.4f} "
                          f"({row.get('seconds')} s)", flush=True)
            if a.jobs:
                return


if __name__ == "__main__":
    main()
