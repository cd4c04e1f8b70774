"""torchrum: the Rotational Unit of Memory for PyTorch."""

from typing import TYPE_CHECKING, Any

# These imports also register the operators that saved torch.export programs call.
from torchrum.cells.rum import RUMCell
from torchrum.layers.cuda_graphs import graphed
from torchrum.layers.rum import RUM
from torchrum.layers.stream import Stream
from torchrum.layers.window import InputWindow
from torchrum.ops.orthogonal_power import orthogonal_power
from torchrum.ops.rotation import rotate, rotation_angle, rotation_matrix

if TYPE_CHECKING:
    from torchrum.lab.compare import compare as compare

__version__ = "0.1.0"

__all__ = [
    "RUM",
    "InputWindow",
    "RUMCell",
    "Stream",
    "graphed",
    "orthogonal_power",
    "rotate",
    "rotation_angle",
    "rotation_matrix",
]


def __getattr__(name: str) -> Any:
    if name == "compare":  # needs the extra "train"; the layers need only torch
        from torchrum.lab.compare import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
