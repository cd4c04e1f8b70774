"""torchrum: the Rotational Unit of Memory for PyTorch."""

# Imported at once, not when first asked for: this registers the operators that a saved torch.export program names.
from .cells.rum import RUMCell
from .layers.graphed import graphed
from .layers.rum import RUM
from .ops.orthogonal_power import orthogonal_power
from .ops.rotation import rotate, rotation_angle, rotation_matrix

__version__ = "0.1.0"

__all__ = ["RUM", "RUMCell", "graphed", "orthogonal_power", "rotate", "rotation_angle", "rotation_matrix"]
