"""``torchrum eval``, ``sample`` and ``ask``: score a trained model, and use it."""

import argparse
import io
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from torchrum.cli import complain
from torchrum.cli.parsing import Parser, use_recipe, with_text
from torchrum.lab.models import CharModel
from torchrum.lab.tasks import Babi, CharLM, Task
from torchrum.lab.tasks.babi import split_sentences
from torchrum.lab.trained import ALICE
from torchrum.lab.training import evaluation
from torchrum.lab.training.checkpoint import checkpoint_step, load_model
from torchrum.lab.training.errors import ConfigError, RunError
from torchrum.lab.training.progress import visible
from torchrum.lab.training.run_folder import read_config

SHIPPED = (
    "A small model of Alice's Adventures in Wonderland. One of your own text: torchrum train char-rum --data FILE\n"
)
HELP = "a sentence adds to the story, a question ends with ?; an empty line starts a new story, Ctrl-D ends"


def _assignments(text: str) -> str:
    """Parse ``--dynamic``; refuse a run folder that follows it."""
    if text and "=" not in text:  # without a value argparse passes the empty text of const
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE,...; name the run before --dynamic")
    return text


def evaluate(arguments: list[str]) -> int:
    """Score a run."""
    parser = Parser("eval", "Score a run on its test or validation set.")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.share("--recipe")
    split = "set to score on (default: test)"
    parser.add_argument("--split", choices=("validation", "test"), default="test", help=split)
    parser.share("--checkpoint", "--device")
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
    parser.share("--data-dir", "--data")
    options = parser.parse_args(arguments)

    use_recipe(options.recipe)
    config = with_text(read_config(options.run), options.data)
    where = options.run, options.split, options.checkpoint, options.device
    dynamic = None if options.dynamic is None else evaluation.DynamicConfig.parse(options.dynamic)
    step = checkpoint_step(options.run, options.checkpoint)  # before scoring: the run may still be training
    scores, how = evaluation.evaluate(*where, config.task, dynamic), str(dynamic or "")
    if options.split == "test" and config.task.has_test:
        evaluation.write_look(options.run, step, scores, how)
    if options.json:
        print(json.dumps(scores))
        return 0
    dynamic_words = f", dynamic evaluation ({how})" if how else ""
    print(f"{options.run}: {options.split} set, {options.checkpoint} checkpoint{dynamic_words}")
    show_scores(scores, config.task)
    return 0


def show_scores(scores: dict[str, float], task: Task) -> None:
    """Print the scores, one per line, and the baseline."""
    width = max(12, *map(len, scores))
    for name, value in scores.items():
        print(f"  {name:<{width}} {value:,.0f}" if 1e5 <= value < 1e15 else f"  {name:<{width}} {value:.6g}")
    print(f"  {'baseline':<{width}} {task.baseline():.6g}  ({task.baseline_name} loss in {task.loss_unit})")


def sample(arguments: list[str]) -> int:
    """Generate text with a trained language model."""
    parser = Parser("sample", "Generate text with a trained language model.")
    add = parser.add_argument
    run = (
        "a run folder of a recipe that reads text, such as char-rum (default: a small model of Alice's Adventures in "
        "Wonderland, which comes with the package)"
    )
    add("run", type=Path, nargs="?", help=run)
    add("--prompt", default="", help="text to continue (default: the start of a line)")
    add("--length", type=int, default=500, metavar="N", help="number of characters to generate (default: 500)")
    likeliest = "0 always takes the most likely character (default: 0.8)"
    add("--temperature", type=float, default=0.8, metavar="X", help=likeliest)
    add("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.share("--checkpoint", "--device")
    parser.set_defaults(device="cpu")
    options = parser.parse_args(arguments)
    if options.length < 1:
        parser.error(f"--length is {options.length}, but it must be at least 1")

    if options.run is None:
        options.run = ALICE
        print(SHIPPED, file=sys.stderr)
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
        first = next(pieces, "")  # raise errors before anything is printed
        for piece in itertools.chain([options.prompt + first], pieces):
            print(shown(piece), end="", flush=True)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print()
    return 0


def ask(arguments: list[str]) -> int:
    """Ask a trained model about a story."""
    parser = Parser(
        "ask",
        "Ask a model trained on bAbI about a story. Without --question, story and questions are read line by line.",
    )
    parser.add_argument("run", type=Path, help="a run folder of a bAbI recipe")
    parser.add_argument("--story", default="", help="sentences, each ending with a full stop")
    parser.add_argument("--question", help="the question (default: read the story and questions from standard input)")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="number of answers to show (default: 3)")
    parser.share("--checkpoint")
    parser.add_argument("--json", action="store_true", help="print answers and unknown words as JSON")
    options = parser.parse_args(arguments)

    if options.top < 1:
        raise ConfigError(f"--top is {options.top}, but it must be at least 1.")
    task = read_config(options.run).task
    if not isinstance(task, Babi):
        raise ConfigError(
            f"{options.run} was trained on {type(task).__name__}, not on bAbI; ask needs a run of a babi recipe."
        )
    model = load_model(options.run, options.checkpoint)

    def answer(story: str, question: str) -> str:
        answers, unknown = best_answers(task, model, story, question, options.top)
        if options.json:
            return json.dumps({"answers": answers, "unknown": unknown})
        width = max(map(len, answers))
        lines = [f"{word:<{width}}  {chance:.1%}" for word, chance in answers.items()]
        if unknown:
            lines.append(f"not known to the model, read as blanks: {', '.join(unknown)}")
        return visible("\n".join(lines))  # words may come from a file

    if options.question is not None:
        print(answer(options.story, options.question))
        return 0
    sentences, answered = [options.story] if options.story else [], False
    for line in _lines():
        text = line.strip()
        if not text:
            sentences.clear()
        elif not text.endswith("?"):
            sentences.append(text)
        else:
            *told, question = split_sentences(text)
            sentences += told
            try:
                print(answer("\n".join(sentences), question), flush=True)  # another program may be waiting
                answered = True
            except ConfigError as error:  # the next line may be better
                complain(str(error))
    if not answered and not sys.stdin.isatty():
        raise ConfigError("no question was answered: a question ends with ?; or pass it with --question.")
    return 0


def best_answers(
    task: Babi, model: nn.Module, story: str, question: str, top: int
) -> tuple[dict[str, float], list[str]]:
    """The ``top`` most likely answers with their probabilities, and the words that the model does not know."""
    try:
        batch, unknown = task.ask(story, question)
    except ValueError as error:
        raise ConfigError(f"ask: {error}") from error
    with torch.no_grad():
        chances = model(batch.x, batch.lengths)[0].float().softmax(-1)
    best = chances[1:].topk(min(top, len(chances) - 1))  # skip the blank
    return {task.words()[int(i) + 1]: float(p) for p, i in zip(best.values, best.indices, strict=True)}, unknown


def _lines() -> Iterator[str]:
    """Read the lines of standard input; prompt for them on a terminal."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 gives an unknown word
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    print(HELP)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()  # the shell's prompt gets a line of its own
            return
