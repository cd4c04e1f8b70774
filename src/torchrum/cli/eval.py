"""``torchrum eval runs/copying-rum``"""

import argparse
import json
from pathlib import Path

from torchrum.cli.data import add_data_dir, add_text, use_data_dir, with_text
from torchrum.cli.parsing import Parser, use_recipe
from torchrum.lab.tasks import Task
from torchrum.lab.training.checkpoint import checkpoint_step
from torchrum.lab.training.evaluation import DynamicConfig, dynamic_evaluate, evaluate, write_look
from torchrum.lab.training.run_folder import read_config


def _assignments(text: str) -> str:
    """Parse ``--dynamic``; refuse a run folder that follows it."""
    if text and "=" not in text:  # without a value argparse passes the empty text of const
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE,...; name the run before --dynamic")
    return text


def main(arguments: list[str]) -> int:
    """Score a run."""
    parser = Parser("eval", "Score a run on its test or validation set.")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_recipe()
    parser.add_argument(
        "--split", choices=("validation", "test"), default="test", help="set to score on (default: test)"
    )
    parser.add_checkpoint()
    parser.add_device("auto")
    parser.add_argument(
        "--dynamic",
        nargs="?",
        const="",
        type=_assignments,
        metavar="FIELD=VALUE,...",
        help="update the weights while reading the text (dynamic evaluation); the defaults of the fields are "
        "segment=50,lr=5e-5,decay=0.05,eps=2e-5,temperature=1,lanes=100",
    )
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    add_data_dir(parser)
    add_text(parser)
    options = parser.parse_args(arguments)
    use_data_dir(options.data_dir)

    use_recipe(options.recipe)
    config = with_text(read_config(options.run), options.data)
    where = options.run, options.split, options.checkpoint, options.device
    how = ""
    if options.dynamic is not None:
        dynamic = DynamicConfig.parse(options.dynamic)
        scores, how = dynamic_evaluate(*where, dynamic, config.task), str(dynamic)
    else:
        scores = evaluate(*where, config.task)
    if options.split == "test" and config.task.has_test:
        write_look(options.run, checkpoint_step(options.run, options.checkpoint), scores, how)
    if options.json:
        print(json.dumps(scores))
        return 0
    dynamic_words = f", dynamic evaluation ({how})" if how else ""
    print(f"{options.run}: {options.split} set, {options.checkpoint} checkpoint{dynamic_words}")
    show(scores, config.task)
    return 0


def show(scores: dict[str, float], task: Task) -> None:
    """Print the scores, one per line, and the baseline."""
    width = max(12, *map(len, scores))
    for name, value in scores.items():
        print(f"  {name:<{width}} {value:,.0f}" if 1e5 <= value < 1e15 else f"  {name:<{width}} {value:.6g}")
    print(f"  {'baseline':<{width}} {task.baseline():.6g}  ({task.baseline_name} loss in {task.loss_unit})")
