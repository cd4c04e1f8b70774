"""Data of a file against the types that a dataclass declares."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from torchrum.lab.training import RunError
from torchrum.lab.training.typed_data import Reader


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
