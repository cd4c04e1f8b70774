"""Files that anyone may have written: damaged, endless, deep, or larger than they look; and data of wrong types."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from torchrum.lab.training import RunError, read_metrics
from torchrum.lab.training.files import Reader, read_json, write_atomic

LINE = '{"kind": "train", "step": 1, "loss": 0.5, "seconds": 1.0}\n'


def test_neither_a_device_nor_a_folder_is_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(RunError, match=r"pipe cannot be written: it is not a plain file"):
        write_atomic(tmp_path / "pipe", b"x")
    for folder in (tmp_path, Path()):
        with pytest.raises(IsADirectoryError) as caught:
            write_atomic(folder, b"x")
        assert caught.value.filename == str(folder)  # not that of a file in between
    for nowhere in (tmp_path / "missing" / "x.html", tmp_path / ("x" * 300)):
        with pytest.raises(OSError) as refused:
            write_atomic(nowhere, b"x")
        assert refused.value.filename == str(nowhere)
    (tmp_path / "link").symlink_to("pipe")
    write_atomic(tmp_path / "link", b"x")  # the link goes, what it led to stays
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "Expecting value"),
        (b"\xff{}", "codec can't decode"),
        (b"[" * 100_000, "nested too deep"),
        (b"[" + b"9" * 5000 + b"]", "integer string conversion"),
        (b'"' + b"x" * 2**24 + b'"', "more than the 16,777,216 allowed"),
    ],
)
def test_a_damaged_json_file_is_named(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.json cannot be read: .*" + message):
        read_json(tmp_path / "a.json")


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "folder.json").mkdir()
    for name in ("pipe", "zero"):
        with pytest.raises(RunError, match=f"{name}.json cannot be read: it is not a plain file"):
            read_json(tmp_path / f"{name}.json")
    with pytest.raises(RunError, match=r"folder.json cannot be read: Is a directory"):
        read_json(tmp_path / "folder.json")


@pytest.mark.parametrize(
    "line, message",
    [
        ("null", "has no attribute"),
        ('{"kind": "train"', "Expecting"),
        ('{"step": 1, "seconds": 1}', "kind"),
        ('{"kind": "train", "step": "1", "loss": 1, "seconds": 1}', "it needs a kind, a step, seconds"),
        ('{"kind": "train", "step": 1, "seconds": 1}', "it needs a kind, a step, seconds"),
        ('{"kind": "train", "step": 1, "loss": [], "seconds": 1}', "all numbers"),
        ("[" * 100_000, "objects are nested too deep"),
        ("\udcff", "codec can't decode"),
    ],
)
def test_a_damaged_line_of_metrics_is_named(tmp_path, line, message):
    content = (LINE + line + "\n" + LINE).encode(errors="surrogateescape")
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2, is damaged: .*" + message):
        read_metrics(tmp_path)


def test_a_file_is_replaced_and_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("safe")
    (tmp_path / "a.json").symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "a.json", b"new")
    assert ((tmp_path / "victim").read_text(), (tmp_path / "a.json").read_text()) == ("safe", "new")
    assert not (tmp_path / "a.json").is_symlink()


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner
    rate: float = 1.0
    pair: tuple[float, float] = (0.0, 1.0)
    curve: list[float] = field(default_factory=list)
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    maybe: int | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate is {self.rate}, but it must not be negative.")


SOUND = {"name": "x", "inner": {"size": 3}}


def test_sound_data_become_the_dataclass():
    data = {
        **SOUND,
        "pair": [1, 2.5],
        "curve": [0, 0.5, math.inf],
        "scores": {"loss": 1},
        "maybe": None,
        "anything": [1, {}],
    }
    built = Reader("here").build(Outer, data)
    assert built == Outer(
        name="x", inner=Inner(size=3), pair=(1, 2.5), curve=[0, 0.5, math.inf], scores={"loss": 1}, anything=[1, {}]
    )
    assert isinstance(built.pair, tuple)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": 3}, "here: name is 3, but it must be text."),
        ({"inner": None}, "here: inner is None, but it must be an object."),
        ({"inner": {}}, "here: the field inner.size is missing."),
        ({"inner": {"size": 1.5}}, "here: inner.size is 1.5, but it must be a whole number."),
        ({"inner": {"size": True}}, "here: inner.size is True, but it must be a whole number."),
        ({"inner": {"size": 1, "names": ["a", 2]}}, r"here: inner.names[1] is 2, but it must be text."),
        ({"rate": "fast"}, "here: rate is 'fast', but it must be a number."),
        ({"rate": -1.0}, "here: rate is -1.0, but it must not be negative."),
        ({"curve": [1.0, True]}, "here: curve[1] is True, but it must be a number."),
        ({"curve": [1.0, 2, "x"]}, "here: curve[2] is 'x', but it must be a number."),
        ({"pair": [1.0]}, "here: pair is [1.0], but it must be a list of 2."),
        ({"kind": "c"}, "here: kind is 'c', but it must be one of 'a', 'b'."),
        ({"kind": ["a"]}, "here: kind is ['a'], but it must be one of 'a', 'b'."),
        ({"flag": 1}, "here: flag is 1, but it must be true or false."),
        ({"scores": {"loss": None}}, "here: scores.loss is None, but it must be a number."),
        ({"scores": [1]}, "here: scores is [1], but it must be an object."),
        ({"surprise": 1}, "here: 'surprise' is not a field of it; there are: name, inner, rate"),
        ({"name": ["long"] * 100}, ", but it must be text."),
    ],
)
def test_other_data_are_refused_with_file_and_field(change, message):
    with pytest.raises(RunError) as failure:
        Reader("here").build(Outer, {**SOUND, **change})
    assert message in str(failure.value)
    assert len(str(failure.value)) < 200


@pytest.mark.parametrize("data", [None, 3, "x", [], [1]])
def test_what_is_no_object_is_refused(data):
    with pytest.raises(RunError, match=r"here: it is .*, but it must be an object"):
        Reader("here").build(Outer, data)


def test_numbers_must_be_finite_where_that_is_asked():
    data = {**SOUND, "scores": {"loss": float("nan")}}
    assert Reader("here").build(Outer, data).name == "x"
    with pytest.raises(LookupError, match=r"scores.loss is nan, but it must be a finite number"):
        Reader("here", LookupError, finite=True).build(Outer, data)
