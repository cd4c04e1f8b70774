"""torchrum: the Rotational Unit of Memory for PyTorch."""

from .cells.rum import RUMCell
from .layers.rum import RUM
from .ops.orthogonal_power import orthogonal_power
from .ops.rotation import rotate, rotation_angle, rotation_matrix

__version__ = "0.1.0"

__all__ = ["RUM", "RUMCell", "orthogonal_power", "rotate", "rotation_angle", "rotation_matrix"]
