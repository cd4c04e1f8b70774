"""Every random state of one process, as data that a checkpoint can hold."""

import random
import sys
from typing import Any

import torch


def seed_process(seed: int, rank: int) -> None:
    """Seed torch, Python and (where it is in use) numpy; processes differ, so that their dropout masks do."""
    mixed = (seed * 1_000_003 + rank * 7_919 + 1) % 2**31
    torch.manual_seed(mixed)
    random.seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed)


def collect(generator: torch.Generator) -> dict[str, Any]:
    """The states of torch, CUDA, Python, numpy and of the generator that makes the data."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "device": generator.device.type,
        "data": generator.get_state(),
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    if generator.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(generator.device)
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def restore(state: dict[str, Any], generator: torch.Generator) -> bool:
    """Put ``collect``'s states back; False if they come from another kind of device and so could not be."""
    if state["device"] != generator.device.type:
        return False
    generator.set_state(state["data"])
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], generator.device)
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    return True
