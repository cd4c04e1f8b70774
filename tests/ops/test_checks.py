"""Checks of arguments: what they accept, and every message."""

import math

import pytest
import torch

from torchrum.ops._checks import (
    check_broadcast,
    check_choice,
    check_finite,
    check_floating,
    check_not_negative,
    check_positive_int,
    check_probability,
    check_same_device,
    check_square,
)

X = torch.ones(2, 3)


@pytest.mark.parametrize(
    "check, kwargs, message",
    [
        (check_broadcast, {"a": X, "b": X.mT}, r"op: b has shape \(3, 2\), but a has \(2, 3\); all inputs must be"),
        (check_broadcast, {"a": X[:, :0]}, r"op: a has shape \(2, 0\); it must be \(\.\.\., H\) with H at least 1"),
        (check_square, {"R": X}, r"op: R has shape \(2, 3\); it must be \(\.\.\., N, N\)"),
        (check_floating, {"a": X.int()}, r"op: a has dtype torch\.int32; it must be float64.* Convert it with \.float"),
        (check_same_device, {"a": X, "b": X.to("meta")}, r"op: b is on meta, but a is on cpu; move them to one device"),
        (
            check_positive_int,
            {"hidden_size": 0},
            r"op: hidden_size=0 is not allowed; it must be an integer",
        ),
        (check_positive_int, {"hidden_size": 2.0}, r"op: hidden_size=2\.0 is not allowed"),
        (check_positive_int, {"hidden_size": True}, r"op: hidden_size=True is not allowed"),
        (check_finite, {"eta": math.nan}, r"op: eta=nan is not allowed; it must be a finite number"),
        (check_finite, {"eta": -math.inf}, r"op: eta=-inf is not allowed"),
        (check_finite, {"eta": "1"}, r"op: eta='1' is not allowed"),
        (check_not_negative, {"ln_eps": -1e-5}, r"op: ln_eps=-1e-05 is not allowed; it must be 0 or more\."),
        (check_not_negative, {"ln_eps": math.inf}, r"op: ln_eps=inf is not allowed; it must be a finite number"),
        (check_probability, {"zoneout": 1.5}, r"op: zoneout=1\.5 is not allowed; it must be a number from 0 to 1"),
        (check_probability, {"zoneout": math.nan}, r"op: zoneout=nan is not allowed"),
    ],
)
def test_message(check, kwargs, message):
    with pytest.raises(ValueError, match=message):
        check("op", **kwargs)


def test_not_a_tensor_is_a_type_error():
    with pytest.raises(TypeError, match=r"op: a is a list; it must be a torch.Tensor. Convert it with torch.as_tensor"):
        check_floating("op", a=[1.0])


def test_choice_names_the_nearest_one():
    known = ("auto", "reference", "torch")
    check_choice("op", "backend", "torch", known)
    with pytest.raises(ValueError, match=r"op: backend='refrence' is not .*'torch'\. Did you mean 'reference'\?"):
        check_choice("op", "backend", "refrence", known)
    with pytest.raises(ValueError, match=r"op: backend=7 is not .* must be one of 'auto', 'reference', 'torch'\.$"):
        check_choice("op", "backend", 7, known)


def test_good_values_pass():
    check_broadcast("op", a=X, b=X[0], c=X.unsqueeze(1))
    check_square("op", R=torch.ones(4, 3, 3))
    check_floating("op", a=X.half(), b=X.double())
    check_same_device("op", a=X, b=X)
    check_positive_int("op", size=1)
    check_finite("op", eta=0.5, lam=-2)
    check_not_negative("op", ln_eps=0)
    check_probability("op", zoneout=0, dropout=1.0)


@pytest.mark.parametrize("wrong", ["1", True, None, [1]])
def test_a_number_of_a_wrong_type_is_a_type_error_and_a_value_error(wrong):
    for check in (check_finite, check_probability, check_not_negative):
        for error in (TypeError, ValueError):
            with pytest.raises(error, match="op: x="):
                check("op", x=wrong)
        with pytest.raises(ValueError, match="op: x=") as caught:
            check("op", x=float("nan"))
        assert not isinstance(caught.value, TypeError)


def test_a_choice_of_a_wrong_type_is_a_type_error():
    with pytest.raises(TypeError, match=r"op: x=3 is not known; it must be one of 'a', 'b'\."):
        check_choice("op", "x", 3, ("a", "b"))
    with pytest.raises(ValueError, match=r"op: x='c' is not known") as caught:
        check_choice("op", "x", "c", ("a", "b"))
    assert not isinstance(caught.value, TypeError)
