"""``torchrum sample runs/char-rum --prompt "the company said" --temperature 0.8``"""

import itertools
import sys
from pathlib import Path

from torchrum.cli.parsing import Parser


def sample_parser() -> Parser:
    """The options of ``torchrum sample``."""
    parser = Parser("sample", "Generate text with a trained language model.")
    parser.add_argument("run", type=Path, help="a run folder of a recipe that reads text, such as char-rum")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a line)")
    parser.add_argument(
        "--length", type=int, default=500, metavar="N", help="number of characters to generate (default: 500)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 always takes the most likely character (default: 0.8)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_checkpoint()
    parser.add_device("cpu")
    return parser


def main(arguments: list[str]) -> int:
    """Write text."""
    options = sample_parser().parse_args(arguments)

    import torch

    from torchrum.lab.models import CharModel
    from torchrum.lab.tasks import CharLM
    from torchrum.lab.training import load_model, read_config
    from torchrum.lab.training.errors import ConfigError, RunError
    from torchrum.lab.training.progress import visible

    task = read_config(options.run).task
    if not isinstance(task, CharLM):
        raise ConfigError(
            f"{options.run} was trained on {type(task).__name__}, not on text; sample needs a run such as char-rum's."
        )
    cuda = torch.cuda.is_available()
    if options.device == "cuda" and not cuda:
        raise RunError("--device cuda, but torch sees no CUDA device; pass --device cpu.")
    model = load_model(options.run, options.checkpoint).to("cuda" if cuda and options.device != "cpu" else "cpu")
    assert isinstance(model, CharModel)
    shown = visible if sys.stdout.isatty() else str  # a file gets the text as it is
    pieces = task.stream(
        model, length=options.length, prompt=options.prompt, temperature=options.temperature, seed=options.seed
    )
    try:
        first = next(pieces, "")  # what is refused is refused before anything is printed
        for piece in itertools.chain([options.prompt + first], pieces):
            print(shown(piece), end="", flush=True)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print()
    return 0
