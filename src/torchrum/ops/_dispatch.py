"""Choice of the backend that runs an operator, with the reason."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torchrum.ops._checks import check_choice

Backend = Literal["auto", "fused", "native", "torch", "reference", "persistent", "stepwise", "lam1"]
"""``"auto"``, a backend or one of the designs of the fused backend (``"persistent"``, ``"stepwise"``, ``"lam1"``)."""
BACKENDS: tuple[str, ...] = get_args(Backend)


class Choice(NamedTuple):
    """A backend and the reason for its choice."""

    backend: str
    reason: str


class Design(NamedTuple):
    """One implementation of an operator; a backend may have several, each for different inputs."""

    name: str
    backend: str
    """The backend to which it belongs, the name that a user passes."""
    module: Any = None
    """The module or package with its ``obstacle``, ``forward`` and ``backward``."""
    lam: float | None = None
    """The only lam that it supports; None if it supports every lam of the operator."""
    sized: bool = False
    """Whether its obstacle depends on the batch size, on which a compiler must not specialise."""
    by_driver: bool = False
    """Whether it launches only through CUDA's driver. Such a design needs no tensor for an initial state of zeros, and
    both directions can add the bias to the projected input as they read it."""
    projects: bool = False
    """Whether its ``forward`` can project a small float32 input."""


FUSED, TORCH, REFERENCE = (Design(name, name) for name in ("fused", "torch", "reference"))


def choose_backend(
    requested: str, designs: Sequence[Design], obstacle_of: Callable[[Design], str | None]
) -> tuple[Design, str]:
    """Return the fastest design that can run, among all designs or those of the requested backend, and the reason.

    Args:
        requested: ``"auto"``, or the requested backend.
        designs: the designs, fastest first. The last one can always run.
        obstacle_of: returns the reason why a design cannot run, or None; called only if the result matters.
    """
    check_choice("backend", "backend", requested, BACKENDS)
    skipped: list[tuple[Design, str]] = []
    for design in designs:
        if requested not in ("auto", design.backend, design.name):
            continue
        obstacle = obstacle_of(design)
        if obstacle is None:
            return design, _reason(requested, design, skipped)
        skipped.append((design, obstacle))
    why = _explain(skipped) if skipped else f"{requested} does not run this recurrence, or not with its lam"
    raise ValueError(f"backend={requested!r} cannot run: {why}. Pass backend='auto' to fall back.")


def choose_fused(requested: str, obstacle: Callable[[], str | None]) -> Choice:
    """Return the choice for an operator with one fused design, whose torch backend is its reference.

    ``obstacle`` returns the reason why the fused design cannot run, or None.
    """
    design, reason = choose_backend(
        requested, (FUSED, TORCH, REFERENCE), lambda design: obstacle() if design is FUSED else None
    )
    return Choice(design.backend, reason)


def choose_reference(requested: str, reason: str) -> Choice:
    """Return the choice if ``reason`` prevents every faster backend from running."""
    faster = tuple(Design(name, name) for name in ("fused", "native", "torch"))
    design, why = choose_backend(
        requested, (*faster, REFERENCE), lambda design: None if design is REFERENCE else reason
    )
    return Choice(design.backend, why)


def _reason(requested: str, design: Design, skipped: Sequence[tuple[Design, str]]) -> str:
    name = "" if design.name == design.backend else f"the {design.name} design: "
    if skipped:
        return name + ("" if requested == "auto" else "it was asked for; ") + _explain(skipped, design)
    return name + ("it is the fastest and no restriction applies" if requested == "auto" else "it was asked for")


def _explain(skipped: Sequence[tuple[Design, str]], chosen: Design | None = None) -> str:
    """Return the reasons why designs were skipped, each once, under the backend's name if all its designs share it.

    Without ``chosen``, all designs of one backend were skipped, and a reason that they share needs no name.
    """
    reasons = dict.fromkeys(obstacle for _, obstacle in skipped)
    if chosen is None and len(reasons) == 1:
        return skipped[0][1]
    reasons_of: dict[str, set[str]] = {}
    for design, why in skipped:
        reasons_of.setdefault(design.backend, set()).add(why)
    whole_backends = {
        backend
        for backend, found in reasons_of.items()
        if len(found) == 1 and (not chosen or backend != chosen.backend)
    }
    sentences = []
    for reason in reasons:
        names = [d.backend if d.backend in whole_backends else d.name for d, why in skipped if why == reason]
        *others, last = dict.fromkeys(names)
        listed = f"{', '.join(others)} and {last}" if others else last
        sentences.append(f"{listed} cannot run: {reason}")
    return "; ".join(sentences)
