"""Shared by the small benchmarks: print a Markdown table; ``--json FILE`` keeps the numbers and their machine."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchrum.lab.training.run_folder import environment


def run(about: str, measure: Callable[[], Any], table: Callable[[Any], str]) -> None:
    """Measure, print the table, and write what was measured to the file of ``--json``."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    measured = measure()
    print(table(measured))
    if options.json:
        record = {"environment": asdict(environment(torch.device("cpu"), processes=1)), "measured": measured}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def markdown(head: list[str], rows: list[list[str]], numbers: bool = True) -> str:
    """A Markdown table; its columns after the first are numbers unless said otherwise."""
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])
