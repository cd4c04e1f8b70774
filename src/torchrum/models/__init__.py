"""Input encoding, a recurrent layer and a read-out: one file per shape of problem."""

from torchrum.models.answering import AnsweringModel
from torchrum.models.build import build_model
from torchrum.models.char_lm import CharModel
from torchrum.models.memn2n import MemN2N
from torchrum.models.story import StoryReader
from torchrum.models.tagging import TaggingModel

__all__ = ["AnsweringModel", "CharModel", "MemN2N", "StoryReader", "TaggingModel", "build_model"]
