"""The one place that picks a backend, and can say why."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torchrum.ops._checks import check_choice

Backend = Literal["auto", "fused", "native", "torch", "reference", "persistent", "stepwise", "lam1"]
"""``"auto"``, a backend to insist on or, last, one design of the fused backend."""
BACKENDS: tuple[str, ...] = get_args(Backend)


class Choice(NamedTuple):
    """A backend and the reason it was taken."""

    backend: str
    reason: str


class Design(NamedTuple):
    """One way to run an operator; a backend may have several, each for inputs of its own."""

    name: str
    backend: str
    """What a user asks for it by."""
    module: Any = None
    """The module or package that holds it, with ``obstacle``, ``forward`` and ``backward``."""
    lam: float | None = None
    """The one lam that a RUM's design is for; None for any that the operator takes."""
    sized: bool = False
    """Whether its obstacle depends on the batch size, to which a compiler that traces the choice must not be bound."""
    by_driver: bool = False
    """Whether it launches by CUDA's driver alone: it needs no tensor for a state of zeros, and both directions can add
    the bias to the projected input where they read it."""
    projects: bool = False
    """Whether ``forward`` can project a small float32 input itself."""


FUSED, TORCH, REFERENCE = (Design(name, name) for name in ("fused", "torch", "reference"))


def choose_backend(
    asked: str, designs: Sequence[Design], obstacle_of: Callable[[Design], str | None]
) -> tuple[Design, str]:
    """Take the fastest design that can run, of all or of the backend that is asked for, and say why.

    Args:
        asked: ``"auto"``, or the backend to insist on.
        designs: fastest first. The last one can always run.
        obstacle_of: why a design cannot run, in words, or None; asked only where the answer matters.
    """
    check_choice("backend", "backend", asked, BACKENDS)
    skipped: list[tuple[Design, str]] = []
    for design in designs:
        if asked not in ("auto", design.backend, design.name):
            continue
        obstacle = obstacle_of(design)
        if obstacle is None:
            return design, _reason(asked, design, skipped)
        skipped.append((design, obstacle))
    why = _explain(skipped) if skipped else f"{asked} does not run this recurrence, or not with its lam"
    raise ValueError(f"backend={asked!r} cannot run: {why}. Pass backend='auto' to fall back.")


def choose_fused(asked: str, obstacle: Callable[[], str | None]) -> Choice:
    """The choice of an operator with one fused design; its torch backend is its reference.

    ``obstacle`` says why the fused design cannot run, or None.
    """
    design, reason = choose_backend(
        asked, (FUSED, TORCH, REFERENCE), lambda design: obstacle() if design is FUSED else None
    )
    return Choice(design.backend, reason)


def choose_reference(asked: str, reason: str) -> Choice:
    """The choice where ``reason`` keeps every faster backend from running."""
    faster = tuple(Design(name, name) for name in ("fused", "native", "torch"))
    design, why = choose_backend(asked, (*faster, REFERENCE), lambda design: None if design is REFERENCE else reason)
    return Choice(design.backend, why)


def _reason(asked: str, design: Design, skipped: Sequence[tuple[Design, str]]) -> str:
    name = "" if design.name == design.backend else f"the {design.name} design: "
    if skipped:
        return name + ("" if asked == "auto" else "it was asked for; ") + _explain(skipped, design)
    return name + ("it is the fastest and no restriction applies" if asked == "auto" else "it was asked for")


def _explain(skipped: Sequence[tuple[Design, str]], chosen: Design | None = None) -> str:
    """Why designs were passed over, each reason once: for a whole backend where it holds for all of its designs.

    Without ``chosen``, all of one backend were, and a reason that they share needs no name.
    """
    reasons = dict.fromkeys(obstacle for _, obstacle in skipped)
    if chosen is None and len(reasons) == 1:
        return skipped[0][1]
    answers: dict[str, set[str]] = {}
    for design, why in skipped:
        answers.setdefault(design.backend, set()).add(why)
    whole = {
        backend for backend, found in answers.items() if len(found) == 1 and (not chosen or backend != chosen.backend)
    }
    said = []
    for reason in reasons:
        names = [d.backend if d.backend in whole else d.name for d, why in skipped if why == reason]
        *others, last = dict.fromkeys(names)
        listed = f"{', '.join(others)} and {last}" if others else last
        said.append(f"{listed} cannot run: {reason}")
    return "; ".join(said)
