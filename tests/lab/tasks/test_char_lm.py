import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from texts import small_text
from torchrum.lab.data import DataError
from torchrum.lab.data.text import encode
from torchrum.lab.tasks import CharLM
from torchrum.lab.tasks.char_lm import IGNORED
from torchrum.lab.training.config import CHANGEABLE, TrainConfig, from_json, to_json, without
from torchrum.lab.training.errors import ConfigError


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(small_text(4000))
    return path


@pytest.fixture
def task(book):
    return CharLM(lanes=5, segment=30, validation_lanes=4).reading(book)


def test_penn_treebank_has_the_papers_epoch():
    task = CharLM()
    assert (task.segments, task.input_size, task.num_classes) == (265, 50, 50)
    assert CharLM(corpus="ptb.char").segments == 261


def test_an_epoch_reads_the_lanes_in_order(task, book):
    """Put together again, the segments of a lane are the text itself, and the answers are the text one on."""
    data = task.setup(torch.device("cpu"), 0)
    ids = encode(task.read().train, task.facts.symbols).long()
    length = (len(ids) - 1) // task.lanes
    steps = [task.train_batch(5, torch.Generator(), torch.tensor(step), data) for step in range(task.segments)]
    x, y = torch.cat([step.x for step in steps], 1), torch.cat([step.y for step in steps], 1)
    assert x.shape == (5, task.segments * 30) and length - x.shape[1] < 30
    for lane in range(task.lanes):
        start = lane * length
        assert torch.equal(x[lane], ids[start : start + x.shape[1]])
        assert torch.equal(y[lane], ids[start + 1 : start + 1 + x.shape[1]])
    again = task.train_batch(5, torch.Generator(), torch.tensor(task.segments), data)
    assert torch.equal(again.x, steps[0].x)
    assert [task.starts_over(step) for step in range(task.segments + 1)] == [True, *[False] * (task.segments - 1), True]


def test_nothing_of_a_step_is_read_on_the_host(task):
    """On the meta device a value that is read on the host is an error; capture fails for the same reason."""
    data = task.setup(torch.device("cpu"), 0).to("meta")
    batch = task.train_batch(5, torch.Generator(), torch.zeros((), dtype=torch.long, device="meta"), data)
    logits = torch.zeros(5, 30, task.num_classes, device="meta")
    assert batch.x.shape == batch.y.shape == (5, 30)
    assert task.loss(logits, batch).shape == task.metrics(logits, batch)["bpc"].shape == ()


@pytest.mark.parametrize("lanes", [1, 3, 7, 10_000])
def test_every_symbol_is_scored_once_whatever_the_lanes(task, lanes):
    task = replace(task, validation_lanes=lanes)
    batches = list(task.validation(0))
    assert sum(task.weight(batch) for batch in batches) == task.facts.sizes[1]
    answers = torch.cat([batch.y for batch in batches], 1).flatten()
    assert torch.equal(answers[answers != IGNORED], encode(task.read().valid, task.facts.symbols).long())


def test_the_test_is_one_lane_with_the_symbol_before(task):
    batches = list(task.test(0))
    x, y = torch.cat([batch.x for batch in batches], 1), torch.cat([batch.y for batch in batches], 1)
    parts = task.read()
    assert torch.equal(y[0], encode(parts.test, task.facts.symbols).long())
    assert torch.equal(x[0], encode(parts.valid[-1:] + parts.test[:-1], task.facts.symbols).long())
    assert (
        list(map(len, task.evaluation("validation", 0)))
        and next(iter(task.evaluation("validation", 0))).x.shape[0] == 1
    )


def test_loss_leaves_the_padding_out(task):
    logits = torch.randn(2, 3, task.num_classes)
    y = torch.tensor([[1, 2, 3], [4, IGNORED, IGNORED]])
    batch = next(iter(task.validation(0)))._replace(y=y)
    wanted = -torch.log_softmax(logits, -1)[[0, 0, 0, 1], [0, 1, 2, 0], [1, 2, 3, 4]].mean()
    torch.testing.assert_close(task.loss(logits, batch), wanted)
    torch.testing.assert_close(task.metrics(logits, batch)["bpc"], wanted / math.log(2))
    assert task.weight(batch) == 4


def test_both_conventions_come_from_the_total_of_bits():
    raw = CharLM().summary("test", {"loss": 1.189 * math.log(2), "bpc": 1.189})
    assert raw["bits"] == pytest.approx(1.189 * 449_945)
    assert raw["bpc_ptb"] == pytest.approx(1.189)
    assert raw["bpc_ptb.char"] == pytest.approx(1.189 * 1.0170, abs=1e-4)
    assert raw["word_perplexity"] == pytest.approx(2 ** (1.189 * 449_945 / 82_430))
    other = CharLM(corpus="ptb.char").summary("validation", {"bpc": 1.2})
    assert other["bpc_ptb.char"] == pytest.approx(1.2)
    assert other["bpc_ptb"] == pytest.approx(1.2 * 393_042 / 399_782)


def test_a_text_of_ones_own_has_one_convention(task):
    totals = task.summary("test", {"bpc": 2.0})
    assert set(totals) == {"bits", "symbols"}
    assert totals["bits"] == 2 * task.facts.sizes[2]


def test_a_prompt_is_bytes_that_the_text_has(tmp_path):
    """A byte of a command line that is no UTF-8 comes as a surrogate; it is a symbol like any other."""
    (tmp_path / "book.txt").write_bytes("caf\xe9 na\xefve\n".encode("latin-1") * 100)
    task = CharLM(lanes=2, segment=10).reading(tmp_path / "book.txt")
    assert bytes(task.facts.symbols[number] for number in task.ids("caf\udce9")) == b"caf\xe9"
    with pytest.raises(ValueError, match=r"the prompt has '\\udce8', which .* are '.*' and letters made of other"):
        task.ids("caf\udce8")


def test_a_path_is_no_part_of_what_was_run(task, book, tmp_path):
    config = TrainConfig(name="own", task=task, batch_size=5)
    assert str(tmp_path) in str(to_json(config))  # the run folder knows where the text was
    assert str(tmp_path) not in str(without(CHANGEABLE, to_json(config), config.task))
    assert from_json(to_json(config)) == config
    assert task.corpus == "book.txt"
    moved = book.rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match="no longer exists; if it was moved"):
        task.read()
    assert replace(task, path=str(moved)).read()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
@pytest.mark.parametrize("name, shown", [(b"caf\xe9.txt", "caf?.txt"), (b"a\nb.txt", "a?b.txt"), (b" ", "?")])
def test_a_text_of_any_name_has_one_that_can_be_printed(tmp_path, name, shown):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.write_bytes(small_text(1000))
    task = CharLM(lanes=2, segment=10).reading(path)
    assert task.corpus == shown
    assert task.read()


def test_a_text_that_has_changed_is_refused(task, book):
    book.write_bytes(small_text(4000, seed=1))
    with pytest.raises(DataError, match="has changed: it is no longer the text of this run"):
        task.setup(torch.device("cpu"), 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"corpus": "wikitext"},
            "corpus='wikitext' belongs to a text of your own; take corpus ptb or ptb.char alone, or give",
        ),
        ({"path": "book.txt"}, "belongs to a text of your own; take corpus ptb or ptb.char alone"),
        ({"sizes": (1, 2, 3)}, "belongs to a text of your own"),
        ({"lanes": 0}, "lanes=0"),
        ({"segment": 2.5}, "segment=2.5"),
        ({"heldout": 0.5}, "heldout=0.5"),
        ({"heldout": "x"}, "heldout='x' is not allowed; it must be a finite number"),
        ({"shown": "3"}, "shown='3'; it must be a whole number of at least 0"),
        ({"shown": 1.5}, "shown=1.5; it must be a whole number"),
        ({"lanes": 60_000}, r"has 5101618 symbols, but 60000 lanes of one segment of 150 need 9000001; take a longer"),
    ],
)
def test_wrong_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CharLM(**changes)


def test_a_text_shorter_than_its_lanes_is_refused(book):
    with pytest.raises(ValueError, match=r"training part of book.txt has \d+ symbols, but 128 lanes"):
        CharLM().reading(book)


def test_a_row_of_the_batch_is_a_lane():
    with pytest.raises(ConfigError, match="batch_size is 64, but the text is read in 128 lanes; set both"):
        TrainConfig(name="own", task=CharLM(), batch_size=64)


def test_unseen_bytes_are_counted(tmp_path):
    (tmp_path / "book.txt").write_bytes(small_text(2000) + b"@@ no such sign before @@")
    task = CharLM(lanes=2, segment=10).reading(tmp_path / "book.txt")
    assert task.unseen() == (0, 0, 4)
