"""The one place that picks a backend, and can say why."""

from typing import Literal, NamedTuple, get_args

from ._checks import check_choice

Backend = Literal["auto", "fused", "native", "torch", "reference"]
BACKENDS: tuple[str, ...] = get_args(Backend)

NOT_WRITTEN = "there is no native scan of this recurrence"


class Choice(NamedTuple):
    """A backend and the reason it was taken."""

    backend: str
    reason: str


def choose_backend(asked: Backend, *, fused: str | None, torch: str | None, native: str | None = NOT_WRITTEN) -> Choice:
    """Take the fastest backend that can run, or the one that is asked for.

    Args:
        asked: ``"auto"``, or the backend to insist on.
        fused, native, torch: why that backend cannot run, in words; None if it can.
    """
    check_choice("backend", "backend", asked, BACKENDS)
    obstacles = {"fused": fused, "native": native, "torch": torch, "reference": None}
    if asked != "auto":
        if obstacles[asked] is not None:
            raise ValueError(f"backend={asked!r} cannot run: {obstacles[asked]}. Pass backend='auto' to fall back.")
        return Choice(asked, "it was asked for")
    if fused is None:
        return Choice("fused", "it is the fastest and nothing stands against it")
    if native is None:
        return Choice("native", f"fused cannot run: {fused}")
    if torch is None:
        more = "" if native == NOT_WRITTEN else f"; native cannot run: {native}"
        return Choice("torch", f"fused cannot run: {fused}{more}")
    return Choice("reference", f"torch cannot run: {torch}")
