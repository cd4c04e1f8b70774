"""Recipes that exist twice: tuned under the plain name, and beside it as the paper has it."""

import re
from collections.abc import Collection

PRESET = "-paper"
"""In the name of a recipe that is set as in the paper, before its size, where the plain name is tuned."""
OURS = re.compile("-(tuned|cosine|tanh)$")
"""At the end of the name of a recipe that is set in a way of ours, where the plain name is the paper's."""


def paper_preset(name: str, known: Collection[str]) -> str:
    """The name of the recipe that ``name`` is a tuned form of; itself if it is of none."""
    forms = (re.sub(r"(-t\d+)$", rf"{PRESET}\1", name), OURS.sub("", name))
    return next((form for form in forms if form != name and form in known), name)


def is_preset(name: str) -> bool:
    """Whether a recipe is the paper's setting beside a tuned one."""
    return re.search(rf"{PRESET}-t\d+$", name) is not None
