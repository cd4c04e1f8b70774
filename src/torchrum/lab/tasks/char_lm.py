"""Character-level language modelling: the next symbol of a text, with the state carried from segment to segment."""

import codecs
import math
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.lab.data.files import DataError
from torchrum.lab.data.text import KNOWN, Facts, Parts, describe, encode, fingerprint, read_known, read_own
from torchrum.lab.models import CharModel
from torchrum.lab.models.char_lm import sample
from torchrum.lab.tasks.base import Batch, Split, Task, check_sizes
from torchrum.ops._checks import check_finite

SPLITS: tuple[Split, ...] = typing.get_args(Split)  # in the order of the parts of a text
IGNORED = -100  # the answer where a lane is padded; cross_entropy leaves it out
ONE_LANE = 1000  # steps of a segment in the final evaluation: long, since each call has a fixed cost


@dataclass(frozen=True, kw_only=True)
class CharLM(Task):
    """Predict each symbol of a text from those before it.

    The training part is cut into ``lanes`` contiguous lanes of equal length, and every step reads the next ``segment``
    symbols of each. The state is carried from step to step and reset at the start of an epoch. Symbols that do not
    fill a segment at the end of a lane are not read.
    """

    answers: ClassVar = "steps"
    metric: ClassVar = "bpc"
    goal: ClassVar = "min"
    carries_state: ClassVar = True
    has_test: ClassVar = True
    loss_unit: ClassVar = "nats per character"
    baseline_name: ClassVar = "bigram"
    quotable: ClassVar = False
    from_data: ClassVar = ("corpus", "symbols", "sizes", "words", "memoryless", "sha256")
    batching: ClassVar = ("lanes", "segment", "validation_lanes")
    local: ClassVar = ("path", "shown")

    corpus: str = "ptb"
    """ptb (Penn Treebank, raw bytes), ptb.char (without the spaces around lines), or the name of a text of your own."""
    lanes: int = 128
    """Contiguous lanes that are read side by side; the same as batch_size."""
    segment: int = 150
    """Symbols of a lane in one step; T of truncated backpropagation."""
    validation_lanes: int = 128
    """Lanes of the validation part during training: more are faster, but each starts from an empty state."""
    heldout: float = 0.05
    """Share of a text of your own that is kept for validation, and again for the test."""
    symbols: str = ""
    """Bytes of a text of your own, by descending frequency, in hexadecimal; read from it."""
    sizes: tuple[int, ...] = ()
    """Symbols of its training, validation and test part; read from it."""
    words: tuple[int, ...] = ()
    """Words of each part; read from it."""
    memoryless: float = 0.0
    """Loss of its best bigram model; read from it."""
    sha256: str = ""
    """Hash of its three parts; read from it."""
    path: str = ""
    """Path of a text of your own on this machine; not part of a result."""
    shown: int = 0
    """Number of sampled characters to show after each validation."""

    def __post_init__(self) -> None:
        check_sizes(self, "lanes", "segment", "validation_lanes")
        check_sizes(self, "shown", least=0)
        check_finite("CharLM", heldout=self.heldout)
        if not 0 < self.heldout < 0.5:
            raise ValueError(f"CharLM: heldout={self.heldout!r}; it must be above 0 and below 0.5.")
        given = any(getattr(self, name) for name in (*self.from_data[1:], "path"))  # all but the corpus
        if not self.sha256 and (self.corpus not in KNOWN or given):
            raise ValueError(
                f"CharLM: corpus={self.corpus!r} belongs to a text of your own; take corpus {' or '.join(KNOWN)} "
                "alone, or give a text with --data PATH (in Python: task.reading(path))."
            )
        if self.segments < 1:
            needed = self.lanes * self.segment + 1
            raise ValueError(
                f"CharLM: the training part of {self.corpus} has {self.facts.sizes[0]} symbols, but {self.lanes} lanes "
                f"of one segment of {self.segment} need {needed}; take a longer text, fewer lanes "
                "(--task.lanes and --batch_size) or a shorter --task.segment."
            )

    def reading(self, path: Path | str) -> "CharLM":
        """Return the same task on a text of the user's own: a file, or a folder (see ``lab.data.text.read_own``)."""
        path = Path(path)
        facts = describe(read_own(path, self.heldout))
        # results name the text, and a file may be called anything
        name = "".join(letter if letter.isprintable() else "?" for letter in path.resolve().name).strip()
        return replace(
            self,
            corpus=self.corpus if facts.sha256 == self.sha256 else name or "?",  # it may have been renamed
            symbols=facts.symbols.hex(),
            sizes=facts.sizes,
            words=facts.words,
            memoryless=facts.memoryless,
            sha256=facts.sha256,
            path=str(path.absolute()),
        )

    @property
    def facts(self) -> Facts:
        """Facts about the text, without reading it."""
        if not self.sha256:
            return KNOWN[self.corpus]
        return Facts(bytes.fromhex(self.symbols), self.sizes, self.words, self.memoryless, self.sha256)

    @property
    def source(self) -> str:
        """The text, and the size of its training part."""
        name = self.corpus if self.own_data else f"Penn Treebank ({self.corpus})"
        return f"{name}, {self.facts.sizes[0]:,} characters to train on"

    @property
    def own_data(self) -> str:
        """Name of a text of the user's own."""
        return self.corpus if self.sha256 else ""

    @property
    def input_size(self) -> int:
        """Symbols of the text."""
        return len(self.facts.symbols)

    @property
    def num_classes(self) -> int:
        """The same symbols."""
        return self.input_size

    @property
    def segments(self) -> int:
        """Steps of an epoch."""
        return (self.facts.sizes[0] - 1) // self.lanes // self.segment

    def check_batch_size(self, size: int) -> None:
        """Require as many rows as lanes."""
        if size != self.lanes:
            raise ValueError(
                f"batch_size is {size}, but the text is read in {self.lanes} lanes; "
                f"set both: --batch_size {size} --task.lanes {size}."
            )

    def read(self) -> Parts:
        """Read the text; raise if it is not the text of this task."""
        if not self.sha256:
            return read_known(self.corpus)
        if not self.path:
            raise DataError(f"this task reads your own text, {self.corpus}; pass its path with --data PATH.")
        if not Path(self.path).exists():
            raise DataError(
                f"the text of this run, {self.path}, no longer exists; if it was moved, pass its new path: --data PATH."
            )
        parts = read_own(Path(self.path), self.heldout)
        if fingerprint(parts) != self.sha256:
            raise DataError(
                f"{self.path} has changed: it is no longer the text of this run ({self.corpus}, sha256 of its parts "
                f"{self.sha256[:12]}...). Give the right one with --data PATH."
            )
        return parts

    def unseen(self) -> tuple[int, ...]:
        """Count the bytes of each part that are left out because they do not occur in training."""
        return tuple(len(part) - size for part, size in zip(self.read(), self.facts.sizes, strict=True))

    def setup(self, device: torch.device, seed: int) -> Tensor:
        """Put the lanes on ``device``, ``(lanes, length + 1)`` uint8; the last column begins the next lane."""
        ids = encode(self.read().train, self.facts.symbols)
        length = (len(ids) - 1) // self.lanes
        return ids.unfold(0, length + 1, length)[: self.lanes].contiguous().to(device)

    def train_batch(self, size: int, generator: torch.Generator, step: Tensor, data: Tensor) -> Batch:
        """Return the next segment of every lane, and the symbols that follow, ``(lanes, segment)`` int64."""
        first = (step % self.segments) * self.segment
        columns = first + torch.arange(self.segment + 1, device=data.device)
        window = data.index_select(1, columns).long()
        return Batch(window[:, :-1], window[:, 1:])

    def starts_over(self, step: int) -> bool:
        """Reset the state at the start of an epoch."""
        return step % self.segments == 0

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Compute nats per symbol, the mean over symbols that are not padding; logits are ``(B, T, V)``."""
        return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED)

    def metrics(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute ``bpc``, bits per character."""
        return {"bpc": self.loss(logits, batch) / math.log(2)}

    def scores(self, loss: float) -> dict[str, float]:
        """Compute loss and metrics from nats per symbol."""
        return {"loss": loss, "bpc": loss / math.log(2)}

    def weight(self, batch: Batch) -> int:
        """Count the scored symbols: all but the padding."""
        return int((batch.y != IGNORED).sum())

    def validation(self, seed: int) -> Iterator[Batch]:
        """Yield the validation part in ``validation_lanes`` lanes, each symbol once."""
        return self.read_lanes("validation", self.validation_lanes, self.segment)

    def test(self, seed: int) -> Iterator[Batch]:
        """Yield the test part in one lane, each symbol once."""
        return self.read_lanes("test", 1, ONE_LANE)

    def evaluation(self, split: Split, seed: int) -> Iterator[Batch]:
        """Yield a part in one lane, each symbol once; the state is empty at the first symbol only."""
        return self.read_lanes(split, 1, ONE_LANE)

    def read_lanes(self, split: Split, lanes: int, segment: int) -> Iterator[Batch]:
        """Yield a part in segments of ``lanes`` lanes, each symbol once; the last lanes are padded."""
        symbols, texts, place = self.facts.symbols, self.read(), SPLITS.index(split)
        y = encode(texts[place], symbols).long()
        before = encode(texts[place - 1], symbols)[-1:].long()  # the symbol before the first one
        x = torch.cat((before, y[:-1]))
        lanes = min(lanes, len(y))
        length = -(-len(y) // lanes)
        padding = lanes * length - len(y)
        x, y = F.pad(x, (0, padding)).view(lanes, length), F.pad(y, (0, padding), value=IGNORED).view(lanes, length)
        for start in range(0, length, segment):
            yield Batch(x[:, start : start + segment], y[:, start : start + segment])

    def show(self, model: nn.Module) -> str:
        """Sample a few lines from the model."""
        if not self.shown or not isinstance(model, CharModel):
            return ""
        return self.draw(model, length=self.shown, temperature=0.7)

    def draw(self, model: CharModel, *, length: int, prompt: str = "", temperature: float = 1.0, seed: int = 0) -> str:
        """Sample text that follows ``prompt``: ``task.draw(load_model(run), length=500, prompt="the company ")``."""
        return "".join(self.stream(model, length=length, prompt=prompt, temperature=temperature, seed=seed))

    def stream(
        self, model: CharModel, *, length: int, prompt: str = "", temperature: float = 1.0, seed: int = 0
    ) -> Iterator[str]:
        """Yield the same piece by piece; a character of several symbols is yielded when it is complete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for symbol in sample(model, self.ids(prompt), length, temperature=temperature, seed=seed):
            yield decoder.decode(self.facts.symbols[symbol : symbol + 1])
        yield decoder.decode(b"", final=True)

    def ids(self, prompt: str) -> list[int]:
        """Return the symbols of a prompt; an empty prompt is the end of a line, if the text has lines."""
        symbols, codes = self.facts.symbols, {letter: letter.encode("utf-8", "surrogateescape") for letter in prompt}
        unknown = sorted(letter for letter, code in codes.items() if not set(code) <= set(symbols))
        if unknown:
            ascii_only = bytes(sorted(byte for byte in symbols if byte < 128)).decode()
            others = " and letters made of other bytes" if max(symbols) >= 128 else ""
            raise ValueError(
                f"the prompt has {', '.join(map(repr, unknown))}, which the text of the run ({self.corpus}) does not "
                f"have; allowed are {ascii_only!r}{others}."
            )
        start = b"".join(codes[letter] for letter in prompt) or (b"\n" if b"\n" in symbols else symbols[:1])
        return [symbols.index(byte) for byte in start]

    def summary(self, split: Split, scores: dict[str, float]) -> dict[str, float]:
        """Compute totals of a part; for Penn Treebank also bits per character in both versions and word perplexity.

        Both versions divide the same bits: the two spaces per line that ``ptb.char`` lacks cost nothing. The perplexity
        is left out if it would overflow.
        """
        place = SPLITS.index(split)
        bits = scores["bpc"] * self.facts.sizes[place]
        totals = {"bits": bits, "symbols": float(self.facts.sizes[place])}
        if self.sha256:
            return totals
        totals |= {f"bpc_{name}": bits / facts.sizes[place] for name, facts in KNOWN.items()}
        words = self.facts.words[place]
        if bits / words < sys.float_info.max_exp:
            totals["word_perplexity"] = 2 ** (bits / words)
        return totals

    def baseline(self) -> float:
        """Return nats per symbol of the best bigram model of the training part."""
        return self.facts.memoryless
