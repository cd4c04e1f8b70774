"""Recipes: one function that returns a ``TrainConfig`` for each published number."""

import functools
import importlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from torchrum.lab.data.babi import TASKS
from torchrum.lab.recipes import babi, char_ptb, copying, recall
from torchrum.lab.training.config import TrainConfig
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.overrides import unknown_name

__all__ = [
    "FAMILIES",
    "PAPER_ONLY",
    "RECIPES",
    "Recipe",
    "is_preset",
    "load_recipe",
    "paper_preset",
    "registered_recipe",
]

Recipe = Callable[[], TrainConfig]


def _sized(
    family: str,
    recipe: Callable[[str, str, int, bool], TrainConfig],
    models: Iterable[str],
    sizes: Collection[int],
    tuned: Collection[tuple[str, int]],
) -> dict[str, Recipe]:
    """Each model at each size as it learns best, and where that is tuned, with ``-paper`` in the paper's setting."""
    found: dict[str, Recipe] = {}
    for model, size in dict.fromkeys((*itertools.product(models, sizes), *tuned)):
        name = f"{family}-{model}-t{size}"
        found[name] = functools.partial(recipe, name, model, size, (model, size) in tuned)
        if (model, size) in tuned and size in sizes:
            name = f"{family}-{model}-paper-t{size}"
            found[name] = functools.partial(recipe, name, model, size, False)
    return found


RECIPES: dict[str, Recipe] = {
    **_sized("copying", copying.copying, copying.MODELS, copying.DELAYS, copying.TUNED),
    **_sized("recall", recall.recall, recall.MODELS, recall.LENGTHS, recall.TUNED),
    **{
        f"recall-{model}-{kind}-t{length}": functools.partial(recall.recall_compared, model, length, window)
        for model in recall.COMPARED
        for kind, window in (("fresh", 1), ("window", 2))
        for length in recall.COMPARED_LENGTHS
    },
    **{
        f"recall-{model}-curriculum-t{length}": functools.partial(recall.recall_curriculum, model, length)
        for model in recall.CURRICULUM_MODELS
        for length in recall.CURRICULUM
    },
    **{f"char-ptb-{model}": functools.partial(char_ptb.char_ptb, model) for model in char_ptb.MODELS},
    **{f"char-ptb-{model}": functools.partial(char_ptb.char_ptb_other, model) for model in char_ptb.OTHERS},
    "char-ptb-fs-rum-2-cosine": char_ptb.char_ptb_cosine,
    **{f"char-ptb-{model}-tuned": functools.partial(char_ptb.char_ptb_tuned, model) for model in char_ptb.TUNED},
    **{f"char-ptb-{model}-tanh": functools.partial(char_ptb.char_ptb_tanh, model) for model in char_ptb.TANH},
    "char-ptb-fs-rum-2-slim": char_ptb.char_ptb_slim,
    **{
        f"char-ptb-{model}-constant": functools.partial(char_ptb.char_ptb_constant, model)
        for model in char_ptb.CONSTANT
    },
    "char-ptb-rum-awd": char_ptb.char_ptb_awd,
    "char-rum": char_ptb.char_rum,
    **{f"babi-{model}-qa{task}": functools.partial(babi.babi, model, task) for model in babi.MODELS for task in TASKS},
    **{f"babi-memn2n-qa{task}": functools.partial(babi.babi_memn2n, task) for task in TASKS},
    **{f"babi-joint-{model}": functools.partial(babi.babi_joint, model) for model in babi.JOINT},
}
"""Every recipe by its name; a config is built when its function is called."""

FAMILIES: dict[str, tuple[str, ...]] = {
    f"babi-{model}": tuple(f"babi-{model}-qa{task}" for task in TASKS) for model in (*babi.MODELS, "memn2n")
}
"""Recipes that are trained as a set, by the name of the set."""

PAPER_ONLY = {"recall": recall.PAPER_ONLY}
"""Task and size to baseline models that have no recipe: name and printed number."""

OURS = re.compile("-(tuned|cosine|tanh)$")
"""Suffix of a recipe that is trained in a way of ours, where the plain name has the paper's setting."""
LISTING = "torchrum list shows them all."


def paper_preset(name: str) -> str:
    """Name of the recipe with the paper's setting that ``name`` is a tuned form of; ``name`` if there is none."""
    forms = (re.sub(r"(-t\d+)$", r"-paper\1", name), OURS.sub("", name))
    return next((form for form in forms if form != name and form in RECIPES), name)


def is_preset(name: str) -> bool:
    """Whether a recipe has the paper's setting while the plain name is tuned."""
    return re.search(r"-paper-t\d+$", name) is not None


def registered_recipe(name: str) -> TrainConfig:
    """Build the config of a recipe in ``RECIPES``; for names from files, which must not import modules."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES, LISTING)
    return RECIPES[name]()


def load_recipe(name: str) -> TrainConfig:
    """Build the config of a recipe; for names that a user types, not for names from files.

    Args:
        name: a name in ``RECIPES``; a name without its size, such as ``copying-rum``, which selects the smallest; the
            name of a set, such as ``babi-rum``, which selects its first recipe; or ``module:function``, a recipe of
            your own, whose module is imported.
    """
    if ":" in name:
        return _load_own(name)
    if name in FAMILIES:
        return RECIPES[FAMILIES[name][0]]()
    sized = [known for known in RECIPES if re.fullmatch(re.escape(name) + r"-t\d+", known)]
    if sized and name not in RECIPES:
        return RECIPES[min(sized, key=lambda known: int(known.rpartition("-t")[2]))]()
    if name not in RECIPES:
        short = {re.sub(r"-t\d+$", "", known) for known in RECIPES}
        raise unknown_name("recipe", name, {*RECIPES, *FAMILIES, *short}, LISTING)
    return RECIPES[name]()


def _load_own(name: str) -> TrainConfig:
    module, _, function = name.partition(":")
    if module.endswith(".py"):
        raise ConfigError(
            f"{name!r} names a file; write MODULE:FUNCTION, as {module[:-3].replace('/', '.')}:{function}."
        )
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # an installed command does not search the current folder
    try:
        recipe = getattr(importlib.import_module(module), function)
        if callable(recipe):
            with suppress(ValueError):  # builtins may have none
                inspect.signature(recipe).bind()
    except (ImportError, AttributeError, SyntaxError, ValueError, TypeError) as error:
        places = "the current folder and Python's path were searched"
        raise ConfigError(f"the recipe {name!r} cannot be loaded: {error}; {places}.") from error
    config = recipe() if callable(recipe) else recipe
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"the recipe {name!r} returned {type(config).__name__}, but it must return a TrainConfig.")
    return config
