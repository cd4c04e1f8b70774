"""``torchrum record``, ``table``, ``figure`` and ``report``: runs into the ledger, and what is made of it."""

import sys
from pathlib import Path

from torchrum.cli import complain
from torchrum.cli.parsing import Parser, in_clone, use_recipe
from torchrum.lab.recipes import RECIPES
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.overrides import unknown_name
from torchrum.lab.training.run_folder import CONFIG, holds_run
from torchrum.paper.ledger import LedgerError, read_ledger
from torchrum.paper.ledger import record as record_run
from torchrum.paper.ledger.entries import arrays_path


def record(arguments: list[str]) -> int:
    """Enter runs in the ledger."""
    parser = Parser("record", "Copy finished runs into the results ledger. Nothing is evaluated: see torchrum eval.")
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run folders, or folders that contain them")
    add("--results", type=Path, help="folder of the ledger (default, in a clone of torchrum: results)")
    add("--note", default="", help="a remark to show beside the numbers")
    add("--commit", metavar="HASH", help="commit of the code, or HEAD, if the run did not record it")
    add("--replace", action="store_true", help="replace an entry of the same name")
    add(
        "--arrays",
        action="store_true",
        help="also store the data for the figures of a trained RUM, in the folder arrays",
    )
    parser.share("--data-dir")
    options = parser.parse_args(arguments)
    if options.results is None and not in_clone():
        parser.error("name the folder of your ledger with --results DIR; only a clone of torchrum has one, in results")
    results = options.results or Path("results")

    found: list[Path] = []
    for folder in options.runs:
        inside = sorted(path.parent for path in folder.rglob(CONFIG)) if folder.is_dir() else []
        if inside or folder.suffix != ".json":  # the summary of a sweep beside its runs is passed over
            found += inside or [folder]
    code = 0
    chosen = {"note": options.note, "commit": options.commit, "replace": options.replace, "arrays": options.arrays}
    for run in found:
        try:
            entry = record_run(run, results, **chosen)
        except LedgerError as error:
            if len(found) == 1:
                raise
            complain(str(error))  # the others are still recorded
            code = error.exit_code
            continue
        print(f"{results / entry.task}.jsonl: {entry.name}")
        if options.arrays:
            arrays = arrays_path(results, entry)
            print(arrays if arrays.exists() else f"{run} has no RUM: no arrays to keep")
    return code


def table(arguments: list[str]) -> int:
    """Print the results, or write them into a file."""
    from torchrum.paper.ledger.tables import asked_table, write_tables

    parser = Parser("table", "Print the results ledger as Markdown tables.")
    add = parser.add_argument
    add("task", nargs="?", help="copying, recall, char or babi (default: all)")
    parser.share("--results")
    best = (
        "only the best setting of each model; with STEPS, the best within that many steps and the best beyond "
        "(STEPS makes no difference for bAbI)"
    )
    add("--best", type=int, nargs="?", const=sys.maxsize, metavar="STEPS", help=best)
    within = "compare after BUDGET / T steps each, a matched step budget; T is the size of the problem"
    add("--within", type=int, metavar="BUDGET", help=within)
    add("--write", type=Path, metavar="FILE", help="update the tables between the markers in this file")
    options = parser.parse_args(arguments)
    if options.best is not None and options.within is not None:
        parser.error("--best and --within make different tables; pass only one of them")
    words = ""
    for name in ("best", "within"):
        if (count := getattr(options, name)) is None:
            continue
        words = f" {name} {count}"
        if count < 1:
            parser.error(f"--{name} is {count}, but it must be at least 1")
        if options.write:
            marker = f"<!-- torchrum:table recall {name} 20000 -->"
            parser.error(f"--{name} cannot be combined with --write; put it in the marker instead: {marker}")

    known = {name.partition("-")[0] for name in RECIPES}
    if options.task is not None and options.task not in known:
        raise unknown_name("task", options.task, known)
    if not options.results.is_dir():
        raise ConfigError(f"{options.results} is not a folder; pass the folder of a results ledger with --results DIR.")
    entries = read_ledger(options.results)
    if options.write:
        return _say_written(options.write, "tables", write_tables(options.write, entries))
    tasks = [options.task] if options.task else sorted({entry.task for entry in entries})
    title = "**{}**\n\n" if options.within else ""
    tables = [title.format(task) + asked_table(task + words, entries) for task in tasks]
    print("\n".join(tables) or f"{options.results} holds no run yet.")
    return 0


def figure(arguments: list[str]) -> int:
    """Draw figures from the ledger or from a run."""
    parser = Parser(
        "figure",
        "Draw the paper's figures from the results ledger, or figures of one run. Each figure has a light and a dark "
        "version.",
    )
    add = parser.add_argument
    what = (
        "copying, recall, char (learning curves), babi (task by task), headline (recall), kernels (heat maps of "
        "W_hh), rotation (angles, planes, norms), phases (of R), diagonal (of W_hh over training), gradients (through "
        "time), all, or a run folder: its curve"
    )
    add("what", help=what)
    add("run", type=Path, nargs="?", help="a run folder, for kernels, rotation, phases and diagonal of that run")
    parser.share("--results")
    out = (
        "folder to write to (default: for a run, the run folder; else docs/figures in a clone of the project, and "
        "figures elsewhere)"
    )
    add("--out", type=Path, help=out)
    write = "with all: update the figures and captions between the markers in this file"
    add("--write", type=Path, metavar="FILE", help=write)
    parser.share("--recipe")
    options = parser.parse_args(arguments)
    if options.write and options.what != "all":
        parser.error(f"--write needs all, the figures of a whole page; got {options.what!r}")
    if options.write and not options.write.is_file():
        parser.error(f"--write {options.write} is not a file; name a page with markers <!-- torchrum:figure recall -->")
    if options.out and options.out.is_file():
        parser.error(f"--out {options.out} is a file; name a folder for the figures")
    use_recipe(options.recipe)

    from torchrum.paper.plots.catalog import FIGURES, draw_figure, draw_run, write_gallery
    from torchrum.paper.plots.run import draw_curve

    run, folder = Path(options.what), options.out or Path("docs/figures" if in_clone() else "figures")
    if options.run is not None:
        paths = draw_run(options.what, options.run, options.out or options.run)
    elif holds_run(run):
        paths = [draw_curve(run, options.out and options.out / "curve.png")]
    elif options.what in (*FIGURES, "all"):
        paths = draw_figure(options.what, options.results, folder)
    else:
        raise ConfigError(f"{options.what!r} is neither a figure ({', '.join(FIGURES)}, all) nor a run folder.")
    print(*paths, sep="\n")
    if options.write:
        return _say_written(options.write, "figures", write_gallery(options.write, options.results, folder))
    return 0


def report(arguments: list[str]) -> int:
    """Write the report of the ledger, or of run folders."""
    parser = Parser(
        "report",
        "Write a self-contained HTML page that sets the results ledger beside the paper's numbers and figures, or one "
        "about the given runs.",
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="*", metavar="RUN", help="run folders (default: the results ledger)")
    parser.share("--results")
    add("--out", type=Path, help="file to write (default: report.html)")
    write = "write no page; update the headline numbers between the markers in this file"
    add("--write", type=Path, metavar="FILE", help=write)
    parser.share("--recipe")
    options = parser.parse_args(arguments)
    if options.write and options.runs:
        parser.error("--write uses the results ledger; leave the run folders out")
    if options.write and options.out:
        parser.error("--write makes no page; leave --out out")

    from torchrum.lab.page import write_page
    from torchrum.paper.report import ledger_page, runs_page, write_headlines

    use_recipe(options.recipe)
    if options.write:
        changed = write_headlines(options.write, read_ledger(options.results), options.results)
        return _say_written(options.write, "headlines", changed)
    page = runs_page(options.runs) if options.runs else ledger_page(options.results, _progress)
    print(write_page(page, options.out or Path("report.html")))
    return 0


def _progress(line: str) -> None:
    """Print a line about slow work; standard output gets only the path of the page."""
    print(line, file=sys.stderr, flush=True)


def _say_written(path: Path, what: str, changed: bool) -> int:
    """Say whether the marked parts of a file changed; return the exit code."""
    print(f"{path}: {what} {'written' if changed else 'are up to date'}")
    return 0
