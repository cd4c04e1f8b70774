"""``torchrum eval runs/copying-rum``"""

import argparse
import json
from pathlib import Path

from torchrum.cli.data import add_data_dir, add_text, use_data_dir, with_text


def main(arguments: list[str]) -> int:
    """Score a run."""
    parser = argparse.ArgumentParser(prog="torchrum eval", description="Score a run on its fixed examples.")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument(
        "--recipe", metavar="MODULE:FUNCTION", help="where the run's task is defined, if not in torchrum"
    )
    parser.add_argument(
        "--split", choices=("validation", "test"), default="test", help="which examples (default: test)"
    )
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which weights (default: best)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    add_data_dir(parser)
    add_text(parser)
    options = parser.parse_args(arguments)
    use_data_dir(options.data_dir)

    from torchrum.training import evaluate, read_config
    from torchrum.training.testing import look

    if options.recipe:
        from torchrum.recipes import load_recipe

        load_recipe(options.recipe)
    config = with_text(read_config(options.run), options.data)
    if options.split == "test" and config.task.has_test:
        scores = look(options.run, options.checkpoint, options.device, config.task).scores
    else:
        scores = evaluate(options.run, options.split, options.checkpoint, options.device, config.task)
    if options.json:
        print(json.dumps(scores))
        return 0
    print(f"{options.run}: {options.split} set, {options.checkpoint} checkpoint")
    width = max(12, *map(len, scores))
    for name, value in scores.items():
        print(f"  {name:<{width}} {value:,.0f}" if value >= 1e5 else f"  {name:<{width}} {value:.6g}")
    print(f"  {'memoryless':<{width}} {config.task.baseline():.6g}  (loss of the best model without memory)")
    return 0
