"""The problems: data, loss, metrics and the score to beat."""

from torchrum.lab.tasks.babi import Babi
from torchrum.lab.tasks.base import Batch, Task
from torchrum.lab.tasks.char_lm import CharLM
from torchrum.lab.tasks.copying import Copying
from torchrum.lab.tasks.recall import Recall

__all__ = ["Babi", "Batch", "CharLM", "Copying", "Recall", "Task"]
