"""torchrum: the Rotational Unit of Memory for PyTorch."""

# These imports also register the operators that a saved torch.export program names.
from torchrum.cells.rum import RUMCell
from torchrum.layers.cuda_graphs import graphed
from torchrum.layers.rum import RUM
from torchrum.layers.stream import Stream
from torchrum.layers.window import InputWindow
from torchrum.ops.orthogonal_power import orthogonal_power
from torchrum.ops.rotation import rotate, rotation_angle, rotation_matrix

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
