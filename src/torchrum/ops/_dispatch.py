"""The one place that picks a backend, and can say why."""

from typing import Literal, NamedTuple

from ._checks import check_choice

Backend = Literal["auto", "fused", "torch", "reference"]


class Choice(NamedTuple):
    """A backend and the reason it was taken."""

    backend: str
    reason: str


def choose_backend(asked: Backend, *, fused: str | None, torch: str | None) -> Choice:
    """Take the fastest backend that can run, or the one that is asked for.

    Args:
        asked: ``"auto"``, or the backend to insist on.
        fused, torch: why that backend cannot run, in words; None if it can.
    """
    check_choice("backend", "backend", asked, ("auto", "fused", "torch", "reference"))
    obstacles = {"fused": fused, "torch": torch, "reference": None}
    if asked != "auto":
        if obstacles[asked] is not None:
            raise ValueError(f"backend={asked!r} cannot run: {obstacles[asked]}. Pass backend='auto' to fall back.")
        return Choice(asked, "it was asked for")
    if fused is None:
        return Choice("fused", "it is the fastest and nothing stands against it")
    if torch is None:
        return Choice("torch", f"fused cannot run: {fused}")
    return Choice("reference", f"torch cannot run: {torch}")
