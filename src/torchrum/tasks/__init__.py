"""The problems: data, loss, metrics and the score to beat."""

from torchrum.tasks.babi import Babi
from torchrum.tasks.base import Batch, Task
from torchrum.tasks.char_lm import CharLM
from torchrum.tasks.copying import Copying
from torchrum.tasks.recall import Recall

__all__ = ["Babi", "Batch", "CharLM", "Copying", "Recall", "Task"]
