"""What is neither a row nor a layer comes back as it was."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.values import decoded, encoded

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
)


def through(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decoded(json.loads(json.dumps(encoded(value, "x", tensors), allow_nan=False)), tensors)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, dict):
        return [*left] == [*right] and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(VALUES)
def test_values(value: Any) -> None:
    found = through(value)
    assert type(found) is type(value)
    assert same(found, value)


def test_random_states_and_arrays() -> None:
    assert through(random.getstate()) == random.getstate()
    kind, array, *rest = np.random.get_state(legacy=True)
    assert through((kind, array, *rest))[1].dtype == array.dtype
    assert (through(array) == array).all()
    for dtype in ("u1", "u2", "<u8", "i4", "f8", "?"):
        given_array = np.array([0, 1, 255]).astype(dtype)
        found = through({"a": given_array})["a"]
        assert found.dtype == given_array.dtype and (found == given_array).all()
    assert through(torch.bfloat16) is torch.bfloat16
    assert through(np.float64(0.5)) == 0.5 and through(np.int64(3)) == 3


def test_names_that_are_alike_are_told_apart() -> None:
    zeros, ones = torch.zeros(2), torch.ones(2)
    for value in ({1: zeros, "1": ones}, {"a.b": zeros, "a": {"b": ones}}):
        found = through(value)
        assert [
            float(v["b"][0]) if isinstance(v, dict) else float(v[0]) for v in found.values()
        ] == [0, 1]
    assert through(np.array(3)).shape == ()


@pytest.mark.parametrize(
    "value",
    [
        print,
        object(),
        {1, 2},
        b"x",
        1j,
        torch.eye(2).to_sparse(),
        np.zeros(1, ">f4"),
        np.longdouble(1),
    ],
)
def test_others_are_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"x\.0\.a is of type"):
        encoded([{"a": value}], "x", {})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def holding_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (holding_itself(), "lies in more than 100 lists, tuples and dicts, or one holds itself"),
        (nested(101), r"x\.a\.a.* lies in more than 100 lists"),
        pytest.param(10**4000, "x is an integer of more than 10,000 bits", id="large"),
        (torch.empty(3, device="meta"), "x is on the device meta"),
        (torch.ones(2, dtype=torch.complex64), "x has the dtype torch.complex64"),
        (np.ma.array([1, 2], mask=[True, False]), "x is of type MaskedArray"),
    ],
)
def test_what_could_not_be_read_again_is_refused(value: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        encoded(value, "x", {})


def test_large_numbers_and_deep_dicts_come_back() -> None:
    for value in (2**10_000 - 1, -(2**10_000) + 1, nested(100)):
        assert through(value) == value


@pytest.mark.parametrize(
    "value", [{}, {"x": 1}, {"tensor": "gone"}, {"dict": 3}, {"tuple": [1], "y": 2}, {"float": "1"}]
)
def test_what_is_no_value(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decoded(value, {})
