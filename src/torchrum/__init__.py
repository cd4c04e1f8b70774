"""torchrum: the Rotational Unit of Memory for PyTorch."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["RUM", "RUMCell", "graphed", "orthogonal_power", "rotate", "rotation_angle", "rotation_matrix"]


def _is_command() -> bool:
    """Whether this process is the command ``torchrum``: then torch, seconds of import, waits until it is needed."""
    program = (getattr(sys, "argv", None) or [""])[0].replace("\\", "/").rpartition("/")[2]
    return program in ("torchrum", "torchrum.exe") or sys.orig_argv[1:3] == ["-m", "torchrum"]


if TYPE_CHECKING or not _is_command():
    # Imported at once, not when first asked for: this registers the operators that a saved torch.export program names.
    from torchrum.cells.rum import RUMCell
    from torchrum.layers.graphed import graphed
    from torchrum.layers.rum import RUM
    from torchrum.ops.orthogonal_power import orthogonal_power
    from torchrum.ops.rotation import rotate, rotation_angle, rotation_matrix
else:

    def __getattr__(name: str) -> Any:
        homes = {"RUM": "layers.rum", "RUMCell": "cells.rum", "graphed": "layers.graphed"}
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = homes.get(name, "ops.orthogonal_power" if name == "orthogonal_power" else "ops.rotation")
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
