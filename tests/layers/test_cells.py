"""CellLayer of layers/registry.py: any cell gets nn.GRU's contract."""

import pytest
from torch import nn

from torchrum.layers.registry import CellLayer


def test_what_is_no_cell_is_refused_when_the_layer_is_made():
    with pytest.raises(TypeError, match="make_cell returned an object of type Linear; it must return a Cell"):
        CellLayer(lambda size: nn.Linear(size, 3), 10, 3)
