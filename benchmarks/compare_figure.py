"""Draw the learning curves of docs/compare.md from results/compare/examples.jsonl.

python benchmarks/compare_figure.py docs/figures
"""

import json
import sys
from pathlib import Path

from torchrum.lab.compare.models import Finished
from torchrum.lab.compare.page import curves
from torchrum.lab.compare.verdict import standings
from torchrum.lab.plot_style import save_themes

EXAMPLES = Path(__file__).parents[1] / "results/compare/examples.jsonl"


def main(folder: Path) -> None:
    """Draw the run with idle cores on pairs of a key and a value, in light and dark."""
    examples = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    pairs = next(each for each in examples if (each["data"], each["run"]) == ("pairs", "idle"))
    found = standings([Finished(**training) for training in pairs["trainings"]])
    save_themes(lambda: curves(found, pairs["floor"], pairs["metric"]), folder / "compare")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
