"""Input encoding, a recurrent layer and a read-out: one file per shape of problem."""

from torchrum.lab.models.build import build_model
from torchrum.lab.models.char_lm import CharModel
from torchrum.lab.models.memn2n import MemN2N
from torchrum.lab.models.one_hot import AnsweringModel, TaggingModel
from torchrum.lab.models.story import StoryReader

__all__ = ["AnsweringModel", "CharModel", "MemN2N", "StoryReader", "TaggingModel", "build_model"]
